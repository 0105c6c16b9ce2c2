"""The epilogue of learned sinks, and its gradient. A sink is one more key of score ``sink`` and value 0.

out' = out exp(lse - lse'),  lse' = log(exp(lse) + exp(sink))

sinks has a number for each head, or for each head and row. The gradient has the same shape.
"""

import flash_attn_2_cuda
import torch

from flash_attn._dispatch import transforms_are_active

INF = float("inf")


def _of_rows(sinks):
    return sinks.float() if sinks.dim() > 1 else sinks.float()[:, None]


def add_sinks(out, lse, sinks):
    """Adds a key of the sink's score and value 0. out is written. Returns lse'. A row that saw no key keeps out 0."""
    with_sink = torch.logaddexp(lse, _of_rows(sinks))
    weight = torch.where(lse == -INF, 0.0, torch.exp(lse - with_sink))
    out.mul_(weight.transpose(-1, -2)[..., None].to(torch.promote_types(out.dtype, torch.float32)))
    return with_sink


def gradient_of_sinks(sinks, out, lse, dout, dlse):
    """The sum over rows of ``exp(sink - lse') (dlse' - dout'.out')``."""
    if sinks.dim() == 1 and not (torch.compiler.is_compiling() or transforms_are_active()):
        found = flash_attn_2_cuda.gradient_of_sinks(sinks, out, lse, dout, dlse)
        if found is not None:
            return found
    probability = torch.where(lse.isinf(), 0.0, torch.exp(_of_rows(sinks) - lse))
    addend = -(dout.float() * out.float()).sum(-1).transpose(-1, -2)
    if dlse is not None:
        addend = addend + dlse
    rows = torch.where(probability == 0, 0.0, probability * addend)
    if sinks.dim() > 1:
        return rows.sum_to_size(sinks.shape).to(sinks.dtype)
    return rows.sum([dim for dim in range(rows.dim()) if dim != rows.dim() - 2]).to(sinks.dtype)
