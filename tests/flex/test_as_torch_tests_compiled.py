"""What PyTorch's own tests of FlexAttention check of compiled code, on the CPU and on a GPU (torchs_tests.py)."""

import functools

import pytest
import torch
from oracle_attention import close, moved
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchs_harness import DEVICES, in_pages_of_torch, tensors
from torchs_mods import BUILTIN, CAPTURES, DERIVED, LEARNED, MASKS, B, S, is_before, is_behind, random

from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention, noop_mask


@pytest.fixture(params=DEVICES)
def device(request):
    torch._dynamo.reset()
    return request.param


@pytest.fixture
def counter():
    return CompileCounterWithBackend("aot_eager")


def inputs(device, *sizes, **options):
    return [x.to(device).requires_grad_() for x in tensors(*sizes, **options)]


def same(function, compiled, leaves, *args):
    """The results and gradients of a function and of its compiled form."""
    found = []
    for each in (function, compiled):
        outs = each(*args)
        outs = outs if isinstance(outs, (tuple, list)) else (outs,)
        grads = torch.autograd.grad(sum(x.float().sin().sum() for x in outs if x.requires_grad), leaves)
        found.append([*outs, *grads])
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ---- mods -----------------------------------------------------------------------------------------------------------


def test_captures_of_many_calls(device, counter):
    """All in one graph, which is a program with many calls."""
    mods = [moved(make(), device) for name, make in CAPTURES.items() if name != "euclid, 30 columns"]
    leaves = inputs(device)

    def function(q, k, v):
        return [flex_attention(q, k, v, mod) for mod in mods]

    same(function, torch.compile(function, backend=counter, fullgraph=True), leaves, *leaves)
    assert counter.frame_count == 1


def test_learned_tensors_of_many_calls(device, counter):
    seen, made = {}, [make() for make in LEARNED.values()]
    mods, qkv = [moved(mod, device, seen) for mod, _ in made], inputs(device)
    leaves = [*qkv, *(seen[id(x)] for _, captures in made for x in captures)]

    def function(q, k, v):
        return [flex_attention(q, k, v, mod) for mod in mods]

    same(function, torch.compile(function, backend=counter, fullgraph=True), leaves, *qkv)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", DERIVED)
def test_tables_that_the_graph_makes(device, counter, name):
    make, leaves = DERIVED[name]
    qkv, leaves = inputs(device), [x.detach().to(device).requires_grad_() for x in leaves()]

    def function(q, k, v, *leaves):
        return flex_attention(q.sin(), k, v, make(*leaves)).cos()

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    same(function, compiled, [*qkv, *leaves], *qkv, *leaves)


MASK_OF = {"causal": is_before, "inverse causal": is_behind, "distance, causal": is_before}


@pytest.mark.parametrize("name", BUILTIN)
def test_one_graph_for_all_sizes(device, counter, name):
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True, dynamic=True)
    for b, n in ((2, 200), (4, 100), (4, 50)):
        block_mask = create_block_mask(MASK_OF.get(name, noop_mask), 1, 1, n, n, device=device, BLOCK_SIZE=16)
        leaves = inputs(device, b, 3, 3, n, n)
        same(flex_attention, compiled, leaves, *leaves, BUILTIN[name], block_mask)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["identity", "alibi"])
def test_two_graphs_for_all_sizes(device, counter, name):
    """One for the first sizes, and one for all others."""
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True)
    for b, n in ((2, 200), (4, 100), (8, 50), (16, 25)):
        block_mask = create_block_mask(noop_mask, 1, 1, n, n, device=device)
        q, k, v = (x.detach() for x in inputs(device, b, 3, 3, n, n))
        want = flex_attention(q, k, v, BUILTIN[name], block_mask)
        close(compiled(q, k, v, BUILTIN[name], block_mask), want, 1e-5)
    assert counter.frame_count == 2


def test_two_graphs_for_lengths_of_keys(device, counter):
    compiled = torch.compile(flex_attention, backend=counter)
    for n in range(S, S + 5):
        q, k, v = (x.detach() for x in inputs(device, len_q=1, len_kv=n))
        close(compiled(q, k, v), flex_attention(q, k, v), 1e-5)
    assert counter.frame_count == 2


