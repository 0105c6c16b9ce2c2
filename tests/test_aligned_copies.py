"""Tensors whose rows do not start at multiples of 16 bytes: tile kernels run on copies of them, and results are copied
back. The bits are those of tensors that the caller pads with zeros."""

from functools import partial

import flash_attn_2_cuda
import pytest
import torch
import torch.nn.functional as F
from harness_cuda import no_gpu

import flash_attn
from flash_attn import explain, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward
from flash_attn.flex_attention import create_block_mask, flex_attention

WIDTHS = (1, 36, 65, 100, 127, 190, 250)
on_gpu = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")


def is_hopper():
    return torch.cuda.get_device_capability()[0] == 9


@pytest.fixture(params=("any,sm80", None), ids=("before Hopper", "all"))
def kernels(request):
    flash_attn_2_cuda.set_cuda_kernels(request.param)
    yield request.param
    flash_attn_2_cuda.set_cuda_kernels(None)


def names_of(function, *args, archs="sm_90a", **kwargs):
    return [kernel.name for kernel in flash_attn.prebuild_call(function, *args, archs=archs, compiles=False, **kwargs)]


def meta(d, length=1000, grad=False, dtype=torch.bfloat16):
    return [torch.empty(2, length, 4, d, device="meta", dtype=dtype, requires_grad=grad) for _ in range(3)]


# ---- which calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
@pytest.mark.parametrize("d", WIDTHS)
def test_long_calls_run_on_copies(arch, d):
    kernels = names_of(flash_attn_func, *meta(d, grad=True), archs=arch)
    assert kernels[0] == "align" and kernels[1].startswith(f"attn_fwd_sm{arch[3:5]}_")
    assert any(name.startswith(("attn_bwd_sm80", "attn_bwd_sm90", "attn_bwd_wide")) for name in kernels)


def test_other_calls_do_not():
    """Copies of short calls take longer than they save. fp32 has generic kernels alone."""
    assert "align" not in names_of(flash_attn_func, *meta(128, grad=True))
    assert "align" not in names_of(flash_attn_func, *meta(36, length=100))
    assert "align" in names_of(flash_attn_func, *meta(37, length=100))
    assert "align" not in names_of(flash_attn_func, *meta(36, dtype=torch.float32))
    assert "align" not in names_of(flash_attn_func, *meta(36), window_size=(50, 50))


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def randn(*shape, grad=True):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def padded(x):
    return F.pad(x, (0, -x.shape[-1] % 8))


def same_bits(tensors, dout, leaves=(), **options):
    """flash_attn_func of the tensors, and of padded tensors: results, and gradients of tensors and leaves."""
    call = partial(flash_attn_func, softmax_scale=0.3, deterministic=True, **options)
    out, wide = call(*tensors), call(*(padded(x) for x in tensors))
    assert torch.equal(out, wide[..., : out.shape[-1]])
    leaves = [*tensors, *leaves]
    found, want = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wide, leaves, padded(dout))
    for x, y in zip(found, want):
        assert torch.equal(x, y) and not x.isnan().any()


@on_gpu
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", WIDTHS)
def test_dense(d, causal, kernels):
    torch.manual_seed(0)
    q, k, v = randn(2, 700, 4, d), randn(2, 900, 2, d), randn(2, 900, 2, d)
    plan = explain(flash_attn_func, q, k, v, causal=causal)
    assert plan.aligns and plan.backward.aligns and "copied to rows of whole 16 bytes" in str(plan)
    same_bits((q, k, v), randn(2, 700, 4, d, grad=False), causal=causal)


@on_gpu
@pytest.mark.parametrize("d", WIDTHS)
def test_packed(d, kernels):
    """Rows behind the last sequence keep what they hold, also in tensors of the caller."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 300, 300, 1000], device="cuda", dtype=torch.int32)
    q, k, v = (randn(1100, 2, d, grad=False) for _ in range(3))
    args = (ends, ends, 700, 700)
    want = flash_attn_varlen_func(*(padded(x) for x in (q, k, v)), *args, softmax_scale=0.3)
    out, lse, _ = flash_attn_varlen_func(q, k, v, *args, softmax_scale=0.3, return_attn_probs=True)
    assert torch.equal(out[:1000], want[:1000, :, :d])
    dout, gradients = randn(1100, 2, d, grad=False), [torch.full_like(x, 7.0) for x in (q, k, v)]
    _flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *gradients, *args, 0.0, 0.3, False, -1, -1, 0.0, None, deterministic=True
    )
    wide = [torch.full_like(padded(x), 7.0) for x in (q, k, v)]
    _flash_attn_varlen_backward(
        *(padded(x) for x in (dout, q, k, v, out)),
        lse,
        *wide,
        *args,
        0.0,
        0.3,
        False,
        -1,
        -1,
        0.0,
        None,
        deterministic=True,
    )
    for x, y in zip(gradients, wide):
        assert torch.equal(x[:1000], y[:1000, :, :d]) and torch.equal(x[1000:], y[1000:, :, :d])


@on_gpu
@pytest.mark.parametrize("offset", (1, 2, 4))
def test_views_at_odd_places(offset, kernels):
    """The heads have 64 columns, and begin at any element."""
    torch.manual_seed(0)
    rows = randn(2, 600, 3, 4, 64 + offset, grad=False)
    qkv = rows[..., offset:]
    assert explain(flash_attn_qkvpacked_func, qkv).aligns
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, flash_attn_qkvpacked_func(qkv.contiguous(), causal=True))


@on_gpu
@pytest.mark.parametrize("d", (36, 100, 127))
def test_mods(d):
    """Block masks, mods and gradients of captured tensors do not see the copies."""
    if not is_hopper():
        pytest.skip("other GPUs have generic kernels for mods")
    torch.manual_seed(0)
    q, k, v = (randn(2, 4, 700, d) for _ in range(3))
    table = torch.randn(4, 1400, device="cuda", requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i // 300 == j // 300), None, None, 700, 700, device="cuda")

    def call(*x):
        score = lambda s, b, h, i, j: s + table[h, i - j + 700]  # noqa: E731
        return flex_attention(*x, score, mask, scale=0.3, return_lse=True)

    outs, wide = call(q, k, v), call(*(padded(x) for x in (q, k, v)))
    assert torch.equal(outs[0], wide[0][..., :d]) and torch.equal(outs[1], wide[1])
    dout = randn(2, 4, 700, d, grad=False)
    found = torch.autograd.grad(outs[0], (q, k, v, table), dout)
    want = torch.autograd.grad(wide[0], (q, k, v, table), padded(dout))
    for x, y in zip(found, want):  # dq and the table add up in any order
        torch.testing.assert_close(x, y, atol=2e-2 * y.abs().max().item(), rtol=0)


@on_gpu
def test_options():
    torch.manual_seed(0)
    q, k, v = (randn(2, 600, 4, 100) for _ in range(3))
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    same_bits((q, k, v), randn(2, 600, 4, 100, grad=False), [sinks], sinks=sinks)


@on_gpu
def test_a_graph_replays(kernels):
    torch.manual_seed(0)
    q, k, v = (randn(1, 700, 4, 100, grad=False) for _ in range(3))
    want = flash_attn_func(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
