"""One forward and one backward of all attention functions that have gradients, and their place in autograd.

A packed tensor holds q, k and v as views of one memory. Dimension -3 counts the parts, in dense and in varlen tensors.
So one function computes every forward (``_forward``), and one function every backward (``_gradients_of``). The backward
op writes into the same views of one packed gradient. The ops check their arguments (csrc/torch/args.c). This file does
only the work that must happen before an op is called.

    _Attended    the node of a finished forward: plain eager calls. torch needs 100 us for each call of the others
    _Attention   forward and node, for torch.compile
    _Transformed the same, with rules for the transforms of torch.func
    _Gradients   the backward as a function of its own, where someone asks for its derivative or maps over it

Their rules for ``torch.vmap`` are in _vmap.py.
"""

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flash_attn import _vmap
from flash_attn._arguments import (
    as_int,
    as_number,
    as_scale,
    as_window,
    check_given,
    distinct,
    fold,
    maybe_contiguous,
    pack,
    split,
    unfold,
)
from flash_attn._dispatch import (
    call,
    call_op,
    check_not_traced,
    directly,
    is_exporting,
    transforms_are_active,
    warn_of_order,
)
from flash_attn._ops import (
    NO_JVP,
    NO_SECOND_DERIVATIVE,
    empty_like,
    flash_attn_2_cuda,
    register_gradient,
    register_once,
)

_dense, _packed = torch.ops.flash_attn._flash_attn_forward, torch.ops.flash_attn._flash_attn_varlen_forward

# ---- forward -------------------------------------------------------------------------------------------------------


def _forward(tensors, lengths, dropout_p, mask, alibi_slopes, return_softmax, block_table):
    """Returns ``(out, softmax_lse, S_dmask, rng_state)``.

    ``tensors`` is (q, k, v), (q, kv) or (qkv,). ``lengths`` is () or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k). ``mask`` is (softmax_scale, causal, window_size, softcap).
    """
    parts = split(tensors)
    options = dropout_p, *mask, alibi_slopes, False, False
    if lengths:
        results = directly(flash_attn_2_cuda.direct_varlen_forward, *parts, *lengths, *options, block_table)
    else:
        results = directly(flash_attn_2_cuda.direct_forward, *parts, *options)
    if results is not None:  # there is no dropout
        return *results, results[0].new_empty((0,)) if return_softmax else None, None
    paged = () if block_table is None else (block_table,)
    op = _packed if lengths else _dense
    want_s_dmask = return_softmax and dropout_p > 0
    arguments = *parts, *lengths, dropout_p, *unfold(mask), alibi_slopes, want_s_dmask, *paged
    if is_compiling():
        return call_op(op, *arguments)
    with torch.no_grad():  # the op has a node of its own
        return call_op(op, *arguments)


# ---- backward ------------------------------------------------------------------------------------------------------


def save(
    ctx, tensors, out, softmax_lse, rng_state, alibi_slopes, lengths, dropout_p, mask, deterministic, is_paged=False
):
    """Saves the tensors and options for ``gradients``. Their memory is linear in the lengths. No scores are saved.

    A checkpoint repeats the forward. The repetition may be watched although the first forward was not, and must save
    the same tensors.
    """
    rng_state = rng_state if dropout_p else None
    ctx.save_for_backward(*tensors, out, softmax_lse, rng_state, alibi_slopes, *lengths[:2])
    ctx.options = lengths[2:], dropout_p, mask, deterministic or torch.are_deterministic_algorithms_enabled()
    ctx.is_paged = is_paged


def backward(varlen, *arguments):
    """Runs the backward op on these arguments, without torch's dispatcher if possible."""
    if varlen:
        function, op = flash_attn_2_cuda.direct_flash_attn_varlen_backward, _packed_backward
    else:
        function, op = flash_attn_2_cuda.direct_flash_attn_backward, _dense_backward
    return call(function, op, 6, *arguments)


_dense_backward = torch.ops.flash_attn._flash_attn_backward
_packed_backward = torch.ops.flash_attn._flash_attn_varlen_backward