def test_a_learned_factor_of_many_heads(device, counter):
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True, dynamic=True)
    for heads in (4, 8, 4, 16, 4):
        factor = random(heads).to(device).requires_grad_()
        leaves = inputs(device, B, heads, heads, 40, 40)
        block_mask = create_block_mask(noop_mask, B, 1, 40, 40, device=device)

        def mod(s, b, h, i, j, factor=factor):
            return s * factor[h]

        same(flex_attention, compiled, [*leaves, factor], *leaves, mod, block_mask)
    assert counter.frame_count <= 2


def test_sums_of_sizes_in_a_mask(device, counter):
    def function(q, k, v):
        len_q, len_kv, frame = q.size(-2), k.size(-2), 32

        def mask_mod(b, h, i, j):
            return i < (len_q // frame + len_kv // frame) * frame - 130

        return flex_attention(
            q, k, v, block_mask=create_block_mask(mask_mod, q.size(0), q.size(1), len_q, len_kv, device=q.device)
        )

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for len_q, len_kv in ((192, 128), (160, 96)):
        leaves = inputs(device, 1, 2, 2, len_q, len_kv)
        same(function, compiled, leaves, *leaves)
    assert counter.frame_count == 1


def test_a_size_in_a_score(device, counter):
    """The batch is a symbol that a mod reads. One graph serves all batches."""

    def function(x):
        batches = x.size(0)
        q, k, v = x.view(batches, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * batches + b)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for b in (4, 8, 16):
        x = random(b, 64, 192).to(device).requires_grad_()
        same(function, compiled, [x], x)
    assert counter.frame_count == 1


def test_a_long_row_of_a_capture(device):
    """A sum over 256 columns, which PyTorch refuses. A GPU's compiler would take a minute for so many."""
    places = random(40, 256 if device == "cpu" else 64).to(device)

    def mod(s, b, h, i, j):
        return s * torch.exp(-(places[i] - places[j]).pow(2).sum(-1).sqrt() / 20)

    leaves = inputs(device, 1, 2, 2, 40, 40)
    same(flex_attention, torch.compile(flex_attention, backend="aot_eager", fullgraph=True), leaves, *leaves, mod)


class Hidden(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score, mask):
        return torch.where(mask, score, -float("inf"))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx, dout):
        return dout, None


def test_an_autograd_function_is_refused(device):
    """A difference to PyTorch, where a mod may call one in compiled code."""
    q, k, v = (x.detach() for x in inputs(device))

    def mod(s, b, h, i, j):
        return Hidden.apply(s, i <= j)

    with pytest.raises(NotImplementedError, match=r"autograd\.Function.*test_as_torch_tests_compiled.py, line"):
        flex_attention(q, k, v, mod)


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_two_masks_in_one_graph(device, counter):
    leaves = inputs(device, 1, 4, 4, 300, 300)
    masks = [create_block_mask(MASKS[name](), 1, None, 300, 300, device=device) for name in ("causal", "causal window")]

    def function(q, k, v):
        return flex_attention(q, k, v, block_mask=masks[0]) + flex_attention(q, k, v, block_mask=masks[1])

    same(function, torch.compile(function, backend=counter, fullgraph=True), leaves, *leaves)
    assert counter.frame_count == 1


def test_lse_alone_and_with_out(device):
    leaves, dlse = inputs(device, 2, 2, 2, 128, 128, 64), random(2, 2, 128).to(device)

    def both(q, k, v):
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
        return out, aux.lse * dlse, aux.max_scores

    def alone(q, k, v):
        return 2 * flex_attention(q, k, v, return_aux=AuxRequest(lse=True))[1].lse

    for function in (both, alone):
        used = leaves if function is both else leaves[:2]
        same(function, torch.compile(function, backend="aot_eager", fullgraph=True), used, *leaves)


def test_out_is_viewed(device):
    """Values are wider than queries, and the graph's idea of out's strides must be right."""
    leaves = inputs(device, 1, 4, 2, 100, 100, 16, 32)

    def function(q, k, v):
        return flex_attention(q, k, v, enable_gqa=True).view(1, 4, 100, 2, 16)

    same(function, torch.compile(function, backend="aot_eager", fullgraph=True), leaves, *leaves)


