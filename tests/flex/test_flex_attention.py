"""flex_attention against its specification: masks, score mods, block masks, gradients, shapes and errors."""

import enum
import functools
import gc
import random
import threading
import types
import warnings
import weakref
from contextlib import nullcontext

import flash_attn_2_cuda
import numpy
import pytest
import torch
from catalogue import CATALOGUE
from oracle_attention import INF, attention, check, close
from score_catalogue import SCORES
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as create_block_mask_of_torch

from flash_attn import flash_attn_func
from flash_attn.flex import tracer
from flash_attn.flex.derivative import derivative_of
from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention, noop_mask, or_masks


def make(b, h, h_kv, len_q, len_kv, d, d_v=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, h, len_q, d), (b, h_kv, len_kv, d), (b, h_kv, len_kv, d_v or d)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def causal(b, h, q, k):
    return q >= k


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
        tail = mod, None, None, None, False, False
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


# ---- errors ------------------------------------------------------------------------------------------------------


def call(q=(1, 4, 8, 16), k=(1, 4, 8, 16), v=None, dtypes=(torch.float32,) * 3, **kwargs):
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip((q, k, v or k), dtypes)]
    return flex_attention(*tensors, **kwargs)


def masked(shape, **kwargs):
    return create_block_mask(causal, *shape, device="cpu", **kwargs)


ERRORS = [
    ({"dtypes": (torch.float32, torch.float16, torch.float32)}, ValueError, "to have the same dtype"),
    ({"k": (1, 4, 8, 32)}, ValueError, "same embedding dimension but got E=16 and E=32"),
    ({"q": (4, 8, 16), "k": (4, 8, 16)}, NotImplementedError, "must be 4D tensors"),
    ({"k": (1, 2, 8, 16)}, ValueError, "same number of heads but got Hq=4 and Hkv=2. Try setting enable_gqa=True"),
    ({"k": (1, 3, 8, 16), "enable_gqa": True}, ValueError, "multiple of kv heads for GQA but got Hq=4 and Hkv=3"),
    ({"q": (2, 4, 8, 16)}, ValueError, "or non-none block_mask"),
    ({"q": (2, 4, 8, 16), "block_mask": (1, 1, 8, 8)}, ValueError, "B_block_mask=1"),
    ({"block_mask": (1, 1, 7, 8)}, ValueError, "smaller length"),
    ({"block_mask": (1, 1, 9, 8)}, ValueError, r"block_mask\._adjust"),
    ({"v": (1, 4, 9, 16)}, ValueError, "key and value to have the same batch size, heads and length"),
    ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError, "both return_lse and return_aux"),
    ({"block_mask": (1, 1, 8, 8), "mask_mod": causal}, ValueError, "not both"),
    ({"kernel_options": {"BACKEND": "MAGIC"}}, ValueError, "Invalid BACKEND value 'MAGIC'"),
    ({"kernel_options": {"OUTPUT_MAX": True}}, AssertionError, "OUTPUT_MAX"),
    ({"k": (1, 4, 8, 300), "q": (1, 4, 8, 300)}, NotImplementedError, "at most 256"),
    ({"dtypes": (torch.float8_e4m3fn,) * 3}, NotImplementedError, "q is float8_e4m3fn"),
    ({"dtypes": (torch.int32,) * 3}, NotImplementedError, "q is int32"),
    ({"scale": 1e31}, RuntimeError, "scale must be between"),
    ({"scale": "a"}, TypeError, "scale must be a number or None; it is 'a', of type str"),
    ({"scale": torch.tensor(0.3, requires_grad=True)}, RuntimeError, "scale gets no gradient"),
    (
        {"mask_mod": lambda b, h, q, k: q - k},
        AssertionError,
        "must return torch.bool, but returns torch.int64: .*py, line",
    ),
    ({"mask_mod": lambda i, j: i >= j}, TypeError, r"a mask_mod takes \(b, h, q_idx, kv_idx\).*py, line .* takes 2"),
    ({"score_mod": lambda b, h, i, j: i}, TypeError, r"a score_mod \(score, b, h.*py, line .* takes 4 positional"),
    ({"score_mod": lambda s, *_: (lambda: 0)(s)}, TypeError, r"^[^:]*takes 0 positional arguments"),
    ({"score_mod": lambda s, *_: numpy.tanh(s)}, TypeError, "cannot call functions of NumPy.* torch: .*py, line"),
    ({"kernel_options": "AUTO"}, TypeError, "kernel_options must be a dict or None; it is 'AUTO', of type str"),
    ({"return_aux": True}, TypeError, "return_aux must be an AuxRequest or None; it is True, of type bool"),
    ({"return_aux": {"lse": True}}, TypeError, "return_aux must be an AuxRequest or None; it is of type dict"),
    ({"score_mod": "relu"}, TypeError, "score_mod must be a function or None; it is 'relu', of type str"),
    ({"score_mod": 3}, TypeError, "score_mod must be a function or None; it is 3, of type int"),
    ({"mask_mod": masked((1, 1, 8, 8))}, TypeError, "mask_mod must be a function or None; it is of type BlockMask"),
    ({"block_mask": causal}, TypeError, "block_mask must be a BlockMask or None; it is of type function"),
    ({"block_mask": torch.ones(8, 8)}, TypeError, r"block_mask must be a BlockMask or None; it is a tensor of shape"),
]


