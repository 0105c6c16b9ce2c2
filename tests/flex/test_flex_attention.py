"""flex_attention against its specification: masks, score mods, block masks, gradients and shapes."""

import functools
import random
import threading
import types
import warnings

import flash_attn_2_cuda
import pytest
import torch
from catalogue import CATALOGUE
from harness_flex import causal, make
from oracle_attention import INF, attention, check, close
from score_catalogue import SCORES
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as create_block_mask_of_torch

from flash_attn import flash_attn_func
from flash_attn.flex import tracer
from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention, noop_mask

# ---- mods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_mod", CATALOGUE, ids=lambda make: make.__name__)
def test_every_mask(make_mod, isa):
    rng = random.Random(CATALOGUE.index(make_mod))
    shape = (2, 4, rng.randint(1, 200), rng.randint(1, 200))
    mod = make_mod(rng, shape)
    block = rng.choice([128, 64, (32, 96), (256, 64)])
    block_mask = create_block_mask(mod, *shape, device="cpu", BLOCK_SIZE=block)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    tensors = make(2, 4, rng.choice([1, 2, 4]), *shape[2:], 32, dtype=dtype)
    check(*tensors, block_mask=block_mask, mask=create_mask(mod, *shape, device="cpu"))


@pytest.mark.parametrize("make_mod", SCORES, ids=lambda make: make.__name__)
def test_every_score_mod(make_mod, isa):
    rng = random.Random(SCORES.index(make_mod))
    shape = (2, 3, rng.randint(1, 150), rng.randint(1, 150))
    mod, leaves = make_mod(rng, shape)
    tensors = make(2, 3, 3, *shape[2:], 40, 24)
    check(*tensors, score_mod=mod, leaves=leaves, tolerance=5e-5)


@pytest.mark.parametrize("make_mod", SCORES, ids=lambda make: make.__name__)
def test_every_score_mod_in_fp64(make_mod):
    rng = random.Random(SCORES.index(make_mod))
    mod, leaves = make_mod(rng, (1, 2, 9, 21))
    tensors = make(1, 2, 2, 9, 21, 8, dtype=torch.float64)
    block_mask = create_block_mask(causal, 1, 1, 9, 21, device="cpu", BLOCK_SIZE=8)
    mask = create_mask(causal, 1, 1, 9, 21, device="cpu")
    check(*tensors, score_mod=mod, block_mask=block_mask, mask=mask, leaves=leaves, tolerance=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed):
    rng = random.Random(seed)
    g, h_kv = rng.choice([1, 1, 2, 3, 5]), rng.choice([1, 2])
    shape = (rng.randint(1, 3), g * h_kv, rng.choice([1, 15, 16, 17, 127, 128, 129, rng.randint(1, 400)]), 0)
    shape = (*shape[:3], rng.choice([1, 15, 16, 17, 127, 128, 129, rng.randint(1, 400)]))
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    d = rng.choice([1, 8, 16, 40, 64, 72, 80, 96, 128])
    tensors = make(shape[0], shape[1], h_kv, *shape[2:], d, rng.choice([d, 8, 24, 64, 160]), dtype, seed)
    mod = rng.choice(CATALOGUE)(rng, shape)
    score_mod, leaves = rng.choice(SCORES)(rng, shape) if rng.random() < 0.7 else (None, [])
    size = (rng.choice([shape[0], 1]), rng.choice([shape[1], 1]))
    if rng.random() < 0.5:
        mod = rng.choice([noop_mask, causal])
    if {"b", "h"} & {op for op in "bh" if tracer.program_of(mod)[0].reads(op)}:
        size = shape[:2]
    block = rng.choice([(128, 128), (64, 64), (256, 128), (128, 64), (96, 96), (16, 24)])
    block_mask = create_block_mask(mod, *size, *shape[2:], device="cpu", BLOCK_SIZE=block)
    mask = create_mask(mod, *size, *shape[2:], device="cpu")
    scale = rng.choice([None, 0.3, 1.0, -0.2])
    tolerance = None if dtype != torch.float32 else 1e-4
    check(
        *tensors, score_mod=score_mod, block_mask=block_mask, mask=mask, leaves=leaves, scale=scale, tolerance=tolerance
    )


# ---- block masks ----------------------------------------------------------------------------------------------------


def test_lists_in_any_order_with_garbage_behind_the_counts():
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randint(0, 3, (2, 3, 5, 4), generator=generator)
    lists = []
    for kind in (1, 2):
        num = (kinds == kind).sum(-1).to(torch.int32)
        places = torch.full((2, 3, 5, 4), 2**31 - 1, dtype=torch.int32)
        for at in torch.cartesian_prod(*map(torch.arange, (2, 3, 5))).tolist():
            found = (kinds[tuple(at)] == kind).nonzero().flatten()
            places[tuple(at)][: len(found)] = found[torch.randperm(len(found), generator=generator)]
        lists += [num, places]
    mod = lambda b, h, q, k: (q + k) % 3 != 0  # noqa: E731
    block_mask = BlockMask(
        seq_lengths=(150, 120),
        kv_num_blocks=lists[0],
        kv_indices=lists[1],
        full_kv_num_blocks=lists[2],
        full_kv_indices=lists[3],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(32, 32),
        mask_mod=mod,
    )
    blocks = kinds.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :150, :120]
    mask = (blocks == 2) | ((blocks == 1) & create_mask(mod, 2, 3, 150, 120, device="cpu"))
    check(*make(2, 3, 1, 150, 120, 16), block_mask=block_mask, mask=mask)


def lists_of(kinds, width, full_width, garbage=0):
    """The lists of a BlockMask of these kinds of blocks, 1 for partial and 2 for full, with so many places in a row."""
    lists = []
    for kind, places in ((1, width), (2, full_width)):
        num = (kinds == kind).sum(-1).to(torch.int32)
        indices = torch.full((*kinds.shape[:3], places), garbage, dtype=torch.int32)
        for at in torch.cartesian_prod(*map(torch.arange, kinds.shape[:3])).tolist():
            found = (kinds[tuple(at)] == kind).nonzero().flatten()
            indices[tuple(at)][: len(found)] = found
        lists += [num, indices]
    return lists


@pytest.mark.parametrize("is_compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("width, full_width", [(2, 2), (2, 1), (1, 3), (0, 2), (7, 2)])
def test_lists_with_fewer_places_than_columns_of_blocks(width, full_width, is_compiled):
    """As for the k best blocks of each row: ``[b, h, rows, k]``."""
    kinds = torch.zeros(2, 1, 3, 5, dtype=torch.int64)
    for row in range(3):
        kinds[:, :, row, [4, row][: min(width, 2)]] = 1
        kinds[:, :, row, [3, (row + 1) % 3][: min(full_width, 2)]] = 2
    mod = lambda b, h, q, k: (q + k) % 3 != 0  # noqa: E731
    lists = lists_of(kinds, width, full_width, 4)
    block_mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=16, mask_mod=mod, seq_lengths=(40, 70), compute_q_blocks=False
    )
    blocks = kinds.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :40, :70]
    mask = (blocks == 2) | ((blocks == 1) & create_mask(mod, 1, 1, 40, 70, device="cpu"))
    q, k, v = make(2, 2, 1, 40, 70, 16)
    if not is_compiled:
        check(q, k, v, block_mask=block_mask, mask=mask)
        return
    torch._dynamo.reset()
    call = torch.compile(functools.partial(flex_attention, enable_gqa=True), backend="aot_eager", fullgraph=True)
    q.requires_grad_()
    close(call(q, k, v, None, block_mask), attention(q.double(), k.double(), v.double(), mask=mask)[0], 1e-5)
    call(q, k, v, None, block_mask).sum().backward()