@pytest.mark.parametrize("d", [8, 64])
def test_options_in_a_graph(device, d):
    leaves, options = inputs(device, 2, 2, 2, 100, 100, d), {"BLOCK_M": 64, "BLOCK_N": 64}
    call = functools.partial(flex_attention, kernel_options=options)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    same(call, functools.partial(compiled, kernel_options=options), leaves, *leaves)


def test_columns_first(device):
    """The last dimension is not contiguous."""
    leaves = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs(device, len_q=64, len_kv=64)]
    assert leaves[0].stride(-1) != 1
    same(flex_attention, torch.compile(flex_attention, backend="aot_eager", fullgraph=True), leaves, *leaves)


def test_projections_of_one_tensor(device):
    """Slices of one product are query, key and value."""
    weight, x = random(96, 32).to(device).requires_grad_(), random(1, 100, 32).to(device).requires_grad_()

    def function(x, weight):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in functional.linear(x, weight).split(32, 2))
        return flex_attention(q, k, v)

    same(function, torch.compile(function, backend="aot_eager", fullgraph=True), [x, weight], x, weight)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_makes_dtypes_equal(device, dtype, way):
    """Those of query, key and value differ, and gradients come back in the dtypes that they have."""
    leaves = [x.detach().to(d).requires_grad_() for x, d in zip(inputs(device), (torch.float16, torch.float32, dtype))]
    with pytest.raises(ValueError, match="Expected query, key, and value to have the same dtype"):
        flex_attention(*leaves)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype):
        out = (flex_attention if way == "eager" else compiled)(*leaves, BUILTIN["alibi"])
        want = flex_attention(*(x.to(dtype) for x in leaves), BUILTIN["alibi"])
    assert out.dtype == dtype and torch.equal(out, want)
    for leaf, has, wants in zip(leaves, *(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, want))):
        assert has.dtype == leaf.dtype and torch.equal(has, wants)