@pytest.mark.parametrize("arguments, error, text", ERRORS, ids=[text for _, _, text in ERRORS])
def test_errors(arguments, error, text):
    arguments = dict(arguments)
    if isinstance(arguments.get("block_mask"), tuple):
        arguments["block_mask"] = masked(arguments["block_mask"])
    with pytest.raises(error, match=text):
        call(**arguments)


@pytest.mark.parametrize("name, place", [("query", 0), ("key", 1), ("value", 2)])
@pytest.mark.parametrize(
    "change, text",
    [
        (lambda x: None, "must be a tensor; it is of type NoneType"),
        (lambda x: x.numpy(), "must be a tensor; it is of type ndarray"),
        (lambda x: x.to_sparse(), "must be a dense tensor; it has layout torch.sparse_coo"),
    ],
)
def test_tensors_of_other_kinds_are_named(name, place, change, text):
    tensors = [torch.ones(1, 4, 8, 16) for _ in range(3)]
    tensors[place] = change(tensors[place])
    with pytest.raises(TypeError, match=f"{name} {text}"):
        flex_attention(*tensors)


def test_a_mask_that_requires_grad_is_refused():
    bias = torch.zeros(8, requires_grad=True)
    with pytest.raises(
        AssertionError, match="from mask mod that require grad are not supported. Use detach\\(\\): .*py, line"
    ):
        call(mask_mod=lambda b, h, q, k: bias[q] > 0)


def test_a_changed_input_is_noticed():
    q, k, v = make(1, 1, 1, 8, 8, 16)
    q.requires_grad_()
    out = flex_attention(q, k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_nested_capture_is_refused():
    """At the first call, and when the program of the mod is known."""
    nested = torch.nested.nested_tensor([torch.ones(8), torch.ones(4)])
    for table in (nested, torch.ones(2, 8), nested):
        with pytest.raises(RuntimeError, match="a capture is a nested tensor") if table is nested else nullcontext():
            call(score_mod=lambda s, b, h, q, k: s + table[h % 2, k % 8])  # noqa: B023


def test_a_freed_capture_is_noticed():
    table = torch.zeros(100)
    table.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="a capture has shape"):
        call(score_mod=lambda s, b, h, q, k: s + table[k])


def test_the_kernels_of_torch_on_demand():
    q, k, v = make(1, 2, 2, 16, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = flex_attention(q, k, v, kernel_options={"BACKEND": "TRITON"})
    close(flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "fwd_num_warps": 4}), want, 1e-5)


# ---- the short way and the long way ---------------------------------------------------------------------------------

DOCUMENT, TABLE, SLOPES = torch.arange(33) // 7, torch.randn(2, 65), torch.tensor([0.5, 0.25])
WAYS = {
    "nothing": {},
    "heads in groups": {"enable_gqa": True, "scale": 0.3},
    "causal block mask": {"block_mask": (causal, 33)},
    "documents": {"block_mask": (lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j], 33)},
    "softcap in documents": {
        "block_mask": (lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) & (i >= j), 33),
        "score_mod": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
    },
    "a table with a gradient": {"score_mod": lambda s, b, h, i, j: s + TABLE[h, i - j + 32]},
    "lse": {"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i), "return_aux": AuxRequest(lse=True)},
    "all results": {"mask_mod": None, "return_aux": AuxRequest(lse=True, max_scores=True)},
    "a window by mask_mod": {"mask_mod": lambda b, h, i, j: (i - j < 9) & (i >= j)},
}


