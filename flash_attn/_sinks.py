"""The epilogue of learned sinks, and its gradient. A sink is one more key of score ``sink`` and value 0.

out' = out exp(lse - lse'),  lse' = log(exp(lse) + exp(sink))

sinks has a number for each head. In graphs it may have one for each head and row: then a shift was subtracted. The
gradient has the same shape. C computes both in eager mode (csrc/torch/options.c).
"""

import flash_attn_2_cuda
import torch

from flash_attn._dispatch import is_unseen

INF = float("inf")


def _of_rows(sinks, shift, lse):
    of_heads = sinks.float() if sinks.dim() > 1 else sinks.float()[:, None]
    return of_heads if shift is None else of_heads - shift.reshape(shift.shape[-lse.dim() :])


def add_sinks(out, lse, sinks, shift=None):
    """Adds a key of the sink's score and value 0. out is written, and lse perhaps. Returns lse'.

    A row that saw no key keeps out 0. sinks None: only lse of such a row changes, from inf to -inf. shift: fp32
    ``[b, h, rows]``, or 1 in place of a size, was subtracted from the scores of a row.
    """
    if (sinks is None or sinks.dim() == 1) and is_unseen():
        if flash_attn_2_cuda.add_sinks(out, lse, sinks, shift):
            return lse
    lse = torch.where(lse == INF, -INF, lse)
    if sinks is None:
        return lse
    of_rows = _of_rows(sinks, shift, lse)
    with_sink = torch.logaddexp(lse, of_rows)
    weight = torch.where(lse == -INF, 0.0, torch.exp(lse - with_sink))
    out.mul_(weight.transpose(-1, -2)[..., None].to(torch.promote_types(out.dtype, torch.float32)))
    return with_sink


def without_rows_behind(lse, cu_seqlens_q):
    """lse ``[h, rows]`` of packed sequences with sinks: rows that belong to no sequence have no sink, and get -inf."""
    rows = torch.arange(lse.shape[-1], device=lse.device)
    return torch.where(rows < cu_seqlens_q[-1], lse, -INF)


def gradient_of_sinks(sinks, out, lse, dout, dlse, softmax_d=None, shift=None, cu_seqlens_q=None):
    """The sum over rows of ``exp(sink - lse') (dlse' - dout'.out')``.

    softmax_d: ``dout'.out' - dlse'`` as the backward wrote it, perhaps with further rows; None: it was not computed.
    shift: was subtracted from the scores of a row. Beside softmax_d rows behind the last of cu_seqlens_q do not count.
    """
    if sinks.dim() == 1 and is_unseen():
        delta, ends = (_delta(out, dout, dlse), None) if softmax_d is None else (softmax_d, cu_seqlens_q)
        found = flash_attn_2_cuda.gradient_of_sinks(sinks, lse, delta, shift, ends)
        if found is not None:
            return found
    probability = torch.where(lse.isinf(), 0.0, torch.exp(_of_rows(sinks, shift, lse) - lse))
    rows = torch.where(probability == 0, 0.0, -probability * _delta(out, dout, dlse))
    if sinks.dim() > 1:
        return rows.sum_to_size(sinks.shape).to(sinks.dtype)
    return rows.sum([dim for dim in range(rows.dim()) if dim != rows.dim() - 2]).to(sinks.dtype)


def _delta(out, dout, dlse):
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse
