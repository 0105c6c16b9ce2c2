"""The attention functions of flash-attn 2, with the same names, order of arguments and results.

    public function                     op of namespace flash_attn
    flash_attn_func                     _flash_attn_forward, _flash_attn_backward
    flash_attn_kvpacked_func            the same
    flash_attn_qkvpacked_func           the same
    flash_attn_varlen_func              _flash_attn_varlen_forward, _flash_attn_varlen_backward
    flash_attn_varlen_kvpacked_func     the same
    flash_attn_varlen_qkvpacked_func    the same
    flash_attn_with_kvcache             fwd_kvcache

A plain eager call goes from here straight to a direct function of the extension (_dispatch.py). Each idea around the
calls has a file of its own:

    _arguments.py          what callers pass becomes what the ops take
    _calls.py              nested tensors, autocast, errors in the caller's names: what comes before one forward
    _attention.py          one forward, one backward, and their place in autograd
    _vmap.py               torch.vmap in one call; _vmap_ops.py: of the ops
    _transforms.py         torch.func over calls with options that upstream does not have
    _cache.py              decoding
    _distributed.py        DTensors; _distributed_ops.py: of the ops
    _private_functions.py  private functions and classes that clients of flash-attn 2 call
"""

import sys as _sys
from typing import Optional, Union

from torch import Tensor
from torch.compiler import is_compiling

from flash_attn._arguments import as_int as _as_int
from flash_attn._arguments import as_number as _as_number
from flash_attn._arguments import as_scale as _as_scale
from flash_attn._arguments import as_window as _as_window
from flash_attn._arguments import distinct as _distinct
from flash_attn._arguments import has_distributed as _has_distributed
from flash_attn._arguments import maybe_contiguous
from flash_attn._attention import backward as _backward
from flash_attn._attention import record as _record
from flash_attn._calls import attend as _attend
from flash_attn._calls import attend_extended as _attend_extended
from flash_attn._calls import attend_with_cache as _attend_with_cache
from flash_attn._flops import register as register_flops
from flash_attn._kinds import check_kinds
from flash_attn._ops import flash_attn_2_cuda, forget_own_kernels, register_once, round_multiple, warn_of_gradients
from flash_attn._private_functions import (
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)
from flash_attn._types import Length, Window
from flash_attn._vmap_ops import register as _register_rules_of_vmap

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_as_int",
    "_as_number",
    "_as_scale",
    "_as_window",
    "_backward",
    "_distinct",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]

USE_TRITON_ROCM = False
flash_attn_gpu = _direct = flash_attn_2_cuda