@pytest.mark.parametrize("name, value", [("is_near", False), ("kind", "far")])
def test_a_mask_that_changes_keeps_its_blocks(name, value):
    """Both masks are windows, which the plain kernels know. The lists are still those of the first mask."""
    tensors, setting = make(1, 2, 2, 64, 64, 16), types.SimpleNamespace(is_near=True, kind="near")

    def mask_mod(b, h, q, k):
        if setting.is_near and setting.kind == "near":
            return (q >= k) & (q - k < 20)
        return q >= k

    block_mask = create_block_mask(mask_mod, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    listed = block_mask.to_dense().bool().repeat_interleave(16, -1).repeat_interleave(16, -2)
    setattr(setting, name, value)
    mask = create_mask(mask_mod, 1, 1, 64, 64, device="cpu") & listed
    close(
        flex_attention(*tensors, block_mask=block_mask), attention(*(x.double() for x in tensors), mask=mask)[0], 1e-5
    )


def test_blocks_without_a_mask_mod():
    num, places = torch.tensor([[[1, 2, 0]]], dtype=torch.int32), torch.tensor([[[[1, 0], [1, 0], [0, 0]]]])
    block_mask = BlockMask.from_kv_blocks(num, places.int(), BLOCK_SIZE=64, seq_lengths=(170, 100))
    mask = torch.zeros(1, 1, 170, 100, dtype=torch.bool)
    mask[..., :64, 64:] = mask[..., 64:128, :] = True
    out = check(*make(2, 2, 2, 170, 100, 24), block_mask=block_mask, mask=mask)
    assert out[:, :, 128:].eq(0).all()


def test_full_blocks_are_not_asked():
    mod = lambda b, h, q, k: q < 0  # noqa: E731
    num, places = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    none = torch.zeros_like(num)
    full = BlockMask.from_kv_blocks(none, places, num, places, BLOCK_SIZE=64, mask_mod=mod, seq_lengths=(50, 60))
    check(*make(1, 1, 1, 50, 60, 16), block_mask=full)


def test_a_mask_of_torch():
    mod = lambda b, h, q, k: (q >= k) & (h % 2 == 0)  # noqa: E731
    block_mask = create_block_mask_of_torch(mod, None, 4, 200, 200, device="cpu")
    check(*make(3, 4, 2, 200, 200, 32), block_mask=block_mask, mask=create_mask(mod, 1, 4, 200, 200, device="cpu"))


def test_a_sliced_mask_with_a_shifted_mod():
    block_mask = create_block_mask(causal, None, None, 512, 512, device="cpu")
    q, k, v = make(2, 2, 2, 1, 512, 64)
    row, position = block_mask[:, :, 2], torch.tensor(300)
    with pytest.raises((RuntimeError, ValueError)):
        flex_attention(q, k, v, block_mask=row)
    row.mask_mod = lambda b, h, q, k: causal(b, h, q + position, k)
    row.seq_lengths = (1, 512)
    check(q, k, v, block_mask=row, mask=(torch.arange(512) <= 300))


def test_a_bare_mask_mod():
    mod = lambda b, h, q, k: (q >= k) | (k < 7 * h)  # noqa: E731
    tensors = make(2, 3, 3, 170, 300, 32)
    check(*tensors, mask_mod=mod, mask=create_mask(mod, 1, 3, 170, 300, device="cpu"))
    check(*tensors)
    check(*tensors, mask_mod=noop_mask)


def test_one_key_for_all_batches():
    q, k, v = make(3, 2, 2, 40, 50, 16)
    block_mask = create_block_mask(lambda b, h, q, k: k <= q + b, 3, 1, 40, 50, device="cpu")
    mask = create_mask(lambda b, h, q, k: k <= q + b, 3, 1, 40, 50, device="cpu")
    check(q, k[:1], v[:1], block_mask=block_mask, mask=mask)


# ---- rows that see nothing, infinities ------------------------------------------------------------------------------


def test_nothing_is_seen():
    q, k, v = make(1, 2, 2, 140, 130, 32)
    for kwargs in (
        {"block_mask": create_block_mask(lambda b, h, q, k: q < 0, None, None, 140, 130, device="cpu")},
        {"mask_mod": lambda b, h, q, k: q < 0},
        {"score_mod": lambda s, b, h, q, k: s - INF},
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = flex_attention(*leaves, return_lse=True, **kwargs)
        assert out.eq(0).all() and lse.eq(-INF).all()
        for gradient in torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.zeros_like(lse)]):
            assert gradient.eq(0).all()


def test_what_is_masked_may_be_anything(isa):
    q, k, v = make(1, 2, 1, 200, 200, 32)
    for bad in (float("nan"), INF):
        k[:, :, 150:], v[:, :, 150:] = bad, bad
        mod = lambda b, h, q, k: (k <= q) & (k < 150)  # noqa: E731
        block_mask = create_block_mask(mod, None, None, 200, 200, device="cpu", BLOCK_SIZE=64)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flex_attention(*leaves, block_mask=block_mask, enable_gqa=True)
        clean = [x.nan_to_num(0, 0, 0).detach().requires_grad_() for x in leaves]
        want = flex_attention(*clean, block_mask=block_mask, enable_gqa=True)
        assert torch.equal(out, want)
        for has, wants in zip(*(torch.autograd.grad(x.sum(), y) for x, y in ((out, leaves), (want, clean)))):
            assert torch.equal(has, wants)


