"""``flex_attention``: attention with a score_mod and a block mask, in one kernel, forward and backward.

A call goes the short way (``_directly``) if its mods are of kinds that were traced before, and if C finds nothing wrong
(csrc/torch/flex_attend.h). Any other call goes the long way, which checks every argument, traces mods and says what is
wrong. Both give the same results and save the same tensors for the backward.
"""

import copy
import functools
import math
import warnings
from typing import Any, Optional, Union

import flash_attn_2_cuda
import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as upstream
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from torch.nn.attention.flex_attention import flex_attention as torchs_flex_attention

from .._dispatch import check_not_traced
from .._imagined import is_imagined, is_on_cpu
from .._kinds import check_kinds
from .._ops import empty_like, is_freed, refuse_transforms, without_second_derivative
from .._types import MaskMod, ScoreMod
from .._vmap import gradients_of_each
from . import ahead, calls
from .arguments import (
    as_lists,
    check_arguments,
    check_block_mask,
    check_dropout_p,
    check_kernel_options,
    check_tensors,
    in_autocast,
    number_of,
)
from .block_mask import LISTS, is_own, mod_of, noop_mask, on_device
from .derivative import derivative_of
from .patterns import bounds_of, softcap_of, window_of
from .sequences import Sequences, are_ready, key_length, sequences_of, shift_of
from .tracer import known_program_of, place_of

NO_WINDOW = (-1, -1, 0.0)  # of a call with mods, or of one that needs none


class Call:
    """What forward and backward share besides tensors that may require grad. scale None: 1 / sqrt(E).

    ``dropout``: None, or its probability and the rng_state of the call.
    """

    def __init__(self, scale, score, mask, blocks, wants_max, plain=NO_WINDOW, sequences=None, dropout=None):
        self.scale, self.wants_max, self.plain = scale, wants_max, plain
        self.score, self.score_numbers = (score[0], score[2]) if score else (None, ())
        self.mask = None if mask is None else (mask[0].text, mask[1], mask[2])
        self.blocks, self.sequences, self.dropout = blocks, sequences, dropout

    def tensors(self):
        """The tensors of the mask and of the places of sequences, and Nones. The last one is rng_state or None."""
        blocks = () if self.blocks is None else self.blocks[2:6]
        places = () if self.sequences is None else self.sequences[:3]
        mask = () if self.mask is None else self.mask[1]
        return *blocks, *places, *mask, None if self.dropout is None else self.dropout[1]

    def with_state(self, rng_state):
        """The call with the rng_state that a node has saved: another one than in the forward, if that was repeated."""
        if self.dropout is None:
            return self
        call = copy.copy(self)
        call.dropout = self.dropout[0], rng_state
        return call

    def score_with(self, tensors):
        return None if self.score is None else (self.score.text, tuple(tensors), self.score_numbers)


def empty_out(query, columns):
    """Dense, with the order of query's strides, but for the last dimension."""
    order = sorted(range(3), key=lambda dim: (-query.stride(dim), dim))
    strides, step = [0, 0, 0, 1], columns
    for dim in reversed(order):
        strides[dim] = step
        step *= max(query.size(dim), 1)
    return query.new_empty_strided((*query.shape[:3], columns), strides)


def rows_of(tensor):
    """The tensor with a contiguous last dimension. One of a freed storage is left to the op, which names it."""
    is_ready = tensor.stride(-1) == 1 or tensor.size(-1) <= 1 or is_freed(tensor)
    return tensor if is_ready else tensor.contiguous()


def attend(call, query, key, value, tensors, sinks=None, wants_probability=False):
    """The forward, of tensors with a contiguous last dimension. Returns out, lse, max_scores and probability.

    sinks: None or ``(sinks, shift, cu_seqlens_q)``: see ``_sinks.py``. Their probability in each row is found on the
    CPU.
    """
    if ops.is_watched(query, key, value, *tensors):
        return ops.forward(call, query, key, value, tensors, sinks)
    out = empty_out(query, value.size(-1))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    max_scores = torch.empty_like(lse) if call.wants_max else None
    probability = torch.empty_like(lse) if wants_probability and is_on_cpu(query) else None
    calls.forward(
        query,
        key,
        value,
        out,
        lse,
        max_scores,
        call.scale,
        call.plain,
        call.score_with(tensors),
        call.mask,
        call.blocks,
        call.sequences,
        None if sinks is None else (*sinks, probability),
        call.dropout,
    )
    return out, lse, max_scores, probability


