"""``flash_attn_with_kvcache``, and the hint that upstream computes for it."""

import numbers
import warnings
from typing import Optional, Union

import torch
from torch import Tensor

from flash_attn_3._arguments import (
    Length,
    Window,
    as_int,
    as_window,
    call_named,
    call_op,
    check_tensors,
    has_distributed,
    maybe_contiguous,
)
from flash_attn_3._ops import _C, ops, output_dtype, refuse_wrapped


def _check_cache(name, cache):
    """Checks a cache. A cache is written in place, so it is never copied to suit the op."""
    if cache.dim() > 0 and cache.stride(-1) != 1 and cache.shape[-1] > 1:
        raise AssertionError(f"{name} must have contiguous last dimension; it has stride {cache.stride(-1)}")


_has_warned = False


def _warn_of_gradients(*tensors):
    """Warns once if ``flash_attn_with_kvcache`` drops gradients that an input requires."""
    global _has_warned
    if torch.compiler.is_compiling() or _has_warned or not torch.is_grad_enabled():
        return
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        _has_warned = True
        warnings.warn(
            "flash_attn_with_kvcache has no backward: its result requires no grad, although an input does. Call it "
            "under torch.no_grad(), or flash_attn_func for gradients.",
            stacklevel=3,
        )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[Length] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """One step of decoding: appends to a cache of keys and values, then attends over the cache.

    If k and v are given, they are written into the cache **in place** at rows ``cache_seqlens`` onwards. The rotary
    embedding, if there is one, rotates k before. Then q attends to rows ``cache_leftpad`` to
    ``cache_seqlens + len_new - 1``. Masks are aligned to the bottom right corner of these keys. Causal,
    with len_q = 2, cache_seqlens = 2, len_new = 2, and with more queries than keys, cache_seqlens = 0:

        cached  new      new
         x x    x .      . .
         x x    x x      . .
                         x .
                         x x

    Args:
        q: ``[b, len_q, h, d]``, or ``[total_q, h, d]`` with cu_seqlens_q and max_seqlen_q. Its dtype is that of the
            cache.
        k_cache, v_cache: ``[b_cache, capacity, h_kv, d]`` and ``[.., d_v]``, or pages ``[num_pages, page_size, h_kv,
            d]`` with page_table. Last dimension contiguous.
        k, v: ``[b, len_new, h_kv, d]`` and ``[.., d_v]``: keys and values to append; need cache_seqlens. With
            cu_seqlens_k_new ``[total_new, h_kv, d]``.
        qv: like q with d_v columns; see ``flash_attn_func``.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]`` in the dtype of q; for FP8 also in bf16. They rotate the
            first rotary_dim dimensions of k and q. Row t of k rotates by position ``offset + t``. With causal, a window
            or a chunk, row t of q does so too. Otherwise every row of q rotates by offset. As in upstream, a left
            side of a window from capacity - 1 on counts as none here, a right side from len_q - 1 on too, and causal
            with one row of q as not causal. The tensor q itself is not changed. Positions past the last row are not
            rotated.
        cache_seqlens: rows in use before the append: int32 ``[b]``, or one int for all; None: the whole cache.
        cache_batch_idx: int32 ``[b]``: the cache row (of page_table, if paged) of each batch entry; None: the same.
            Two entries may share a row or pages. If both append to one place, each number there is that of either
            entry.
        cache_leftpad: int32 ``[b]``: first row in use; None: 0.
        page_table: int32 ``[b, max_pages]``: the pages of each sequence. Entries past the pages needed are not read.
            Pages hold any number of keys. On Hopper, many queries over pages of no multiple of 8 keys copy the pages
            first, up to 1 GiB (``gathers`` of ``explain``). Few queries load their keys one by one (kernels whose names
            have ``_single``). Pages of a multiple of 8 keys, but not of 32, whose columns fill several chunks of
            64, are loaded with all columns at once (``_whole``).
        cu_seqlens_q, cu_seqlens_k_new: int32 ``[b + 1]``: 0, then the running sums of the lengths.
        max_seqlen_q: at least the longest length of packed queries.
        rotary_seqlens: int32 ``[b]``: the offsets of the rotary embedding; None: cache_seqlens.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ..; otherwise (0, r / 2), (1, r / 2 + 1), ..
        scheduler_metadata: the result of ``get_scheduler_metadata``, a hint that changes no result.
        num_splits: parts into which the keys of one row are split, at most 256; 0: the plan decides.
        return_softmax_lse: return ``(out, softmax_lse)``.
        The others: see ``flash_attn_func``, with the keys of each sequence in place of len_kv.
    Returns:
        ``out``, like q with d_v columns, and on request softmax_lse, fp32 ``[b, h, len_q]`` or ``[h, total_q]``.
    Raises:
        AssertionError: the last dimension of a cache is not contiguous.
        RuntimeError, TypeError, ValueError: see ``flash_attn_func``; RuntimeError also if the append does not fit, and
            then nothing is written.
    There are no gradients. If an input requires a gradient, one warning says so.
    Source: FlashAttention-3, arXiv 2407.08608; rotary embedding, arXiv 2104.09864. Specification: csrc/cpu/reference.c.

    >>> k_cache, v_cache = torch.zeros(2, 1, 16, 2, 8)  # room for 16 tokens
    >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    >>> lengths = torch.tensor([3], dtype=torch.int32)
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    >>> out.shape, torch.equal(k_cache[0, 3], k[0, 0])
    (torch.Size([1, 1, 4, 8]), True)
    """
    if rotary_cos is None and rotary_sin is None:
        rotary_seqlens = None
    if not torch.compiler.is_compiling() and (return_softmax_lse is False or return_softmax_lse is True):
        attend = _C.direct_kvcache_forward if return_softmax_lse else _C.direct_kvcache_attention
        results = attend(
            q, k_cache, v_cache, k, v, qv, cu_seqlens_q, cu_seqlens_k_new, cache_seqlens, max_seqlen_q, page_table,
            cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_seqlens, q_descale, k_descale, v_descale,
            softmax_scale, causal, window_size, attention_chunk, softcap, rotary_interleaved, scheduler_metadata,
            num_splits, pack_gqa, sm_margin,
        )  # fmt: skip
        if results is not None:
            return results
    descales = (q_descale, k_descale, v_descale) if getattr(q, "dtype", None) == torch.float8_e4m3fn else ()
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        tensors = q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, *descales, cache_seqlens, page_table
        refuse_wrapped("flash_attn_with_kvcache of flash_attn_3", (*tensors, cache_batch_idx, cache_leftpad))
    _warn_of_gradients(
        q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, softmax_scale, softcap, *descales
    )  # fmt: skip
    named = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "qv": qv, "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin, "cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, "page_table": page_table, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k_new": cu_seqlens_k_new, "max_seqlen_q": max_seqlen_q, "rotary_seqlens": rotary_seqlens,
        "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "softmax_scale": softmax_scale,
        "causal": causal, "window_size": window_size, "attention_chunk": attention_chunk, "softcap": softcap,
        "rotary_interleaved": rotary_interleaved, "scheduler_metadata": scheduler_metadata, "num_splits": num_splits,
        "pack_gqa": pack_gqa, "sm_margin": sm_margin,
    }  # fmt: skip
    out, softmax_lse = call_named(
        lambda: _attend(named),
        lambda: {**named, "return_softmax_lse": return_softmax_lse},
        optional=("k", "v", "cu_seqlens_q", "max_seqlen_q"),
        flags=(causal, rotary_interleaved, pack_gqa, return_softmax_lse),
        integers=(
            attention_chunk,
            num_splits,
            sm_margin,
            max_seqlen_q,
            cache_seqlens if isinstance(cache_seqlens, bool) else None,
        ),
    )
    return (out, softmax_lse) if return_softmax_lse else out


