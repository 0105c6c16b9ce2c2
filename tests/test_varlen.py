"""Packed sequences: forward and backward, used and skipped keys, pages of any size, rows of no sequence."""

from __future__ import annotations

import math

import pytest
import torch
from cases import PACKED, Case, each, in_dtypes
from harness import offsets, ours, problem, verify
from harness_varlen import Parts, paged, run

from flash_attn import (
    _attention,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

NAN = math.nan
LARGEST = 2**63 - 1


@pytest.mark.parametrize("case", in_dtypes(PACKED), ids=repr)
def test_packed(case, isa):
    short_and_large = {"m_grad": 5.0, "a_grad": 2e-4 if case.dtype == "fp32" else None}  # as in test_bwd.py
    verify(case, backward=True, **(short_and_large if case.values == "large" else {}))


def test_max_seqlen_may_be_larger(isa):
    """max_seqlen is an upper bound, and may be a tensor without dimensions."""
    case = Case((5, 70, 0), (70, 33, 4), causal=True)
    p = problem(case)
    tensors = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
    results = []
    for max_q, max_k in ((70, 70), (500, 400), (torch.tensor(70), 70), (2**31, 2**40), (LARGEST, LARGEST)):
        out = flash_attn_varlen_func(*tensors, p.cu_q, p.cu_k, max_q, max_k, causal=True)
        results.append([out, *torch.autograd.grad(out, tensors, p.dout)])
        assert all(map(torch.equal, results[-1], results[0]))


@pytest.mark.parametrize(
    "lengths",
    [((17, 128, 1, 65), (64, 129, 33, 65)), ((100, 20, 300, 3), (130, 500, 1100, 1025))],
    ids=("short", "around 1024 keys"),
)
def test_packed_equals_dense_of_each(lengths, isa):
    """A sequence gives the same bits alone and beside other sequences of other lengths."""
    case = Case(*lengths, h=4, h_kv=2, causal=True)
    together = ours(case, False)
    p = problem(case)
    for n, (len_q, len_kv) in enumerate(case.lengths):
        rows = [slice(*p.cu_q[n : n + 2].tolist())] + [slice(*p.cu_k[n : n + 2].tolist())] * 2
        q, k, v = (x[r] for x, r in zip((p.q, p.k, p.v), rows))
        cu_q, cu_k = offsets([len_q]), offsets([len_kv])
        alone = flash_attn_varlen_func(q, k, v, cu_q, cu_k, len_q, len_kv, causal=True)
        assert torch.equal(alone, together.out[n])


def test_packed_forms_are_the_same_function():
    torch.manual_seed(0)
    cu, cu_k = offsets((9, 0, 20)), offsets((3, 30, 7))
    qkv = torch.randn(29, 3, 4, 16, requires_grad=True)
    kv = torch.randn(40, 2, 2, 16, requires_grad=True)
    dout = torch.randn(29, 4, 16)
    want = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 20, 20, causal=True)
    got = flash_attn_varlen_qkvpacked_func(qkv, cu, 20, causal=True)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(x, qkv, dout)[0] for x in (got, want)))
    want = flash_attn_varlen_func(qkv[:, 0], *kv.unbind(1), cu, cu_k, 20, 30)
    got = flash_attn_varlen_kvpacked_func(qkv[:, 0], kv, cu, cu_k, 20, 30)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(x, kv, dout)[0] for x in (got, want)))


def test_rows_outside_every_sequence(isa):
    """Rows past cu_seqlens[-1] keep their old values. zero_tensors makes them 0, and their lse -inf."""
    torch.manual_seed(0)
    cu_q, cu_k = offsets((5, 0, 9)), offsets((7, 3, 0))
    q, k, v, dout = (torch.randn(n, 2, 16) for n in (20, 15, 15, 20))
    q[14:], dout[14:], k[10:], v[10:] = NAN, NAN, NAN, NAN
    args = (cu_q, cu_k, 9, 7, 0.0, 0.25, False)
    out, lse, _, rng = _flash_attn_varlen_forward(q, k, v, *args, zero_tensors=True)
    assert (out[14:] == 0).all() and (lse[:, 14:] == -math.inf).all()
    assert out[:5].isfinite().all() and (out[5:14] == 0).all() and (lse[:, 5:14] == math.inf).all()
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    softmax_d = _flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, *args, -1, -1, 0.0, None, False, rng
    )  # fmt: skip
    assert softmax_d.shape == (2, 20 + 128 * 3)
    for grad, rows in zip(grads, (14, 10, 10)):
        assert grad[:rows].isfinite().all() and (grad[rows:] == 7.0).all()
    assert (grads[0][5:14] == 0).all() and (grads[1][7:10] == 0).all() and (grads[2][7:10] == 0).all()
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    _flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, *args, -1, -1, 0.0, None, False, rng, zero_tensors=True
    )  # fmt: skip
    for grad, rows in zip(grads, (14, 10, 10)):
        assert grad[:rows].isfinite().all() and (grad[rows:] == 0).all()