class _FlexAttention(torch.autograd.Function):
    """The autograd node of a finished forward. Its forward does little, because each step of it costs every call time.

    ``done``: out and lse, whether the caller gets the lse, the arguments of :class:`Call`, and the tensors of the mask
    and of the places of sequences.
    """

    @staticmethod
    def forward(ctx, done, query, key, value, *tensors):
        out, lse, wants_lse, ctx.call, others = done
        ctx.save_for_backward(query, key, value, out, lse, *tensors, *others)
        if not wants_lse:
            return out
        ctx.set_materialize_grads(False)  # a loss may need one of both
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        saved = ctx.saved_tensors  # torch checks that none was changed since
        query, key, value, out, lse, *tensors = saved
        wanted = ctx.needs_input_grad[1:]
        call, tensors = Call(*ctx.call).with_state(saved[-1]), tensors[: len(wanted) - 3]
        query, key, value = map(rows_of, (query, key, value))

        def gradients_of(dout, dlse):
            with torch.no_grad():
                grads, _ = gradients(call, (query, key, value), tensors, out, lse, dout, dlse, wanted)
            return without_second_derivative(grads, dout, dlse, *saved)

        return None, *gradients_of_each(gradients_of, dout, dlse)


# This is ``_FlexAttention.apply`` without the layer that looks for functorch, whose tensors were refused before.
_record = super(torch.autograd.Function, _FlexAttention).apply


def gradients(call, inputs, tensors, out, lse, dout, dlse, wanted, deterministic=False):
    """The backward: the gradients of query, key and value, and of the tensors of the score_mod. Others are None.

    Behind them softmax_d, fp32 ``[b, h, rows]``, or None where ops do not return it. The caller records no gradients.
    """
    query, key, value = inputs
    wants_q, wants_k, wants_v, *wanted = wanted
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = [i for i, want in enumerate(wanted) if want]
    text, places = (b"", ()) if call.score is None else derivative_of(call.score, wanted)
    dout = rows_of(dout.resolve_neg())
    dlse = None if dlse is None else rows_of(dlse.float().resolve_neg())
    out, lse = rows_of(out), rows_of(lse)  # hooks on saved tensors may return other strides
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    sums = [None] * len(tensors)
    if ops.is_watched(*inputs, dout, *tensors):
        grads, found = ops.backward(
            call, inputs, tensors, out, lse, dout, dlse, (wants_q, wants_k, wants_v), wanted, (text, places),
            deterministic,
        )  # fmt: skip
        for i, x in zip(wanted, found):
            sums[i] = x.to(tensors[i].dtype)
        return (*grads, *sums), None
    dq = empty_like(query) if wants_q else None
    dk = empty_like(key) if wants_k else None
    dv = empty_like(value) if wants_v else None
    derivative, places_of_sums, softmax_d = None, None, torch.empty_like(lse)
    if call.score is not None:
        for i in wanted:
            sums[i] = torch.zeros(tensors[i].shape, dtype=sum_dtype(tensors[i]), device=query.device)
        derivative = text, tuple(tensors[i] for i in places), call.score_numbers
        places_of_sums = tuple(sums[i] for i in places)
    calls.backward(
        query,
        key,
        value,
        out,
        lse,
        dout,
        dlse,
        dq,
        dk,
        dv,
        softmax_d,
        call.scale,
        call.plain,
        call.score_with(tensors),
        call.mask,
        call.blocks,
        derivative,
        places_of_sums,
        deterministic,
        call.sequences,
        call.dropout,
    )
    sums = [x if x is None else x.to(tensor.dtype) for x, tensor in zip(sums, tensors)]
    return (dq, dk, dv, *sums), softmax_d


def _dropout_of(dropout_p, query):
    """The dropout of a :class:`Call`. Each call draws its own."""
    return (dropout_p, graph.rng_state_of(dropout_p, query.device)) if dropout_p else None


def prepare(query, key, scale, score_mod=None, mask_mod=None, blocks=None, wants_max=False, dropout_p=0.0):
    """The call of a score_mod and a bare mask_mod, and the tensors of the score_mod. blocks None: they are found."""
    score_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    score = None if score_mod is None else mod_of(score_mod, score_dtype, query.device)
    mask = _mask_of(mask_mod, query.device)
    blocks = _blocks_of(None, mask, query, key.size(-2)) if blocks is None else blocks
    dropout = _dropout_of(dropout_p, query)
    call = Call(scale, score, mask, blocks, wants_max, dropout=dropout)
    return call, score[1] if score else ()


def sum_dtype(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


_said = set()


def _warn_once(text):
    if text not in _said:
        _said.add(text)
        warnings.warn(text, FutureWarning, stacklevel=3)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Optional[ScoreMod] = None,
    block_mask: Optional[BlockMask] = None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Optional[dict[str, Any]] = None,
    *,
    return_aux: Optional[AuxRequest] = None,
    mask_mod: Optional[MaskMod] = None,
    q_offset: Union[int, Tensor, None] = None,
    kv_len: Union[int, Tensor, None] = None,
    block_table: Optional[Tensor] = None,
    dropout_p: float = 0,  # NOTE: Dynamo may take a default of 0.0 for a number that changes
) -> Union[Tensor, tuple[Tensor, Tensor], tuple[Tensor, AuxOutput]]:
    """Attention with a score function and a block mask, as ``torch.nn.attention.flex_attention.flex_attention``.

    One kernel computes it, forward and backward, with and without ``torch.compile``. No array of all scores is made.

    Args:
        query: ``[B, Hq, L, E]``, fp16, bf16 or fp32; fp64 on the CPU.
        key: ``[B, Hkv, S, E]``. A batch of 1 serves all queries if there is a block mask for their batch.
        value: ``[B, Hkv, S, Ev]``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, applied to ``scale * q.k``. None keeps the score.
        block_mask: a ``BlockMask``. Its mask_mod is evaluated in partial blocks. None allows everything.
        scale: a number, default ``1 / sqrt(E)``. It gets no gradient, so a tensor that requires grad raises.
        enable_gqa: allows fewer heads of key and value than of query.
        return_lse: returns ``(out, lse)``; ``return_aux`` is the newer form.
        kernel_options: hints that no kernel here needs. ``BACKEND="TRITON"`` calls PyTorch's own function.
        return_aux: an ``AuxRequest``; returns ``(out, AuxOutput)``.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` instead of a block mask. The call finds its blocks. Those of a mask
            that reads no tensor are kept for the next call.
        q_offset: ``[B]``, integers on query's device, or one for all: the mods' q_idx of query i is
            ``i + q_offset[b]``. A block mask with more rows than query is then that of the whole sequence.
        kv_len: ``[B]``, integers on query's device, or one for all: only the first ``kv_len[b]`` keys exist.
        block_table: ``[B, pages]``, page numbers. key and value are then ``[num_pages, Hkv, page_size, E or Ev]``, and
            key j of batch b is row ``j % page_size`` of page ``block_table[b, j // page_size]``.
        dropout_p: the probability that a pair's share of the output is dropped, from 0 to below 1. The others are
            divided by ``1 - dropout_p``. lse and max_scores know no dropout. PyTorch's generator of query's device
            draws its seed.
    Returns:
        ``[B, Hq, L, Ev]``, with the order of query's strides. lse is fp32, ``[B, Hq, L]``, the natural logarithm of
        the sum of exponentials, and differentiable. max_scores is fp32, ``[B, Hq, L]``. A row that sees no key has out
        0, lse -inf, max_scores -inf and no gradient.
    Gradients:
        of query, key, value, and of floating tensors that score_mod captures. None with kv_len or block_table.
    Raises:
        ValueError: the tensors or the block mask do not fit each other.
        NotImplementedError: a mod uses an operation that is not supported, E is above 256, Ev is above 512 (256 in a
            backward), or a gradient is wanted with kv_len or block_table.

    >>> query, key, value = torch.randn(3, 2, 4, 256, 16)
    >>> block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, "cpu")
    >>> slopes = torch.randn(4, requires_grad=True)
    >>> out = flex_attention(query, key, value, lambda s, b, h, i, j: s + slopes[h] * (j - i), block_mask)
    >>> out.sum().backward()
    >>> out.shape, slopes.grad.shape
    (torch.Size([2, 4, 256, 16]), torch.Size([4]))
    """
    is_for_torch = kernel_options and check_kernel_options(kernel_options)
    if type(dropout_p) not in (int, float) or dropout_p != 0:
        dropout_p = check_dropout_p(dropout_p)
    if return_aux is not None and type(return_aux) is not AuxRequest:
        check_kinds({"return_aux": return_aux})
    if not (
        is_for_torch
        or (return_lse and return_aux is not None)
        or (block_mask is not None and mask_mod is not None)
        or dropout_p
        or is_compiling()
    ):
        found = _directly(
            query,
            key,
            value,
            score_mod,
            mask_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse or (return_aux is not None and return_aux.lse),
            return_aux is not None and return_aux.max_scores,
            None if q_offset is kv_len is block_table is None else Sequences(q_offset, kv_len, block_table),
        )
        if found is not None:
            if return_aux is None and not return_lse:
                return found[0]
            return _results(*found[:3], return_lse, return_aux)
    if is_for_torch:
        if q_offset is not None or kv_len is not None or block_table is not None or dropout_p:
            raise ValueError(
                "PyTorch's own kernels, which BACKEND asks for, have no q_offset, kv_len, block_table and dropout_p"
            )
        return torchs_flex_attention(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse,
            kernel_options,
            return_aux=return_aux,
        )
    if graph.is_exported():
        return graph.exported(
            flex_attention, query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse,
            return_aux=return_aux, mask_mod=mask_mod, q_offset=q_offset, kv_len=kv_len, block_table=block_table,
            dropout_p=dropout_p,
        )  # fmt: skip
    if return_lse and return_aux is not None:
        raise ValueError(
            "Cannot specify both return_lse and return_aux. return_lse is deprecated, please use "
            "return_aux=AuxRequest(lse=True) instead."
        )
    if block_mask is not None and mask_mod is not None:
        raise ValueError("pass block_mask or mask_mod, not both: a block mask has its own mask_mod")
    check_arguments(query, key, value, score_mod, mask_mod, block_mask)
    check_tensors(query, key, value, enable_gqa, block_mask, block_table is not None)
    sequences = sequences_of(query, q_offset, kv_len, block_table)
    len_kv = key_length(key, sequences)
    if block_mask is not None and check_block_mask(block_mask, query, len_kv, sequences):
        sequences = sequences._replace(blocks_have_offset=True)
    if torch.compiler.is_dynamo_compiling():
        check_not_traced()
        return _compiled(
            query, key, value, score_mod, block_mask, scale, return_lse, return_aux, mask_mod, sequences, dropout_p
        )
    refuse_transforms("flex_attention", query, key, value)
    query, key, value = in_autocast(query, key, value)
    score_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    score = None if score_mod is None else mod_of(score_mod, score_dtype, query.device)
    mask = _mask_of(mask_mod if block_mask is None else block_mask.mask_mod, query.device)
    if key.size(0) != query.size(0) and block_table is None:
        key, value = (x.expand(query.size(0), -1, -1, -1) for x in (key, value))
    scale = 1 / math.sqrt(max(query.size(-1), 1)) if scale is None else number_of(scale)
    wants_max = return_aux is not None and return_aux.max_scores
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    inputs = (query, key, value, *(score[1] if score else ()))
    refuse_transforms("flex_attention", *inputs, *(mask[1] if mask else ()))
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if is_recorded and sequences is not None:
        sequences.refuse_gradients()
    plain = None
    if not wants_max and not (wants_lse and is_recorded):  # a gradient of lse needs a kernel with mods
        rows_fit = q_offset is None or sequences.blocks_have_offset
        if block_mask is None or (mask and rows_fit and is_own(block_mask, mask)):
            plain = plain_of(score, mask, lambda: shift_of(query.size(-2), len_kv, q_offset, kv_len))
    dropout = _dropout_of(dropout_p, query)
    if plain is not None:
        score, parts = None, (scale, None, None, None, False, plain, sequences, dropout)
    else:
        wants_lists = is_recorded or wants_max or value.size(-1) != query.size(-1)
        blocks = _blocks_of(block_mask, mask, query, len_kv, sequences, key, wants_lists)
        parts = scale, _without_tensors(score), mask, blocks, wants_max, NO_WINDOW, sequences, dropout
    call, tensors = Call(*parts), score[1] if score else ()
    if query.is_cuda and not is_imagined() and not ops.is_watched(*inputs):
        ahead.compile_kernels(call, query, key, value, tensors, is_recorded)
    with torch.no_grad():
        out, lse, max_scores, _ = attend(call, *map(rows_of, (query, key, value)), tensors)
    if is_recorded:
        found = _record((out, lse, wants_lse, parts, call.tensors()), query, key, value, *tensors)
        out, lse = found if wants_lse else (found, lse)
    return _results(out, lse, max_scores, return_lse, return_aux)


def _results(out, lse, max_scores, return_lse, return_aux):
    if return_lse and not torch.compiler.is_dynamo_compiling():
        _warn_once("return_lse is deprecated. Please use return_aux=AuxRequest(lse=True) instead.")
    if return_aux is not None:
        return out, upstream.AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores)
    return (out, lse) if return_lse else out


def _compiled(query, key, value, score_mod, block_mask, scale, return_lse, return_aux, mask_mod, sequences, dropout_p):
    """The checked call, while Dynamo traces it."""
    found = graph.flex_attention(
        query, key, value, score_mod, block_mask, scale, return_lse, return_aux, mask_mod, sequences, dropout_p
    )
    out, lse, max_scores = found
    wants_max = return_aux is not None and return_aux.max_scores
    return _results(out, lse, max_scores if wants_max else None, return_lse, return_aux)


def plain_of(score, mask, find_shift):
    """``(window_left, window_right, softcap)`` of a call that the plain kernels compute, or None.

    ``find_shift()`` is asked only where the mask is a window. A program keeps what was found for its last numbers.
    """
    softcap, window = 0.0, (-1, -1)
    if score is not None:
        program, _, numbers = score
        kept = program.pattern
        if kept is None or kept[0] != numbers:
            kept = program.pattern = numbers, softcap_of(program, numbers)
        softcap = kept[1]
        if softcap is None:
            return None
    if mask is not None:
        program, _, numbers = mask
        kept = program.pattern
        if kept is None or kept[0] != numbers:
            kept = program.pattern = numbers, bounds_of(program, numbers), None, None
        shift = None if kept[1] is None else find_shift()
        if shift is None:
            return None
        if kept[2] != shift:
            kept = program.pattern = numbers, kept[1], shift, window_of(kept[1], shift)
        window = kept[3]
    return None if window is None else (*window, softcap)


