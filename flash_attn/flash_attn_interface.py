"""The attention functions of flash-attn 2, with the same names, order of arguments and results.

    public function                     autograd class                  op of namespace flash_attn
    flash_attn_func                     FlashAttnFunc                   _flash_attn_forward, _flash_attn_backward
    flash_attn_kvpacked_func            FlashAttnKVPackedFunc           the same
    flash_attn_qkvpacked_func           FlashAttnQKVPackedFunc          the same
    flash_attn_varlen_func              FlashAttnVarlenFunc             _flash_attn_varlen_forward, .._backward
    flash_attn_varlen_kvpacked_func     FlashAttnVarlenKVPackedFunc     the same
    flash_attn_varlen_qkvpacked_func    FlashAttnVarlenQKVPackedFunc    the same
    flash_attn_with_kvcache             none                            fwd_kvcache

In eager mode the extension's direct functions replace the ops (csrc/torch/direct.c), unless something watches the ops.
The direct functions do the same without torch's dispatcher, which takes longer than all the rest of a small call. A
direct function that cannot serve a call returns None and has done nothing. Then the op is called.

A packed tensor holds q, k and v as views of one memory. Dimension -3 counts the parts, in dense and in varlen tensors.
So one function computes every forward (``_attend``), and one function every backward (``_gradients``). The backward op
writes into the same views of one packed gradient. The classes only name the packed arguments. The ops check their
arguments (csrc/torch/args.c). This file does only the work that must happen before an op is called.
"""

import torch
from torch.autograd import forward_ad

from flash_attn._ops import (
    check_layout,
    check_tensor,
    empty_like,
    flash_attn_2_cuda,
    forget_own_kernels,
    is_freed,
    refuse_tangents,
    register_once,
    round_multiple,
    warn_of_gradients,
    without_second_derivative,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "round_multiple",
]

USE_TRITON_ROCM = False
flash_attn_gpu = flash_attn_2_cuda

_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward
_wrapped_flash_attn_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward
_fwd_kvcache = torch.ops.flash_attn.fwd_kvcache.default


_direct = flash_attn_2_cuda


# ---- arguments ---------------------------------------------------------------------------------------------------


def maybe_contiguous(x):
    """Returns ``x`` if its last dimension is contiguous or ``x`` is no tensor, otherwise a contiguous copy.

    A tensor of a freed storage is returned, too. The op names it.
    """
    if isinstance(x, torch.Tensor) and x.dim() > 0 and x.stride(-1) != 1 and not is_freed(x):
        return x.contiguous()
    return x


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """Keys that share one row maximum in ``S_dmask``: all of them, on every device."""
    return 1 << 30


