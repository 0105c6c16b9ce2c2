"""Decoding with a cache of keys and values, for the calls that the direct function does not serve."""

import numbers

import torch

from flash_attn import _vmap
from flash_attn._arguments import as_window, maybe_contiguous
from flash_attn._autocast import follow_cache
from flash_attn._dispatch import call_op, check_not_traced, transforms_are_active
from flash_attn._ops import NO_JVP, check_tensor, empty_like

_fwd_kvcache = torch.ops.flash_attn.fwd_kvcache.default
_CAST = "q", "k", "v", "rotary_cos", "rotary_sin"  # take the dtype of the cache under autocast


def _check_cache(name, cache):
    """Checks a cache. A cache is written in place, so it is never copied to suit the op."""
    check_tensor(name, cache)
    if cache.dim() > 0 and cache.stride(-1) != 1 and cache.shape[-1] > 1:
        raise AssertionError(f"{name} must have contiguous last dimension; it has stride {cache.stride(-1)}")


def _step(tensors, mask_and_options):
    """Returns ``(out, softmax_lse)`` of the op. ``tensors`` are its tensors but out."""
    out = empty_like(tensors[0])
    return out, call_op(_fwd_kvcache, *tensors, out, *mask_and_options)


class _Step(torch.autograd.Function):
    """The step under the transforms of torch.func, which ask it for rules."""

    @staticmethod
    def forward(mask_and_options, *tensors):
        return _step(tensors, mask_and_options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    def vmap(info, in_dims, mask_and_options, *tensors):
        return _vmap.step(_Step.apply, info, in_dims[1:], mask_and_options, tensors)


def attend_with_cache(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits,
):  # fmt: skip
    """Returns ``(out, softmax_lse)`` of ``flash_attn_with_kvcache``."""
    check_tensor("q", q)
    _check_cache("k_cache", k_cache)
    _check_cache("v_cache", v_cache)
    q, k, v, rotary_cos, rotary_sin = follow_cache(k_cache, _CAST, (q, k, v, rotary_cos, rotary_sin))
    if isinstance(cache_seqlens, numbers.Integral) and not torch.compiler.is_compiling():
        cache_seqlens = int(cache_seqlens)  # numpy's integers, too
    if isinstance(cache_seqlens, int) and abs(cache_seqlens) >= 2**31:
        allowed = "at least 0" if cache_seqlens < 0 else "at most the keys that there are"
        raise RuntimeError(f"cache_seqlens must be {allowed}; it is {cache_seqlens}")
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None:
        check_tensor("cache_seqlens", cache_seqlens)
    new_and_indices = (k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table)
    tensors = maybe_contiguous(q), k_cache, v_cache, *map(maybe_contiguous, new_and_indices), alibi_slopes
    options = softmax_scale, causal, *as_window(window_size), softcap, rotary_interleaved, num_splits
    if transforms_are_active():
        check_not_traced()
        return _Step.apply(options, *tensors)
    return _step(tensors, options)
