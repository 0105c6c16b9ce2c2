"""flash_attn_with_kvcache: append, rotate, attend; every cell of the caches is compared afterwards."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from harness_kvcache import BASE, CASES, PAGES, ROTARY, WHERE, Cache, run

from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_backward

NAN = math.nan


@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_cache(case, dtype, isa):
    run(replace(case, dtype=dtype))


@pytest.mark.parametrize("case", BASE[::2] + ROTARY[::3] + WHERE + PAGES[::4], ids=repr)
def test_cache_fp64(case):
    run(replace(case, dtype="fp64"))


@pytest.mark.parametrize("num_splits", (0, 1, 4, 128))
@pytest.mark.parametrize(
    "case",
    [
        Cache(len_q=1, seqlens=(500, 0, 129), capacity=512),
        Cache(len_q=5, seqlens=(600, 5, 3), capacity=610, causal=True, page=16),
    ],
    ids=repr,
)
def test_num_splits(case, num_splits, isa):
    run(replace(case, num_splits=num_splits, d=64))
    run(replace(case, num_splits=num_splits, d=64, dtype="bf16", window=(200, 1)))


def test_returns_and_layouts(isa):
    """A tensor, or (out, lse). q, k, v are copied if their last dimension is not contiguous, but caches never."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 30, 2, 16), torch.randn(2, 30, 2, 16)
    q = torch.randn(2, 3, 4, 32)[..., ::2]
    want = flash_attn_func(q, k_cache, v_cache)
    got = flash_attn_with_kvcache(q, k_cache, v_cache)
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, want)
    _, lse = flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True)
    assert lse.shape == (2, 4, 3) and lse.dtype == torch.float32
    # Caches as views: heads before rows, and one of two tensors packed in a buffer.
    for view in (
        torch.full((2, 2, 30, 16), NAN).transpose(1, 2),
        torch.full((2, 30, 2, 2, 20), NAN)[:, :, 1, :, 1:17],
    ):
        k_view, v_view = view.copy_(k_cache), v_cache
        k = torch.randn(2, 16, 2, 2).permute(0, 3, 2, 1)
        seqlens = torch.tensor([5, 28], dtype=torch.int32)
        flash_attn_with_kvcache(q, k_view, v_view.clone(), k, k, cache_seqlens=seqlens)
        want = k_cache.clone()
        want[0, 5:7], want[1, 28:30] = k[0], k[1]
        assert torch.equal(k_view, want)


def test_size_one_dimensions_have_any_stride():
    """transformers' continuous batching: q of shape (3, 1, 8, 8) with strides (64, 192, 8, 1), -1 for no page."""
    torch.manual_seed(0)
    q = torch.randn(3 * 64).as_strided((3, 1, 8, 8), (64, 192, 8, 1))
    k_cache, v_cache = torch.randn(3, 256, 8, 8), torch.randn(3, 256, 8, 8)
    table = torch.tensor([[0, -1], [1, -1], [2, -1]], dtype=torch.int32)
    seqlens = torch.tensor([7, 256, 1], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, block_table=table)
    want = flash_attn_with_kvcache(q.contiguous(), k_cache, v_cache, cache_seqlens=seqlens)
    assert torch.equal(out, want)


def test_same_batch_idx_twice_without_append():
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(4, 30, 2, 16), torch.randn(4, 30, 2, 16)
    q = torch.randn(3, 1, 2, 16)
    idx = torch.tensor([2, 2, 0], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=idx)
    torch.testing.assert_close(out, flash_attn_func(q, k_cache[idx.long()], v_cache[idx.long()]))


def test_long_decode(isa):
    """Decode over thousands of keys, split or not."""
    run(Cache(len_q=1, seqlens=(3000, 17, 2049), capacity=3001, d=64, h=8, h_kv=2, dtype="bf16"))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 0)}, {"alibi_slopes": torch.zeros(0)}])
@pytest.mark.parametrize("len_q", [2, 40])
def test_no_query_heads(len_q, options, isa):
    """Nothing is computed, but keys are appended, and gradients are 0."""
    q, k = torch.randn(2, len_q, 0, 32, requires_grad=True), torch.randn(2, 90, 2, 32, requires_grad=True)
    out = flash_attn_func(q, k, k, **options)
    dq, dk, dv = torch.empty_like(q), torch.full_like(k, 7), torch.full_like(k, 7)
    _flash_attn_backward(out, q, k, k, out, torch.empty(2, 0, len_q), dq, dk, dv, 0, 0.2, True, -1, -1, 0, None, False)
    assert out.shape == q.shape and not dk.any() and not dv.any()
    cache, new = torch.zeros(2, 90, 2, 32), torch.randn(2, 3, 2, 32)
    assert flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=50, **options).shape == q.shape
    assert torch.equal(cache[:, 50:53], new)


def test_two_entries_append_to_one_row(isa):
    """Each number of the row comes from either entry, as in upstream. It is rotated once, although both write at once.
    Both threads walk through the same rows."""
    new, q = torch.randn(1, 512, 2, 64).bfloat16().expand(2, -1, -1, -1), torch.randn(2, 1, 2, 64).bfloat16()
    cos, sin = torch.rand(1024, 32).bfloat16(), torch.rand(1024, 32).bfloat16()

    def append(rows):
        caches = torch.zeros(2, 2, 1024, 2, 64).bfloat16()
        options = {"cache_seqlens": 3, "cache_batch_idx": torch.tensor(rows, dtype=torch.int32)}
        flash_attn_with_kvcache(q, *caches, new, new, cos, sin, **options)
        return caches[:, 0]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = append([0, 1])
        assert all(torch.equal(append([0, 0]), expected) for _ in range(30))
    finally:
        torch.set_num_threads(threads)
