"""flex_attention's gradients in Hopper's own kernels, against its specification in fp64.

Only Hopper's kernels may run, so a call that they refuse is an error. The catalogues have long mods, too, which generic
kernels compute."""

import random

import flash_attn_2_cuda
import pytest
import torch
from catalogue import CATALOGUE
from harness_flex import on_hopper, prepared, random_blocks, shape_of, tensors_of
from oracle_attention import INF, TOLERANCES, attention, close, gradients
from score_catalogue import SCORES

from flash_attn.flex_attention import flex_attention

pytestmark = pytest.mark.skipif(not on_hopper, reason="there is no Hopper GPU")
DIMS = [(64, 64), (72, 72), (96, 96), (128, 128), (64, 128), (24, 8)]
WIDE = [(136, 136), (192, 128), (192, 192), (256, 256)]


@pytest.fixture(autouse=True)
def only_hoppers_kernels(request):
    flash_attn_2_cuda.set_cuda_kernels(None if "make" in request.fixturenames else "sm90")
    yield
    flash_attn_2_cuda.set_cuda_kernels(None)


def drawn(rng, shape, dims, dtype):
    """tensors_of, without grouped heads above 128 columns, where masks of the heads of a group have generic kernels."""
    q, *others = tensors_of(rng, shape, dims, dtype)
    if max(dims) > 128:
        others = [torch.cat([x, x.flip(-1)], 1)[:, : q.shape[1]] for x in others]
    return [q, *others]


def compare(tensors, score_mod=None, *args, leaves=(), wide_mod=None, wants_qkv=True, **kwargs):
    """Compares the gradients of q, k and v, and of the captures ``leaves``. Returns them.

    wide_mod: the mod of the specification and its captures, if they are not those of score_mod.
    """
    seen = {}
    want_mod, want_leaves = wide_mod or (score_mod, leaves)
    mask, kwargs = prepared(tensors, score_mod, *args, seen=seen, **kwargs)
    ours, wide = ([x.to(*to).requires_grad_(wants_qkv) for x in tensors] for to in (["cuda"], [torch.float64]))
    out, lse = flex_attention(*ours, **kwargs)
    want = attention(*wide, want_mod, mask)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, lse))
    dlse = torch.where(want[1].isinf(), 0.0, dlse).float()
    ours, wide = ([*x, *captured] if wants_qkv else captured for x, captured in (
        (ours, [seen[id(x)] for x in leaves]), (wide, list(want_leaves))))  # fmt: skip
    got = gradients((out, lse), ours, (dout.cuda(), dlse.cuda()))
    wants = gradients(want[:2], wide, (dout.double(), dlse.double()))
    for has, wanted in zip(got, wants, strict=True):
        close(has.cpu(), wanted, 2 * max(TOLERANCES[x.dtype] for x in (has, tensors[0])))
    return got


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", CATALOGUE, ids=lambda make: make.__name__)
def test_gradients_of_every_mask_on_hopper(make, seed):
    rng = random.Random(1000 * seed + CATALOGUE.index(make))
    shape = shape_of(rng)
    block = rng.choice([None, 128, 128, 64, (256, 128), (16, 24), (128, 64)])
    compare(tensors_of(rng, shape, rng.choice(DIMS if seed == 0 else WIDE)), None, make(rng, shape), block)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", SCORES, ids=lambda make: make.__name__)
def test_gradients_of_every_score_mod_on_hopper(make, seed):
    rng = random.Random(1000 * seed + SCORES.index(make))
    shape = shape_of(rng)
    score_mod, leaves = make(rng, shape)
    mask_mod = rng.choice([None, lambda b, h, i, j: i >= j, lambda b, h, i, j: (i + j + h) % 3 != 0])
    block = rng.choice([None, 128]) if mask_mod else None
    dims = rng.choice(DIMS if seed == 0 else WIDE)
    compare(tensors_of(rng, shape, dims), score_mod, mask_mod, block, leaves=leaves)


@pytest.mark.parametrize("dims", DIMS + WIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_random_blocks_on_hopper(dims, dtype):
    """Query heads of one key head with masks of their own, too. Above 128 columns such heads are not grouped."""
    rng, generator = random.Random(dims[0]), torch.Generator().manual_seed(dims[1])
    mod = lambda b, h, i, j: (i * 7 + j * 3) % 5 != 0  # noqa: E731
    for block in ((128, 128), (64, 96), (192, 32)):
        for masks in ((2, 4), (1, 1), (2, 1), (1, 4)):
            lengths = 5 * block[0] - 17, 6 * block[1] - 5
            block_mask, mask = random_blocks(rng, generator, mod, masks, lengths, block)
            draw = drawn if masks[1] > 1 else tensors_of
            compare(draw(rng, (2, 4, *lengths), dims, dtype), mask=mask, block_mask=block_mask)


def test_masks_of_heads_of_a_group_have_generic_kernels_above_128_columns():
    tensors = tensors_of(random.Random(8), (1, 4, 300, 300), (192, 192), torch.bfloat16)
    mod = lambda b, h, i, j: (i >= j) & ((i + h) % 3 != 0)  # noqa: E731
    with pytest.raises(RuntimeError, match="above 128 columns it takes one block mask for all query heads"):
        compare(tensors, None, mod, 64)
    flash_attn_2_cuda.set_cuda_kernels(None)
    compare(tensors, None, mod, 64)


@pytest.mark.parametrize("dims", [(128, 128), (192, 192), (256, 256)])
def test_gradients_of_rows_that_see_nothing_on_hopper(dims):
    """Their dq is 0, though keys that others see are inf."""
    tensors = drawn(random.Random(0), (1, 2, 300, 300), dims, torch.bfloat16)
    compare(tensors, lambda s, b, h, i, j: torch.where(i % 2 == 0, s, -INF))
    compare(tensors, None, lambda b, h, i, j: (i // 64 != 2) & (i % 5 != 0), 64)
    tensors[1][:, :, 200:] = INF
    ours = [x.cuda().requires_grad_() for x in tensors]
    out = flex_attention(*ours, mask_mod=lambda b, h, i, j: (i < 100) | (i > 250) & (j < 200), enable_gqa=True)
    dq = torch.autograd.grad(out.sum(), ours)[0]
    assert not dq[:, :, 100:251].any()


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (80, 80), (128, 128), (192, 192)])
def test_sums_of_hidden_pairs_may_be_nan_on_hopper(dims):
    """What is added to the score of a hidden pair is no part of any result, even if it is NaN or inf."""
    tensors = drawn(random.Random(5), (1, 2, 300, 300), dims, torch.bfloat16)
    slopes = torch.tensor([0.5, 0.01])
    see_past = lambda b, h, i, j: i >= j  # noqa: E731
    compare(tensors, lambda s, b, h, i, j: s - torch.sqrt((i - j).float()), see_past, 64)
    compare(tensors, lambda s, b, h, i, j: s - slopes[h] / (i - j + 1).clamp(min=0), see_past, 128)
    compare(tensors, lambda s, b, h, i, j: s - slopes[h] * (i - j), see_past, 128)
    compare(tensors, lambda s, b, h, i, j: s + torch.where(i < j, INF, 0.0), see_past, 128)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_gradients_of_long_sequences_on_hopper(dims):
    """More work tiles than multiprocessors, and walks of very different lengths. dk and dv repeat, and in a fixed order
    dq repeats, too."""
    n, document = 1700, torch.tensor([0] * 100 + [1] * 900 + [2] * 200 + [3] * 500)
    mod = lambda b, h, i, j: (document[i] == document[j]) & (i >= j)  # noqa: E731
    tensors = drawn(random.Random(2), (2, 16, n, n), dims, torch.bfloat16)
    compare(tensors, None, mod, 128)
    compare(tensors, lambda s, b, h, i, j: s - (i - j) * 0.01 * (h + 1), mod, (64, 256))
    kwargs = prepared(tensors, None, mod, 128)[1]
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(3):
            ours = [x.cuda().requires_grad_() for x in tensors]
            results.append(torch.autograd.grad(flex_attention(*ours, **kwargs)[0].square().sum(), ours))
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("dims", [(128, 128), (192, 192), (256, 256)])
def test_a_graph_of_gradients_is_replayed_with_other_lists_on_hopper(dims):
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    mod = lambda b, h, i, j: i >= j  # noqa: E731
    made = [random_blocks(rng, generator, mod, (1, 2), (700, 900), (128, 128)) for _ in range(3)]
    lists = made[0][0]
    tensors = drawn(rng, (1, 2, 700, 900), dims, torch.bfloat16)
    ours = [x.cuda().requires_grad_() for x in tensors]
    dout = torch.randn(1, 2, 700, dims[1], device="cuda", dtype=torch.bfloat16)

    def step():
        return torch.autograd.grad(flex_attention(*ours, block_mask=lists, enable_gqa=True), ours, dout)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for other, mask in made:
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            getattr(lists, name).copy_(getattr(other, name))
        graph.replay()
        wide = [x.double().requires_grad_() for x in tensors]
        wants = torch.autograd.grad(attention(*wide, None, mask)[0], wide, dout.cpu().double())
        for has, wanted in zip(got, wants, strict=True):
            close(has.cpu(), wanted, 2 * TOLERANCES[has.dtype])


@pytest.mark.parametrize("head", range(4))
def test_keys_that_one_head_of_a_group_sees_on_hopper(head):
    """Heads of a group have masks of their own. Each adds to dk and dv, if it is the only one, too."""
    mod = lambda b, h, i, j: (h == head) | (j < 100)  # noqa: E731
    compare(tensors_of(random.Random(head), (1, 4, 200, 400), (64, 64), torch.bfloat16), None, mod, 128)
    compare(tensors_of(random.Random(head), (1, 4, 200, 400), (128, 128), torch.bfloat16), None, mod, 128)


# ---- captures -------------------------------------------------------------------------------------------------------


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).requires_grad_()


