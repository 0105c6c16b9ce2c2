"""Options that upstream does not have: attn_bias, attn_mask, sinks, return_lse and return_max_logits.

There are two ways to the kernels:

    plain kernels   sinks, and an lse without a gradient
    mods            attn_bias, attn_mask, return_max_logits, and an lse with a gradient (flash_attn/flex/options.py)

The kernels add the sinks where they end a row, and give out' and lse'. Only ops of the first way know no sinks: their
results get them afterwards (_sinks.py). The backward needs no kernels of its own for q, k and v. With out' and lse' in
place of out and lse, the kernels compute the gradients of a softmax that has the sink in its sum. The gradient of the
sink is left: its probability times ``0 - softmax_d``, where softmax_d is what the backward wrote for each row. On the
CPU the forward keeps the probability, because lse' has lost digits of it.

In the graphs of torch.compile the second way is the operator of flex_attention (flash_attn/flex/graph.py).
"""

import torch
from torch.autograd import forward_ad

from flash_attn import _vmap
from flash_attn import flash_attn_interface as interface
from flash_attn._dispatch import check_not_traced, is_exporting, is_unseen, transforms_are_active
from flash_attn._imagined import is_imagined, is_on_cpu
from flash_attn._kinds import check_layout_of_memory
from flash_attn._ops import (
    check_layout,
    check_storage,
    check_storages,
    check_tensor,
    empty_like,
    flash_attn_2_cuda,
    is_freed,
    refuse_tangents,
    without_second_derivative,
)
from flash_attn._remembered import remembered
from flash_attn._sinks import add_sinks, gradient_of_sinks, without_rows_behind
from flash_attn._transforms import Rule, transformed
from flash_attn.flex import attention as flex
from flash_attn.flex import graph, ops
from flash_attn.flex import options as mods
from flash_attn.flex.ops import is_watched

INF = float("inf")

# ---- the two ways to the kernels ----------------------------------------------------------------------------------


class _Plain:
    """The kernels of ``flash_attn_func``.

    A way of this kind is a tuple (the lengths that are numbers, dropout_p, mask, deterministic), which Dynamo traces.
    Its tensors are (alibi_slopes, block_table), then cu_seqlens_q and cu_seqlens_k of packed sequences.
    """

    @staticmethod
    def forward(way, q, k, v, tensors, sinks, wants_probability):
        max_lengths, dropout_p, mask, _ = way
        alibi_slopes, block_table, *cu_seqlens = tensors
        is_packed = len(cu_seqlens) > 0
        options = *cu_seqlens, *max_lengths, dropout_p, *mask, alibi_slopes, False
        options = (*options, block_table) if is_packed else options
        if sinks is not None and not torch.compiler.is_compiling() and is_on_cpu(q) and not is_imagined():
            results = _plain_with_sinks(is_packed, q, k, v, *options, sinks, True, wants_probability)
            if results is not None:
                out, lse, *probability, _, rng_state = results
                return out, lse, None, (rng_state if dropout_p else None,), probability[0] if probability else None
        op = interface._flash_attn_varlen_forward if is_packed else interface._flash_attn_forward
        out, lse, _, rng_state = op(q, k, v, *options)
        out, lse, probability = add_sinks(out, lse, sinks, wants_probability)
        return out, lse, None, (rng_state if dropout_p else None,), probability

    @staticmethod
    def ends(way, tensors, saved):
        return tensors[2] if len(tensors) > 2 else None

    @staticmethod
    def backward(way, inputs, tensors, saved, out, lse, dout, dlse, wanted):
        max_lengths, dropout_p, mask, deterministic = way
        alibi_slopes, block_table, *cu_seqlens = tensors
        if block_table is not None:
            raise RuntimeError("flash_attn_varlen_func has no backward with block_table: paged keys are for inference")
        grads = [empty_like(x) if is_wanted else None for x, is_wanted in zip(inputs, wanted)]
        is_packed = len(cu_seqlens) > 0
        zero_tensors = (out.is_cpu,) if is_packed else ()
        softmax_d = interface._backward(
            is_packed, interface.maybe_contiguous(dout), *inputs, out, lse, *grads, *cu_seqlens, *max_lengths,
            dropout_p, *mask, alibi_slopes, deterministic, saved[0], *zero_tensors,
        )  # fmt: skip
        return (*grads, *[None] * len(tensors)), softmax_d