def _attend(named):
    """Returns ``(out, softmax_lse)`` of a call that no direct function served. Its arguments come by name."""
    (
        q, k_cache, v_cache, k, v, qv, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, q_descale, k_descale, v_descale,
        softmax_scale, causal, window_size, attention_chunk, softcap, rotary_interleaved, scheduler_metadata,
        num_splits, pack_gqa, sm_margin,
    ) = named.values()  # fmt: skip
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if has_distributed(named.values()):
        from flash_attn_3 import _distributed

        return _distributed.attend_with_cache(named)
    _check_cache("k_cache", k_cache)
    _check_cache("v_cache", v_cache)
    q = maybe_contiguous(q)
    if isinstance(cache_seqlens, numbers.Integral) and not torch.compiler.is_compiling():
        cache_seqlens = int(cache_seqlens)  # numpy's integers, too
    if isinstance(cache_seqlens, int) and abs(cache_seqlens) >= 2**31:
        allowed = "at least 0" if cache_seqlens < 0 else "at most the keys that there are"
        raise RuntimeError(f"cache_seqlens must be {allowed}; it is {cache_seqlens}")
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        shape = q.shape[:1] if cu_seqlens_q is None else (max(cu_seqlens_q.numel() - 1, 0),)
        cache_seqlens = torch.full(shape, cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None:
        check_tensors(cache_seqlens=cache_seqlens)
    make = q.new_empty if cu_seqlens_q is None else q.new_zeros  # the op leaves rows of no sequence in a caller's out
    out = make((*q.shape[:-1], *v_cache.shape[-1:]), dtype=output_dtype(q))
    left, right = as_window(window_size)
    softmax_lse = call_op(
        ops._fwd_kvcache.default, q, k_cache, v_cache, *map(maybe_contiguous, (k, v, qv)), out,
        *map(maybe_contiguous, (cu_seqlens_q, cu_seqlens_k_new, cache_seqlens)), as_int(max_seqlen_q, "max_seqlen_q"),
        *map(maybe_contiguous, (page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_seqlens)),
        q_descale, k_descale, v_descale, softmax_scale, causal, left, right, attention_chunk, softcap,
        rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip
    return out, softmax_lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> Tensor:
    """Returns a hint for ``flash_attn_with_kvcache`` calls with the same sizes and options.

    The plans of this package are made in a microsecond and need no hint. So the result holds nothing, and a call with
    the hint equals the call without it.

    Args:
        cache_seqlens: int32 ``[batch_size]``, on the device of the calls.
        The others: those of the calls; headdim_v None: headdim; page_size None: not paged.
    Returns:
        An int32 tensor of one dimension on the device of cache_seqlens.
    Raises:
        RuntimeError, TypeError: the message names the argument that does not fit.

    >>> lengths = torch.tensor([3, 9], dtype=torch.int32)
    >>> get_scheduler_metadata(2, 1, 16, 4, 2, 64, lengths).dtype
    torch.int32
    """
    named = {
        "batch_size": batch_size, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        "num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "headdim": headdim, "cache_seqlens": cache_seqlens,
        "qkv_dtype": qkv_dtype, "headdim_v": headdim_v, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k_new": cu_seqlens_k_new, "cache_leftpad": cache_leftpad, "page_size": page_size,
        "max_seqlen_k_new": max_seqlen_k_new, "causal": causal, "window_size": window_size,
        "attention_chunk": attention_chunk, "has_softcap": has_softcap, "num_splits": num_splits, "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
    }  # fmt: skip

    def call():
        check_tensors(cache_seqlens=cache_seqlens)
        left, right = as_window(window_size)
        return call_op(
            ops.get_scheduler_metadata.default, batch_size, as_int(max_seqlen_q, "max_seqlen_q"),
            as_int(max_seqlen_k, "max_seqlen_k"), num_heads_q, num_heads_kv, headdim,
            headdim if headdim_v is None else headdim_v, qkv_dtype, maybe_contiguous(cache_seqlens), cu_seqlens_q,
            None, cu_seqlens_k_new, None, cache_leftpad, page_size, max_seqlen_k_new, causal, left, right,
            attention_chunk, has_softcap, num_splits, pack_gqa, sm_margin,
        )  # fmt: skip

    integers = (
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v, page_size,
        max_seqlen_k_new, attention_chunk, num_splits, sm_margin,
    )  # fmt: skip
    return call_named(call, lambda: named, _OPTIONAL, (causal, has_softcap, pack_gqa), integers, _RENAMED)


_OPTIONAL = ("cu_seqlens_q",)
_RENAMED = {"seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