def _gradients_of(options, needed, dout, saved):
    """Returns the gradients of the given tensors, packed like the tensors. A tensor without gradient gets None.

    NOTE: compiled code writes dq, dk and dv to separate tensors and packs them afterwards. Inductor with dynamic shapes
    loses the offset of a view that an op writes into (pytorch/pytorch#198068).
    """
    max_seqlens, dropout_p, mask, deterministic = options
    num_lengths = len(max_seqlens)
    lengths = (*saved[len(saved) - num_lengths :], *max_seqlens)
    *tensors, out, softmax_lse, rng_state, alibi_slopes = saved[: len(saved) - num_lengths]
    mask = as_scale(mask[0], tensors[0]), *mask[1:]
    wanted = [x if is_needed else None for x, is_needed in zip(tensors, needed)]
    compiling = is_compiling()
    grads = [None if x is None else empty_like(x) for x in (split(wanted) if compiling else wanted)]
    packed = num_lengths > 0  # NOTE: torch 2.11 does not compile bool() of a tuple of tensors
    zero_tensors = (tensors[0].is_cpu,) if packed else ()  # gradients of rows that belong to no sequence
    backward(
        packed, maybe_contiguous(dout), *split(tensors), out, softmax_lse, *split(grads), *lengths, dropout_p,
        *unfold(mask), alibi_slopes, deterministic, rng_state, *zero_tensors,
    )  # fmt: skip
    return pack(grads, len(tensors)) if compiling else grads


class _Gradients(torch.autograd.Function):
    """The gradients, as a function of everything that they depend on."""

    @staticmethod
    def forward(options, needed, dout, *saved):
        return tuple(_gradients_of(options, needed, dout, saved))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info, in_dims, options, needed, dout, *saved):
        return _vmap.gradients(_Gradients.apply, info, in_dims, options, needed, dout, saved)


def gradients(ctx, dout):
    """Computes the backward of every node that ``save`` has prepared.

    If gradients are recorded, the gradients have a node too, whose derivative raises. torch's ``once_differentiable``
    is not enough for this. It treats the tensors as constants if dout requires no grad.
    """
    if ctx.is_paged:
        raise RuntimeError("flash_attn_varlen_func has no backward with block_table: paged keys are for inference")
    saved = ctx.saved_tensors  # read once, because a checkpoint computes them
    needed = ctx.needs_input_grad
    if dout is None:  # only softmax_lse or S_dmask were used, which carry no gradient
        dout = torch.zeros_like(saved[-4 - len(ctx.options[0])])
    if is_compiling():
        with torch.no_grad():
            return _gradients_of(ctx.options, needed, dout, saved)
    if _vmap.is_batch_of_gradients(dout):
        return _vmap.batch_of_gradients(_Gradients.apply, ctx.options, tuple(needed), dout, saved)
    if torch.is_grad_enabled() or transforms_are_active():
        return _Gradients.apply(ctx.options, tuple(needed), dout, *saved)
    return _gradients_of(ctx.options, needed, dout, saved)


# ---- autograd ------------------------------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    @staticmethod
    def backward(ctx, dout, *_):
        """Only ``out`` carries a gradient. The gradients of softmax_lse and S_dmask are dropped."""
        grads = gradients(ctx, dout)
        return (*grads, *[None] * (len(ctx.needs_input_grad) - len(grads)))


def _lengths_of(*lengths):
    return () if lengths[0] is None else lengths


class _Attention(_Node):
    """q is qkv if k is None, and k is kv if v is None. Dense tensors have no lengths."""

    @staticmethod
    def forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table, max_seqlen_q, max_seqlen_k, dropout_p, mask,
        deterministic, return_softmax,
    ):  # fmt: skip
        lengths = _lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        tensors = [x for x in (q, k, v) if x is not None]
        return _forward(tensors, lengths, dropout_p, mask, alibi_slopes, return_softmax, block_table)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table, *max_seqlens, dropout_p, mask, _, _ = inputs
        out, softmax_lse, _, rng_state = output
        lengths = _lengths_of(cu_seqlens_q, cu_seqlens_k, *max_seqlens)
        tensors = [x for x in (q, k, v) if x is not None]
        is_paged = block_table is not None
        save(ctx, tensors, out, softmax_lse, rng_state, alibi_slopes, lengths, dropout_p, mask, inputs[-2], is_paged)
        ctx.set_materialize_grads(False)


class _Transformed(_Attention):
    """``_Attention`` with rules for the transforms of torch.func. Dynamo does not trace a class that has such rules."""

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _vmap.attention(_Transformed.apply, info, in_dims, arguments)


class _Attended(_Node):
    """The autograd node of a finished forward. It has only necessary arguments, because each argument costs time."""

    @staticmethod
    def forward(ctx, q, k, v, done):
        (out, softmax_lse), alibi_slopes, lengths, mask, deterministic, is_paged = done
        save(ctx, (q, k, v), out, softmax_lse, None, alibi_slopes, lengths, 0.0, mask, deterministic, is_paged)
        return out


