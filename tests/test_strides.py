"""Memory layouts. The layout of a view changes no bit of the result, and results have the documented layout."""

import mmap

import pytest
import torch
from cases import LAYOUTS, in_dtypes
from harness import lay, verify

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward


@pytest.mark.parametrize("case", in_dtypes(LAYOUTS), ids=repr)
def test_backward(case, isa):
    verify(case, backward=True)


FREE = ("padded", "gaps", "odd_base", "heads_first", "rows_first", "interleaved")


@pytest.mark.parametrize("layout", FREE)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_same_bits(layout, dtype, isa):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, h, 40).to(dtype) for n, h in ((65, 4), (70, 2), (70, 2), (65, 4)))

    def both(layout):
        leaves = [lay(x, layout).detach().requires_grad_() for x in (q, k, v)]
        out, lse, _ = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
        return out, lse, *torch.autograd.grad(out, leaves, lay(dout, layout), retain_graph=False)

    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), both(layout), both("plain")):
        assert torch.equal(got, want), name


def test_last_dimension_is_copied_when_it_must_be(isa):
    torch.manual_seed(0)
    q = torch.randn(2, 9, 3, 32)[..., ::2]
    k = torch.randn(2, 16, 3, 20).transpose(1, 3)
    v = torch.randn(16, 2, 20, 3).permute(1, 2, 3, 0)
    want = flash_attn_func(*(x.contiguous() for x in (q, k, v)))
    assert torch.equal(flash_attn_func(q, k, v), want)
    same = torch.zeros(1, 1, 1, 1).expand(2, 9, 3, 16)
    assert torch.equal(flash_attn_func(same, k, v), flash_attn_func(same.contiguous(), k.contiguous(), v.contiguous()))


def test_out_is_laid_out_like_q():
    """empty_like(q) keeps the strides of a dense permuted q, but not the strides of a slice."""
    k = torch.randn(2, 7, 3, 16)
    for q in (
        torch.randn(2, 5, 3, 16),
        torch.randn(2, 3, 5, 16).transpose(1, 2),
        torch.randn(5, 2, 3, 16).transpose(0, 1),
        torch.randn(2, 5, 3, 48)[..., 16:32],
        torch.randn(2, 5, 9, 16)[:, :, 3:6],
        torch.randn(1, 5, 1, 16).expand(2, 5, 3, 16),
        torch.randn(2, 1, 3, 16).as_strided((2, 1, 3, 16), (48, 7, 16, 1)),
    ):
        for out in (
            flash_attn_func(q, k, k),
            _flash_attn_forward(q, k, k, 0.0, 1.0, False, -1, -1, 0.0, None, False)[0],
        ):
            assert out.shape == q.shape
            assert out.stride() == torch.empty_like(q).stride()
    transposed = torch.randn(2, 16, 5, 3).permute(0, 2, 3, 1)
    assert flash_attn_func(transposed, k, k).is_contiguous()
    out, lse, _, rng = _flash_attn_forward(q, k, k, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    assert lse.is_contiguous() and rng.is_contiguous()


def test_qkvpacked_of_any_layout(isa):
    torch.manual_seed(0)
    qkv = torch.randn(2, 33, 3, 4, 24)
    want = flash_attn_qkvpacked_func(qkv, causal=True)
    heads_outside = qkv.permute(0, 3, 1, 2, 4).contiguous().permute(0, 2, 3, 1, 4)
    assert torch.equal(flash_attn_qkvpacked_func(heads_outside, causal=True), want)
    last_strided = torch.stack((qkv, qkv), -1)[..., 1]
    assert torch.equal(flash_attn_qkvpacked_func(last_strided, causal=True), want)
    interleaved_heads = qkv.transpose(2, 3).contiguous()  # [b, s, h, 3, d], as fused projections give it
    assert torch.equal(flash_attn_qkvpacked_func(interleaved_heads.transpose(2, 3), causal=True), want)


def test_alibi_slopes_of_any_stride(isa):
    torch.manual_seed(0)
    q = torch.randn(3, 20, 4, 16)
    slopes = torch.rand(3, 4)
    want = flash_attn_func(q, q, q, alibi_slopes=slopes)
    wide = torch.full((3, 9), float("nan"))
    wide[:, 2:6] = slopes
    assert torch.equal(flash_attn_func(q, q, q, alibi_slopes=wide[:, 2:6]), want)
    shared = slopes[:1].expand(3, 4)
    assert torch.equal(flash_attn_func(q, q, q, alibi_slopes=shared), flash_attn_func(q, q, q, alibi_slopes=slopes[0]))


def test_packed_slice_of_a_batch():
    """(b, s, h, d) viewed as (b s, h, d) with a row stride, as padding-free training does."""
    torch.manual_seed(0)
    qkv = torch.randn(2 * 17, 3 * 4 * 16).view(34, 3, 4, 16)
    cu = torch.tensor([0, 17, 34], dtype=torch.int32)
    out = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 17, 17, causal=True)
    want = flash_attn_qkvpacked_func(qkv.view(2, 17, 3, 4, 16), causal=True)
    assert torch.equal(out, want.reshape(34, 4, 16))


def far_apart(x, dim, stride=2**30):
    """x with 2^30 elements from one index of dim to the next; only the pages in use exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, (x.shape[dim] * stride) * x.element_size(), flags)
    strides = list(x.contiguous().stride())
    strides[dim] = stride
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("dim", (0, 1, 2))
def test_offsets_beyond_32_bits(dim, isa):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(3, 3, 3, 16).half() for _ in range(4))
    far = [far_apart(x, dim) for x in (q, k, v)]
    results = []
    for tensors in ((q, k, v), far):
        out, lse, _, rng = _flash_attn_forward(*tensors, 0.0, 0.25, True, -1, -1, 0.0, None, False)
        grads = [far_apart(x, dim) if tensors is far else torch.empty_like(x) for x in tensors]
        _flash_attn_backward(
            dout, *tensors, out, lse, *grads, 0.0, 0.25, True, -1, -1, 0.0, None, False, rng
        )  # fmt: skip
        results.append((out, lse, *grads))
    assert all(torch.equal(x, y) for x, y in zip(*results))


@pytest.mark.parametrize("paged", (False, True))
def test_cache_beyond_32_bits(paged, isa):
    torch.manual_seed(0)
    q, new, cache = torch.randn(3, 1, 2, 16).half(), torch.randn(3, 2, 2, 16).half(), torch.randn(3, 8, 2, 16).half()
    where = {"cache_seqlens": torch.tensor([1, 6, 3], dtype=torch.int32)}
    if paged:
        where["block_table"] = torch.tensor([[2], [1], [0]], dtype=torch.int32)
    far, near = (far_apart(cache, 0), far_apart(cache, 0)), (cache.clone(), cache.clone())
    out = [flash_attn_with_kvcache(q, *caches, new, new, **where) for caches in (far, near)]
    assert torch.equal(*out) and all(torch.equal(x, y) for x, y in zip(far, near))