def test_infinite_values_reach_those_that_see_them():
    q, k, v = make(1, 1, 1, 20, 20, 8)
    v[0, 0, 7, 3] = INF
    out = flex_attention(q, k, v, mask_mod=causal)
    assert out[0, 0, :7].isfinite().all() and (out[0, 0, 7:, 3] == INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("mask_mod", [None, causal], ids=["all", "causal"])
def test_max_scores_of_rows_with_nan(dtype, mask_mod):
    """As in PyTorch, and as on GPUs: NaN where the row sees one, +inf where it sees that alone."""
    q, k, v = (x.to(dtype) for x in make(1, 2, 2, 40, 40, 16))
    table = torch.zeros(40, 40)
    table[5, 3], table[6, 2], table[7, 1], table[8] = torch.nan, INF, -INF, torch.nan
    _, aux = flex_attention(
        q, k, v, lambda s, b, h, i, j: s + table[i, j], mask_mod=mask_mod, return_aux=AuxRequest(max_scores=True)
    )
    scores = (q.double() @ k.double().mT) / 4 + table
    if mask_mod is not None:
        scores = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -INF)
    torch.testing.assert_close(aux.max_scores.double(), scores.amax(-1), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_max_logits_of_a_head_with_nan():
    q, k, v = (x.transpose(1, 2).contiguous() for x in make(2, 3, 3, 20, 30, 16))
    q[1, 4, 2, 0] = torch.nan
    *_, largest = flash_attn_func(q, k, v, return_max_logits=True)
    assert largest.isnan().tolist() == [False, False, True]


def test_no_keys():
    q, k, v = (x.requires_grad_() for x in make(2, 2, 2, 5, 0, 16))
    out, lse = flex_attention(q, k, v, return_lse=True)
    assert out.shape == (2, 2, 5, 16) and out.eq(0).all() and lse.eq(-INF).all()
    out.sum().backward()
    assert q.grad.eq(0).all() and k.grad.shape == k.shape


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7)], ids=str)
def test_no_queries(shape):
    b, h, len_q, len_kv = shape
    q, k, v = (x.requires_grad_() for x in make(b, h, h, len_q, len_kv, 16))
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, q, k: s + k)
    assert out.shape == (b, h, len_q, 16)
    out.sum().backward()
    assert k.grad.eq(0).all()


# ---- results -----------------------------------------------------------------------------------------------------


def test_out_has_the_order_of_querys_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make(2, 3, 3, 17, 19, 16))
    assert flex_attention(q, k, v).transpose(1, 2).is_contiguous()
    assert flex_attention(q.contiguous(), k, v).is_contiguous()
    check(q, k, v)


def test_expanded_and_strided_inputs():
    q, k, v = make(2, 4, 4, 33, 45, 16)
    check(q, k[:, :1].expand(2, 4, -1, -1), v[:1].expand(2, -1, -1, -1))
    check(q.mT.contiguous().mT, k[..., ::1], torch.randn(2, 4, 45, 32)[..., ::2])
    overlapping = torch.as_strided(torch.randn(9999), (2, 4, 45, 16), (1, 16, 200, 1))  # two dimensions have stride 1
    check(q, overlapping, overlapping)


def test_results_are_what_is_asked_for():
    q, k, v = make(1, 1, 1, 9, 9, 16)
    assert isinstance(flex_attention(q, k, v), torch.Tensor)
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and aux.max_scores.shape == (1, 1, 9)
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest())
    assert aux.lse is None and aux.max_scores is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, lse = flex_attention(q, k, v, return_lse=True)
    assert lse.shape == (1, 1, 9)


def test_the_gradient_of_lse_alone():
    q, k, v = (x.requires_grad_() for x in make(1, 2, 2, 40, 50, 16))
    lse = flex_attention(q, k, v, score_mod=lambda s, b, h, q, k: s * 2, return_lse=True)[1]
    lse.sum().backward()
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    ((wide[0] @ wide[1].mT) * 0.5).logsumexp(-1).sum().backward()
    close(q.grad, wide[0].grad, 1e-4)
    close(k.grad, wide[1].grad, 1e-4)
    assert v.grad.eq(0).all()