class _AttendedWithAll(_Node):
    """``_Attended`` with dropout, all results, and packed tensors: k and v may be None, as in ``_Attention``."""

    @staticmethod
    def forward(ctx, q, k, v, done):
        results, dropout_p, return_softmax, alibi_slopes, lengths, mask, *rest = done
        out, softmax_lse, _, rng_state = results
        tensors = [x for x in (q, k, v) if x is not None]
        save(ctx, tensors, out, softmax_lse, rng_state, alibi_slopes, lengths, dropout_p, mask, *rest)
        ctx.set_materialize_grads(False)
        return results[:3] if return_softmax else out


# These are ``apply`` for plain tensors in eager mode, without the layer that looks for functorch.
record = super(torch.autograd.Function, _Attended).apply
_record_all = super(torch.autograd.Function, _AttendedWithAll).apply


def _any_requires_grad(tensors):
    for x in tensors:  # a generator in any() takes three times as long
        if x.requires_grad:
            return True
    return False


def attend(
    tensors, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_softmax, block_table=None,
):  # fmt: skip
    """Computes every attention function that the short way has not served. The arguments: see ``_forward``."""
    check_given(tensors, len(lengths) > 0)
    tensors = [maybe_contiguous(x) for x in tensors]
    if lengths:
        lengths = (*lengths[:2], as_int(lengths[2], "max_seqlen_q"), as_int(lengths[3], "max_seqlen_k"))
    causal, softcap = as_number(causal, "causal"), as_number(softcap, "softcap")
    dropout_p = as_number(dropout_p, "dropout_p")
    mask = as_scale(softmax_scale, tensors[0]), causal, as_window(window_size), softcap
    has_transforms = transforms_are_active()
    if is_exporting() and not has_transforms:
        # torch.export drops the backward of an autograd.Function. The op has gradients of its own.
        if deterministic:
            warn_of_order()
        results = _forward(tensors, lengths, dropout_p, mask, alibi_slopes, return_softmax, block_table)
        return results[:3] if return_softmax else results[0]
    if has_transforms:
        check_not_traced()
        alibi_slopes = maybe_contiguous(alibi_slopes)  # where a vmap has its dimension is unseen
        if dropout_p:
            _vmap.check_randomness(tensors)
    if is_compiling() or has_transforms or forward_ad._current_level >= 0:
        q, k, v = (*tensors, None, None)[:3]
        cu_seqlens_q, cu_seqlens_k, *max_seqlens = lengths or (None,) * 4
        function = _Attention if is_compiling() else _Transformed
        out, softmax_lse, s_dmask, _ = function.apply(
            *distinct(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table), *max_seqlens, dropout_p, mask,
            deterministic, return_softmax,
        )  # fmt: skip
        return (out, softmax_lse, s_dmask) if return_softmax else out
    results = _forward(tensors, lengths, dropout_p, mask, alibi_slopes, return_softmax, block_table)
    if torch.is_grad_enabled() and _any_requires_grad(tensors):
        is_paged = block_table is not None
        done = results, dropout_p, return_softmax, alibi_slopes, lengths, mask, deterministic, is_paged
        return _record_all(*(*tensors, None, None)[:3], done)
    return results[:3] if return_softmax else results[0]


# ---- autograd of the ops themselves --------------------------------------------------------------------------------
# A direct call of an op has gradients too.


def _save_dense(ctx, inputs, output):
    q, k, v, dropout_p, *mask, alibi_slopes, _ = inputs
    out, softmax_lse, _, rng_state = output
    save(ctx, (q, k, v), out, softmax_lse, rng_state, alibi_slopes, (), dropout_p, fold(mask), False)


def _save_varlen(ctx, inputs, output):
    q, k, v, lengths, dropout_p, mask = *inputs[:3], inputs[3:7], inputs[7], inputs[8:13]
    alibi_slopes, _, block_table, leftpad_k, seqused_k, *_ = inputs[13:]
    if leftpad_k is not None or seqused_k is not None:
        raise RuntimeError("_flash_attn_varlen_forward has no gradients with leftpad_k or seqused_k")
    is_paged = block_table is not None
    out, softmax_lse, _, rng_state = output
    save(ctx, (q, k, v), out, softmax_lse, rng_state, alibi_slopes, lengths, dropout_p, fold(mask), False, is_paged)


def _differentiate(op, save_for_op):
    num_arguments = len(op.default._schema.arguments)

    def backward_of_op(ctx, dout, *_):
        return (*gradients(ctx, dout), *[None] * (num_arguments - 3))

    register_gradient(op.default, backward_of_op, save_for_op)


register_once("formula of the dense op", _differentiate, _dense, _save_dense)
register_once("formula of the packed op", _differentiate, _packed, _save_varlen)