def _plain_with_sinks(is_packed, q, k, v, *arguments):
    direct = flash_attn_2_cuda.direct_varlen_forward_options if is_packed else flash_attn_2_cuda.direct_forward_options
    return direct(*(x.detach() if type(x) is torch.nn.Parameter else x for x in (q, k, v)), *arguments)


class Mods:
    """The kernels of flex_attention, whose tensors are ``[b, h, len, d]``. Packed sequences are one batch.

    ``names``: what the caller calls the tensors of the mods. None: the caller does not know the tensor. ``shift``: what
    the mods subtract from the scores of rows, fp32, or None.
    """

    def __init__(self, call, is_packed, deterministic, names, shift, cu_seqlens_q=None):
        self.call, self.is_packed, self.deterministic, self.names = call, is_packed, deterministic, names
        self.shift, self._cu_seqlens_q = shift, cu_seqlens_q

    def _to(self, x):
        return flex.rows_of((x.unsqueeze(0) if self.is_packed else x).transpose(1, 2))

    def _from(self, x):
        return None if x is None else x.transpose(1, 2).squeeze(0) if self.is_packed else x.transpose(1, 2)

    def _row(self, x):
        return x if x is None or not self.is_packed else x.unsqueeze(0)

    def saved(self, sinks):
        """What a node saves besides its inputs and results. The CPU keeps the probability of sinks in place of ends."""
        ends = None if sinks is None or is_on_cpu(sinks) else self._cu_seqlens_q
        return *self.call.tensors(), ends

    @staticmethod
    def ends(self, tensors, saved):
        return saved[-1]

    @staticmethod
    def forward(self, q, k, v, tensors, sinks, wants_probability):
        of_rows = None if sinks is None else (sinks, self.shift, self._cu_seqlens_q)
        out, lse, max_scores, probability = flex.attend(
            self.call, *map(self._to, (q, k, v)), tensors, of_rows, wants_probability
        )
        if self.is_packed:
            lse, probability = lse.squeeze(0), None if probability is None else probability.squeeze(0)
        return self._from(out), lse, max_scores, self.saved(sinks), probability

    @staticmethod
    def backward(self, inputs, tensors, saved, out, lse, dout, dlse, wanted):
        check_storages(self.names, (*tensors, *saved)[: len(self.names)])
        call = self.call.with_state(saved[-2])
        (dq, dk, dv, *sums), softmax_d = flex.gradients(
            call, [self._to(x) for x in inputs], tensors, self._to(out), self._row(lse), self._to(dout),
            self._row(dlse), wanted, self.deterministic,
        )  # fmt: skip
        return (*map(self._from, (dq, dk, dv)), *sums), softmax_d


# ---- autograd -------------------------------------------------------------------------------------------------------


def _kind(way):
    return _Plain if isinstance(way, tuple) else Mods


def _shift_of(way):
    return None if isinstance(way, tuple) else way.shift


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx, way, *inputs):
        """NOTE: without gradients Dynamo omits ctx if there are as many arguments as parameters. So these are few."""
        sinks, q, k, v, *tensors = inputs
        q, k, v = map(interface.maybe_contiguous, (q, k, v))
        wants_probability = sinks is not None and (torch.compiler.is_compiling() or ctx.needs_input_grad[1])
        out, lse, max_scores, saved, probability = _kind(way).forward(way, q, k, v, tensors, sinks, wants_probability)
        _save(ctx, way, sinks, q, k, v, out, lse, tensors, saved, probability)
        if max_scores is None:
            return out, lse
        ctx.mark_non_differentiable(max_scores)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx, dout, dlse=None, *unused):
        return None, *_all_gradients(ctx, ctx.needs_input_grad[1:], dout, dlse)


class _Recorded(torch.autograd.Function):
    """The node of a finished call. results: out, lse, what its way saves, and the probability of sinks or None."""

    @staticmethod
    def forward(ctx, way, results, sinks, q, k, v, *tensors):
        out, lse, saved, probability = results
        _save(ctx, way, sinks, q, k, v, out, lse, tensors, saved, probability)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return None, None, *_all_gradients(ctx, ctx.needs_input_grad[2:], dout, dlse)


# This is ``_Recorded.apply`` for plain tensors in eager mode, without the layer that looks for functorch.
record = super(torch.autograd.Function, _Recorded).apply


