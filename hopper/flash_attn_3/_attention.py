"""One forward (``attend``), one backward (``_gradients``) and their autograd, for all functions without a cache.

In eager mode the extension's direct functions replace the ops (csrc/torch/direct.c), unless something watches the ops.
The direct functions do the same without torch's dispatcher, which takes longer than all the rest of a small call. A
direct function that cannot serve a call returns None and has done nothing. Then the op is called.
"""

import warnings
from collections import namedtuple

import torch
from torch.autograd import forward_ad

from flash_attn_3._arguments import (
    as_int,
    as_number,
    as_window,
    call_named,
    call_op,
    check_tensors,
    distinct,
    has_distributed,
    maybe_contiguous,
    refuse_transforms,
)
from flash_attn_3._ops import _C, NO_BATCHES, ops, refuse_backward, register_gradient, register_once

_forward_op = ops._flash_attn_forward.default
_backward_op = ops._flash_attn_backward.default

# Where the sequences of packed tensors lie. A dense call has None everywhere.
Lengths = namedtuple(
    "Lengths",
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k",
    defaults=(None,) * 6,
)

# The options of a forward, in the order of the direct functions.
Options = namedtuple(
    "Options",
    "qv q_descale k_descale v_descale softmax_scale causal window_size attention_chunk softcap num_splits pack_gqa "
    "sm_margin",
)

DENSE = Lengths()

# The caller's names of the tensors. A dense call has no lengths.
NAMES = {1: ("qkv",), 3: ("q", "k", "v")}
_RENAMED = dict.fromkeys("qkv", "qkv")
_OPTIONAL = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "num_heads_q"


def run_forward(q, k, v, lengths, options):
    """Returns ``(out, softmax_lse)`` of the direct function or of the op."""
    o = options
    if not torch.compiler.is_compiling():
        direct = _C.direct_forward(q, k, v, *lengths, *options)
        if direct is not None:
            return direct
    check_tensors(q=q, k=k, v=v)
    o = o._replace(qv=maybe_contiguous(o.qv))
    lengths = lengths._replace(
        max_seqlen_q=as_int(lengths.max_seqlen_q, "max_seqlen_q"),
        max_seqlen_k=as_int(lengths.max_seqlen_k, "max_seqlen_k"),
    )
    left, right = as_window(o.window_size)
    out, softmax_lse, *_ = call_op(
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
    lengths = Lengths(*lengths)
    ctx.save_for_backward(
        *tensors, out, softmax_lse, lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_q, lengths.seqused_k
    )
    ctx.max_seqlens = lengths.max_seqlen_q, lengths.max_seqlen_k
    ctx.num_heads_q = num_heads_q
    ctx.has_qv = options.qv is not None
    ctx.options = options._replace(qv=None, q_descale=None, k_descale=None, v_descale=None)
    ctx.deterministic = deterministic or torch.are_deterministic_algorithms_enabled()


def _empty_like(x, zeros):
    """Returns an empty or zero tensor like ``x`` whose last dimension is contiguous."""
    like = torch.empty_like(x)
    torn = like.dim() > 0 and like.stride(-1) != 1 and like.shape[-1] > 1
    if torn:
        like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like.zero_() if zeros else like


def run_backward(*arguments):
    """Runs the backward op on these arguments, without torch's dispatcher if possible."""
    softmax_d = None if torch.compiler.is_compiling() else _C.direct_backward(*arguments)
    if softmax_d is None:  # hooks on saved tensors may have returned other strides
        softmax_d = call_op(_backward_op, *map(maybe_contiguous, arguments[:6]), *arguments[6:])
    return softmax_d


@torch.no_grad()
def _first_gradients(ctx, saved, dout):
    """Returns the gradients of the given tensors, packed like the tensors.

    If there is no backward, this function raises. While compiling, the code that it returns for the gradients of the
    tensors and of qv will raise.

    The op does not write rows that belong to no sequence or are not in use. Gradients of unused rows are 0. On a GPU
    those of rows of no sequence are not written, as upstream leaves them.

    NOTE: compiled code writes dq, dk and dv to separate tensors and packs them afterwards. Inductor with dynamic shapes
    loses the offset of a view that an op writes into (pytorch/pytorch#198068).
    """
    *tensors, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = saved
    o = ctx.options
    is_fp8 = tensors[0].dtype == torch.float8_e4m3fn
    if ctx.has_qv or o.attention_chunk or is_fp8:
        what = "attention_chunk" if o.attention_chunk else "FP8" if is_fp8 else "qv"
        return refuse_backward(what, [*tensors, dout])  # dout is like qv
    q, k, v = _split(tensors, ctx.num_heads_q)
    packs = cu_seqlens_q is not None or cu_seqlens_k is not None
    zeros = seqused_q is not None or seqused_k is not None or (packs and q.is_cpu)
    packed = len(tensors) == 1
    whole = [_empty_like(x, zeros) for x in ((q, k, v) if torch.compiler.is_compiling() else tensors)]
    grads = whole if len(whole) == 3 else _split(whole, ctx.num_heads_q)
    left, right = as_window(o.window_size)
    max_seqlens = [as_int(x, "max_seqlen") for x in ctx.max_seqlens]
    run_backward(
        maybe_contiguous(dout), *map(maybe_contiguous, (q, k, v)), out, softmax_lse, cu_seqlens_q, cu_seqlens_k,
        seqused_q, seqused_k, *max_seqlens, *grads, o.softmax_scale, o.causal, left, right, o.softcap,
        ctx.deterministic, o.sm_margin,
    )  # fmt: skip
    return [_pack(grads, ctx.num_heads_q)] if packed and len(whole) == 3 else whole


def _gradients(ctx, dout):
    if not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(dout):
        raise NotImplementedError(NO_BATCHES)
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


def _grads_of_options(ctx, refused):
    """The gradients of the options, which begin with qv. Only a compiled backward that will raise has one for qv."""
    of_qv = refused[0] if ctx.has_qv and refused else None
    return of_qv, *[None] * (len(Options._fields) - 1)


class _Attention(torch.autograd.Function):
    """Attention of (q, k, v) or (qkv,) with the options of ``attend``. Only ``out`` carries a gradient."""

    @staticmethod
    def forward(ctx, num_tensors, *arguments):
        tensors, arguments = arguments[:num_tensors], arguments[num_tensors:]
        num_heads_q, deterministic, return_lse, *rest = arguments
        lengths, options = Lengths(*rest[:6]), Options(*rest[6:])
        out, softmax_lse = run_forward(*_split(tensors, num_heads_q), lengths, options)
        _save(ctx, tensors, num_heads_q, out, softmax_lse, lengths, options, deterministic)
        return (out, softmax_lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, *_):
        grads = _gradients(ctx, dout)
        before_qv = 3 + len(Lengths._fields)
        num = len(ctx.needs_input_grad) - 1 - before_qv - len(Options._fields)
        return (None, *grads[:num], *[None] * before_qv, *_grads_of_options(ctx, grads[num:]))


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


def _frozen(lengths, options):
    """Returns both with Python's numbers, because the caller may write lists and tensors before the backward."""
    lengths = lengths._replace(
        max_seqlen_q=as_int(lengths.max_seqlen_q, "max_seqlen_q"),
        max_seqlen_k=as_int(lengths.max_seqlen_k, "max_seqlen_k"),
    )
    names = "softmax_scale", "causal", "attention_chunk", "softcap", "sm_margin"
    numbers = {name: as_number(getattr(options, name), name) for name in names}
    return lengths, options._replace(window_size=as_window(options.window_size), **numbers)


def _refuse_gradients_of_descales(descales):
    """A descale of an FP8 tensor gets no gradient, and the result would not show it."""
    for name, x in zip(Options._fields[1:4], descales):
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{name} gets no gradient, and it requires grad: detach it")


def _say_that_the_order_is_forgotten(_):
    warnings.warn(
        "torch.export forgets deterministic=True of flash_attn_3: where the exported program is trained, call "
        "torch.use_deterministic_algorithms(True)",
        stacklevel=2,
    )


def _warn_of_order():
    """The op has no argument for ``deterministic=True``. Dynamo ignores warnings of the text that it traces."""
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_say_that_the_order_is_forgotten)
    else:
        _say_that_the_order_is_forgotten(None)


def _attend(tensors, num_heads_q, lengths, options, deterministic, return_lse, records_qv):
    """Computes and records what no direct function served."""
    compiling = torch.compiler.is_compiling()
    if has_distributed((*tensors, *lengths, *options)):
        from flash_attn_3 import _distributed  # imports torch.distributed.tensor, which a plain call does not need

        return _distributed.attend(attend, tensors, num_heads_q, lengths, options, deterministic, return_lse)
    check_tensors(**dict(zip(NAMES[len(tensors)], tensors)))
    if not compiling:
        lengths, options = _frozen(lengths, options)
    # torch.export drops the backward of an autograd.Function. The op has gradients of its own.
    is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)()
    if (
        (compiling and not is_exporting)
        or records_qv
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and not is_exporting and any(x.requires_grad for x in tensors))
    ):
        if not compiling:
            refuse_transforms((*tensors, *options))
        rest = distinct(*tensors, num_heads_q, deterministic, return_lse, *lengths, *options)
        return _Attention.apply(len(tensors), *rest)
    if is_exporting and deterministic:
        _warn_of_order()
    results = run_forward(*_split(tensors, num_heads_q), lengths, options)
    return tuple(results) if return_lse else results[0]


def attend(tensors, num_heads_q, lengths, options, deterministic, return_lse):
    """Computes the forward of every function below, and records it if a tensor requires grad."""
    compiling = torch.compiler.is_compiling()
    qv, *descales = options[:4]
    if getattr(tensors[0], "dtype", None) == torch.float8_e4m3fn:
        _refuse_gradients_of_descales(descales)
    # The direct function does not look at qv. A backward through qv must reach our node, which refuses it.
    records_qv = qv is not None and isinstance(qv, torch.Tensor) and qv.requires_grad and torch.is_grad_enabled()
    is_plain = return_lse is False and (deterministic is False or deterministic is True)
    if is_plain and not (compiling or records_qv) and len(tensors) == 3:
        out = _C.direct_attention(*tensors, *lengths, *options)
        if type(out) is tuple:
            return _record(*tensors, (out, lengths, Options(*options), deterministic))
        if out is not None:
            return out
    lengths, o = Lengths(*lengths), Options(*options)
    return call_named(
        lambda: _attend(tensors, num_heads_q, lengths, o, deterministic, return_lse, records_qv),
        lambda: {
            **dict(zip(NAMES[len(tensors)], tensors)), **lengths._asdict(), **o._asdict(), "num_heads_q": num_heads_q,
            "deterministic": deterministic, "return_attn_probs": return_lse,
        },
        _OPTIONAL,
        (o.causal, o.pack_gqa, deterministic, return_lse),
        (o.attention_chunk, o.num_splits, o.sm_margin, lengths.max_seqlen_q, lengths.max_seqlen_k),
        _RENAMED if len(tensors) == 1 else None,
    )  # fmt: skip


# ---- autograd of the op itself -------------------------------------------------------------------------------------
# A direct call of the op has gradients too.


def _save_op(ctx, inputs, output):
    given = dict(zip(_ARGUMENTS, inputs))
    without = "k_new", "v_new", "out_", "page_table", "kv_batch_idx", "leftpad_k", "cu_seqlens_k_new"
    if any(given[name] is not None for name in without):
        raise RuntimeError(f"_flash_attn_forward has no gradients with any of {', '.join(without)}")
    window = given["window_size_left"], given["window_size_right"]
    options = Options(*[window if name == "window_size" else given[name] for name in Options._fields])
    lengths = Lengths(*[given[name] for name in Lengths._fields])
    _save(ctx, inputs[:3], None, *output[:2], lengths, options, False)


def _differentiate_op(ctx, dout, *_):
    grads = dict(zip(("q", "k", "v", "qv" if ctx.has_qv else None), _gradients(ctx, dout)))
    return tuple(grads.get(name) for name in _ARGUMENTS)


_ARGUMENTS = [argument.name for argument in _forward_op._schema.arguments]
register_once("formula", register_gradient, _forward_op, _differentiate_op, _save_op)