def _as_int(x, name):
    """Returns a Python integer. A tensor of one element gives its value, and a CUDA tensor waits for the device."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.numel() != 1:
        raise RuntimeError(f"{name} must be one integer; it is a tensor of shape {tuple(x.shape)}")
    return x.item()


def _is_pair(x):
    """Does ``x`` already consist of two Python integers?"""
    return type(x) in (tuple, list) and len(x) == 2 and type(x[0]) is type(x[1]) is int


def _as_window(window_size):
    """Returns ``(left, right)`` as Python integers, from a tuple, a list or a tensor of two."""
    if _is_pair(window_size):
        return window_size
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be (left, right), two integers; it is {window_size!r}") from None
    return _as_int(left, "window_size"), _as_int(right, "window_size")


def _as_scale(softmax_scale, q):
    """Returns the given scale, or 1 / sqrt(d). The op reports errors of q."""
    if softmax_scale is not None:
        return softmax_scale
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def _unfold(mask):
    """Flattens ``(softmax_scale, causal, (left, right), softcap)`` for the ops."""
    softmax_scale, causal, (left, right), softcap = mask
    return softmax_scale, causal, left, right, softcap


def _split(tensors):
    """Returns q, k, v as views of (q, k, v), (q, kv) or (qkv,). Nothing is copied. A packed None gives Nones."""
    if len(tensors) == 3:
        return tensors
    *given, packed = tensors
    parts = 3 - len(given)
    return (*given, *(None if packed is None else packed.select(-3, i) for i in range(parts)))


def _pack(tensors, num):
    """Does the inverse of ``_split`` and returns q, k, v as num tensors."""
    if num == 3:
        return tensors
    given, parts = tensors[: num - 1], tensors[num - 1 :]
    return [*given, None if parts[0] is None else torch.stack(parts, -3)]


def _check_given(tensors, varlen):
    """Checks that the tensors can be split into q, k and v. The op checks everything else."""
    if not all(map(torch.is_tensor, tensors)):
        names = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}[len(tensors)]
        for name, x in zip(names, tensors):
            check_tensor(name, x)
    if len(tensors) == 3:
        return
    rows = ("total",) if varlen else ("batch_size", "seqlen")
    if len(tensors) == 1:
        check_layout("qkv", tensors[0], *rows, 3, "num_heads", "head_size")
    else:
        check_layout("kv", tensors[1], *rows, 2, "num_heads_k", "head_size")


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


def _call(op, *arguments):
    """Returns ``op(*arguments)``. The dispatcher makes exceptions RuntimeErrors; here they are restored."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    if forward_ad._current_level >= 0:
        refuse_tangents(arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        exception = _direct.mended_exception(error)
        if exception is error:
            raise
        raise exception from None


# ---- one forward and one backward ----------------------------------------------------------------------------------


def _attend_directly(tensors, lengths, dropout_p, mask, alibi_slopes, block_table):
    """Returns ``(out, softmax_lse)`` of a direct function, or None."""
    if dropout_p or torch.compiler.is_compiling():
        return None
    if lengths:
        return _direct.direct_varlen_forward(*_split(tensors), *lengths, *mask, alibi_slopes, block_table)
    return _direct.direct_forward(*_split(tensors), *mask, alibi_slopes)


def _attend(
    ctx, tensors, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
    deterministic, return_softmax, is_grad_enabled, block_table=None,
):  # fmt: skip
    """Computes the forward of every class below.

    ``tensors`` is (q, k, v), (q, kv) or (qkv,). ``lengths`` is () or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k).
    """
    mask = softmax_scale, causal, window_size, softcap
    is_split = len(tensors) == 3  # packed tensors are split after _check_given
    direct = _attend_directly(tensors, lengths, dropout_p, mask, alibi_slopes, block_table) if is_split else None
    if direct is None:
        _check_given(tensors, len(lengths) > 0)
        tensors = [maybe_contiguous(x) for x in tensors]
        if lengths:
            lengths = (*lengths[:2], _as_int(lengths[2], "max_seqlen"), _as_int(lengths[3], "max_seqlen"))
        mask = _as_scale(softmax_scale, tensors[0]), causal, _as_window(window_size), softcap
        direct = _attend_directly(tensors, lengths, dropout_p, mask, alibi_slopes, block_table)
    if direct is None:
        forward = _wrapped_flash_attn_varlen_forward if lengths else _wrapped_flash_attn_forward
        paged = () if block_table is None else (block_table,)
        out, softmax_lse, s_dmask, rng_state = _call(
            forward,
            *_split(tensors),
            *lengths,
            dropout_p,
            *_unfold(mask),
            alibi_slopes,
            return_softmax and dropout_p > 0,
            *paged,
        )
    else:
        out, softmax_lse = direct
        s_dmask, rng_state = out.new_empty((0,)) if return_softmax else None, None
    if is_grad_enabled and ctx is not None and True in ctx.needs_input_grad:
        _save(ctx, tensors, out, softmax_lse, rng_state, alibi_slopes, lengths, dropout_p, mask, deterministic)
        ctx.paged = block_table is not None
    return (out, softmax_lse, s_dmask) if return_softmax else out


def _save(ctx, tensors, out, softmax_lse, rng_state, alibi_slopes, lengths, dropout_p, mask, deterministic):
    """Saves the tensors and options for ``_gradients``. Their memory is linear in the lengths. No scores are saved.

    A checkpoint repeats the forward. The repetition may be watched although the first forward was not, and must save
    the same tensors.
    """
    rng_state = rng_state if dropout_p else None
    ctx.save_for_backward(*tensors, out, softmax_lse, rng_state, alibi_slopes, *lengths[:2])
    ctx.options = lengths[2:], dropout_p, mask, deterministic or torch.are_deterministic_algorithms_enabled()


def _backward(varlen, *arguments):
    """Runs the backward op on these arguments, without torch's dispatcher if possible."""
    softmax_d = None
    if not torch.compiler.is_compiling():
        direct = _direct.direct_flash_attn_varlen_backward if varlen else _direct.direct_flash_attn_backward
        softmax_d = direct(*arguments)
    if softmax_d is None:
        op = _wrapped_flash_attn_varlen_backward if varlen else _wrapped_flash_attn_backward
        softmax_d = _call(op, *arguments)
    return softmax_d


@torch.no_grad()
def _first_gradients(ctx, saved, dout):
    """Returns the gradients of the given tensors, packed like the tensors. A tensor without gradient gets None.

    NOTE: compiled code writes dq, dk and dv to separate tensors and packs them afterwards. Inductor with dynamic shapes
    loses the offset of a view that an op writes into (pytorch/pytorch#198068).
    """
    max_seqlens, dropout_p, mask, deterministic = ctx.options
    num_lengths = len(max_seqlens)
    lengths = (*saved[len(saved) - num_lengths :], *max_seqlens)
    *tensors, out, softmax_lse, rng_state, alibi_slopes = saved[: len(saved) - num_lengths]
    mask = _as_scale(mask[0], tensors[0]), *mask[1:]
    wanted = [x if needed else None for x, needed in zip(tensors, ctx.needs_input_grad)]
    compiling = torch.compiler.is_compiling()
    grads = [None if x is None else empty_like(x) for x in (_split(wanted) if compiling else wanted)]
    packed = num_lengths > 0  # NOTE: torch 2.11 does not compile bool() of a tuple of tensors
    zero_tensors = (tensors[0].is_cpu,) if packed else ()  # gradients of rows that belong to no sequence
    _backward(
        packed, maybe_contiguous(dout), *_split(tensors), out, softmax_lse, *_split(grads), *lengths, dropout_p,
        *_unfold(mask), alibi_slopes, deterministic, rng_state, *zero_tensors,
    )  # fmt: skip
    return _pack(grads, len(tensors)) if compiling else grads


def _gradients(ctx, dout):
    saved = ctx.saved_tensors  # read once, because a checkpoint computes them
    return without_second_derivative(_first_gradients(ctx, saved, dout), dout, *saved)


class _Attention(torch.autograd.Function):
    @staticmethod
    def backward(ctx, dout, *_):
        """Only ``out`` carries a gradient. The gradients of softmax_lse and S_dmask are dropped."""
        if ctx.paged:
            raise RuntimeError("flash_attn_varlen_func has no backward with block_table: paged keys are for inference")
        grads = _gradients(ctx, dout)
        return (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))


# In every ``apply`` these arguments follow the tensors and lengths: dropout_p, softmax_scale, causal, window_size,
# softcap, alibi_slopes, deterministic, return_softmax, (FlashAttnVarlenFunc: block_table,) is_grad_enabled.


class FlashAttnFunc(_Attention):
    @staticmethod
    def forward(ctx, q, k, v, *options):
        return _attend(ctx, (q, k, v), (), *options)


class FlashAttnKVPackedFunc(_Attention):
    @staticmethod
    def forward(ctx, q, kv, *options):
        return _attend(ctx, (q, kv), (), *options)


class FlashAttnQKVPackedFunc(_Attention):
    @staticmethod
    def forward(ctx, qkv, *options):
        return _attend(ctx, (qkv,), (), *options)


class FlashAttnVarlenFunc(_Attention):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options):
        *options, block_table, is_grad_enabled = options
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return _attend(ctx, (q, k, v), lengths, *options, is_grad_enabled, block_table)


class FlashAttnVarlenKVPackedFunc(_Attention):
    @staticmethod
    def forward(ctx, q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options):
        return _attend(ctx, (q, kv), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *options)


class FlashAttnVarlenQKVPackedFunc(_Attention):
    @staticmethod
    def forward(ctx, qkv, cu_seqlens, max_seqlen, *options):
        return _attend(ctx, (qkv,), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), *options)


class _Attended(_Attention):
    """The autograd node of a finished forward. It has only necessary arguments, because each argument costs time."""

    @staticmethod
    def forward(ctx, q, k, v, done):
        (out, softmax_lse), alibi_slopes, lengths, mask, deterministic, paged = done
        _save(ctx, (q, k, v), out, softmax_lse, None, alibi_slopes, lengths, 0.0, mask, deterministic)
        ctx.paged = paged
        return out


