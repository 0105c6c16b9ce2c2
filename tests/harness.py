"""From a case to tensors, to our results, and to the expected results.

Memory that a kernel must not read is NaN. Such memory is rows before and after, gaps between heads and between rows,
and rows of a packed tensor that belong to no sequence. A single stray read turns a result into NaN.
"""

import functools
import os
from types import SimpleNamespace

import flash_attn_2_cuda
import pytest
import torch
from cases import Case
from compare import DTYPES, check, check_lse, largest, size_of_values
from oracle import attention, dropout_keep

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_forward

ISAS = list(flash_attn_2_cuda.cpu_isas())
NAN = float("nan")


# ---- values: what q, k, v contain ----------------------------------------------------------------------------------


def fill(kind, q, k, v):
    """Changes normal values [rows, h, d] of one sequence in place, to a kind that is difficult for a softmax."""
    d = q.shape[-1]
    if kind == "equal":  # all scores of a row are equal and not zero
        k.copy_(k[:1].clone().expand_as(k))
    elif kind == "zero":
        q.zero_()
    elif kind == "ones":
        v.fill_(1.0)  # out must be 1 for all weights
    elif kind == "huge":  # scores up to 1e4
        q.mul_(50 * 2 / d**0.25), k.mul_(50 / d**0.25)
    elif kind == "wide":
        q.mul_(15)
    elif kind == "large":
        q.mul_(5), k.mul_(3), v.mul_(3)
    elif kind == "sparse":
        q.mul_(torch.rand_like(q) < 0.1), k.mul_(torch.rand_like(k) < 0.1), v.mul_(torch.rand_like(v) < 0.1)
    elif kind in ("rising", "falling"):
        ramp = torch.linspace(-30, 30, max(len(k), 1))
        q.copy_(q.abs()), k.copy_((ramp if kind == "rising" else -ramp)[:, None, None].expand_as(k))
    elif kind == "sentinel":
        q.fill_(1.0), k.zero_()
        if len(k):
            k[len(k) // 2] = 1e4 * d**0.5 / d
    else:
        assert kind == "normal", kind


# ---- layouts: the same values [..., rows, h, d] in other memory ----------------------------------------------------


def in_nan(x, before, after):
    """x inside a larger tensor of NaN: before[i] and after[i] elements around dimension i."""
    big = x.new_full([n + a + z for n, a, z in zip(x.shape, before, after)], NAN)
    view = big[tuple(slice(a, a + n) for n, a in zip(x.shape, before))]
    return view.copy_(x)


def lay(x, layout):
    n = x.dim()
    if layout == "plain":
        return x.contiguous()
    if layout == "padded":  # rows in front and behind
        return in_nan(x, [0] * (n - 3) + [2, 0, 0], [0] * (n - 3) + [3, 0, 0])
    if layout == "gaps":  # NaN around every dimension, so that no stride is aligned
        return in_nan(x, [1] * (n - 1) + [2], [1] * (n - 1) + [3])
    if layout == "odd_base":  # the first element has only the alignment of an element
        flat = x.new_full([x.numel() + 1], NAN)
        return flat[1:].view(x.shape).copy_(x)
    if layout == "heads_first":  # [.., h, rows, d] in memory
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "rows_first":  # [rows, .., h, d] in memory
        return x.transpose(0, n - 3).contiguous().transpose(0, n - 3)
    if layout == "interleaved":  # one of three tensors packed along the row, like q of qkv
        return in_nan(x.unsqueeze(-3), [0] * (n - 2) + [1, 0, 0], [0] * (n - 2) + [1, 0, 0]).squeeze(-3)
    if layout == "same_batch":
        return x[:1].expand_as(x)
    if layout == "same_head":
        return x[..., :1, :].expand_as(x)
    if layout == "size_one":  # the strides of dimensions of size one are arbitrary
        strides = [77 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.contiguous().stride())]
        return x.contiguous().as_strided(x.shape, [*strides, 1])
    raise AssertionError(layout)


# ---- the problem ---------------------------------------------------------------------------------------------------


def need(module):
    """Skips the tests of a file that need a package. CI installs every package, so there its lack is an error."""
    if not os.environ.get("CI"):
        pytest.importorskip(module, reason=f"{module} is not installed: make test installs it")