def _save(ctx, way, sinks, q, k, v, out, lse, tensors, saved, probability):
    ctx.way, ctx.num_tensors = way, len(tensors)
    ctx.save_for_backward(sinks, q, k, v, out, lse, probability, *tensors, *saved)
    ctx.set_materialize_grads(False)


def _all_gradients(ctx, needed, dout, dlse):
    everything = ctx.saved_tensors  # read once, because a checkpoint computes them

    def gradients(dout, dlse):
        return without_second_derivative(_gradients(ctx, needed, everything, dout, dlse), dout, dlse, *everything)

    return _vmap.gradients_of_each(gradients, dout, dlse)


NAMES_OF_SAVED = "dout", "sinks", "q", "k", "v", "out", "softmax_lse"


def _gradients(ctx, needed, everything, dout, dlse):
    if torch.is_grad_enabled():  # of a backward with create_graph
        with torch.no_grad():
            return _gradients(ctx, needed, everything, dout, dlse)
    sinks, q, k, v, out, lse, probability, *rest = everything
    check_storages(NAMES_OF_SAVED, (dout, *everything[: len(NAMES_OF_SAVED) - 1]))
    tensors, saved = rest[: ctx.num_tensors], rest[ctx.num_tensors :]
    wants_sinks, *wanted = needed
    dout = torch.zeros_like(out) if dout is None else dout
    grads, softmax_d = [None] * len(wanted), None
    if any(wanted):
        grads, softmax_d = _kind(ctx.way).backward(ctx.way, (q, k, v), tensors, saved, out, lse, dout, dlse, wanted)
    if not wants_sinks:
        return None, *grads
    softmax_d = softmax_d if k.numel() > 0 else None  # without keys the kernels may have written nothing
    ends = _kind(ctx.way).ends(ctx.way, tensors, saved)
    return gradient_of_sinks(sinks, out, lse, dout, dlse, softmax_d, _shift_of(ctx.way), ends, probability), *grads


# ---- arguments ----------------------------------------------------------------------------------------------------


def _check_scores(name, x, q, shape, dims):
    check_tensor(name, x)
    check_storage(name, x)
    if x.device != q.device:
        raise RuntimeError(f"{name} must be on {q.device}, where q is; it is on {x.device}")
    sizes = (1,) * (len(shape) - x.dim()) + tuple(x.shape)
    if len(sizes) > len(shape) or any(n != 1 and n != want for n, want in zip(sizes, shape)):
        raise RuntimeError(
            f"{name} must have the shape {dims} = {tuple(shape)}, or 1 in place of a size; it has {tuple(x.shape)}"
        )


def fit_sinks(sinks, q):
    """Is there one floating number for each head of q, on its device?"""
    return (
        sinks.shape == q.shape[-2:-1] and sinks.is_floating_point() and sinks.device == q.device and not is_freed(sinks)
    )


def check_sinks(sinks, q):
    """Raises unless there is one floating number for each head of q, ``[..., h, d]``."""
    if sinks is None:
        return
    check_tensor("sinks", sinks)
    check_layout_of_memory("sinks", sinks)
    if sinks.shape != q.shape[-2:-1]:
        raise RuntimeError(f"sinks must have the shape (num_heads,) = ({q.shape[-2]},); it has {tuple(sinks.shape)}")
    if not sinks.is_floating_point():
        raise RuntimeError(f"sinks must be floating; it is {sinks.dtype}")
    if sinks.device != q.device:
        raise RuntimeError(f"sinks must be on {q.device}, where q is; it is on {sinks.device}")
    check_storage("sinks", sinks)


def _check(q, k, attn_bias, attn_mask, sinks, lengths):
    is_packed = len(lengths) > 0
    if is_packed:
        check_layout("q", q, "total_q", "num_heads", "head_size")
        shape = len(lengths[0]) - 1, q.shape[-2], lengths[2], lengths[3]
    else:
        check_layout("q", q, "batch_size", "seqlen_q", "num_heads", "head_size")
        check_layout("k", k, "batch_size", "seqlen_k", "num_heads_k", "head_size")
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    dims = "(b, h, max_seqlen_q, max_seqlen_k)" if is_packed else "(b, h, len_q, len_k)"
    if attn_bias is not None:
        _check_scores("attn_bias", attn_bias, q, shape, dims)
        if not attn_bias.is_floating_point() or attn_bias.element_size() == 1:
            raise RuntimeError(
                f"attn_bias must be fp16, bf16, fp32 or fp64; it is {attn_bias.dtype}: a bool mask is attn_mask"
            )
    if attn_mask is not None:
        _check_scores("attn_mask", attn_mask, q, shape, dims)
        if attn_mask.dtype != torch.bool:
            raise RuntimeError(f"attn_mask must be bool; it is {attn_mask.dtype}: numbers to add are attn_bias")
    check_sinks(sinks, q)
    return shape


