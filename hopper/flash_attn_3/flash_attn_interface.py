"""The attention functions of FlashAttention-3, with the same names, order of arguments and results.

    public function              op of namespace flash_attn_3
    flash_attn_func              _flash_attn_forward, _flash_attn_backward
    flash_attn_varlen_func       the same
    flash_attn_qkvpacked_func    the same
    flash_attn_with_kvcache      _fwd_kvcache
    flash_attn_combine           _combine; fwd_combine if out is given
    get_scheduler_metadata       get_scheduler_metadata
    quantize                     quantize

In eager mode the extension's direct functions replace the ops (csrc/torch/direct.c), unless something watches the ops.
The direct functions do the same without torch's dispatcher, which takes longer than all the rest of a small call. A
direct function that cannot serve a call returns None and has done nothing. Then the op is called.

One function computes every forward (``_attend``), and one function every backward (``_gradients``). The ops check their
arguments (csrc/torch/args.c). This file does only the work that must happen before an op is called.
"""

import warnings
from collections import namedtuple

import torch
from torch.autograd import forward_ad

from flash_attn_3._ops import _C, forget_own_kernels, ops, output_dtype, register_once

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "quantize",
]

_forward_op = ops._flash_attn_forward.default
_backward_op = ops._flash_attn_backward.default
_kvcache_op = ops._fwd_kvcache.default


# ---- arguments ---------------------------------------------------------------------------------------------------


def maybe_contiguous(x):
    """Returns ``x`` if its last dimension is contiguous or ``x`` is no tensor, otherwise a contiguous copy."""
    if isinstance(x, torch.Tensor) and x.dim() > 0 and x.stride(-1) != 1:
        return x.contiguous()
    return x


def round_multiple(x, m):
    """Rounds ``x`` up to a multiple of ``m``."""
    return (x + m - 1) // m * m


def _as_int(x, name):
    """Returns a Python integer or None. A tensor of one element gives its value; a CUDA tensor waits for the device."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.numel() != 1:
        raise RuntimeError(f"{name} must be one integer; it is a tensor of shape {tuple(x.shape)}")
    return x.item()


def _as_window(window_size):
    """Returns ``(left, right)`` as Python integers, from a tuple, a list or a tensor of two."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be (left, right), two integers; it is {window_size!r}") from None
    return _as_int(left, "window_size"), _as_int(right, "window_size")


def _as_table(table, q):
    """Returns a table of the rotary embedding. One of FP8, beside a q of FP8, becomes bf16, which changes no value."""
    fp8 = torch.float8_e4m3fn
    if isinstance(q, torch.Tensor) and isinstance(table, torch.Tensor) and q.dtype == table.dtype == fp8:
        return table.to(torch.bfloat16)
    return table


def _check_tensors(**tensors):
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; it is of type {type(x).__name__}")


def _distinct(*arguments):
    """Returns the arguments. While compiling, a repeated tensor is replaced by a view of itself.

    torch.compile refuses an autograd.Function if two arguments are the same tensor, like cu_seqlens of self attention.
    """
    if not torch.compiler.is_compiling():
        return arguments
    distinct = []
    for x in arguments:
        repeated = isinstance(x, torch.Tensor) and any(x is y for y in distinct)
        distinct.append(x.view_as(x) if repeated else x)
    return distinct


def _refuse_tangents(arguments):
    """The dispatcher would drop the tangents of forward-mode derivatives without a word."""
    for x in arguments:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("flash_attn_3 has no jvp: there is no forward-mode derivative of attention")