def test_batches_of_gradients():
    query, key, value, bias = (x.requires_grad_() for x in (*torch.randn(3, 1, 2, 5, 8), torch.randn(5)))
    leaves = query, key, value, bias
    out, aux = flex_attention(
        query, key, value, lambda score, b, h, i, j: score + bias[j], return_aux=AuxRequest(lse=True)
    )
    douts, dlses = torch.randn(3, *out.shape), torch.randn(3, *aux.lse.shape)
    got = torch.autograd.grad((out, aux.lse), leaves, (douts, dlses), is_grads_batched=True, retain_graph=True)
    for i in range(3):
        want = torch.autograd.grad((out, aux.lse), leaves, (douts[i], dlses[i]), retain_graph=True)
        torch.testing.assert_close([x[i] for x in got], list(want))


def test_gradients_do_not_depend_on_threads():
    def run(threads):
        torch.set_num_threads(threads)
        bias = torch.linspace(-1, 1, 599).requires_grad_()
        leaves = [x.requires_grad_() for x in make(2, 4, 2, 300, 300, 32)]
        out = flex_attention(*leaves, lambda s, b, h, q, k: s + bias[q - k + 299], mask_mod=causal, enable_gqa=True)
        return torch.autograd.grad(out.square().sum(), [*leaves, bias])

    try:
        for has, wants in zip(run(2), run(1)):
            assert torch.equal(has, wants)
    finally:
        torch.set_num_threads(1)


def test_autocast():
    q, k, v = make(1, 2, 2, 30, 30, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(q, k, v).dtype == torch.bfloat16
        assert flex_attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="same dtype"):
            flex_attention(q, k, v.double())


def test_one_trace_for_many_calls():
    q, k, v = make(1, 1, 1, 33, 33, 16)
    before = tracer.num_traces
    for i in range(100):
        table = torch.randn(40 + i)
        flex_attention(
            q, k, v, lambda s, b, h, q, k, t=table, n=i: s + t[q - k + n], mask_mod=lambda b, h, q, k: q >= k
        )
    assert tracer.num_traces <= before + 2


def nested(depth, table, factor):
    """A mod whose program is longer the deeper it is."""

    def outermost(score, b, h, i, j):
        return score * factor + table[h, j]

    def around(inner):
        return lambda score, b, h, i, j: inner(score, b, h, i, j) * 0.75

    mod = outermost
    for _ in range(depth):
        mod = around(mod)
    return mod


def test_more_programs_in_turn_than_are_kept():
    """C keeps the last decoded programs with places for their values. Each call brings other tensors and numbers."""
    query, key, value = (torch.randn(1, 2, 9, 16) for _ in range(3))
    for turn in range(3):
        for depth in [*range(11), 3, 3]:
            table, factor = torch.randn(2, 9 + turn), 1.0 + depth + turn
            scores = query @ key.transpose(-1, -2) / 4 * factor + table[:, None, :9]
            want = (scores * 0.75**depth).softmax(-1) @ value
            with torch.no_grad():
                got = flex_attention(query, key, value, nested(depth, table, factor))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_kept_program_takes_no_other_values():
    """The same program with fewer tensors, tensors of another dtype, and then with its own again."""
    query, key, value = (torch.randn(1, 2, 9, 16) for _ in range(3))
    table = torch.randn(2, 9)
    program, tensors, numbers = tracer.program_of(nested(1, table, 2.0), torch.float32)

    def call(tensors, numbers=numbers):
        mod = program.text, tensors, numbers
        tail = mod, None, None, None, None, False, False
        return flash_attn_2_cuda.flex_direct(query, key, value, None, False, None, *tail)

    want = call(tensors)[0]
    for wrong in ((), (table.double(),), (table.int(),), (table[0],), (None,), (3,)):
        assert call(wrong) is None
        assert torch.equal(call(tensors)[0], want)
    assert call(tensors, ()) is None and call(tensors, (*numbers, 1.0)) is None
    assert torch.equal(call(tensors)[0], want)


def test_threads_have_calls_of_their_own():
    q, k, v = make(1, 2, 2, 100, 100, 32)
    want = [flex_attention(q, k, v, lambda s, b, h, i, j, c=c: s * c) for c in range(4)]
    wrong = []

    def run(c):
        for _ in range(20):
            if not torch.equal(flex_attention(q, k, v, lambda s, b, h, i, j: s * c), want[c]):
                wrong.append(c)

    threads = [threading.Thread(target=run, args=(c,)) for c in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