@pytest.mark.parametrize("grads", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", WAYS)
def test_both_ways_are_the_same(name, grads, monkeypatch):
    from flash_attn.flex import attention

    arguments = dict(WAYS[name])
    if "block_mask" in arguments:
        mod, n = arguments["block_mask"]
        arguments["block_mask"] = create_block_mask(mod, None, None, n, n, "cpu", BLOCK_SIZE=16)
    q, k, v = make(2, 2, 1 if "enable_gqa" in arguments else 2, 33, 33, 16)
    q = torch.nn.Parameter(q.transpose(1, 2).contiguous().transpose(1, 2))
    monkeypatch.setitem(globals(), "TABLE", TABLE.clone().requires_grad_(grads))
    leaves = [q, k.requires_grad_(grads), v, *([TABLE] if "table" in name else [])]
    directly, taken = attention._directly, []

    def counted(*args):
        taken.append(directly(*args))
        return taken[-1]

    def results(way):
        monkeypatch.setattr(attention, "_directly", way)
        with torch.set_grad_enabled(grads):
            found = flex_attention(q, k, v, **arguments)
        out, aux = found if isinstance(found, tuple) else (found, None)
        found = [out, *([] if aux is None else [x for x in aux if x is not None])]
        if not grads:
            assert not any(x.requires_grad for x in found)
            return found, []
        total = sum(x.sin().sum() for x in found if x.requires_grad)
        return found, [*torch.autograd.grad(total, [x for x in leaves if x.requires_grad])]

    want = results(lambda *args: None)  # and the mods are traced now
    got = results(counted)
    assert len(taken) == 1 and taken[0] is not None
    for wants, gots in zip(want, got):
        for x, y in zip(wants, gots, strict=True):
            assert torch.equal(x, y) and x.stride() == y.stride() and type(x) is type(y) is torch.Tensor


def _steps(i, num, step):
    for _ in range(num):
        i = step(i)
    return i


WIDTH = 2.5
LIKE_WINDOWS = {
    "a float made an integer": (None, lambda b, h, i, j: i - j <= torch.full_like(j, WIDTH)),
    "a number made a bool": (None, lambda b, h, i, j: (i >= j) & (i - j <= torch.full_like(j, 3).bool().long())),
    "an integer that fp32 lacks": (
        None,
        lambda b, h, i, j: i - j + 33554430 <= torch.full_like(j, 33554435).float().long(),
    ),
    "a cap made an integer": (
        lambda s, b, h, i, j: torch.full_like(j, WIDTH) * torch.tanh(s / torch.full_like(j, WIDTH)),
        None,
    ),
    "many steps": (None, lambda b, h, i, j: _steps(i, 1500, lambda x: x + 1) >= j + 1500),
    "doubled again and again": (
        None,
        lambda b, h, i, j: _steps(i, 40, lambda x: x + x) >= _steps(j, 40, lambda x: x + x),
    ),
    "masks in masks": (None, lambda b, h, i, j: _steps(i >= j, 40, lambda x: (x & (i - j < 9)) & (x & (j >= 0)))),
}


@pytest.mark.parametrize("name", LIKE_WINDOWS)
def test_what_looks_like_a_window_or_a_softcap(name):
    """Whether or not the plain kernels take the call, the results are those of kernels with mods."""
    score_mod, mask_mod = LIKE_WINDOWS[name]
    q, k, v = make(1, 2, 2, 33, 33, 16)
    want, _ = flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_aux=AuxRequest(max_scores=True))
    close(flex_attention(q, k, v, score_mod, mask_mod=mask_mod), want, 1e-5)


def test_transforms_are_refused():
    q, k, v = make(1, 1, 1, 8, 8, 16)
    table = torch.zeros(8)
    with forward_ad.dual_level():
        dual, dual_table = forward_ad.make_dual(q, q), forward_ad.make_dual(table, table)
        for arguments in ({"query": dual}, {"score_mod": lambda s, b, h, i, j: s + dual_table[j]}):
            with pytest.raises(NotImplementedError, match="has no jvp"):
                flex_attention(**{"query": q, "key": k, "value": v, **arguments})
    for transformed in (
        torch.func.vmap(lambda q: flex_attention(q, k, v)),
        torch.func.grad(lambda q: flex_attention(q[0], k, v).sum()),
    ):
        with pytest.raises(NotImplementedError, match="flex_attention takes no tensors of torch.func"):
            transformed(torch.stack([q, q]))
    want = flex_attention(q, k, v)
    torch.func.vmap(lambda x: close(flex_attention(q, k, v), want, 1e-6) or x)(q)  # its tensors are of no transform