def _call(op, *arguments):
    """Returns ``op(*arguments)``. The dispatcher makes exceptions RuntimeErrors; here they are restored."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    if forward_ad._current_level >= 0:
        _refuse_tangents(arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        exception = _C.mended_exception(error)
        if exception is error:
            raise
        raise exception from None


# ---- one forward and one backward ----------------------------------------------------------------------------------

# Where the sequences of packed tensors lie. A dense call has None everywhere.
_Lengths = namedtuple(
    "_Lengths",
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k",
    defaults=(None,) * 6,
)

# The options of a forward, in the order of the direct functions.
_Options = namedtuple(
    "_Options",
    "qv q_descale k_descale v_descale softmax_scale causal window_size attention_chunk softcap num_splits pack_gqa "
    "sm_margin",
)

_DENSE = _Lengths()


def _forward(q, k, v, lengths, options):
    """Returns ``(out, softmax_lse)`` of the direct function or of the op."""
    o = options
    if not torch.compiler.is_compiling():
        direct = _C.direct_forward(q, k, v, *lengths, *options)
        if direct is not None:
            return direct
    _check_tensors(q=q, k=k, v=v)
    o = o._replace(qv=maybe_contiguous(o.qv))
    lengths = lengths._replace(
        max_seqlen_q=_as_int(lengths.max_seqlen_q, "max_seqlen_q"),
        max_seqlen_k=_as_int(lengths.max_seqlen_k, "max_seqlen_k"),
    )
    left, right = _as_window(o.window_size)
    out, softmax_lse, *_ = _call(
        _forward_op,
        *map(maybe_contiguous, (q, k, v)), None, None, o.qv, None, lengths.cu_seqlens_q, lengths.cu_seqlens_k, None,
        lengths.seqused_q, lengths.seqused_k, lengths.max_seqlen_q, lengths.max_seqlen_k, None, None, None, None, None,
        None, o.q_descale, o.k_descale, o.v_descale, o.softmax_scale, o.causal, left, right, o.attention_chunk,
        o.softcap, True, None, o.num_splits, o.pack_gqa, o.sm_margin,
    )  # fmt: skip
    return out, softmax_lse


def _split(tensors, num_heads_q):
    """Returns q, k, v as views of (q, k, v) or of (qkv,). Nothing is copied."""
    if len(tensors) == 3:
        return tensors
    (qkv,) = tensors
    if num_heads_q is None:
        return qkv.unbind(-3)
    num_heads_k = (qkv.shape[-2] - num_heads_q) // 2
    return qkv.split([num_heads_q, num_heads_k, num_heads_k], -2)


def _pack(tensors, num_heads_q):
    """Does the inverse of ``_split`` on packed tensors."""
    return torch.stack(tensors, -3) if num_heads_q is None else torch.cat(tensors, -2)


def _save(ctx, tensors, num_heads_q, out, softmax_lse, lengths, options, deterministic):
    """Saves the tensors and options for ``_gradients``. Their memory is linear in the lengths. No scores are saved."""
    lengths = _Lengths(*lengths)
    ctx.save_for_backward(
        *tensors, out, softmax_lse, lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_q, lengths.seqused_k
    )
    ctx.max_seqlens = lengths.max_seqlen_q, lengths.max_seqlen_k
    ctx.num_heads_q = num_heads_q
    ctx.has_qv = options.qv is not None
    ctx.options = options._replace(qv=None, q_descale=None, k_descale=None, v_descale=None)
    ctx.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()


def _check_has_backward(ctx):
    if ctx.options.attention_chunk:
        raise AssertionError("FA3 backward does not support attention_chunk")
    if ctx.has_qv:
        raise RuntimeError("flash_attn_3 has no backward with qv: qv would need a gradient, too")


def _empty_like(x, zeros):
    """Returns an empty or zero tensor like ``x`` whose last dimension is contiguous."""
    like = torch.empty_like(x)
    torn = like.dim() > 0 and like.stride(-1) != 1 and like.shape[-1] > 1
    if torn:
        like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like.zero_() if zeros else like


def _backward(*arguments):
    """Runs the backward op on these arguments, without torch's dispatcher if possible."""
    softmax_d = None if torch.compiler.is_compiling() else _C.direct_backward(*arguments)
    return _call(_backward_op, *arguments) if softmax_d is None else softmax_d


@torch.no_grad()
def _first_gradients(ctx, saved, dout):
    """Returns the gradients of the given tensors, packed like the tensors.

    The op does not write rows that belong to no sequence or are not in use. Their gradients are 0.

    NOTE: compiled code writes dq, dk and dv to separate tensors and packs them afterwards. Inductor with dynamic shapes
    loses the offset of a view that an op writes into (pytorch/pytorch#198068).
    """
    _check_has_backward(ctx)
    *tensors, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = saved
    q, k, v = _split(tensors, ctx.num_heads_q)
    o = ctx.options
    packs = cu_seqlens_q is not None or cu_seqlens_k is not None
    zeros = seqused_q is not None or seqused_k is not None or (packs and q.is_cpu)
    packed = len(tensors) == 1
    whole = [_empty_like(x, zeros) for x in ((q, k, v) if torch.compiler.is_compiling() else tensors)]
    grads = whole if len(whole) == 3 else _split(whole, ctx.num_heads_q)
    left, right = _as_window(o.window_size)
    max_seqlens = [_as_int(x, "max_seqlen") for x in ctx.max_seqlens]
    _backward(
        maybe_contiguous(dout), *map(maybe_contiguous, (q, k, v)), out, softmax_lse, cu_seqlens_q, cu_seqlens_k,
        seqused_q, seqused_k, *max_seqlens, *grads, o.softmax_scale, o.causal, left, right, o.softcap,
        ctx.deterministic, o.sm_margin,
    )  # fmt: skip
    return [_pack(grads, ctx.num_heads_q)] if packed and len(whole) == 3 else whole