def offsets(lengths):
    """cu_seqlens."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def randn(*shape, device="cpu", dtype=None):
    """N(0, 1) of this shape, the same in every call and on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@functools.lru_cache(maxsize=4)
def problem(case):
    """Tensors of a case. q, k, v, dout have its layout: dense [b, rows, h, d], packed [all rows and 3 more, h, d]."""
    gen = torch.Generator().manual_seed(1000 + case.seed)
    dtype = DTYPES[case.dtype]
    q, k, v, dout = [], [], [], []
    for len_q, len_kv in case.lengths:
        shape_q, shape_kv = (len_q, case.h, case.d), (len_kv, case.heads_kv, case.d)
        x = [torch.randn(shape, generator=gen) for shape in (shape_q, shape_kv, shape_kv, shape_q)]
        fill(case.values, *x[:3])
        for tensors, value in zip((q, k, v, dout), x):
            tensors.append(value)

    def assemble(parts, len_x, heads):
        if case.packed:
            tail = torch.full((3, heads, case.d), NAN)
            x = torch.cat([*parts, tail])
        else:
            x = torch.stack(parts) if parts else torch.empty(0, len_x, heads, case.d)
        return lay(x.to(dtype), case.layout)

    p = SimpleNamespace(
        q=assemble(q, case.len_q, case.h),
        k=assemble(k, case.len_kv, case.heads_kv),
        v=assemble(v, case.len_kv, case.heads_kv),
        dout=assemble(dout, case.len_q, case.h),
        slopes=None,
    )
    b = len(case.lengths)
    if case.alibi:
        shape = (b, case.h) if case.alibi == "bh" else (case.h,)
        p.slopes = torch.rand(shape, generator=gen) * 0.3
    p.slopes_of = [None if p.slopes is None else (p.slopes[n] if case.alibi == "bh" else p.slopes) for n in range(b)]
    if case.packed:
        p.cu_q, p.cu_k = offsets(case.len_q), offsets(case.len_kv)
        p.max_q, p.max_k = max(case.len_q, default=0), max(case.len_kv, default=0)
    return p


def rows_of(case, x, which):
    """The sequences of q or a similar tensor (which 0), or of k or a similar tensor (1)."""
    return slices(case, x, [lengths[which] for lengths in case.lengths])


def slices(case, x, lengths):
    """The sequences of a tensor [b, rows, h, d] or [all rows, h, d]."""
    if not case.packed:
        return list(x)
    return list(x[: sum(lengths)].split(list(lengths))) if lengths else []


def drawn_seed(case):
    """The seed that a call with dropout draws directly after torch.manual_seed(case.seed)."""
    torch.manual_seed(case.seed)
    x = torch.zeros(1, 1, 1, 8)
    return int(_flash_attn_forward(x, x, x, 0.5, 1.0, False, -1, -1, 0.0, None, False)[3][0])


# ---- results -------------------------------------------------------------------------------------------------------


def truth(case, p, dtype, backward, seed=0, offset=0):
    """out, lse and the gradients of every sequence by the oracle, computed in dtype."""
    q, k, v, dout = (
        [x.detach().to(dtype).requires_grad_(backward) for x in rows_of(case, whole, which)]
        for whole, which in ((p.q, 0), (p.k, 1), (p.v, 1), (p.dout, 0))
    )
    result = SimpleNamespace(out=[], lse=[], dq=[], dk=[], dv=[])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for n, (len_q, len_kv) in enumerate(case.lengths):
        keep = dropout_keep(seed, offset, n, case.h, len_q, len_kv, case.dropout) if case.dropout else None
        slopes = None if p.slopes is None else p.slopes_of[n].to(wide)
        out, lse = attention(
            q[n], k[n], v[n], case.scale, case.causal, case.window, case.softcap, slopes, keep, case.dropout
        )  # fmt: skip
        result.out.append(out.detach())
        result.lse.append(lse.detach())
        if backward:
            for name, grad in zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q[n], k[n], v[n]), dout[n].detach())):
                getattr(result, name).append(grad)
    return result


@functools.lru_cache(maxsize=4)
def expected(case, backward):
    """(float64 truth, plain PyTorch in the dtype of the case, plain PyTorch in fp32 for lse)."""
    p = problem(case)
    seed = drawn_seed(case) if case.dropout else 0
    dtype = DTYPES[case.dtype]
    ref = truth(case, p, torch.float64, backward, seed)
    plain = truth(case, p, dtype, backward, seed)
    plain_fp32 = plain if dtype == torch.float32 else truth(case, p, torch.float32, False, seed)
    return ref, plain, plain_fp32