def _check_by_op(q, k, v, lengths, mask, alibi_slopes):
    """Checks tensors, lengths and options as the plain op does. It computes nothing, because it gets no query heads.

    NOTE: under torch.no_grad an exported graph would have a part without results, which torch.export.load refuses.
    """
    none, one = slice(0, 0), slice(0, 1)
    q, k, v = (x.detach() for x in (q, k, v))
    slopes = None if alibi_slopes is None else alibi_slopes[..., none]
    op = interface._flash_attn_varlen_forward if lengths else interface._flash_attn_forward
    op(q[..., none, :], k[..., one, :], v[..., one, :], *lengths, 0.0, *mask, slopes, False)
    h, h_kv = q.shape[-2], k.shape[-2]
    if h % h_kv:
        raise RuntimeError(
            f"Number of heads in key/value must divide number of heads in query; k has {h_kv}, q has {h}"
        )
    if v.shape != k.shape:
        raise RuntimeError(f"v must have the shape of k, {tuple(k.shape)}; it has {tuple(v.shape)}")
    if alibi_slopes is not None and alibi_slopes.shape[-1] != h:
        raise RuntimeError(
            f"alibi_slopes must have a slope for each of the {h} heads; it has the shape {tuple(alibi_slopes.shape)}"
        )


def _mods(q, k, v, lengths, shape, mask, alibi_slopes, attn_bias, attn_mask, sinks):
    """The places of the rows, the shift of the rows, a score_mod and a mask_mod of the call."""
    _, causal, left, right, softcap = mask
    window = (left, 0 if causal else right)
    _check_by_op(q, k, v, lengths, mask, alibi_slopes)
    if len(lengths) > 0:
        places = mods.PackedPlaces(*lengths[:2], len(q), len(k), window)
    else:
        places = mods.Places(*shape[2:], window)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shift = mods.shift_of_rows(places, attn_bias, sinks, dtype)
    score_mod = mods.score_mod_of(places, shape, softcap, alibi_slopes, attn_bias, shift)
    return places, shift, score_mod, mods.mask_mod_of(places, shape, attn_mask)


def _root(x):
    """The tensor of which x is a view, or x."""
    return x if x is None or x._base is None else x._base


def _names_of(captures, given):
    """The names of the given tensors, by name, behind tensors of mods that may be views of them."""
    roots = [(name, _root(x)) for name, x in given.items() if x is not None]
    return [next((name for name, root in roots if root is _root(x)), None) for x in captures]


def _way_of_mods(
    q, k, scale, lengths, places, score_mod, mask_mod, deterministic, alibi_slopes, attn_bias, attn_mask, window,
    wants_max, shift, dropout_p,
):  # fmt: skip
    is_packed = len(lengths) > 0
    views = [(x.unsqueeze(0) if is_packed else x).transpose(1, 2) for x in (q, k)]
    blocks = None
    has_dense_mask = attn_mask is not None and not is_packed
    finds_blocks = has_dense_mask or (
        is_packed and ops.finds_blocks_of_packed(q.shape[0], q.shape[1], k.shape[0], lengths[3], attn_mask)
    )
    if not is_on_cpu(q) and places.has_window and q.numel() and k.numel() and not finds_blocks:
        blocks = mods.blocks_of(places, views[0].shape[2], views[1].shape[2], q.device, attn_mask is None)
    elif has_dense_mask and is_on_cpu(q) and not is_imagined() and not is_watched(attn_mask):
        shape = *views[0].shape[:3], views[1].shape[2]  # the layers of a model share a mask
        blocks = remembered(attn_mask, (shape, window), lambda: flex.prepare(*views, scale, None, mask_mod)[0].blocks)
    call, tensors = flex.prepare(*views, scale, score_mod, mask_mod, blocks, wants_max, dropout_p)
    given = {"alibi_slopes": alibi_slopes, "attn_bias": attn_bias, "attn_mask": attn_mask}
    names = _names_of((*tensors, *call.tensors()), given)
    return Mods(call, is_packed, deterministic, names, shift, lengths[0] if is_packed else None), tensors