def _gradients(ctx, dout):
    saved = ctx.saved_tensors  # read once, because a checkpoint computes them
    grads = _first_gradients(ctx, saved, dout)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    return _LastDerivative.apply(len(grads), *grads, dout, *saved)


class _LastDerivative(torch.autograd.Function):
    """Returns the first num tensors unchanged, as a function of all tensors without a derivative.

    torch's ``once_differentiable`` is not enough. It treats the tensors as constants if dout requires no grad.
    """

    @staticmethod
    def forward(ctx, num, *tensors):
        return tensors[:num]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("flash_attn_3 has no second derivatives: its gradients cannot be differentiated again")


class _Attention(torch.autograd.Function):
    """Attention of (q, k, v) or (qkv,) with the options of ``_attend``. Only ``out`` carries a gradient."""

    @staticmethod
    def forward(ctx, num_tensors, *arguments):
        tensors, arguments = arguments[:num_tensors], arguments[num_tensors:]
        num_heads_q, deterministic, return_lse, *rest = arguments
        lengths, options = _Lengths(*rest[:6]), _Options(*rest[6:])
        out, softmax_lse = _forward(*_split(tensors, num_heads_q), lengths, options)
        _save(ctx, tensors, num_heads_q, out, softmax_lse, lengths, options, deterministic)
        return (out, softmax_lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, *_):
        grads = _gradients(ctx, dout)
        return (None, *grads, *[None] * (len(ctx.needs_input_grad) - 1 - len(grads)))


class _Attended(_Attention):
    """The autograd node of a finished forward. It has only necessary arguments, because each argument costs time."""

    @staticmethod
    def forward(ctx, q, k, v, done):
        (out, softmax_lse), lengths, options, deterministic = done
        _save(ctx, (q, k, v), None, out, softmax_lse, lengths, options, deterministic)
        return out

    @staticmethod
    def backward(ctx, dout):
        return (*_gradients(ctx, dout), None)


# This is ``_Attended.apply`` for plain tensors in eager mode. It skips the layer that looks for functorch.
_record = super(torch.autograd.Function, _Attended).apply


def _attend(tensors, num_heads_q, lengths, options, deterministic, return_lse):
    """Computes the forward of every function below, and records it if a tensor requires grad."""
    compiling = torch.compiler.is_compiling()
    qv = options[0]
    # The direct function does not look at qv. A backward through qv must reach our node, which refuses it.
    records_qv = qv is not None and isinstance(qv, torch.Tensor) and qv.requires_grad and torch.is_grad_enabled()
    if not (compiling or return_lse or records_qv) and len(tensors) == 3:
        out = _C.direct_attention(*tensors, *lengths, *options)
        if type(out) is tuple:
            return _record(*tensors, (out, lengths, _Options(*options), deterministic))
        if out is not None:
            return out
    lengths, options = _Lengths(*lengths), _Options(*options)
    _check_tensors(**dict(zip(("q", "k", "v") if len(tensors) == 3 else ("qkv",), tensors)))
    if (
        compiling
        or records_qv
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    ):
        rest = _distinct(*tensors, num_heads_q, deterministic, return_lse, *lengths, *options)
        return _Attention.apply(len(tensors), *rest)
    results = _forward(*_split(tensors, num_heads_q), lengths, options)
    return tuple(results) if return_lse else results[0]


