"""The attention functions of FlashAttention-3, with the same names, order of arguments and results.

    public function              file            op of namespace flash_attn_3
    flash_attn_func              here            _flash_attn_forward, _flash_attn_backward
    flash_attn_varlen_func       here            the same
    flash_attn_qkvpacked_func    here            the same
    flash_attn_with_kvcache      _kvcache.py     _fwd_kvcache
    get_scheduler_metadata       _kvcache.py     get_scheduler_metadata
    flash_attn_combine           _combine.py     fwd_combine; _combine, which has a gradient
    quantize                     _quantize.py    quantize

_attention.py computes what the first three have in common. The ops check their arguments (csrc/torch/args.c). Python
does only the work that must happen before an op is called (_arguments.py).
"""

from typing import Optional, Union

from torch import Tensor, strided

from flash_attn_3._arguments import Length, Window, as_int, call_op, is_int, maybe_contiguous, round_multiple
from flash_attn_3._attention import DENSE, attend, run_backward
from flash_attn_3._combine import flash_attn_combine
from flash_attn_3._kinds import check_kinds
from flash_attn_3._kvcache import flash_attn_with_kvcache, get_scheduler_metadata
from flash_attn_3._ops import forget_own_kernels, ops, register_once
from flash_attn_3._quantize import quantize

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
    "quantize",
    "round_multiple",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Exact attention ``softmax(softmax_scale * (q @ k.T + qv @ v.T) + mask) @ v`` without storing the scores.

    The causal mask is aligned to the bottom right corner; window_size (1, 0) keeps that corner's diagonal and the key
    before it. Fewer queries than keys, and more:

        causal     x x x .      window     . x x .
                   x x x x      (1, 0)     . . x x

        causal     . .          window     . .
                   . .          (1, 0)     . .
                   x .                     x .
                   x x                     x x

    Args:
        q: ``[b, len_q, h, d]`` in fp16, bf16, float8_e4m3fn, fp32 or (CPU) fp64; d is a multiple of 8 up to 256 (FP8:
            of 16). Any strides are allowed. A tensor whose last dimension is not contiguous is copied.
        k: ``[b, len_kv, h_kv, d]`` in the dtype of q. h is a multiple of h_kv. Query head i uses key head
            ``i // (h // h_kv)``.
        v: ``[b, len_kv, h_kv, d_v]``. d_v is d, or at most 512 if d is at most 64, or at most 128 if d is in (128,
            192].
        softmax_scale: factor of the scores; None: ``1 / sqrt(d)``, with qv ``1 / sqrt(d + d_v)``.
        causal: key j is visible from row i iff ``j <= i + len_kv - len_q``.
        qv: ``[b, len_q, h, d_v]`` or None; needs d at most 64 and d_v at least 256.
        q_descale, k_descale, v_descale: fp32 ``[b, h_kv]``, any strides: q, k and v are multiplied by these factors;
            None: 1. They are ignored unless the tensors are FP8.
        window_size: ``(left, right)``: key j is visible from row i iff ``i + len_kv - len_q - left <= j <=
            i + len_kv - len_q + right``; -1 lifts a bound. Combines with causal, which is a right bound of 0.
        attention_chunk: c > 0: row i sees only keys j with ``j // c == (i + len_kv - len_q) // c``; 0 is off.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask; 0 is off.
        num_splits: parts into which the keys of one row are split; 1: none; 0: the plan decides. At most 256.
        pack_gqa: a hint that changes no result.
        deterministic: the backward repeats bit for bit. ``torch.use_deterministic_algorithms`` has the same effect.
        sm_margin: multiprocessors of the GPU that the call leaves to others.
        return_attn_probs: return ``(out, softmax_lse)``.
    Returns:
        ``out`` ``[b, len_q, h, d_v]``, contiguous, in the dtype of q; in bf16 for FP8. Rows that see no key are 0.
        softmax_lse: fp32 ``[b, h, len_q]``, natural logarithm of each row's sum of exp(score); -inf if the row sees no
        key, +inf if there are no keys at all.
    Raises:
        RuntimeError: a shape, dtype, device or value does not fit. The message names the argument, what came and what
            is allowed. Also a backward with FP8 or qv.
        TypeError: an argument is of a wrong kind, such as a list in place of a tensor; ValueError: window_size is.
        AssertionError: a backward with attention_chunk.
    Gradients for q, k, v, through out only; none for FP8, qv, attention_chunk, or d_v above 256.
    Source: FlashAttention-3, arXiv 2407.08608. Specification: csrc/cpu/reference.c.

    >>> q, k, v = torch.zeros(1, 2, 1, 8), torch.zeros(1, 4, 1, 8), torch.eye(4, 8)[None, :, None]
    >>> out = flash_attn_func(q, k, v, causal=True)  # the mean of the rows of v that a row sees
    >>> out[0, :, 0, :4] > 0
    tensor([[ True,  True,  True, False],
            [ True,  True,  True,  True]])
    """
    options = (
        qv, q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, sm_margin,
    )  # fmt: skip
    return attend((q, k, v), None, DENSE, options, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    max_seqlen_q: Optional[Length],
    max_seqlen_k: Optional[Length],
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
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
        q: ``[total_q, h, d]``, or ``[b, len_q, h, d]`` if cu_seqlens_q is None.
        k, v: ``[total_kv, h_kv, d]`` and ``[total_kv, h_kv, d_v]``, or dense tensors if cu_seqlens_k is None.
        cu_seqlens_q, cu_seqlens_k: int32 ``[b + 1]``: 0, then the running sums of the lengths. A length may be 0.
        max_seqlen_q, max_seqlen_k: at least the longest length; an int, or a tensor of one element.
        seqused_q, seqused_k: int32 ``[b]``: use only that many first rows of each sequence. The other rows of out and
            softmax_lse are not written.
        The others: see ``flash_attn_func``, with the lengths of each sequence in place of len_q and len_kv.
    Returns:
        As ``flash_attn_func``: out ``[total_q, h, d_v]``, softmax_lse ``[h, total_q]``.
    Raises:
        As ``flash_attn_func``; on the CPU also for lengths that do not fit the tensors.
    Gradients as for ``flash_attn_func``. Rows that are not in use have gradients of 0.
    Source: FlashAttention-3, arXiv 2407.08608. Specification: csrc/cpu/reference.c.

    >>> q, k, v = torch.randn(3, 5, 4, 8)  # 5 tokens of 4 heads
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 3, 3, causal=True)
    >>> torch.allclose(out[2:], flash_attn_func(q[None, 2:], k[None, 2:], v[None, 2:], causal=True)[0], atol=1e-6)
    True
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    options = (
        qv, q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, sm_margin,
    )  # fmt: skip
    return attend((q, k, v), None, lengths, options, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """``flash_attn_func`` with queries, keys and values in one tensor, whose gradient comes in one piece too.

    There are as many queries as keys:

        causal     x . .      window     x . .
                   x x .      (1, 0)     x x .
                   x x x                 . x x

    Args:
        qkv: ``[b, len, 3, h, d]``: queries, keys, values. With num_heads_q ``[b, len, num_heads_q + 2 h_kv, d]``: the
            heads of the queries, then of the keys, then of the values.
        num_heads_q: number of query heads if qkv has four dimensions.
        The others: see ``flash_attn_func``.
    Returns:
        As ``flash_attn_func``; out is ``[b, len, h, d]``.
    Raises:
        AssertionError: the shape of qkv does not fit.
        The others: see ``flash_attn_func``.
    Gradients for qkv.
    Source: FlashAttention-3, arXiv 2407.08608. Specification: csrc/cpu/reference.c.

    >>> qkv = torch.randn(2, 5, 8, 16)  # 4 heads of queries, 2 of keys, 2 of values
    >>> flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4).shape
    torch.Size([2, 5, 4, 16])
    """
    is_right = isinstance(qkv, Tensor) and qkv.layout == strided and (num_heads_q is None or is_int(num_heads_q))
    if not is_right:
        check_kinds({"qkv": qkv, "num_heads_q": num_heads_q}, ("num_heads_q",))
    if num_heads_q is None:
        fits = qkv.dim() == 5 and qkv.shape[-3] == 3
        assert fits, f"qkv must have shape (batch_size, seqlen, 3, num_heads, head_size); it has {tuple(qkv.shape)}"
    else:
        rest = qkv.shape[2] - num_heads_q if qkv.dim() == 4 else -1
        assert num_heads_q > 0 and rest > 0 and rest % 2 == 0, (
            "qkv must have shape (batch_size, seqlen, num_heads_q + 2 * num_heads_k, head_size); it has "
            f"{tuple(qkv.shape)}, and num_heads_q is {num_heads_q}"
        )
    options = (
        None, q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, 1, None,
        sm_margin,
    )  # fmt: skip
    return attend((maybe_contiguous(qkv),), num_heads_q, DENSE, options, deterministic, return_attn_probs)


# ---- private functions that clients call ---------------------------------------------------------------------------


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Optional[Tensor] = None,
    v_new: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    out_: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[Length] = None,
    max_seqlen_k: Optional[Length] = None,
    page_table: Optional[Tensor] = None,
    kv_batch_idx: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    seqlens_rotary: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the forward op on tensors of any strides and returns ``(out, softmax_lse, out_accum, softmax_lse_accum)``.

    The arguments are those of ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``. out_ is a tensor to write.
    k and v may be caches; k_new and v_new are then appended in place. The last two results are empty.
    """
    return call_op(
        ops._flash_attn_forward.default, *map(maybe_contiguous, (q, k, v, k_new, v_new, qv)), out_,
        *map(maybe_contiguous, (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k)),
        as_int(max_seqlen_q, "max_seqlen_q"), as_int(max_seqlen_k, "max_seqlen_k"),
        *map(maybe_contiguous, (page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary)),
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk,
        softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    sequed_q: Optional[Tensor] = None,
    sequed_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[Length] = None,
    max_seqlen_k: Optional[Length] = None,
    dq: Optional[Tensor] = None,
    dk: Optional[Tensor] = None,
    dv: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Runs the backward op, writes dq, dk, dv in place, and returns ``softmax_d``, the row sums of ``dout * out``.

    dq, dk, dv: views of the shapes and dtype of q, k, v with a contiguous last dimension. A None is not computed.
    softmax_d: fp32 ``[b, h, len_q rounded up to 128]``, or ``[h, total_q + 128 b]``. Rows that are in no sequence or
    not in use are not written.
    """
    return run_backward(
        *map(maybe_contiguous, (dout, q, k, v, out)), softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        as_int(max_seqlen_q, "max_seqlen_q"), as_int(max_seqlen_k, "max_seqlen_k"), dq, dk, dv, softmax_scale,
        is_causal, window_size_left, window_size_right, softcap, deterministic, sm_margin,
    )  # fmt: skip


register_once("all", forget_own_kernels)  # after all files have registered their kernels
