"""Learned sinks behind a call, and their gradient. A sink is one more key of score ``sink`` and value 0.

out' = out / (1 + exp(sink - lse)),  lse' = log(exp(lse) + exp(sink))

Kernels add sinks where they end a row. Here lse, rounded to fp32, is all that is known of a row. sinks has a number for
each head, and so has its gradient. C computes both in eager mode (csrc/torch/options.c).
"""

import flash_attn_2_cuda
import torch

from flash_attn._dispatch import is_unseen
from flash_attn._imagined import is_on_cpu

INF = float("inf")


def _wide(like):
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def add_sinks(out, lse, sinks, wants_probability=False):
    """Adds a key of the sink's score and value 0. Returns out', lse', and of each row the sink's probability or None.

    out and lse may be written, unless PyTorch watches ops: then they are results of an op, which a checkpoint may keep.
    A row that saw no key keeps out 0. sinks None: only lse of such a row changes, from inf to -inf.
    """
    if is_unseen() and not torch._C._is_tracing() and not (wants_probability and is_on_cpu(out)):
        if flash_attn_2_cuda.add_sinks(out, lse, sinks):
            return out, lse, None
    lse = torch.where(lse == INF, -INF, lse)
    if sinks is None:
        return out, lse, None
    of_heads, of_keys = sinks.to(_wide(out))[:, None], lse.to(_wide(out))
    above = of_heads - of_keys
    share = torch.where(lse == -INF, 0.0, torch.sigmoid(-above)).transpose(-1, -2)[..., None]
    with_sink = torch.logaddexp(of_keys, of_heads).float()
    probability = torch.where(with_sink.isinf(), 0.0, torch.sigmoid(above)).float()
    return (out * share).to(out.dtype), with_sink, probability


def _are_used(cu_seqlens_q, rows):
    return torch.arange(rows, device=cu_seqlens_q.device) < cu_seqlens_q[-1]


def without_rows_behind(lse, cu_seqlens_q):
    """lse ``[h, rows]`` of packed sequences with sinks: rows that belong to no sequence have no sink, and get -inf."""
    return torch.where(_are_used(cu_seqlens_q, lse.shape[-1]), lse, -INF)


def gradient_of_sinks(
    sinks, out, lse, dout, dlse, softmax_d=None, shift=None, cu_seqlens_q=None, probability=None
):  # fmt: skip
    """The sum over rows of the sink's probability times ``dlse' - dout'.out'``.

    softmax_d: ``dout'.out' - dlse'`` as the backward wrote it, perhaps with further rows; None: it was not computed.
    shift: fp32 ``[b, h, rows]``, or 1 in place of a size, was subtracted from the scores of a row. Rows behind the last
    of cu_seqlens_q do not count. probability: None or empty if nobody kept it; then it is ``exp(sink - lse')``.
    """
    if probability is not None and probability.numel() == 0:
        probability = None
    if is_unseen():
        delta = _delta(out, dout, dlse).float() if softmax_d is None else softmax_d
        found = flash_attn_2_cuda.gradient_of_sinks(sinks, lse, delta, shift, cu_seqlens_q, probability)
        if found is not None:
            return found
    if probability is None:
        of_rows = sinks.to(_wide(out))[:, None]
        of_rows = of_rows if shift is None else of_rows - shift.reshape(shift.shape[-lse.dim() :])
        probability = torch.where(lse.isinf(), 0.0, torch.exp(of_rows - lse))
    if cu_seqlens_q is not None:
        probability = torch.where(_are_used(cu_seqlens_q, lse.shape[-1]), probability, 0.0)
    rows = torch.where(probability == 0, 0.0, -probability * _delta(out, dout, dlse))
    return rows.sum([dim for dim in range(rows.dim()) if dim != rows.dim() - 2]).to(sinks.dtype)


def _delta(out, dout, dlse):
    delta = (dout.to(_wide(out)) * out.to(_wide(out))).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse
