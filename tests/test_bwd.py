"""Backward of the dense functions: gradients of every option on every instruction set, in every dtype."""

import math

import pytest
import torch
from cases import (
    BOTH,
    DIMS,
    DTYPES,
    HEADS,
    LENGTHS,
    OPTIONS,
    SQUARE,
    TILES,
    TINY,
    VALUES,
    WINDOWS,
    ZEROS,
    Case,
    each,
    in_dtypes,
    in_turns,
)
from compare import error
from harness import ISAS, expected, join, ours, problem, verify

from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

CASES = LENGTHS[::2] + DIMS + HEADS + ZEROS + OPTIONS + [c for c in VALUES if c.values != "huge"]


@pytest.mark.parametrize("case", in_dtypes(CASES) + in_turns(TILES + WINDOWS), ids=repr)
def test_dense(case, isa):
    verify(case, backward=True)


@pytest.mark.parametrize("case", in_dtypes(TINY), ids=repr)
def test_short_and_large(case, isa):
    """Five times the error of plain PyTorch, as upstream allows here, plus the cancelled terms. fp32: 2e-4, sums near
    100."""
    verify(case, backward=True, m_grad=5.0, a_grad=2e-4 if case.dtype == "fp32" else None)


@pytest.mark.parametrize("case", in_dtypes(SQUARE, ("bf16", "fp16")), ids=repr)
def test_short_and_large_by_upstreams_rule(case):
    verify(case, backward=True, m_grad=5.0, a_grad=1e-3)


@pytest.mark.parametrize("case", in_dtypes([c for c in VALUES if c.values == "huge"]), ids=repr)
def test_huge_scores_give_finite_gradients(case, isa):
    verify(case, backward=True, m_grad=5.0)


@pytest.mark.parametrize("case", each(Case(300, 517, b=1, h=3, h_kv=1, d=64), dtype=DTYPES, causal=BOTH), ids=repr)
def test_many_tiles(case, isa):
    verify(case, backward=True)


@pytest.mark.parametrize("isa_name", [name for name in ISAS if name not in ("reference", "scalar")])
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_long(dtype, isa_name):
    """Several ranges of keys give parts of dq, which are summed."""
    import flash_attn_2_cuda

    flash_attn_2_cuda.set_cpu_isa(isa_name)
    try:
        verify(Case(70, 5000, b=1, h=1, d=64, dtype=dtype), backward=True)
        verify(Case(2000, 130, b=1, h=1, d=64, dtype=dtype, causal=True), backward=True)
    finally:
        flash_attn_2_cuda.set_cpu_isa(None)


def test_only_some_gradients(isa):
    """requires_grad on any subset gives the same gradients as on all."""
    case = Case(33, 49, h=4, h_kv=2)
    p = problem(case)
    want = ours(case, True).whole[2:]
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        qkv = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((p.q, p.k, p.v))]
        grads = torch.autograd.grad(flash_attn_func(*qkv), [qkv[i] for i in wanted], p.dout)
        for i, grad in zip(wanted, grads):
            assert torch.equal(grad, want[i])


