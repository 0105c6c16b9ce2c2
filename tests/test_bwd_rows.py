"""The backward of few query rows (csrc/cpu/attn_bwd_rows.h): which calls it takes, and which elements may not meet."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import DTYPES
from harness import offsets, randn

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.explain import explain
from flash_attn.flash_attn_interface import _flash_attn_backward

NAN = float("nan")
MOST_ROWS = 24
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 3e-3}
# queries, keys, heads, key heads, d: borders of shares, of blocks and of words
SHAPES = [
    (1, 1, 2, 2, 8),
    (1, 577, 3, 3, 64),
    (2, 33, 5, 5, 33),
    (3, 1025, 4, 2, 72),
    (8, 8, 4, 1, 128),
    (6, 17, 8, 2, 256),
]


def tensors(len_q, len_kv, h, h_kv, d, dtype="fp32", b=2):
    torch.manual_seed(len_q + len_kv)
    sizes = (len_q, h), (len_kv, h_kv), (len_kv, h_kv), (len_q, h)
    return [randn(b, length, heads, d).to(DTYPES[dtype]) for length, heads in sizes]


def gradients(q, k, v, dout, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(flash_attn_func(*leaves, **options), leaves, dout)


def backward_of(q, k, v, dout, out, lse, causal=False):
    """dq, dk, dv and softmax_d, beside memory of 7 that stays."""
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    options = 0.0, q.shape[-1] ** -0.5, causal, -1, -1, 0.0, None, False
    delta = _flash_attn_backward(dout, q, k, v, out, lse, *grads, *options)
    return *grads, delta


def forward_of(q, k, v, causal=False):
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    return out, lse


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 2), "softcap": 5.0}], ids=str)
def test_gradients(shape, dtype, options, isa):
    inputs = tensors(*shape, dtype)
    truth = gradients(*(x.double() for x in inputs), **options)
    for name, x, t in zip(("dq", "dk", "dv"), gradients(*inputs, **options), truth):
        assert (x.double() - t).abs().max() <= TOLERANCE[dtype] * (1 + t.abs().max()), name


def test_it_takes_few_rows():
    def kernel(len_q, h, h_kv, **options):
        q, k, v, _ = tensors(len_q, 40, h, h_kv, 16)
        return explain(flash_attn_func, q.requires_grad_(), k, v, **options).backward.kernel

    assert "bwd_rows" in kernel(MOST_ROWS, 1, 1) and "bwd_rows" in kernel(MOST_ROWS // 4, 8, 2, causal=True)
    assert "rows" not in kernel(MOST_ROWS + 1, 1, 1) + kernel(MOST_ROWS // 4 + 1, 8, 2) + kernel(1, 1, 1, dropout_p=0.5)


@pytest.mark.parametrize("bad", (NAN, math.inf))
def test_hidden_elements_reach_nobody(bad, isa):
    """Under a causal mask row 0 of 4 does not see the last 3 of 35 keys."""
    for hidden in range(2):
        q, k, v, dout = tensors(4, 35, 2, 1, 40)
        out, lse = forward_of(q, k, v, causal=True)
        plain = backward_of(q, k, v, dout, out, lse, True)
        if hidden == 0:
            k[:, -1], v[:, -2] = bad, bad  # keys that row 0 does not see
        else:
            q[:, -1], dout[:, -1] = bad, bad  # a row that sees all keys, of head 0 and 1
        dq, dk, dv, _ = backward_of(q, k, v, dout, out, lse, True)
        if hidden == 0:
            assert torch.allclose(dq[:, :2], plain[0][:, :2], atol=1e-5) and not dq[:, -1].isfinite().any()
            assert torch.allclose(dv[:, :-2], plain[2][:, :-2], atol=1e-5)
        else:
            assert torch.allclose(dq[:, :-1], plain[0][:, :-1], atol=1e-5) and not dk.isfinite().any()
    q, k, v, dout = tensors(4, 6, 2, 1, 40)
    out, lse = forward_of(q, k, v, causal=True)
    plain = backward_of(q, k, v, dout, out, lse, True)
    q[:, 0], dout[:, 0] = bad, bad  # row 0 sees 3 keys of 6
    _, dk, dv, _ = backward_of(q, k, v, dout, out, lse, True)
    assert torch.allclose(dk[:, 3:], plain[1][:, 3:], atol=1e-5) and torch.allclose(
        dv[:, 3:], plain[2][:, 3:], atol=1e-5
    )
    assert not dk[:, :3].isfinite().any() and not dv[:, :3].isfinite().any()


@pytest.mark.parametrize("lse_of_row", (math.inf, -math.inf))
def test_rows_that_contribute_nothing(lse_of_row, isa):
    """dout of such a row may hold any value, and K that only other rows see does not reach its dq."""
    q, k, v, dout = tensors(3, 20, 2, 2, 24)
    out, lse = forward_of(q, k, v)
    lse[:, :, 1] = lse_of_row
    q[:, 1], dout[:, 1], k[:, 7] = NAN, NAN, NAN
    dq, _, dv, delta = backward_of(q, k, v, dout, out, lse)
    assert (dq[:, 1] == 0).all() and (delta[:, :, 1] == 0).all() and not dq[:, 0].isfinite().any()
    assert dv[:, :7].isfinite().all() and not dv[:, 7].isfinite().any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_key_behind_the_last(dtype, isa):
    """Words of bf16 hold two keys. Beside scores of -200 the key behind an odd last one would have P = inf."""
    q, k, v, dout = tensors(2, 5, 2, 2, 16, dtype)
    q, k = torch.full_like(q, 5.0), torch.full_like(k, -10.0) + k
    truth = gradients(*(x.double() for x in (q, k, v, dout)))
    for x, t in zip(gradients(q, k, v, dout), truth):
        assert (x.double() - t).abs().max() <= 3 * TOLERANCE[dtype] * (1 + t.abs().max())


def test_a_bias_stays_in_its_head(isa):
    """Three rows of a head are padded to four. The padding takes no bias of another head, not even NaN."""
    torch.manual_seed(0)
    q, k, v = (randn(2, 2, length, 16).requires_grad_() for length in (3, 10, 10))
    bias = randn(2, 2, 3, 10)
    bias[0, 0, 0, 4] = NAN
    with flash_attn.sdpa():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = torch.autograd.grad(F.scaled_dot_product_attention(*wide, attn_mask=bias.double()).sum(), wide)
    for x, t in zip(grads, truth):
        assert torch.allclose(x.double(), t, atol=1e-5, equal_nan=True)


def test_keys_that_no_row_sees(isa):
    """Their K and V are not read, and their gradients are 0."""
    q, k, v, dout = tensors(2, 600, 2, 1, 16)
    options = {"window_size": (4, 0)}
    k[:, :590], v[:, :590] = NAN, NAN
    dq, dk, dv = gradients(q, k, v, dout, **options)
    assert (dk[:, :590] == 0).all() and (dv[:, :590] == 0).all() and dq.isfinite().all() and dk[:, 595:].any()
    empty = gradients(q[:, :0], k, v, dout[:, :0])
    assert all((x == 0).all() for x in empty[1:])
    assert (gradients(q, k[:, :0], v[:, :0], dout)[0] == 0).all()


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_bits_follow_from_the_sequence(dtype, isa):
    """Neither the threads nor the other sequences change a bit, whether or not these have few rows."""
    lengths = [(3, 1100), (70, 90), (1, 1), (0, 5), (24, 64), (5, 0)]
    len_q, len_kv = zip(*lengths)
    torch.manual_seed(1)
    q, dout = (randn(sum(len_q), 4, 48).to(DTYPES[dtype]) for _ in range(2))
    k, v = (randn(sum(len_kv), 4, 48).to(DTYPES[dtype]) for _ in range(2))

    def run(first, end):
        rows = slice(sum(len_q[:first]), sum(len_q[:end]))
        keys = slice(sum(len_kv[:first]), sum(len_kv[:end]))
        leaves = [x.detach().clone().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        some = len_q[first:end], len_kv[first:end]
        out = flash_attn_varlen_func(*leaves, *(offsets(x) for x in some), *(max(x) for x in some), causal=True)
        return torch.autograd.grad(out, leaves, dout[rows])

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        all_of_one = run(0, len(lengths))
        torch.set_num_threads(3)
        together = run(0, len(lengths))
        assert all(torch.equal(x, y) for x, y in zip(together, all_of_one))
        for i in (0, 2, 4):
            alone = run(i, i + 1)
            for x, y, of_rows in zip(alone, together, (len_q, len_kv, len_kv)):
                assert torch.equal(x, y[sum(of_rows[:i]) : sum(of_rows[: i + 1])])
    finally:
        torch.set_num_threads(threads)


def test_absent_gradients_and_strides():
    """Views with any strides give the bits of dense tensors, and a gradient that nobody wants changes no other."""
    q, k, v, dout = tensors(3, 70, 4, 2, 20)
    plain = gradients(q, k, v, dout)
    apart = [torch.full((*x.shape[:-1], 29), NAN)[..., 3:23].copy_(x) for x in (q, k, v, dout)]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout)]
    for inputs in (apart, turned):
        assert all(torch.equal(x, y) for x, y in zip(gradients(*inputs), plain))
    for i in range(3):
        leaves = [x.detach().clone().requires_grad_(n == i) for n, x in enumerate((q, k, v))]
        (found,) = torch.autograd.grad(flash_attn_func(*leaves), leaves[i : i + 1], dout)
        assert torch.equal(found, plain[i])


@pytest.mark.parametrize(("len_kv", "left"), [(1025, 1019), (1025, 333), (600, 500)])
def test_a_block_with_an_odd_number_of_keys(len_kv, left, isa):
    """Windows begin anywhere, and shares end before the last key. With words of two keys the last word may have one
    With so low a lse exp(-lse) of a key with a score of 0 would be infinite."""
    torch.manual_seed(0)
    q = torch.full((1, 1, 2, 16), 5.0).bfloat16()
    k = (torch.randn(1, len_kv, 1, 16) - 10).bfloat16()
    v, dout = (torch.randn(1, n, h, 16).bfloat16() for n, h in ((len_kv, 1), (1, 2)))
    found = gradients(q, k, v, dout, window_size=(left, 0))
    truth = gradients(*(x.double() for x in (q, k, v, dout)), window_size=(left, 0))
    for x, t in zip(found, truth):
        assert (x.double() - t).abs().max() <= 5e-2 * (1 + t.abs().max())


def test_blocks_do_not_depend_on_the_heads_of_a_task(isa):
    """Some heads have a row that contributes nothing. More threads have tasks of fewer heads."""
    window, d, threads = (396, 1), 128, torch.get_num_threads()
    torch.manual_seed(0)
    for _ in range(12):
        q, k, v, dout = (torch.randn(1, n, 16, d).bfloat16() for n in (2, 400, 400, 2))
        out, lse, _ = flash_attn_func(q, k, v, window_size=window, return_attn_probs=True)
        lse[:, 8:, 0], out[:, 0, 8:] = -math.inf, 0
        found = []
        for num in (1, 2):
            torch.set_num_threads(num)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            _flash_attn_backward(dout, q, k, v, out, lse, *grads, 0.0, d**-0.5, False, *window, 0.0, None, False)
            found.append(grads)
        torch.set_num_threads(threads)
        for x, y in zip(*found):
            assert torch.equal(x, y)