def _mask_of(mask_mod, device):
    """The program of a mask_mod with its values; None allows everything."""
    if mask_mod is None or mask_mod in (upstream.noop_mask, noop_mask):
        return None
    mask = mod_of(mask_mod, None, device)
    if mask[0].dtype != torch.bool:
        raise AssertionError(f"mask_mod must return torch.bool, but returns {mask[0].dtype}: {place_of(mask_mod)}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in mask[1]):
        raise AssertionError(
            f"Captured buffers from mask mod that require grad are not supported. Use detach(): {place_of(mask_mod)}"
        )
    return mask


def _without_tensors(score):
    """What a node keeps of a score_mod. Its tensors are saved, so that hooks may put them elsewhere."""
    return None if score is None else (score[0], None, score[2])


def _any_requires_grad(query, key, value, tensors):
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return True
    for x in tensors:  # a generator in any() takes three times as long
        if x.requires_grad:
            return True
    return False


def _directly(query, key, value, score_mod, mask_mod, block_mask, scale, enable_gqa, wants_lse, wants_max, sequences):
    """``(out, lse, max_scores, ..)``; None: the call must go the long way. The tensors may be anything.

    C looks whether something watches the call, and whether autocast wants another dtype.
    """
    score = mask = plain = None
    try:
        if sequences is not None and (block_mask is not None or not are_ready(sequences, query.shape[0])):
            return None
        len_kv = key_length(key, sequences)
        if score_mod is not None:
            score = known_program_of(score_mod, torch.float64 if query.dtype == torch.float64 else torch.float32)
        mask_mod = mask_mod if block_mask is None else block_mask.mask_mod
        allows_all = mask_mod is None or mask_mod is upstream.noop_mask or mask_mod is noop_mask
        mask = None if allows_all else known_program_of(mask_mod)
        if (score is None) != (score_mod is None) or (mask is None) != allows_all:
            return None
        tensors = () if score is None else score[1]
        is_recorded = torch.is_grad_enabled() and _any_requires_grad(query, key, value, tensors)
        if is_recorded and sequences is not None:
            return None
        if mask is not None:
            if mask[0].dtype != torch.bool:
                return None
            for x in mask[1]:
                if x.requires_grad:
                    return None
        if not (wants_max or (wants_lse and is_recorded)):
            plain = plain_of(score, mask, lambda: shift_of(query.shape[2], len_kv, *(sequences or ())[:2]))
        if block_mask is not None and (mask is None or (plain is not None and not is_own(block_mask, mask))):
            plain = None
        wants_lists = is_recorded or wants_max or value.shape[-1] != query.shape[-1]
    except (AttributeError, IndexError):
        return None
    is_bare = block_mask is None and mask is not None and plain is None
    scale = None if scale is None else number_of(scale)
    score_text = None if score is None or plain is not None else (score[0].text, score[1], score[2])
    mask_text = None if mask is None or plain is not None else (mask[0].text, mask[1], mask[2])
    found = flash_attn_2_cuda.flex_direct(
        query, key, value, scale, enable_gqa, plain, score_text, mask_text, block_mask,
        functools.partial(_blocks_of_bare, mask, query, key, len_kv, sequences, wants_lists) if is_bare else None,
        sequences,
        True if wants_lse or is_recorded else False, True if wants_max else False,
    )  # fmt: skip
    if found is None or not is_recorded:
        return found
    out, lse, max_scores, blocks = found
    if plain is not None:
        out = _record((out, lse, False, (scale, None, None, None, False, plain), ()), query, key, value)
        return out, lse, max_scores
    others = () if blocks is None else blocks[2:6]
    others = others if mask is None else others + mask[1]
    parts = scale, _without_tensors(score), mask, blocks, wants_max
    found = _record((out, lse, wants_lse, parts, others), query, key, value, *tensors)
    return (*found, max_scores) if wants_lse else (found, lse, max_scores)


def _blocks_of(block_mask, mask, query, len_kv, sequences=None, key=None, wants_lists=True):
    """The sizes and lists of blocks as the kernels take them. Of a bare mask_mod they are found now, or None.

    ``wants_lists``: as in :func:`ops.is_few`.

    An op that is watched finds them itself, because a graph that is recorded may get another mask. For GPUs it is told
    so by a size without lists.
    """
    if block_mask is not None:
        block = tuple(map(int, block_mask.BLOCK_SIZE))
        lists = as_lists(*(getattr(block_mask, name) for name in LISTS), block[1], len_kv)
        if is_imagined():
            lists = [x if x is None else on_device(x, query.device) for x in lists]
        return (*block, *lists)
    if mask is None:
        return None
    if ops.is_watched(query, *mask[1]):
        return None if is_on_cpu(query) else ops.BLOCK
    return _blocks_of_bare(mask, query, key, len_kv, sequences, wants_lists)


def _with_text(mask):
    """``(text, tensors, numbers)`` of a mask, and the object of its program."""
    program, tensors, numbers = mask
    return (program.text, tensors, numbers), program


def _blocks_of_bare(mask, query, key, len_kv, sequences, wants_lists):
    b, h, len_q = query.shape[:3]
    is_decoded = key is not None and ops.is_few(query, key, len_kv, wants_lists)
    return ops.blocks_of_mask(query.device, (b, h, len_q, len_kv), *_with_text(mask), sequences, is_decoded=is_decoded)


from . import graph, ops  # noqa: E402  (they need this module)