def _in_a_graph(
    q, k, v, scale, lengths, has_blocks, score_mod, mask_mod, sinks, shift, deterministic, wants_max, dropout_p
):
    """The mods of a call that Dynamo traces: out, lse and max_scores."""
    is_packed = len(lengths) > 0
    views = [(x.unsqueeze(0) if is_packed else x).transpose(1, 2) for x in (q, k, v)]
    of_rows = None if sinks is None else (sinks, shift, lengths[0] if is_packed else None)
    out, lse, max_scores = graph.attend_with_sinks(
        *views, score_mod, mask_mod, scale, of_rows, wants_max, deterministic, mods.BLOCK if has_blocks else 0,
        dropout_p,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out.squeeze(0), lse.squeeze(0), max_scores) if is_packed else (out, lse, max_scores)


def attend(
    q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs, block_table, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
):  # fmt: skip
    """Computes ``flash_attn_func`` and its relatives with options of this file. ``lengths``: see ``_Plain``."""
    if graph.is_exported():
        return graph.exported(
            attend, q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs, block_table, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    if return_attn_probs:
        raise RuntimeError(
            "return_attn_probs cannot be combined with attn_bias, attn_mask, sinks, return_lse or return_max_logits: "
            "return_lse returns softmax_lse"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        check_storage(name, x)
    has_tangents = not torch.compiler.is_compiling() and forward_ad._current_level >= 0
    if has_tangents:
        refuse_tangents((alibi_slopes,))
    if isinstance(alibi_slopes, torch.Tensor):
        check_storage("alibi_slopes", alibi_slopes)
        alibi_slopes = alibi_slopes.detach()  # the plain kernels have no gradient of slopes
    if transforms_are_active():
        check_not_traced()
        alibi_slopes = interface.maybe_contiguous(alibi_slopes)  # where a vmap has its dimension is unseen
        return _transformed(
            q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            block_table, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
    if has_tangents:
        refuse_tangents((q, k, v, attn_bias, attn_mask, sinks))
    if lengths:
        lengths = *lengths[:2], *map(interface._as_int, lengths[2:], ("max_seqlen_q", "max_seqlen_k"))
    shape = _check(q, k, attn_bias, attn_mask, sinks, lengths)
    softmax_scale = float(interface._as_scale(softmax_scale, q))
    causal, softcap = interface._as_number(causal, "causal"), float(interface._as_number(softcap, "softcap"))
    dropout_p = interface._as_number(dropout_p, "dropout_p")
    if not 0 <= dropout_p < 1:
        raise RuntimeError(f"dropout_p must be at least 0 and below 1; it is {dropout_p}")
    mask = softmax_scale, bool(causal), *map(int, interface._as_window(window_size)), softcap
    leaves = [x for x in (q, k, v, attn_bias, sinks) if x is not None]
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    reasons = {
        "attn_bias": attn_bias is not None,
        "attn_mask": attn_mask is not None,
        "return_max_logits": return_max_logits,
        # a checkpoint repeats a forward without gradients with them, and must drop the same elements
        "return_lse with gradients": return_lse and (is_recorded or (dropout_p and block_table is None)),
        # an exported program gets its gradients from the op of flex_attention, which knows sinks and lse
        "torch.export": is_exporting() and block_table is None,
        "sinks in fp64": _has_fp64_sinks(q, sinks) and block_table is None and not dropout_p,
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    max_scores = None
    if reason is None:
        if is_exporting() and block_table is not None and torch.is_grad_enabled() and sinks is not None:
            if sinks.requires_grad:
                raise RuntimeError(
                    "torch.export would drop the gradient of sinks beside block_table: export under torch.no_grad()"
                )
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        way = lengths[2:], dropout_p, mask, deterministic
        tensors = interface._distinct(q, k, v, alibi_slopes, block_table, *lengths[:2])
        out, lse = _Extended.apply(way, sinks, *tensors)
    else:
        if block_table is not None:
            raise RuntimeError(f"block_table cannot be combined with {reason}: paged keys are for plain kernels")
        if not lengths and not torch.compiler.is_dynamo_compiling() and shape[2] == 1:
            mask = softmax_scale, False, mask[2], -1, softcap  # the only query sees up to the last key
        places, shift, *functions = _mods(q, k, v, lengths, shape, mask, alibi_slopes, attn_bias, attn_mask, sinks)
        shift = None if shift is None else shift.float()
        of_rows = None if shift is None else shift.squeeze(0) if lengths else shift
        if torch.compiler.is_dynamo_compiling():
            has_blocks = places.has_window or (attn_mask is not None and not lengths)
            out, lse, max_scores = _in_a_graph(
                q, k, v, softmax_scale, lengths, has_blocks, *functions, sinks, shift, deterministic,
                return_max_logits, dropout_p,
            )  # fmt: skip
        else:
            way, tensors = _way_of_mods(
                q, k, softmax_scale, lengths, places, *functions, deterministic, alibi_slopes, attn_bias, attn_mask,
                mask[1:4], return_max_logits, shift, dropout_p,
            )  # fmt: skip
            out, lse, *rest = _Extended.apply(way, sinks, q, k, v, *tensors)
            max_scores = rest[0] if rest else None
        if shift is not None:
            lse = lse + of_rows if return_lse else None
            max_scores = max_scores + shift if return_max_logits else None
    if return_lse and lengths and sinks is not None:
        lse = without_rows_behind(lse, lengths[0])
    results = [out, *([lse] if return_lse else [])]
    if return_max_logits:
        results.append(max_logits_of(max_scores))
    return tuple(results) if len(results) > 1 else out


def _has_fp64_sinks(q, sinks):
    """Plain ops leave sinks to a step behind them, which knows an lse in fp32 alone. torch.jit records no other ops."""
    if sinks is None or q.dtype != torch.float64:
        return False
    return torch.compiler.is_compiling() or not torch._C._is_tracing()


def _transformed(
    q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, block_table,
    attn_bias, attn_mask, sinks, return_lse, return_max_logits,
):  # fmt: skip
    """``attend`` where transforms of torch.func are active."""
    one = not (return_lse or return_max_logits)

    def function(q, k, v, attn_bias, sinks, attn_mask, alibi_slopes, block_table, *cu_seqlens):
        results = attend(
            q, k, v, (*cu_seqlens, *lengths[2:]), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, False, block_table, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
        )  # fmt: skip
        return (results,) if one else results

    def join(num, tensors, dims):
        q, k, v, attn_bias, sinks, attn_mask, alibi_slopes, *_ = tensors
        if lengths or attn_bias is not None or sinks is not None or return_max_logits or dropout_p:
            return None
        dense = _vmap.Dense(num, q, dims[0])
        if attn_mask is not None and (dims[5] is not None or (attn_mask.dim() == 4 and len(attn_mask) > 1)):
            x = _vmap.entries(attn_mask, dims[5], num)
            x = x.reshape(num, *(1,) * (5 - x.dim()), *x.shape[1:])
            attn_mask = x.expand(num, dense.b, *x.shape[2:]).flatten(0, 1)
        parts = map(dense.q, (q, k, v), dims)
        return *parts, None, None, attn_mask, dense.slopes(alibi_slopes, dims[6]), None

    rule = Rule(function, 5, q.device if dropout_p else None, join)
    tensors = interface._distinct(q, k, v, attn_bias, sinks, attn_mask, alibi_slopes, block_table, *lengths[:2])
    results = transformed(rule, *tensors)
    return results[0] if one else results


def with_sinks(sinks, q, function, *arguments):
    """Returns ``(out, lse)`` of a function without gradients, with sinks. The function returns both."""
    check_tensor("q", q)
    check_sinks(sinks, q)
    k_cache, v_cache, k, v = arguments[:4]
    if not torch.compiler.is_compiling():
        for name, cache, new in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
            if new is not None and flash_attn_2_cuda.share_memory(cache, sinks):
                raise RuntimeError(f"{name} is written and must not share memory with sinks, which is read")
    out, lse = function(q, *arguments)
    with torch.no_grad():
        return add_sinks(out, lse, sinks)[:2]


def max_logits_of(max_scores):
    """The largest score of each head, fp32 ``[h]``, of ``[b, h, rows]``."""
    found = flash_attn_2_cuda.max_logits(max_scores) if is_unseen() else None
    if found is not None:
        return found
    if max_scores.shape[0] * max_scores.shape[2] == 0:
        return max_scores.new_full(max_scores.shape[1:2], -INF)
    return max_scores.amax((0, 2))