@pytest.mark.parametrize("name", ("expanded", "transposed", "strided_last", "sliced"))
def test_dout_of_any_layout(name, isa):
    """sum().backward() passes an expanded dout of stride 0, whose last dimension is not contiguous."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, 3, 16, requires_grad=True) for _ in range(3))
    dout = {
        "expanded": torch.ones(()).expand(2, 20, 3, 16),
        "transposed": torch.randn(2, 3, 20, 16).transpose(1, 2),
        "strided_last": torch.randn(2, 20, 3, 32)[..., ::2],
        "sliced": torch.randn(2, 20, 3, 40)[..., 5:21],
    }[name]
    want = torch.autograd.grad(flash_attn_func(q, k, v), (q, k, v), dout.contiguous())
    got = torch.autograd.grad(flash_attn_func(q, k, v), (q, k, v), dout)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_packed_gradients():
    torch.manual_seed(0)
    qkv = torch.randn(2, 20, 3, 3, 16, requires_grad=True)
    dout = torch.randn(2, 20, 3, 16)
    parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    want = torch.stack(torch.autograd.grad(flash_attn_func(*parts, causal=True), parts, dout), 2)
    (got,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv, causal=True), qkv, dout)
    assert torch.equal(got, want)
    q, kv = torch.randn(2, 9, 4, 16, requires_grad=True), torch.randn(2, 20, 2, 2, 16, requires_grad=True)
    dout = torch.randn(2, 9, 4, 16)
    parts = [q, *(x.detach().requires_grad_() for x in kv.unbind(2))]
    dq, dk, dv = torch.autograd.grad(flash_attn_func(*parts), parts, dout)
    got = torch.autograd.grad(flash_attn_kvpacked_func(q, kv), (q, kv), dout)
    assert torch.equal(got[0], dq) and torch.equal(got[1], torch.stack((dk, dv), 2))


@pytest.mark.parametrize("infinity", (math.inf, -math.inf))
def test_lse_of_blind_rows_by_either_sign(infinity, isa):
    """Our lse of a row that sees no key is +inf, other implementations store -inf. The row's gradient is zero with
    both."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 2, 16) for n in (70, 33, 33, 70))
    out, lse, _, rng = _flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    assert torch.equal(lse.isinf().sum(-1), torch.full((1, 2), 37))
    lse = lse.masked_fill(lse.isinf(), infinity)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    softmax_d = _flash_attn_backward(
        dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, True, -1, -1, 0.0, None, False, rng
    )  # fmt: skip
    assert softmax_d.shape == (1, 2, 128) and softmax_d.dtype == torch.float32
    assert all(x.isfinite().all() for x in (dq, dk, dv)) and (dq[:, :37] == 0).all()
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(softmax_d[..., :70].double(), delta, rtol=1e-5, atol=1e-5)


def test_gradients_of_views_and_none(isa):
    """dq, dk, dv may be slices of one buffer. A gradient that is None is not computed."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 40, 3, 24) for _ in range(4))
    out, lse, _, rng = _flash_attn_forward(q, k, v, 0.0, 0.2, True, -1, -1, 0.0, None, False)

    def backward(dq, dk, dv):
        _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.2, True, -1, -1, 0.0, None, False, rng)

    want = [torch.full_like(q, math.nan) for _ in range(3)]
    backward(*want)
    buffer = torch.full((2, 42, 5, 3, 30), 7.0)
    views = [buffer[:, 1:-1, i + 1, :, 3:27] for i in range(3)]
    backward(*views)
    assert all(torch.equal(x, y) for x, y in zip(views, want))
    for view in views:
        view.fill_(7.0)
    assert (buffer == 7.0).all(), "something outside the given views was written"
    for i in range(3):
        grads = [None, None, None]
        grads[i] = torch.full_like(q, math.nan)
        backward(*grads)
        assert torch.equal(grads[i], want[i])


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_masked_keys_and_blind_rows_may_be_anything(dtype, isa):
    """Keys that no row sees, and queries and dout of rows that see no key, hold NaN. Their gradients are 0."""
    torch.manual_seed(0)
    spoiled_tensors = []
    for len_q, len_kv, window, rows, keys in ((40, 100, (20, 0), [], range(40)), (100, 40, (-1, 0), range(60), [])):
        q, k, v, dout = (torch.randn(1, n, 2, 24).to(dtype) for n in (len_q, len_kv, len_kv, len_q))
        results = []
        for spoil in (False, True):
            if spoil:
                q[:, rows], dout[:, rows], k[:, keys], v[:, keys] = math.nan, math.nan, math.nan, math.inf
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            results.append(torch.autograd.grad(flash_attn_func(*leaves, window_size=window), leaves, dout))
        for name, got, want in zip(("dq", "dk", "dv"), results[1], results[0]):
            assert torch.equal(got, want), name
        spoiled_tensors.append(results[1])
    assert (spoiled_tensors[0][1][:, :40] == 0).all() and (spoiled_tensors[1][0][:, :60] == 0).all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_nan_reaches_what_sees_it(dtype, isa):
    """Under a causal mask NaN of row or key 45 changes no bit of the rows before or of the keys behind."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 90, 2, 24).to(dtype) for _ in range(4)]

    def gradients(q, k, v, dout):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(flash_attn_func(*leaves, causal=True), leaves, dout)

    clean = gradients(*inputs)
    for i, name in enumerate(("q", "k", "v", "dout")):
        spoiled = [x.clone() for x in inputs]
        spoiled[i][:, 45, 1, 7] = math.nan
        is_key = name in ("k", "v")
        for got, want, grad in zip(gradients(*spoiled), clean, ("dq", "dk", "dv")):
            if grad == "dq":
                reached = slice(45, 90) if is_key else slice(45, 46)
            elif (name, grad) == ("v", "dv"):
                reached = slice(0, 0)
            else:
                reached = slice(0, 90) if is_key else slice(0, 46)  # the rows that see the key carry NaN on
            assert got[:, reached, 1].isnan().any(-1).all(), (name, grad)
            kept = torch.ones(90, 2, dtype=torch.bool)
            kept[reached, 1] = False
            assert torch.equal(got[:, kept], want[:, kept]), (name, grad)