# This is ``_Attended.apply`` for plain tensors in eager mode. It skips the layer that looks for functorch.
_record = super(torch.autograd.Function, _Attended).apply


def _any_requires_grad(arguments):
    for x in arguments:  # a generator in any() takes three times as long
        if isinstance(x, torch.Tensor) and x.requires_grad:
            return True
    return False


def _apply(function, *arguments):
    """Returns ``function.apply(*arguments)``. In eager mode without gradients, the forward runs without autograd.

    The last argument is is_grad_enabled. The tensors that may need a gradient come first.
    """
    if (
        (arguments[-1] and _any_requires_grad(arguments[:3]))
        or torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
    ):
        return function.apply(*arguments)
    return function.forward(None, *arguments)


def _attend_extended(*arguments):
    """Computes a call with options that upstream does not have."""
    from flash_attn._extended import attend  # imports flex_attention of torch, which a plain call does not need

    return attend(*arguments)


# ---- public functions ----------------------------------------------------------------------------------------------


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
    *, attn_bias=None, attn_mask=None, sinks=None, return_lse=False, return_max_logits=False,
):  # fmt: skip
    """Exact attention ``softmax(softmax_scale * q @ k.T + mask) @ v`` without storing the scores.

    The causal mask is aligned to the bottom right corner; window_size (1, 0) keeps that corner's diagonal and the key
    before it. len_q = 2, len_kv = 4:

        causal     x x x .      window     . x x .
                   x x x x      (1, 0)     . . x x

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

        These options, by keyword, are not upstream's. ``torch.compile`` keeps them in its graph.
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
        RuntimeError: the message names the argument that does not fit, what came and what is allowed. So do attn_bias,
            attn_mask, return_max_logits, and return_lse with gradients, if there is dropout.
    Gradients for q, k, v, attn_bias and sinks, through out, and through the lse of return_lse.
    Source: FlashAttention-2, arXiv 2307.08691. Specification: csrc/cpu/reference.c.
    """
    if not attn_bias is attn_mask is sinks is None or return_lse or return_max_logits:
        return _attend_extended(
            q, k, v, (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    if not (dropout_p or return_attn_probs or torch.compiler.is_compiling()):
        out = _direct.direct_attention(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)
        if type(out) is tuple:
            mask = softmax_scale, causal, window_size, softcap
            return _record(q, k, v, (out, alibi_slopes, (), mask, deterministic, False))
        if out is not None:
            return out
    return _apply(
        FlashAttnFunc,
        *_distinct(q, k, v), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
    *, attn_bias=None, attn_mask=None, sinks=None, return_lse=False, return_max_logits=False,
):  # fmt: skip
    """``flash_attn_func`` with keys and values in one tensor: same results, and the gradient of kv comes in one piece.

    Args:
        q: ``[b, len_q, h, d]``.
        kv: ``[b, len_kv, 2, h_kv, d]``: keys, then values.
        The others: see ``flash_attn_func``.
    Returns, Raises, Source: see ``flash_attn_func``.
    Gradients for q and kv.
    """
    if not attn_bias is attn_mask is sinks is None or return_lse or return_max_logits:
        _check_given((q, kv), False)
        return _attend_extended(
            q, *kv.unbind(-3), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _apply(
        FlashAttnKVPackedFunc,
        q, kv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
    *, attn_bias=None, attn_mask=None, sinks=None, return_lse=False, return_max_logits=False,
):  # fmt: skip
    """``flash_attn_func`` with queries, keys and values in one tensor, whose gradient comes in one piece too.

    Args:
        qkv: ``[b, len, 3, h, d]``: queries, keys, values; as many key heads as query heads.
        The others: see ``flash_attn_func``.
    Returns, Raises, Source: see ``flash_attn_func``; out is ``[b, len, h, d]``.
    Gradients for qkv.
    """
    if not attn_bias is attn_mask is sinks is None or return_lse or return_max_logits:
        _check_given((qkv,), False)
        return _attend_extended(
            *qkv.unbind(-3), (), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _apply(
        FlashAttnQKVPackedFunc,
        qkv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
    *, attn_bias=None, attn_mask=None, sinks=None, return_lse=False, return_max_logits=False,
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
        q: ``[total_q, h, d]``.
        k, v: ``[total_kv, h_kv, d]``, or pages ``[num_pages, page_size, h_kv, d]`` with block_table.
        cu_seqlens_q, cu_seqlens_k: int32 ``[b + 1]``: 0, then the running sums of the lengths. A length may be 0.
        max_seqlen_q, max_seqlen_k: at least the longest length; an int, or a tensor of one element.
        block_table: int32 ``[b, max_pages]``: the pages of each sequence, in order. Forward only.
        attn_bias, attn_mask: ``[b, h, max_seqlen_q, max_seqlen_k]``, or 1 in place of a size. Row i and key j count
            from 0 in each sequence.
        The others: see ``flash_attn_func``, with the lengths of each sequence in place of len_q and len_kv.
    Returns:
        As ``flash_attn_func``: out ``[total_q, h, d]``, softmax_lse and lse ``[h, total_q]``, S_dmask with max_seqlen
        in place of the lengths.
    Raises:
        RuntimeError: see ``flash_attn_func``; on the CPU also for lengths and pages that do not fit the tensors.
    Gradients for q, k, v; none with block_table.
    Source: FlashAttention-2, arXiv 2307.08691. Specification: csrc/cpu/reference.c.
    """
    if not attn_bias is attn_mask is sinks is None or return_lse or return_max_logits:
        return _attend_extended(
            q, k, v, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p,
            softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, block_table, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    if not (dropout_p or return_attn_probs or torch.compiler.is_compiling()):
        out = _direct.direct_varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size,
            softcap, alibi_slopes, block_table,
        )  # fmt: skip
        if type(out) is tuple:
            mask = softmax_scale, causal, window_size, softcap
            lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            return _record(q, k, v, (out, alibi_slopes, lengths, mask, deterministic, block_table is not None))
        if out is not None:
            return out
    return _apply(
        FlashAttnVarlenFunc,
        *_distinct(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    *, attn_bias=None, attn_mask=None, sinks=None, return_lse=False, return_max_logits=False,
):  # fmt: skip
    """``flash_attn_varlen_func`` with keys and values in one tensor, whose gradient comes in one piece too.

    Args:
        q: ``[total_q, h, d]``.
        kv: ``[total_kv, 2, h_kv, d]``: keys, then values.
        The others: see ``flash_attn_varlen_func``.
    Returns, Raises, Source: see ``flash_attn_varlen_func``.
    Gradients for q and kv.
    """
    if not attn_bias is attn_mask is sinks is None or return_lse or return_max_logits:
        _check_given((q, kv), True)
        return _attend_extended(
            q, *kv.unbind(-3), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p,
            softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _apply(
        FlashAttnVarlenKVPackedFunc,
        *_distinct(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
    *, attn_bias=None, attn_mask=None, sinks=None, return_lse=False, return_max_logits=False,
):  # fmt: skip
    """``flash_attn_varlen_func`` with queries, keys and values in one tensor, whose gradient comes in one piece too.

    Args:
        qkv: ``[total, 3, h, d]``: queries, keys, values; as many key heads as query heads.
        cu_seqlens: int32 ``[b + 1]``: 0, then the running sums of the lengths.
        max_seqlen: at least the longest length; an int, or a tensor of one element.
        The others: see ``flash_attn_varlen_func``.
    Returns, Raises, Source: see ``flash_attn_varlen_func``; out is ``[total, h, d]``.
    Gradients for qkv.
    """
    if not attn_bias is attn_mask is sinks is None or return_lse or return_max_logits:
        _check_given((qkv,), True)
        return _attend_extended(
            *qkv.unbind(-3), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), dropout_p,
            softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, None, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    return _apply(
        FlashAttnVarlenQKVPackedFunc,
        qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, torch.is_grad_enabled(),
    )  # fmt: skip


def _check_cache(name, cache):
    """Checks a cache. A cache is written in place, so it is never copied to suit the op."""
    check_tensor(name, cache)
    if cache.dim() > 0 and cache.stride(-1) != 1 and cache.shape[-1] > 1:
        raise AssertionError(f"{name} must have contiguous last dimension; it has stride {cache.stride(-1)}")


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    *, sinks=None,
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
        q: ``[b, len_q, h, d]`` in fp16, bf16, fp32 or (CPU) fp64.
        k_cache, v_cache: ``[b_cache, capacity, h_kv, d]``, or pages ``[num_pages, page_size, h_kv, d]`` with
            block_table. Last dimension contiguous.
        k, v: ``[b, len_new, h_kv, d]``: keys and values to append; need cache_seqlens.
        rotary_cos, rotary_sin: ``[at least capacity, rotary_dim / 2]`` in the dtype of q. They rotate the first
            rotary_dim dimensions of k and q. Row t of k rotates by position ``cache_seqlens + t``. With causal or a
            window, row t of q does so too. Otherwise every row of q rotates by ``cache_seqlens``. The tensor q itself
            is not changed.
        cache_seqlens: rows in use before the append: int32 ``[b]``, or one int for all; None: the whole cache.
        cache_batch_idx: int32 ``[b]``: the cache row (of block_table, if paged) of each batch entry; None: the same.
            Two entries may share a row or pages. If both append to one place, each number there is that of either
            entry.
        cache_leftpad: int32 ``[b]``: first row in use; None: 0.
        block_table: int32 ``[b, max_pages]``: the pages of each sequence. Entries past the pages needed are not read.
        rotary_interleaved: rotate pairs (0, 1), (2, 3), ..; otherwise (0, r / 2), (1, r / 2 + 1), ..
        num_splits: number of parts into which the keys of one row are split; 0: the plan decides.
        return_softmax_lse: return ``(out, softmax_lse)``.
        sinks: ``[h]``: see ``flash_attn_func``. softmax_lse has their scores in its sum, too.
        The others: see ``flash_attn_func``, with the keys of each sequence in place of len_kv.
    Returns:
        ``out`` ``[b, len_q, h, d]`` in the dtype and layout of q, and on request softmax_lse, fp32 ``[b, h, len_q]``.
    Raises:
        AssertionError: the last dimension of a cache is not contiguous.
        RuntimeError: see ``flash_attn_func``; also if the append does not fit, and then nothing is written.
    There are no gradients. If an input requires a gradient, one warning says so.
    Source: FlashAttention-2, arXiv 2307.08691; rotary embedding, arXiv 2104.09864. Specification: csrc/cpu/reference.c.
    """
    if sinks is not None:
        from flash_attn._extended import with_sinks

        out, softmax_lse = with_sinks(
            sinks, q, flash_attn_with_kvcache, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens,
            cache_batch_idx, cache_leftpad, block_table, softmax_scale, causal, window_size, softcap,
            rotary_interleaved, alibi_slopes, num_splits, True,
        )  # fmt: skip
        return (out, softmax_lse) if return_softmax_lse else out
    if not torch.compiler.is_compiling():
        attend = _direct.direct_kvcache_forward if return_softmax_lse else _direct.direct_kvcache_attention
        results = attend(
            q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad,
            block_table, alibi_slopes, softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits,
        )  # fmt: skip
        if results is not None:
            return results
    warn_of_gradients(q, k_cache, v_cache, k, v)
    check_tensor("q", q)
    _check_cache("k_cache", k_cache)
    _check_cache("v_cache", v_cache)
    q = maybe_contiguous(q)
    if isinstance(cache_seqlens, int) and abs(cache_seqlens) >= 2**31:
        raise RuntimeError(f"cache_seqlens must be at most the keys that there are; it is {cache_seqlens}")
    if isinstance(cache_seqlens, (int, torch.SymInt)):
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    elif cache_seqlens is not None:
        check_tensor("cache_seqlens", cache_seqlens)
    new_and_indices = (k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table)
    out = empty_like(q)
    softmax_lse = _call(
        _fwd_kvcache, q, k_cache, v_cache, *[x if x is None else maybe_contiguous(x) for x in new_and_indices],
        alibi_slopes, out, softmax_scale, causal, *_as_window(window_size), softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    return (out, softmax_lse) if return_softmax_lse else out


# ---- private functions that clients call ---------------------------------------------------------------------------


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    """Runs the forward op on tensors of any strides and returns ``(out, softmax_lse, S_dmask, rng_state)``.

    The arguments are those of ``flash_attn_func``. softmax_scale must be a number. return_softmax returns S_dmask and
    needs dropout. rng_state, int64 ``[2]``, makes the backward draw the same dropout mask. It is zero without dropout.
    """
    if not torch.compiler.is_compiling():
        results = _direct.direct_flash_attn_forward(
            q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax,
        )  # fmt: skip
        if results is not None:
            return results
    return _call(
        _wrapped_flash_attn_forward, *(maybe_contiguous(x) for x in (q, k, v)), dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    """Runs the varlen forward op on tensors of any strides and returns ``(out, softmax_lse, S_dmask, rng_state)``.

    The arguments are those of ``flash_attn_varlen_func`` and ``_flash_attn_forward``, and:
        leftpad_k: int32 ``[b]``: leading keys of each sequence to skip.
        seqused_k: int32 ``[b]``: keys of each sequence to use; masks are aligned to these keys.
        zero_tensors: fill rows that belong to no sequence, out with 0 and softmax_lse with -inf.
        num_splits: 0: the plan decides; 1: results do not depend on the batch; more: refused with block_table.
    """
    if not torch.compiler.is_compiling():
        results = _direct.direct_flash_attn_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k,
            seqused_k, zero_tensors, num_splits,
        )  # fmt: skip
        if results is not None:
            return results
    return _call(
        _wrapped_flash_attn_varlen_forward, *(maybe_contiguous(x) for x in (q, k, v)), cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k, zero_tensors, num_splits,
    )  # fmt: skip


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Runs the backward op, writes dq, dk, dv in place, and returns ``softmax_d``, the row sums of ``dout * out``.

    dq, dk, dv: views of the shapes and dtype of q, k, v with a contiguous last dimension. A None is not computed.
    softmax_d: fp32 ``[b, h, len_q rounded up to 128]``. rng_state comes from the forward, like all other arguments.
    """
    return _backward(
        False, *(maybe_contiguous(x) for x in (dout, q, k, v, out)), softmax_lse, dq, dk, dv, dropout_p, softmax_scale,
        causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """Runs the varlen backward op, writes dq, dk, dv in place, returns ``softmax_d``, the row sums of ``dout * out``.

    The arguments are those of ``_flash_attn_backward``. softmax_d is fp32 ``[h, total_q + 128 b]``. Rows that belong to
    no sequence are not written, unless zero_tensors fills the gradients with 0 first.
    """
    return _backward(
        True, *(maybe_contiguous(x) for x in (dout, q, k, v, out)), softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic, rng_state, zero_tensors,
    )  # fmt: skip


# ---- autograd of the ops themselves --------------------------------------------------------------------------------
# A direct call of an op has gradients too.


def _fold(mask):
    """Does the inverse of ``_unfold``."""
    softmax_scale, causal, left, right, softcap = mask
    return softmax_scale, causal, (left, right), softcap


def _save_dense(ctx, inputs, output):
    q, k, v, dropout_p, *mask, alibi_slopes, _ = inputs
    out, softmax_lse, _, rng_state = output
    _save(ctx, (q, k, v), out, softmax_lse, rng_state, alibi_slopes, (), dropout_p, _fold(mask), False)


def _save_varlen(ctx, inputs, output):
    q, k, v, lengths, dropout_p, mask = *inputs[:3], inputs[3:7], inputs[7], inputs[8:13]
    alibi_slopes, _, block_table, leftpad_k, seqused_k, *_ = inputs[13:]
    if any(x is not None for x in (block_table, leftpad_k, seqused_k)):
        raise RuntimeError("_flash_attn_varlen_forward has no gradients with block_table, leftpad_k or seqused_k")
    out, softmax_lse, _, rng_state = output
    _save(ctx, (q, k, v), out, softmax_lse, rng_state, alibi_slopes, lengths, dropout_p, _fold(mask), False)


def _differentiate(op, save):
    num_arguments = len(op.default._schema.arguments)

    def backward(ctx, dout, *_):
        return (*_gradients(ctx, dout), *[None] * (num_arguments - 3))

    torch.library.register_autograd(op.default, backward, setup_context=save)


register_once("formula of the dense op", _differentiate, _wrapped_flash_attn_forward, _save_dense)
register_once("formula of the packed op", _differentiate, _wrapped_flash_attn_varlen_forward, _save_varlen)
register_once("all", forget_own_kernels)