# ---- public functions ----------------------------------------------------------------------------------------------


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """Exact attention ``softmax(softmax_scale * q @ k.T + mask) @ v`` without storing the scores.

    The causal mask is aligned to the bottom right corner; window_size (1, 0) keeps that corner's diagonal and the key
    before it. Fewer queries than keys, and more:

        causal     x x x .      window     . x x .
                   x x x x      (1, 0)     . . x x

        causal     . .          window     . .
                   . .          (1, 0)     . .
                   x .                     x .
                   x x                     x x

    Args:
        q: ``[b, len_q, h, d]`` in fp16, bf16, fp32 or (CPU) fp64; d from 1 to 256. Any strides are allowed. A tensor
            whose last dimension is not contiguous is copied.
        k, v: ``[b, len_kv, h_kv, d]`` in the dtype of q. h is a multiple of h_kv. Query head i uses key head
            ``i // (h // h_kv)``.
        dropout_p: probability to drop an attention weight. The kept weights grow by ``1 / (1 - dropout_p)``. The seed
            comes from torch's default generator of the device. Use 0 in evaluation.
        softmax_scale: factor of ``q @ k.T``; ``1 / sqrt(d)`` if None.
        causal: key j is visible from row i iff ``j <= i + len_kv - len_q``.
        window_size: ``(left, right)``: key j is visible from row i iff ``i + len_kv - len_q - left <= j <=
            i + len_kv - len_q + right``; -1 lifts a bound. Combines with causal, which is a right bound of 0.
        softcap: scores become ``softcap * tanh(score / softcap)`` before bias and mask; 0 is off.
        alibi_slopes: fp32 ``[h]`` or ``[b, h]``: adds ``-slope * |i + len_kv - len_q - j|`` to the score. No gradient.
        deterministic: the backward repeats bit for bit. ``torch.use_deterministic_algorithms`` has the same effect.
            Otherwise, dq may differ by rounding from run to run if ``explain`` says "added in any order".
        return_attn_probs: return the three results below instead of one.

        These options, by keyword, are not upstream's. ``torch.compile`` keeps them in its graph. They combine with
        dropout_p, but a seed drops other elements then.
        attn_bias: floating ``[b, h, len_q, len_k]``, or 1 in place of a size, or fewer dimensions: added to the score
            after softcap and slopes. Its gradient has its shape.
        attn_mask: bool, of such a shape: key j is visible from row i only where it is True. Combines with causal and
            window_size.
        sinks: floating ``[h]``: each row also attends to a key of this score, whose value is 0. Has a gradient.
        return_lse: return ``(out, lse)``. The lse has a gradient, and is -inf if no key is seen.
        return_max_logits: return ``max_logits`` as the last result: fp32 ``[h]``, the largest score of each head over
            batch, rows and visible keys, without sinks; -inf if there is none. No gradient.
    Returns:
        ``out`` ``[b, len_q, h, d]`` in the dtype and layout of q. Rows that see no key are 0.
        With return_attn_probs ``(out, softmax_lse, S_dmask)``:
        softmax_lse: fp32 ``[b, h, len_q]``, natural logarithm of each row's sum of exp(score); +inf if no key is seen.
        S_dmask: empty, or with dropout ``[b, h, len_q, len_kv]``, lengths rounded up to 128: exp(score - row maximum),
        negative where dropped. For tests.
    Raises:
        RuntimeError: a shape, dtype, device or value does not fit. The message names the argument, what came and what
            is allowed.
        TypeError: an argument is of a wrong kind, such as a list in place of a tensor; ValueError: window_size is.
    Gradients for q, k, v, attn_bias and sinks, through out, and through the lse of return_lse.
    Source: FlashAttention-2, arXiv 2307.08691. Specification: csrc/cpu/reference.c.

    >>> q, k, v = torch.zeros(1, 2, 1, 8), torch.zeros(1, 4, 1, 8), torch.eye(4, 8)[None, :, None]
    >>> out = flash_attn_func(q, k, v, causal=True)  # the mean of the rows of v that a row sees
    >>> out[0, :, 0, :4] > 0
    tensor([[ True,  True,  True, False],
            [ True,  True,  True,  True]])
    >>> out, lse = flash_attn_func(q, k, v, window_size=(1, 0), return_lse=True)
    >>> lse.exp().round()  # two keys, whose scores are 0
    tensor([[[2., 2.]]])
    """
    if not (attn_bias is attn_mask is sinks is None and return_lse is return_max_logits is False):
        return _attend_extended(
            (q, k, v), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    if not is_compiling():
        out = _direct.direct_attention(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs,
        )  # fmt: skip
        if type(out) is tuple:
            mask = softmax_scale, causal, window_size, softcap
            return _record(q, k, v, (out, alibi_slopes, (), mask, deterministic, False))
        if out is not None:
            return out
    return _attend(
        (q, k, v), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """``flash_attn_func`` with keys and values in one tensor: same results, and the gradient of kv comes in one piece.

    The mask is aligned to the bottom right corner. Causal with fewer queries than keys, and with more:

        x x x .      . .
        x x x x      . .
                     x .
                     x x

    Args:
        q: ``[b, len_q, h, d]``.
        kv: ``[b, len_kv, 2, h_kv, d]``: keys, then values.
        The others: see ``flash_attn_func``.
    Returns, Raises, Source: see ``flash_attn_func``.
    Gradients for q and kv.

    >>> q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 2, 8)
    >>> out = flash_attn_kvpacked_func(q, kv, causal=True)
    >>> torch.equal(out, flash_attn_func(q, *kv.unbind(2), causal=True))
    True
    """
    if not (attn_bias is attn_mask is sinks is None and return_lse is return_max_logits is False):
        return _attend_extended(
            (q, kv), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _attend(
        (q, kv), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """``flash_attn_func`` with queries, keys and values in one tensor, whose gradient comes in one piece too.

    There are as many queries as keys:

        causal     x . .      window     x . .
                   x x .      (1, 0)     x x .
                   x x x                 . x x

    Args:
        qkv: ``[b, len, 3, h, d]``: queries, keys, values; as many key heads as query heads.
        The others: see ``flash_attn_func``.
    Returns, Raises, Source: see ``flash_attn_func``; out is ``[b, len, h, d]``.
    Gradients for qkv.

    >>> qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    >>> out = flash_attn_qkvpacked_func(qkv, causal=True)
    >>> out.sum().backward()
    >>> out.shape, qkv.grad.shape
    (torch.Size([2, 5, 4, 8]), torch.Size([2, 5, 3, 4, 8]))
    """
    if not (attn_bias is attn_mask is sinks is None and return_lse is return_max_logits is False):
        return _attend_extended(
            (qkv,), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _attend(
        (qkv,), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
    *,
    attn_bias: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """``flash_attn_func`` over b sequences of different lengths, one after the other without padding.

    Sequence n owns rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1`` and sees only its own keys. Two sequences of
    lengths 2 and 3, causal, cu_seqlens = [0, 2, 5]:

        x . . . .
        x x . . .
        . . x . .
        . . x x .
        . . x x x

    The mask of each sequence is aligned to its bottom right corner. Causal, cu_seqlens_q = [0, 2, 5], cu_seqlens_k =
    [0, 4, 6]: the first sequence has fewer queries than keys, the second has more:

        x x x . . .
        x x x x . .
        . . . . . .
        . . . . x .
        . . . . x x

    Args:
        q: ``[total_q, h, d]``.
        k, v: ``[total_kv, h_kv, d]``, or pages ``[num_pages, page_size, h_kv, d]`` with block_table.
        cu_seqlens_q, cu_seqlens_k: int32 ``[b + 1]``: 0, then the running sums of the lengths. A length may be 0.
        max_seqlen_q, max_seqlen_k: at least the longest length; an int, or a tensor of one element.
        block_table: int32 ``[b, max_pages]``: the pages of each sequence, in order. Forward only, and without
            attn_bias, attn_mask and return_max_logits.
        attn_bias, attn_mask: ``[b, h, max_seqlen_q, max_seqlen_k]``, or 1 in place of a size. Row i and key j count
            from 0 in each sequence.
        The others: see ``flash_attn_func``, with the lengths of each sequence in place of len_q and len_kv.
    Returns:
        As ``flash_attn_func``: out ``[total_q, h, d]``, softmax_lse and lse ``[h, total_q]``, S_dmask with max_seqlen
        in place of the lengths.
    Raises:
        RuntimeError, TypeError, ValueError: see ``flash_attn_func``; RuntimeError on the CPU also for lengths and
            pages that do not fit the tensors.
    Gradients for q, k, v; none with block_table.
    Source: FlashAttention-2, arXiv 2307.08691. Specification: csrc/cpu/reference.c.

    >>> q, k, v = torch.randn(3, 5, 4, 8)  # 5 tokens of 4 heads
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3, causal=True)
    >>> torch.allclose(out[2:], flash_attn_func(q[None, 2:], k[None, 2:], v[None, 2:], causal=True)[0], atol=1e-6)
    True
    """
    if not (attn_bias is attn_mask is sinks is None and return_lse is return_max_logits is False):
        return _attend_extended(
            (q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale,
            causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table, attn_bias,
            attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    if not is_compiling():
        out = _direct.direct_varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
        )  # fmt: skip
        if type(out) is tuple:
            mask = softmax_scale, causal, window_size, softcap
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            return _record(q, k, v, (out, alibi_slopes, lengths, mask, deterministic, block_table is not None))
        if out is not None:
            return out
    return _attend(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """``flash_attn_varlen_func`` with keys and values in one tensor, whose gradient comes in one piece too.

    Causal, cu_seqlens_q = [0, 2, 5], cu_seqlens_k = [0, 4, 6]:

        x x x . . .
        x x x x . .
        . . . . . .
        . . . . x .
        . . . . x x

    Args:
        q: ``[total_q, h, d]``.
        kv: ``[total_kv, 2, h_kv, d]``: keys, then values.
        The others: see ``flash_attn_varlen_func``.
    Returns, Raises, Source: see ``flash_attn_varlen_func``.
    Gradients for q and kv.

    >>> q, kv = torch.randn(5, 4, 8), torch.randn(7, 2, 2, 8)
    >>> cu_seqlens_q, cu_seqlens_k = torch.tensor([[0, 2, 5], [0, 3, 7]], dtype=torch.int32)
    >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, 3, 4).shape
    torch.Size([5, 4, 8])
    """
    if not (attn_bias is attn_mask is sinks is None and return_lse is return_max_logits is False):
        return _attend_extended(
            (q, kv), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale,
            causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, None, attn_bias,
            attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _attend(
        (q, kv), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Length,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_bias: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """``flash_attn_varlen_func`` with queries, keys and values in one tensor, whose gradient comes in one piece too.

    Two sequences of lengths 2 and 3, causal:

        x . . . .
        x x . . .
        . . x . .
        . . x x .
        . . x x x

    Args:
        qkv: ``[total, 3, h, d]``: queries, keys, values; as many key heads as query heads.
        cu_seqlens: int32 ``[b + 1]``: 0, then the running sums of the lengths.
        max_seqlen: at least the longest length; an int, or a tensor of one element.
        The others: see ``flash_attn_varlen_func``.
    Returns, Raises, Source: see ``flash_attn_varlen_func``; out is ``[total, h, d]``.
    Gradients for qkv.

    >>> qkv = torch.randn(5, 3, 4, 8)
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 3, window_size=(1, 0)).shape
    torch.Size([5, 4, 8])
    """
    if not (attn_bias is attn_mask is sinks is None and return_lse is return_max_logits is False):
        return _attend_extended(
            (qkv,), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), dropout_p, softmax_scale,
            causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, None, attn_bias,
            attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _attend(
        (qkv,), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Optional[Tensor] = None,
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
        q: ``[b, len_q, h, d]`` in fp16, bf16, fp32 or (CPU) fp64.
        k_cache, v_cache: ``[b_cache, capacity, h_kv, d]``, or pages ``[num_pages, page_size, h_kv, d]`` with
            block_table. Last dimension contiguous.
        k, v: ``[b, len_new, h_kv, d]``: keys and values to append; need cache_seqlens.
        rotary_cos, rotary_sin: ``[at least capacity, rotary_dim / 2]`` in the dtype of q. They rotate the first
            rotary_dim dimensions of k and q. Row t of k rotates by position ``cache_seqlens + t``. With causal or a
            window, row t of q does so too. Otherwise every row of q rotates by ``cache_seqlens``. As in upstream, a
            side of a window that is not below the capacity counts as none here, and causal with one row of q as not
            causal. The tensor q itself is not changed.
        cache_seqlens: rows in use before the append: int32 ``[b]``, or one int for all; None: the whole cache.
        cache_batch_idx: int32 ``[b]``: the cache row (of block_table, if paged) of each batch entry; None: the same.
            Two entries may share a row or pages. If both append to one place, each number there is that of either
            entry.
        cache_leftpad: int32 ``[b]``: first row in use; None: 0.
        block_table: int32 ``[b, max_pages]``: the pages of each sequence. Entries past the pages needed are not read.
            Pages hold any number of keys. On Hopper, many queries over pages of no multiple of 8 keys copy the pages
            first, up to 1 GiB (``gathers`` of ``explain``). Few queries load their keys one by one (kernels whose names
            have ``_single``). Pages of a multiple of 8 keys, but not of 32, are loaded with all columns at once if
            there are 128, 192 or 256 columns (``_whole``).
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ..; otherwise (0, r / 2), (1, r / 2 + 1), ..
        num_splits: number of parts into which the keys of one row are split; 0: the plan decides.
        return_softmax_lse: return ``(out, softmax_lse)``.
        sinks: ``[h]``: see ``flash_attn_func``. softmax_lse has their scores in its sum, too.
        The others: see ``flash_attn_func``, with the keys of each sequence in place of len_kv.
    Returns:
        ``out`` ``[b, len_q, h, d]`` in the dtype and layout of q, and on request softmax_lse, fp32 ``[b, h, len_q]``.
    Raises:
        AssertionError: the last dimension of a cache is not contiguous.
        RuntimeError, TypeError, ValueError: see ``flash_attn_func``; RuntimeError also if the append does not fit, and
            then nothing is written.
    There are no gradients. If an input requires a gradient, one warning says so.
    Source: FlashAttention-2, arXiv 2307.08691; rotary embedding, arXiv 2104.09864. Specification: csrc/cpu/reference.c.

    >>> k_cache, v_cache = torch.zeros(2, 1, 16, 2, 8)  # room for 16 tokens
    >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    >>> lengths = torch.tensor([3], dtype=torch.int32)
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    >>> out.shape, torch.equal(k_cache[0, 3], k[0, 0])
    (torch.Size([1, 1, 4, 8]), True)
    """
    if sinks is not None:
        if getattr(sinks, "requires_grad", False):
            warn_of_gradients(sinks)
        if not is_compiling() and (return_softmax_lse is False or return_softmax_lse is True):
            results = _direct.direct_kvcache_options(
                q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad,
                block_table, alibi_slopes, softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits,
                sinks, return_softmax_lse, False,
            )  # fmt: skip
            if results is not None:
                return results
        if _has_distributed((q, k_cache, v_cache, sinks)):
            out, softmax_lse = _attend_with_cache(
                q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
                block_table, softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits,
                return_softmax_lse, sinks=sinks,
            )  # fmt: skip
            return (out, softmax_lse) if return_softmax_lse else out
        from flash_attn._extended import with_sinks

        if return_softmax_lse is not True and return_softmax_lse is not False:
            check_kinds({"return_softmax_lse": return_softmax_lse})
        out, softmax_lse = with_sinks(
            sinks, q, flash_attn_with_kvcache, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens,
            cache_batch_idx, cache_leftpad, block_table, softmax_scale, causal, window_size, softcap,
            rotary_interleaved, alibi_slopes, num_splits, True,
        )  # fmt: skip
        return (out, softmax_lse) if return_softmax_lse else out
    if not is_compiling() and (return_softmax_lse is False or return_softmax_lse is True):
        attend = _direct.direct_kvcache_forward if return_softmax_lse else _direct.direct_kvcache_attention
        results = attend(
            q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad,
            block_table, alibi_slopes, softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits,
        )  # fmt: skip
        if results is not None:
            return results
    warn_of_gradients(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes, softmax_scale, softcap)
    out, softmax_lse = _attend_with_cache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse,
    )  # fmt: skip
    return (out, softmax_lse) if return_softmax_lse else out


register_once("formulas for FLOPs", register_flops)
register_once("rules of vmap", _register_rules_of_vmap)
register_once("all", forget_own_kernels)
if "torch.distributed.tensor" in _sys.modules:
    from flash_attn import _distributed_ops  # noqa: F401  the ops take DTensors