def test_gradients_outside_every_sequence_are_zero(isa, monkeypatch):
    """These gradients go on to the weights before the attention, so they must not be old values of the memory."""
    monkeypatch.setattr(_attention, "empty_like", lambda x: torch.full_like(x, NAN))
    cu_q, cu_k = offsets((5, 0, 9)), offsets((7, 3, 0))
    qkv = torch.randn(20, 3, 2, 16, requires_grad=True)
    q, k, v = (torch.randn(n, 2, 16, requires_grad=True) for n in (20, 15, 15))
    dout = torch.randn(20, 2, 16)
    flash_attn_varlen_qkvpacked_func(qkv, cu_q, 9).backward(dout)
    flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 7).backward(dout)
    for grad, rows in ((qkv.grad, 14), (q.grad, 14), (k.grad, 10), (v.grad, 10)):
        assert grad[:rows].isfinite().all() and (grad[rows:] == 0).all()


# ---- keys in use, left padding, pages ------------------------------------------------------------------------------


SEQUENCES = Case((33, 1, 0, 70), (70, 129, 5, 0), h=4, h_kv=2, d=40)


@pytest.mark.parametrize("page_size", (1, 3, 16, 256))
@pytest.mark.parametrize(
    "case",
    in_dtypes([SEQUENCES])
    + each(SEQUENCES, causal=(True,), softcap=(3.0,), alibi=("bh",))
    + each(SEQUENCES, window=((10, 4),), d=(17,)),
    ids=repr,
)
def test_pages(case, page_size, isa):
    """Results equal the results from packed keys, for every size of a page."""
    p = problem(case)
    want, want_lse, _ = ours(case, False).whole[:2] + (None,)
    parts = [[x[a:z] for a, z in zip(p.cu_k[:-1], p.cu_k[1:])] for x in (p.k, p.v)]
    k, table = paged(parts[0], page_size, p.k.dtype)
    v, _ = paged(parts[1], page_size, p.k.dtype)
    scale = case.d**-0.5
    out, lse, _ = flash_attn_varlen_func(
        p.q, k, v, p.cu_q, p.cu_k, p.max_q, p.max_k, 0.0, scale, case.causal, case.window, case.softcap, p.slopes,
        return_attn_probs=True, block_table=table,
    )  # fmt: skip
    rows = sum(case.len_q)
    tolerance = 1e-6 if case.dtype == "fp32" else 2.0**-8 if case.dtype == "bf16" else 2.0**-11
    torch.testing.assert_close(out[:rows], want[:rows], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse[:, :rows], want_lse[:, :rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("page", (0, 1, 16))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_seqused_and_leftpad(dtype, page, isa):
    run(Parts(dtype=dtype, page=page))
    run(Parts(dtype=dtype, page=page, window=(9, 30), causal=False, d=80, softcap=2.0))


def test_num_splits_changes_nothing_much():
    """0 and 1 are legal for packed keys, and the results agree to rounding."""
    case = Case((1, 3), (300, 129), h=4, h_kv=1)
    p = problem(case)
    args = (p.q, p.k, p.v, p.cu_q, p.cu_k, 3, 300, 0.0, 0.2, False)
    want = _flash_attn_varlen_forward(*args)[0][:4]
    for num_splits in (0, 1):
        torch.testing.assert_close(_flash_attn_varlen_forward(*args, num_splits=num_splits)[0][:4], want)


# Upstream's grid draws lengths in [s - 20, s], separately for queries and keys.
def _ragged(len_q, len_kv, b, seed):
    gen = torch.Generator().manual_seed(seed)

    def draw(n):
        return tuple(torch.randint(max(0, n - 20), n + 1, (b,), generator=gen).tolist())

    return draw(len_q), draw(len_kv)


GRID = [
    Case(*_ragged(*lengths, 3, n), h=6, h_kv=h_kv, d=d, dtype=dtype, causal=causal, seed=n)
    for n, (lengths, d, h_kv) in enumerate(
        [
            ((1, 147), 59, 6),
            ((113, 203), 128, 2),
            ((128, 217), 64, 1),
            ((256, 108), 96, 6),
            ((200, 257), 80, 2),
            ((97, 97), 256, 1),
        ]
    )
    for dtype in ("bf16", "fp16")
    for causal in (False, True)
]


@pytest.mark.parametrize("case", GRID, ids=repr)
def test_upstream_grid(case):
    verify(case, backward=True)