def test_no_gradient_through_lse():
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    out, lse, _ = flash_attn_func(q, q, q, return_attn_probs=True)
    (with_lse,) = torch.autograd.grad(out.sum() + lse.sum(), q, retain_graph=True) if lse.requires_grad else (None,)
    (without,) = torch.autograd.grad(out.sum(), q)
    assert with_lse is None or torch.equal(with_lse, without)


# Upstream's grid and rule against fp32 rounded to the dtype: E(ours) <= 3 E(plain) (causal: 2, plus 1e-5).
GRID = [
    Case(*lengths, b=2, h=6, h_kv=h_kv, d=d, dtype=dtype, causal=causal, window=window)
    for lengths, d, h_kv in (
        ((113, 203), 59, 6), ((128, 217), 128, 1), ((211, 113), 64, 2), ((108, 256), 40, 6), ((256, 512), 32, 2),
        ((3, 799), 96, 6), ((127, 512), 111, 1), ((113, 203), 192, 2), ((128, 128), 256, 6),
    )
    for dtype in ("bf16", "fp16")
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (50, 31)))
]  # fmt: skip


@pytest.mark.parametrize("case", GRID, ids=repr)
def test_upstream_grid(case):
    ref, plain, _ = expected(case, True)
    got = ours(case, True, deterministic=True)
    m, a = (2, 1e-5) if case.causal else (3, 0)
    for name in ("dq", "dk", "dv"):
        grad, simple = join(getattr(got, name)), join(getattr(plain, name))
        rounded = join(getattr(ref, name)).to(grad.dtype)
        assert error(grad, rounded) <= m * error(simple, rounded) + a, name


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_rows_of_minus_infinity_alone_contribute_nothing(dtype, isa):
    """Rows whose scores are all -inf have dq 0 and do not change dk and dv, whatever k, v, q and dout hold."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 2, 32).to(dtype) for n in (100, 90, 90, 100))
    q[..., 0], k[..., 0] = 0.0, 1.0
    k[:, 5, :, 0] = 2.0
    silent = torch.zeros(100, dtype=torch.bool)
    silent[[0, 3, 40, 41, 42, 63, 64, 99]] = True
    rows = [x[:, ~silent].clone().requires_grad_() for x in (q,)] + [x.clone().requires_grad_() for x in (k, v)]
    want = torch.autograd.grad(flash_attn_func(*rows), rows, dout[:, ~silent])
    q[:, silent, :, 0] = -math.inf
    dout[:, silent] = math.nan
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(flash_attn_func(*leaves), leaves, dout)
    assert (dq[:, silent] == 0).all()
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for got, exact in zip((dq[:, ~silent], dk, dv), want):
        torch.testing.assert_close(got, exact, rtol=tolerance, atol=tolerance)
