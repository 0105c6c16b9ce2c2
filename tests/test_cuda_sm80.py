"""The backward with the instructions of Ampere, on any GPU: the cases of the CPU kernels, the same oracle, the same
tolerances. The generic kernels take the cases that it does not take."""

import flash_attn_2_cuda
import pytest
import torch
from cases import BOTH, DENSE, PACKED, SQUARE, TILES, TINY, VALUES, WINDOWS, Case, each, in_dtypes, in_turns
from harness_cuda import HALF, no_gpu, verify

from flash_attn import explain, flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_backward

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")


@pytest.fixture(autouse=True)
def kernels_before_hopper():
    flash_attn_2_cuda.set_cuda_kernels("any,sm80")
    yield
    flash_attn_2_cuda.set_cuda_kernels(None)


CALM = [case for case in DENSE + PACKED if case.values != "huge"]
MANY_TILES = each(Case(300, 517, b=1, h=3, h_kv=1), d=(64, 96, 128, 192, 256), dtype=HALF, causal=BOTH)


@pytest.mark.parametrize("case", in_dtypes(CALM, HALF) + in_turns(TILES + WINDOWS) + MANY_TILES, ids=repr)
def test_backward(case):
    verify(case, backward=True)


@pytest.mark.parametrize("case", in_dtypes(TINY, HALF), ids=repr)
def test_short_and_large(case):
    verify(case, backward=True, m_grad=5.0)


@pytest.mark.parametrize("case", in_dtypes(SQUARE, HALF), ids=repr)
def test_short_and_large_by_upstreams_rule(case):
    verify(case, backward=True, m_grad=5.0, a_grad=1e-3)


@pytest.mark.parametrize("case", in_dtypes([case for case in VALUES if case.values == "huge"], HALF), ids=repr)
def test_huge_scores_give_finite_gradients(case):
    verify(case, backward=True, m_grad=5.0)


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("d", (8, 64, 72, 96, 128, 160, 192, 256))
def test_the_kernel_takes_plain_calls(d):
    q = randn(1, 70, 2, d)
    kernel = explain(flash_attn_func, q, q, q).backward.kernel
    assert kernel.startswith("attn_bwd_sm80_bf16_d")


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("d", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("packed", BOTH)
def test_repeats_of_a_fixed_order_are_bitwise_equal(d, causal, packed):
    """dk and dv repeat without a fixed order, too. Several key tiles add to each row of dq."""
    torch.manual_seed(0)
    if packed:
        cu = torch.tensor([0, 700, 700, 1000, 2300], dtype=torch.int32, device="cuda")
        leaves = [randn(2300, h, d) for h in (4, 2, 2)]
        outs = [
            flash_attn_varlen_func(*leaves, cu, cu, 1300, 1300, causal=causal, deterministic=fixed) for fixed in BOTH
        ]
    else:
        leaves = [randn(2, n, h, d) for n, h in ((1300, 4), (1500, 2), (1500, 2))]
        outs = [flash_attn_func(*leaves, causal=causal, deterministic=fixed) for fixed in BOTH]
    dout = torch.randn_like(outs[0])
    for out, fixed in zip(outs, BOTH, strict=True):
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
            assert not fixed or torch.equal(first[0], again[0])
    flash_attn_2_cuda.set_cuda_kernels("any")
    for mine, generic in zip(first, torch.autograd.grad(outs[0], leaves, dout), strict=True):
        torch.testing.assert_close(mine, generic, rtol=0, atol=0.01 * generic.abs().max().item())


@pytest.mark.parametrize("d", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("what", ("keys", "rows"))
def test_nan_stays_where_it_is_seen(d, what):
    """The last key, or the first row, holds NaN. With a causal mask the others have the gradients of a call without."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 200, h, d, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))
    clean = [x.clone() for x in (q, k, v)]
    out, lse, _ = flash_attn_func(*clean, causal=True, return_attn_probs=True)
    spoiled, reached = ((k, v), slice(199, 200)) if what == "keys" else ((q, dout), slice(0, 1))
    grads = []
    for _ in range(2):
        found = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *found, 0.0, d**-0.5, True, -1, 0, 0.0, None, True)
        grads.append(found)
        for x in spoiled:
            x[:, reached] = torch.nan
    others = slice(0, 199) if what == "keys" else slice(1, 200)
    assert all(grad[:, reached].isnan().any() for grad in grads[1])
    for before, after in zip(*grads, strict=True):
        torch.testing.assert_close(after[:, others], before[:, others], rtol=0.02, atol=0.02)
