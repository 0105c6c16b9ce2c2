"""Autocast casts what it casts for torch's scaled_dot_product_attention: on every device, eager and compiled."""

import pytest
import torch
import torch.nn.functional as F

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.flash_attn_interface import _flash_attn_forward

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CU = [0, 3, 10]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request):
    return request.param


def randn(device, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def varlen(function, device):
    cu = torch.tensor(CU, dtype=torch.int32, device=device)
    if function is flash_attn_varlen_qkvpacked_func:
        return lambda qkv: function(qkv, cu, 7, causal=True)
    return lambda *tensors: function(*tensors, cu, cu, 7, 7, causal=True)


SHAPES = {
    flash_attn_func: [(2, 5, 4, 16)] * 3,
    flash_attn_kvpacked_func: [(2, 5, 4, 16), (2, 5, 2, 4, 16)],
    flash_attn_qkvpacked_func: [(2, 5, 3, 4, 16)],
    flash_attn_varlen_func: [(10, 4, 16)] * 3,
    flash_attn_varlen_kvpacked_func: [(10, 4, 16), (10, 2, 4, 16)],
    flash_attn_varlen_qkvpacked_func: [(10, 3, 4, 16)],
}


def run(function, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", SHAPES, ids=lambda x: x.__name__)
def test_fp32_becomes_the_dtype_of_autocast(function, dtype, compiled, device):
    tensors = [randn(device, *shape) + i for i, shape in enumerate(SHAPES[function])]
    attend = varlen(function, device) if "varlen" in function.__name__ else function
    want = run(attend, [x.to(dtype) for x in tensors])
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, dtype=dtype):
        out, *grads = run(attend, tensors)
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in grads)
    for x, y in zip((out, *grads), want):
        torch.testing.assert_close(x.to(dtype), y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16, torch.float16), (torch.float16,) * 3])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_mixed_inputs(dtypes, requires_grad, device):
    tensors = [randn(device, 1, 5, 2, 16, dtype=dtype).requires_grad_(requires_grad) for dtype in dtypes]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_attn_func(*tensors)
        torchs = F.scaled_dot_product_attention(*[x.transpose(1, 2) for x in tensors]).transpose(1, 2)
    assert out.dtype == torchs.dtype == torch.bfloat16
    assert torch.equal(out, flash_attn_func(*[x.bfloat16() for x in tensors]))


def test_what_autocast_leaves_alone(device):
    q = randn(device, 1, 5, 2, 16)
    slopes = torch.tensor([0.1, 0.2], device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        with torch.autocast(device, enabled=False):
            assert flash_attn_func(q, q, q).dtype == torch.float32
        half = q.bfloat16()
        want = flash_attn_func(half, half, half, alibi_slopes=slopes)
        assert torch.equal(flash_attn_func(q, q, q, alibi_slopes=slopes), want)
        assert _flash_attn_forward(q, q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)[0].dtype == torch.float32
        if device == "cpu":
            assert flash_attn_func(q.double(), q.double(), q.double()).dtype == torch.float64
    assert flash_attn_func(q, q, q).dtype == torch.float32


def test_options_of_our_own(device):
    q = randn(device, 1, 5, 2, 16)
    want = flash_attn_func(*[q.bfloat16()] * 3, return_lse=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = flash_attn_func(q, q, q, return_lse=True)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32])
def test_decoding_takes_the_dtype_of_the_cache(cache_dtype, device):
    q, new = randn(device, 2, 1, 4, 32), randn(device, 2, 1, 2, 32)
    caches = [randn(device, 2, 8, 2, 32, dtype=cache_dtype) + i for i in range(2)]
    cos = randn(device, 8, 16)
    seqlens = torch.tensor([2, 5], dtype=torch.int32, device=device)
    caches[2:] = [x.clone() for x in caches[:2]]
    cast = [x.to(cache_dtype) for x in (q, new, new, cos, cos)]
    want = flash_attn_with_kvcache(cast[0], caches[0], caches[1], *cast[1:], seqlens)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = flash_attn_with_kvcache(q, caches[2], caches[3], new, new, cos, cos, seqlens)
    assert got.dtype == cache_dtype and torch.equal(got, want)
    assert torch.equal(caches[2], caches[0]) and torch.equal(caches[3], caches[1])


def test_the_short_way_serves_the_dtype_of_autocast(device, monkeypatch):
    """Nothing is cast where nothing needs to be."""
    from flash_attn import _calls

    monkeypatch.setattr(_calls, "follow_autocast", None)  # called, it would fail
    q = randn(device, 1, 5, 2, 16, dtype=torch.bfloat16)
    with torch.autocast(device, dtype=torch.bfloat16):
        flash_attn_func(q, q, q)
        with pytest.raises(TypeError):
            flash_attn_func(q.float(), q.float(), q.float())