# ---- what a cached program must notice ------------------------------------------------------------------------------


class Mode(enum.Enum):
    CAUSAL = 1
    FULL = 2


class Reach:
    width = 3

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __eq__(self, other):
        return self.items == other.items


module = types.ModuleType("module_of_a_user")
module.width, module.function = 2, lambda i, j: i - j <= module.width
bin = 3


def window(width):
    return lambda b, h, i, j: (i - j).abs() <= width


def by_mode(mode):
    return lambda b, h, i, j: i >= j if mode is Mode.CAUSAL and mode == Mode.CAUSAL else i == i


def by_length(items, other):
    return lambda b, h, i, j: i >= j if items else (i == j if items == other else i - j <= 1)


def pairs_of_mods():
    """(mod, the same mask by torch) where the second mod of a kind differs from the first in one place."""
    twice = window(3)
    yield or_masks(twice, twice), lambda i, j: (i - j).abs() <= 3
    yield or_masks(window(0), window(5)), lambda i, j: (i - j).abs() <= 5
    yield by_mode(Mode.CAUSAL), lambda i, j: i >= j
    yield by_mode(Mode.FULL), lambda i, j: i + j >= 0
    yield by_length(Reach(1), Reach()), lambda i, j: i >= j
    yield by_length(Reach(), Reach()), lambda i, j: i == j
    yield by_length(Reach(), Reach(1)), lambda i, j: i - j <= 1
    for module.width in (2, 4):
        yield lambda b, h, i, j: (i - j).abs() <= module.width, lambda i, j: (i - j).abs() <= module.width
        yield lambda b, h, i, j: module.function(i, j) & (i >= j), lambda i, j: (i - j <= module.width) & (i >= j)
    for Reach.width in (3, 6):
        yield lambda b, h, i, j: (i - j).abs() <= Reach.width, lambda i, j: (i - j).abs() <= Reach.width
    for globals()["bin"] in (3, 5):
        yield lambda b, h, i, j: (i - j).abs() <= bin, lambda i, j: (i - j).abs() <= bin
    for n in (2, 4):
        yield lambda b, h, i, j, steps=range(n): (i - j).abs() <= len(steps), lambda i, j, n=n: (i - j).abs() <= n


def test_a_cached_program_is_of_no_other_mod():
    for mod, mask in pairs_of_mods():
        want = mask(torch.arange(9)[:, None], torch.arange(9))
        assert torch.equal(create_mask(mod, 1, 1, 9, 9, device="cpu")[0, 0], want)


def test_detached_values_have_no_gradient():
    table = torch.randn(12, requires_grad=True)
    tensors = make(1, 1, 1, 12, 12, 8)
    check(*tensors, score_mod=lambda s, b, h, i, j: s + 0.5 * s.detach() * s.detach())
    check(*tensors, score_mod=lambda s, b, h, i, j: s + table[j].detach() + table[i], leaves=[table])


def test_a_mod_must_not_switch_gradients_off():
    def mod(s, b, h, i, j):
        with torch.no_grad():
            return s * 2

    with pytest.raises(NotImplementedError, match="use detach"):
        call(score_mod=mod)


class Doubled(torch.autograd.Function):
    """A gradient of its own, which the tracer does not know."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_a_mod_must_not_call_a_function_with_a_gradient_of_its_own():
    """The error names the line of the mod, not one of torch's files."""
    doubled = Doubled.apply
    for mod in (lambda s, b, h, i, j: doubled(s), lambda s, b, h, i, j: Doubled.apply(s)):
        with pytest.raises(NotImplementedError, match="autograd.Function does; use .*test_flex_attention.py, line"):
            call(score_mod=mod)


def test_no_heads():
    q, k, v = (x.requires_grad_() for x in make(1, 0, 0, 4, 4, 8))
    flex_attention(q, k, v, lambda s, b, h, i, j: s * 2).sum().backward()
    assert q.grad.shape == (1, 0, 4, 8)