def ours(case, backward, deterministic=False):
    """Our out, lse and gradients by the public functions, sequence by sequence. .whole holds the tensors."""
    p = problem(case)
    q, k, v = (x.detach().requires_grad_(backward) for x in (p.q, p.k, p.v))
    options = (case.dropout, case.scale, case.causal, case.window, case.softcap, p.slopes, deterministic, True)
    torch.manual_seed(case.seed)
    if case.packed:
        out, lse, _ = flash_attn_varlen_func(q, k, v, p.cu_q, p.cu_k, p.max_q, p.max_k, *options)
    else:
        out, lse, _ = flash_attn_func(q, k, v, *options)
    grads = torch.autograd.grad(out, (q, k, v), p.dout) if backward else (None,) * 3
    result = SimpleNamespace(whole=(out, lse, *grads), out=rows_of(case, out.detach(), 0))
    if case.packed and case.len_q:
        result.lse = list(lse[:, : sum(case.len_q)].split(case.len_q, dim=1))
    else:
        result.lse = [] if case.packed else list(lse)
    if backward:
        for name, grad, which in zip(("dq", "dk", "dv"), grads, (0, 1, 1)):
            setattr(result, name, rows_of(case, grad, which))
    return result


def join(parts):
    """All numbers of all sequences."""
    return torch.cat([x.reshape(-1) for x in parts]) if parts else torch.empty(0)


def verify(case: Case, backward=False, m_grad=None, a_grad=None):
    """Runs one case on the chosen kernels and compares every result with the truth, over all sequences."""
    ref, plain, plain_fp32 = expected(case, backward)
    got = ours(case, backward)
    dtype = DTYPES[case.dtype]
    for n in range(len(case.lengths)):
        assert got.out[n].shape == ref.out[n].shape and got.lse[n].shape == ref.lse[n].shape
    check_lse(*(join(x.lse) for x in (got, ref, plain_fp32)), dtype)
    scale = max(largest(*ref.out), size_of_values(*rows_of(case, problem(case).v, 1)))
    check("out", *(join(x.out) for x in (got, ref, plain)), scale=scale)
    if backward:
        check_gradients(case, got, ref, plain, m_grad, a_grad)
    return got


def check_gradients(case, got, ref, plain, m_grad=None, a_grad=None):
    """Compares dq, dk, dv of all sequences. If gradients cancel to zero, the error is relative to the terms that
    cancelled.

    dS = P (dP - delta), dq = scale dS k, dk = scale dS q. delta = rowsum(dout * out) has an error of |dout * out|
    units. Where all scores of a row are equal, dq cancels to nothing, and its errors cancel in plain arithmetic. Ours
    keep the errors of each dS, which is rounded to the dtype before its product with k.
    """
    p, dtype = problem(case), DTYPES[case.dtype]
    delta = largest(*((x.double() * o).norm(dim=-1) for x, o in zip(rows_of(case, p.dout, 0), ref.out)))
    qk = largest(*(x.double() for x in rows_of(case, p.q, 0) + rows_of(case, p.k, 1)))
    factor = abs(case.d**-0.5 if case.scale is None else case.scale)
    scale = max(largest(*ref.dq, *ref.dk, *ref.dv), factor * delta * qk)
    scales = {"dq": scale, "dk": scale, "dv": scale}
    if case.values == "equal" and dtype.itemsize == 2:  # a row may see as few as two keys, each with half of the weight
        dout, v = (
            largest(*(x.double().norm(dim=-1) for x in rows))
            for rows in (rows_of(case, p.dout, 0), rows_of(case, p.v, 1))
        )
        scales["dq"] += factor * dout * v / case.d**0.5 * qk
    if dtype == torch.float64:  # P = exp(s - lse), and lse is kept in fp32
        seen = [x[x.isfinite()] for x in ref.lse]
        a_grad = 2.0**-22 * max(1.0, largest(*seen)) * scale
    if m_grad is None:
        m_grad = 2.0 if dtype == torch.float32 else 3.0
    for name in ("dq", "dk", "dv"):
        check(name, *(join(getattr(x, name)) for x in (got, ref, plain)), m=m_grad, a=a_grad, scale=scales[name])