def rounded(x):
    """To bf16. The gradient passes as it is."""
    return x + (x.bfloat16().double() - x).detach()


def captures(kind, heads, length, is_wide=False):
    """A score_mod and its captures. Each kind of sum of ``csrc/flex/scatters.h``, with and without the score.

    is_wide: the captures are fp64, with the same values. PyTorch adds the gradient of a bf16 table in bf16: its sums
    of 1400 numbers are off by 10%.
    """
    table, half, slopes = leaf(heads, 2 * length), leaf(2 * length, dtype=torch.bfloat16), leaf(heads)
    cap, rows, keys, pairs = torch.tensor(2.0, requires_grad=True), leaf(length), leaf(heads, length), leaf(heads, 9)
    reach, to_half = 20, rounded if is_wide else lambda x: x
    if is_wide:
        wide = (x.detach().double().requires_grad_() for x in (table, half, slopes, cap, rows, keys, pairs))
        table, half, slopes, cap, rows, keys, pairs = wide
    return {
        "alibi": (lambda s, b, h, i, j: s - 0.1 * slopes[h] * (i - j).abs(), [slopes]),
        "softcap": (lambda s, b, h, i, j: cap * torch.tanh(s / cap), [cap]),
        "scale of heads": (lambda s, b, h, i, j: s * slopes[h] + slopes[h], [slopes]),
        "queries": (lambda s, b, h, i, j: s + rows[i], [rows]),
        "scale of queries": (lambda s, b, h, i, j: s * rows[i] + keys[h, j], [rows, keys]),
        "keys": (lambda s, b, h, i, j: s + keys[h, j], [keys]),
        "differences": (lambda s, b, h, i, j: s + table[h, i - j + length], [table]),
        "differences in half": (lambda s, b, h, i, j: s + to_half(half[j - i + length] * cap), [half, cap]),
        "buckets": (lambda s, b, h, i, j: s + table[h, torch.clamp(i - j, -reach, reach) + reach], [table]),
        "pairs": (lambda s, b, h, i, j: s + pairs[h, (i * 3 + j) % 9], [pairs]),
    }[kind]  # fmt: skip


KINDS = ["alibi", "softcap", "scale of heads", "queries", "scale of queries", "keys", "differences"]
KINDS += ["differences in half", "buckets", "pairs"]
causal = lambda b, h, i, j: i >= j  # noqa: E731


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_captures_on_hopper(kind, dims):
    rng = random.Random(KINDS.index(kind) + dims[0])
    (mod, leaves), wide_mod = captures(kind, 4, 411), captures(kind, 4, 411, is_wide=True)
    for lengths in ((300, 411), (129, 64), (257, 1)):
        tensors = drawn(rng, (2, 4, *lengths), dims, [torch.bfloat16, torch.float16][KINDS.index(kind) % 2])
        compare(tensors, mod, leaves=leaves, wide_mod=wide_mod)
        compare(tensors, mod, causal, rng.choice([None, 64, 128]), leaves=leaves, wide_mod=wide_mod)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_captures_of_many_tiles_on_hopper(kind):
    """More work tiles than multiprocessors. Each pair adds once, with masks of the heads of a group, too."""
    (mod, leaves), wide_mod = captures(kind, 8, 1500), captures(kind, 8, 1500, is_wide=True)
    tensors = tensors_of(random.Random(5), (3, 8, 1500, 1400), (128, 128), torch.bfloat16)
    compare(tensors, mod, leaves=leaves, wide_mod=wide_mod)
    near = lambda b, h, i, j: (i - j).abs() < 100 * h + 50  # noqa: E731
    compare(tensors, mod, near, 128, leaves=leaves, wide_mod=wide_mod)


def test_gradients_of_captures_of_many_heads_on_hopper():
    """A group of more heads than a warp has lanes."""
    slopes = leaf(40)
    sizes = [(1, 40, 150, 64), (1, 1, 300, 64), (1, 1, 300, 64)]
    tensors = [leaf(*size, dtype=torch.bfloat16).detach() for size in sizes]
    compare(tensors, lambda s, b, h, i, j: s + slopes[h] * (i - j) * 0.1, leaves=[slopes])


def test_gradients_of_captures_alone_on_hopper():
    mod, leaves = captures("differences", 4, 300)
    compare(tensors_of(random.Random(6), (2, 4, 300, 250), (128, 128)), mod, leaves=leaves, wants_qkv=False)


def test_deterministic_gradients_of_captures_are_for_generic_kernels():
    mod, leaves = captures("alibi", 4, 300)
    tensors = tensors_of(random.Random(7), (2, 4, 300, 250), (128, 128))
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="in any order, so they are not deterministic"):
            compare(tensors, mod, leaves=leaves)
    finally:
        torch.use_deterministic_algorithms(False)