def test_masks_made_in_inference_mode():
    with torch.inference_mode():
        block_mask = create_block_mask(causal, None, None, 20, 20, device="cpu")
        tensors = make(1, 1, 1, 20, 20, 8)
        check(*tensors, block_mask=block_mask, mask=create_mask(causal, 1, 1, 20, 20, device="cpu"), backward=False)


def test_a_block_as_large_as_the_mask_is_a_block():
    none, places = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    empty = BlockMask.from_kv_blocks(none, places, BLOCK_SIZE=1 << 30, seq_lengths=(8, 8))
    assert flex_attention(*make(1, 1, 1, 8, 8, 8), block_mask=empty).eq(0).all()


def test_windows_and_caps_beyond_the_plain_kernels():
    tensors, far = make(1, 1, 1, 9, 9, 8), 2**63 - 1
    mod = lambda b, h, i, j: (i + far >= j) & (j >= i - far)  # noqa: E731
    check(*tensors, mask_mod=mod, mask=create_mask(mod, 1, 1, 9, 9, device="cpu"))
    check(*tensors, score_mod=lambda s, b, h, i, j: 1e-30 * torch.tanh(s / 1e-30), scale=2.0, backward=False)


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("least", [1e-45, 1e-40, -1e-45, 0.0])
def test_mods_know_denormals(block, least):
    """Attention runs with denormals as zeros on a CPU. Its mods do not, nor do the bounds of blocks."""
    query, key, value = torch.randn(3, 1, 1, 70, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def mask_mod(b, h, q, k):
        return q.float() / (k + 1).float() >= least

    rows = torch.arange(70)
    seen = mask_mod(0, 0, rows[:, None], rows)
    block_mask = create_block_mask(mask_mod, None, None, 70, 70, "cpu", BLOCK_SIZE=block)
    scores = (query @ key.mT / 4).masked_fill(~seen, -float("inf"))
    wanted = torch.softmax(scores, -1).nan_to_num(0.0) @ value
    for dtype in (torch.float64, torch.float32):
        out = flex_attention(*(x.to(dtype) for x in (query, key, value)), block_mask=block_mask)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


def test_lists_of_floats_are_refused():
    num, places = torch.ones(1, 1, 1), torch.zeros(1, 1, 1, 1)
    block_mask = BlockMask.from_kv_blocks(num.int(), places.int(), BLOCK_SIZE=8, seq_lengths=(8, 8))
    block_mask.kv_num_blocks = num
    with pytest.raises(TypeError, match="must be integers"):
        call(block_mask=block_mask)


def test_programs_of_another_kind_are_refused():
    q, k, v = make(1, 1, 1, 8, 8, 16)
    out, lse = torch.empty_like(q), torch.empty(1, 1, 8)
    program = tracer.program_of(causal)[0].text
    score = tracer.program_of(lambda s, b, h, i, j: s + i, torch.float32)[0]
    wide = tracer.program_of(lambda s, b, h, i, j: s + i, torch.float64)[0].text
    derivative = derivative_of(score)[0]
    for mods in ((program, None), (wide, None), (derivative, None), (None, score.text), (None, derivative)):
        of = [None if text is None else (text, (), ()) for text in mods]
        with pytest.raises(RuntimeError, match="is no score_mod, mask_mod or derivative for fp32"):
            flash_attn_2_cuda.flex_forward(q, k, v, out, lse, None, 1.0, (-1, -1, 0.0), *of, None, None)


def test_a_node_keeps_captured_tensors_only_where_hooks_put_them():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def call():
        slopes = torch.rand(2, requires_grad=True) * 2
        out = flex_attention(q, q, q, lambda score, b, h, i, j: score + slopes[h] * (j - i))
        return out, weakref.ref(slopes)

    for _ in range(3):  # the long way, then the short way
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            out, kept = call()
        gc.collect()  # a trace has cycles
        assert kept() is None
        out.sum().backward()


def test_a_compiled_mask_of_integers_is_named():
    q = torch.ones(1, 2, 8, 16)
    for function in (
        lambda q: flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i - j),
        lambda q: create_block_mask(lambda b, h, i, j: i - j, 1, 1, 8, 8, "cpu").kv_indices,
    ):
        with pytest.raises(Exception, match="must .*torch.bool.* torch.int64: File .*test_flex_attention.py"):
            torch.compile(function, backend="eager", fullgraph=True)(q)