SAVED = {
    "products": lambda: [torch.ops.aten.mm.default],
    "attention": lambda: [torch.ops.flash_attn.flex_forward.default],
    "both": lambda: [torch.ops.aten.mm.default, torch.ops.flash_attn.flex_forward.default],
    "what a policy says": lambda: (
        lambda ctx, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
        )
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_selective_checkpoints(device, name):
    flex_attention(*(x.detach() for x in inputs(device, 1, 1, 1, 2, 2)), return_aux=AuxRequest())
    torch.compile(flex_attention, backend="aot_eager")(*inputs(device, 1, 1, 1, 2, 2))  # registers the ops
    x, weight = random(2, 64, 32).to(device).requires_grad_(), random(96, 32).to(device).requires_grad_()
    block_mask = create_block_mask(is_before, 2, 2, 64, 64, device=device)

    def attend(x, weight):
        q, k, v = functional.linear(x, weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, block_mask=block_mask)

    def function(x, weight):
        contexts = functools.partial(create_selective_checkpoint_contexts, SAVED[name]())
        return checkpoint(attend, x, weight, use_reentrant=False, context_fn=contexts)

    same(attend, function, [x, weight], x, weight)
    same(attend, torch.compile(function, backend="aot_eager", fullgraph=True), [x, weight], x, weight)


# ---- block masks ----------------------------------------------------------------------------------------------------


LISTS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"]


@pytest.mark.parametrize("name", ["causal", "documents of a batch", "clamped documents", "a float width", "padding"])
def test_lists(device, name):
    mod = moved(MASKS[name](), device)
    made = torch.compile(create_block_mask, backend="aot_eager", fullgraph=True)(mod, B, 1, S, S, device=device)
    want = create_block_mask(mod, B, 1, S, S, device=device)
    assert all(torch.equal(getattr(made, each), getattr(want, each)) for each in LISTS)


def test_two_graphs_for_lists_of_all_sizes(device, counter):
    compiled = torch.compile(create_block_mask, backend=counter)
    for b, h, n in ((2, 4, 1024), (4, 8, 2048), (6, 16, 3072)):
        made = compiled(is_before, b, h, n, n, device=device)
        assert made.kv_num_blocks.shape == (b, h, n // 128) and made.kv_indices.shape == (b, h, n // 128, n // 128)
    assert counter.frame_count <= 2


def test_lengths_of_a_batch(device, counter):
    """Other lengths of sequences in each call, bound by functools.partial."""

    def mask_mod(b, h, i, j, lengths):
        return (i < lengths[b]) & (j < lengths[b])

    def function(x, lengths):
        mod = functools.partial(mask_mod, lengths=lengths)
        block_mask = create_block_mask(mod, lengths.size(0), None, x.size(2), x.size(2), device=x.device)
        return flex_attention(x, x, x, block_mask=block_mask)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for seed in range(5):
        x = random(16, 4, 12, 16, seed=seed).to(device).requires_grad_()
        lengths = torch.randint(0, 12, (16,), generator=torch.Generator().manual_seed(seed)).to(device)
        same(function, compiled, [x], x, lengths)
    assert counter.frame_count == 1


def test_masks_of_many_batches(device, counter):
    def function(x, block_mask):
        q, k, v = x.view(x.size(0), 256, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, block_mask=block_mask).transpose(1, 2).reshape(x.size(0), 256, 32)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for b in (4, 8, 16):
        hides = torch.randint(0, 2, (b, 256), generator=torch.Generator().manual_seed(b)).bool().to(device)
        block_mask = create_block_mask(lambda b, h, i, j, x=hides: ~x[b, i], b, None, 256, 256, device=device)
        x = random(b, 256, 96).to(device).requires_grad_()
        same(function, compiled, [x], x, block_mask)
    assert counter.frame_count <= 2


def test_lengths_that_no_block_divides(device):
    compiled = torch.compile(flex_attention, backend="aot_eager")
    for n in range(S, S + 4):
        numbers = torch.bucketize(torch.arange(n), torch.tensor([n // 5, n // 2, n - 3]), right=True).to(device)

        def mod(b, h, i, j, numbers=numbers, end=n - 1):
            return numbers[i.clamp(0, end)] == numbers[j.clamp(0, end)]

        leaves = inputs(device, 1, 2, 2, n, n)
        block_mask = create_block_mask(mod, None, None, n, n, device=device)
        call = functools.partial(flex_attention, block_mask=block_mask)
        same(call, functools.partial(compiled, block_mask=block_mask), leaves, *leaves)


def test_wrong_block_masks_are_refused(device):
    compiled = torch.compile(flex_attention, backend="aot_eager")
    block_mask = create_block_mask(is_before, None, None, 256, 256, device=device)
    q, k, v = (x.detach() for x in inputs(device, 1, 1, 1, 300, 300))
    with pytest.raises(ValueError, match="block_mask was created for"):
        compiled(q, k, v, block_mask=block_mask)
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        compiled(q[:, :, :128], k[:, :, :256], v[:, :, :256], block_mask=block_mask[:, :, 0])


@pytest.mark.parametrize("name", ["distance", "causal", "alibi"])
def test_pages_of_torch(device, counter, name):
    """Two calls of other caches in one graph."""
    q, k, v = tensors(h_kv=2, len_q=4)
    made = [in_pages_of_torch(device, k * n, v, [S] * B, 64) for n in (1, -1)]
    block_mask = create_block_mask(noop_mask, B, 1, 4, S, device=device, BLOCK_SIZE=64)
    kv_len = torch.full((B,), S, device=device)
    calls = [
        (
            caches,
            paged.get_score_mod(BUILTIN[name], kv_len),
            paged.convert_logical_block_mask(block_mask, kv_len=kv_len),
        )
        for paged, caches in made
    ]

    def function(q):
        for caches, mod, mask in calls:
            q = flex_attention(q, *caches, mod, mask, enable_gqa=True)
        return q

    q = q.to(device)
    close(torch.compile(function, backend=counter, fullgraph=True)(q), function(q), 1e-5)
    want = q
    for n in (1, -1):
        want = flex_attention(want, (k * n).to(device), v.to(device), BUILTIN[name], block_mask, enable_gqa=True)
    close(function(q), want, 1e-4)