# ---- public functions ----------------------------------------------------------------------------------------------


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """Exact attention ``softmax(softmax_scale * (q @ k.T + qv @ v.T) + mask) @ v`` without storing the scores.

    The causal mask is aligned to the bottom right corner; window_size (1, 0) keeps that corner's diagonal and the key
    before it. len_q = 2, len_kv = 4:

        causal     x x x .      window     . x x .
                   x x x x      (1, 0)     . . x x

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
        RuntimeError: the message names the argument that does not fit, what came and what is allowed.
        AssertionError: a backward with attention_chunk.
    Gradients for q, k, v, through out only; none for FP8, qv, attention_chunk, or d_v above 256.
    Source: FlashAttention-3, arXiv 2407.08608. Specification: csrc/cpu/reference.c.
    """
    options = (
        qv, q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, sm_margin,
    )  # fmt: skip
    return _attend((q, k, v), None, _DENSE, options, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` over b sequences of different lengths, one after the other without padding.

    Sequence n owns rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1`` and sees only its own keys. Two sequences of
    lengths 2 and 3, causal, cu_seqlens = [0, 2, 5]:

        x . . . .
        x x . . .
        . . x . .
        . . x x .
        . . x x x

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
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    options = (
        qv, q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits,
        pack_gqa, sm_margin,
    )  # fmt: skip
    return _attend((q, k, v), None, lengths, options, deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` with queries, keys and values in one tensor, whose gradient comes in one piece too.

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
    """
    _check_tensors(qkv=qkv)
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
    return _attend((maybe_contiguous(qkv),), num_heads_q, _DENSE, options, deterministic, return_attn_probs)


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
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """One step of decoding: appends to a cache of keys and values, then attends over the cache.

    If k and v are given, they are written into the cache **in place** at rows ``cache_seqlens`` onwards. The rotary
    embedding, if there is one, rotates k before. Then q attends to rows ``cache_leftpad`` to
    ``cache_seqlens + len_new - 1``. Masks are aligned to the bottom right corner of these keys. With len_q = 2,
    cache_seqlens = 2, len_new = 2, causal:

        cached  new
         x x    x .
         x x    x x

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
            or a chunk, row t of q does so too. Otherwise every row of q rotates by offset. The tensor q itself is not
            changed. Positions past the last row are not rotated.
        cache_seqlens: rows in use before the append: int32 ``[b]``, or one int for all; None: the whole cache.
        cache_batch_idx: int32 ``[b]``: the cache row (of page_table, if paged) of each batch entry; None: the same.
        cache_leftpad: int32 ``[b]``: first row in use; None: 0.
        page_table: int32 ``[b, max_pages]``: the pages of each sequence. Entries past the pages needed are not read.
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
        RuntimeError: see ``flash_attn_func``; also if the append does not fit, and then nothing is written.
    There are no gradients. If an input requires a gradient, one warning says so.
    Source: FlashAttention-3, arXiv 2407.08608; rotary embedding, arXiv 2104.09864. Specification: csrc/cpu/reference.c.
    """
    if rotary_cos is None and rotary_sin is None:
        rotary_seqlens = None
    else:
        rotary_cos, rotary_sin = _as_table(rotary_cos, q), _as_table(rotary_sin, q)
    if not torch.compiler.is_compiling():
        attend = _C.direct_kvcache_forward if return_softmax_lse else _C.direct_kvcache_attention
        results = attend(
            q, k_cache, v_cache, k, v, qv, cu_seqlens_q, cu_seqlens_k_new, cache_seqlens, max_seqlen_q, page_table,
            cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_seqlens, q_descale, k_descale, v_descale,
            softmax_scale, causal, window_size, attention_chunk, softcap, rotary_interleaved, scheduler_metadata,
            num_splits, pack_gqa, sm_margin,
        )  # fmt: skip
        if results is not None:
            return results
    _warn_of_gradients(q, k_cache, v_cache, k, v, qv)
    _check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    _check_cache("k_cache", k_cache)
    _check_cache("v_cache", v_cache)
    q = maybe_contiguous(q)
    if isinstance(cache_seqlens, int) and abs(cache_seqlens) >= 2**31:
        raise RuntimeError(f"cache_seqlens must be at most the keys that there are; it is {cache_seqlens}")
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        b = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((b,), cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None:
        _check_tensors(cache_seqlens=cache_seqlens)
    out = q.new_empty((*q.shape[:-1], *v_cache.shape[-1:]), dtype=output_dtype(q))
    left, right = _as_window(window_size)
    softmax_lse = _call(
        _kvcache_op, q, k_cache, v_cache, *map(maybe_contiguous, (k, v, qv)), out,
        *map(maybe_contiguous, (cu_seqlens_q, cu_seqlens_k_new, cache_seqlens)), _as_int(max_seqlen_q, "max_seqlen_q"),
        *map(maybe_contiguous, (page_table, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin, rotary_seqlens)),
        q_descale, k_descale, v_descale, softmax_scale, causal, left, right, attention_chunk, softcap,
        rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip
    return (out, softmax_lse) if return_softmax_lse else out


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Combines partial results over different keys of the same queries into the result over all keys.

        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) out_i

    Args:
        out_partial: fp32 ``[n, b, len, h, d]``, last dimension contiguous; n is at most 256.
        lse_partial: fp32 ``[n, b, len, h]`` with rows (the dimension of len) side by side in memory. A part whose lse
            is infinite, of either sign, saw no key and counts for nothing.
        out: ``[b, len, h, d]`` to write; None: a new tensor.
        out_dtype: fp32 (the default), fp16 or bf16.
    Returns:
        ``(out, lse)``: lse is fp32 ``[b, len, h]``, a transposed view of memory ``[b, h, len]``. If every part has an
        infinite lse, out is 0 and lse is -inf. A NaN in lse_partial makes the row NaN.
    Raises:
        RuntimeError: the message names the argument that does not fit, what came and what is allowed.
    There are no gradients.
    """
    if out is None:
        return tuple(_call(ops._combine.default, out_partial, lse_partial, out_dtype))
    if torch.compiler.is_compiling():
        combined, lse = ops._combine.default(out_partial, lse_partial, out_dtype)
        return out.copy_(combined), lse
    return tuple(_call(ops.fwd_combine.default, out_partial, lse_partial, out, out_dtype))


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """Returns a hint for ``flash_attn_with_kvcache`` calls with the same sizes and options.

    The plans of this package are made in a microsecond and need no hint. So the result holds nothing, and a call with
    the hint equals the call without it.

    Args:
        cache_seqlens: int32 ``[batch_size]``, on the device of the calls.
        The others: those of the calls; headdim_v None: headdim; page_size None: not paged.
    Returns:
        An int32 tensor of one dimension on the device of cache_seqlens.
    Raises:
        RuntimeError: the message names the argument that does not fit.
    """
    _check_tensors(cache_seqlens=cache_seqlens)
    left, right = _as_window(window_size)
    return _call(
        ops.get_scheduler_metadata.default, batch_size, _as_int(max_seqlen_q, "max_seqlen_q"),
        _as_int(max_seqlen_k, "max_seqlen_k"), num_heads_q, num_heads_kv, headdim,
        headdim if headdim_v is None else headdim_v, qkv_dtype, maybe_contiguous(cache_seqlens), cu_seqlens_q, None,
        cu_seqlens_k_new, None, cache_leftpad, page_size, max_seqlen_k_new, causal, left, right, attention_chunk,
        has_softcap, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip


def quantize(q, k, v, cu_seqlens=None, per="head", hadamard=False):
    """Makes float8_e4m3fn tensors of q, k and v, with the descales that the functions above take.

        descale = max |x| / 448 of a sequence and key head;  1 if all x are 0
        result = x / descale, rounded to nearest even

    Args:
        q: ``[b, len_q, h, d]`` in fp16, bf16 or fp32; with cu_seqlens ``[total_q, h, d]``.
        k, v: ``[b, len_k, h_kv, d]`` in the dtype of q; packed ``[total_k, h_kv, d]``. v may have another width.
        cu_seqlens: int32 ``[b + 1]``, the rows where the sequences of packed tensors begin and end. One tensor serves
            q, k and v, a pair is ``(cu_seqlens_q, cu_seqlens_k)``. Rows that belong to no sequence become 0.
        per: "head": a descale for every sequence and key head. The query heads of a key head share a descale. "tensor":
            one descale each for q, k and v.
        hadamard: multiplies q and k along d by the same orthogonal matrix, which spreads outliers over the columns.
            Scores stay the same. The matrix is a Hadamard matrix with random signs, and depends on d alone. So it is
            the same in every call, and a cache of rotated keys stays usable. Where d is no power of two, the matrix
            has blocks of powers of two: 192 = 128 + 64. The signs are the first outputs of SplitMix64 with seed 0:
            column c changes its sign if bit ``c % 64`` of output ``c // 64`` is set.
    Returns:
        ``(q8, k8, v8, q_descale, k_descale, v_descale)``: contiguous tensors of the inputs' shapes, and fp32
        ``[b, h_kv]``. A NaN becomes NaN and leaves the descale alone. An infinity becomes NaN, and its descale is
        infinite. Magnitudes below 2^-126 count as 0, and a descale is at least 2^-126.
    Raises:
        RuntimeError: the message names the argument that does not fit, or the tensor that requires grad.
    There are no gradients. All arithmetic is fp32, and the CPU and the GPU give the same bits.
    Source: csrc/quantization.h.
    """
    _check_tensors(q=q, k=k, v=v)
    if per not in ("head", "tensor"):
        raise ValueError(f'per must be "head" or "tensor"; it is {per!r}')
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"quantize has no gradient, and {name} requires grad: detach it, or use torch.no_grad()")
    cu_seqlens_q, cu_seqlens_k = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
    *tensors, q_descale, k_descale, v_descale = _call(
        ops.quantize.default, *map(maybe_contiguous, (q, k, v)), cu_seqlens_q, cu_seqlens_k, per == "tensor", hadamard
    )
    descales = (q_descale, k_descale, v_descale)
    if per == "tensor":
        b = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        descales = [x.expand(b, k.shape[-2]) for x in descales]
    return *tensors, *descales


# ---- private functions that clients call ---------------------------------------------------------------------------


def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """Runs the forward op on tensors of any strides and returns ``(out, softmax_lse, out_accum, softmax_lse_accum)``.

    The arguments are those of ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``. out_ is a tensor to write.
    k and v may be caches; k_new and v_new are then appended in place. The last two results are empty.
    """
    rotary_cos, rotary_sin = _as_table(rotary_cos, q), _as_table(rotary_sin, q)
    return _call(
        _forward_op, *map(maybe_contiguous, (q, k, v, k_new, v_new, qv)), out_,
        *map(maybe_contiguous, (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k)),
        _as_int(max_seqlen_q, "max_seqlen_q"), _as_int(max_seqlen_k, "max_seqlen_k"),
        *map(maybe_contiguous, (page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary)),
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size_left, window_size_right, attention_chunk,
        softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin,
    )  # fmt: skip


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Runs the backward op, writes dq, dk, dv in place, and returns ``softmax_d``, the row sums of ``dout * out``.

    dq, dk, dv: views of the shapes and dtype of q, k, v with a contiguous last dimension. A None is not computed.
    softmax_d: fp32 ``[b, h, len_q rounded up to 128]``, or ``[h, total_q + 128 b]``. Rows that are in no sequence or
    not in use are not written.
    """
    return _backward(
        *map(maybe_contiguous, (dout, q, k, v, out)), softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        _as_int(max_seqlen_q, "max_seqlen_q"), _as_int(max_seqlen_k, "max_seqlen_k"), dq, dk, dv, softmax_scale,
        is_causal, window_size_left, window_size_right, softcap, deterministic, sm_margin,
    )  # fmt: skip


# ---- autograd of the op itself -------------------------------------------------------------------------------------
# A direct call of the op has gradients too.


def _save_op(ctx, inputs, output):
    given = dict(zip(_ARGUMENTS, inputs))
    without = "k_new", "v_new", "out_", "page_table", "kv_batch_idx", "leftpad_k", "cu_seqlens_k_new"
    if any(given[name] is not None for name in without):
        raise RuntimeError(f"_flash_attn_forward has no gradients with any of {', '.join(without)}")
    window = given["window_size_left"], given["window_size_right"]
    options = _Options(*[window if name == "window_size" else given[name] for name in _Options._fields])
    lengths = _Lengths(*[given[name] for name in _Lengths._fields])
    _save(ctx, inputs[:3], None, *output[:2], lengths, options, False)


def _differentiate_op(ctx, dout, *_):
    return (*_gradients(ctx, dout), *[None] * (len(_ARGUMENTS) - 3))


_ARGUMENTS = [argument.name for argument in _forward_op._schema.arguments]
register_once(
    "formula", lambda: torch.library.register_autograd(_forward_op, _differentiate_op, setup_context=_save_op)
)
register_once("all", forget_own_kernels)
