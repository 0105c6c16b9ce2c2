"""``flash_attn_combine`` and its gradient."""

from typing import Optional

import torch
from torch import Tensor

from flash_attn_3._arguments import call_named, call_op, has_distributed
from flash_attn_3._ops import ops, register_gradient, register_once

_combine_op = ops._combine.default


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx, dout, dlse):
    """Differentiates the formula of ``flash_attn_combine``. w is the weight of a part, lse that of the result:

        w_i = exp(lse_i - lse),  dout_i = w_i dout,  dlse_i = w_i (dlse + dout.out_i - sum_j w_j dout.out_j)

    These are PyTorch's operators, so second derivatives exist. A part that counts for nothing has a gradient of 0,
    whatever it holds. A softmax of the lses has all digits of w_i, where a large lse has lost them.
    """
    parts, lse_parts = ctx.saved_tensors
    if parts.shape[0] == 0:
        return parts * 0, lse_parts * 0, None
    counts = ~lse_parts.isinf()
    top = torch.where(counts, lse_parts, -torch.inf).detach().amax(0)
    weights = torch.where(counts, lse_parts - torch.where(top == -torch.inf, 0, top), -torch.inf).exp()
    total = weights.sum(0)
    weights = torch.where(counts, weights / torch.where(total == 0, 1, total), 0)
    products = (torch.where(counts[..., None], parts, 0) * dout).sum(-1)
    dlse = dlse + products - (weights * products).sum(0)
    return weights[..., None] * dout, weights * dlse, None


register_once("formula of _combine", register_gradient, _combine_op, _gradients, _save)


def _copy_to(out, combined):
    """Writes out so that autograd records it. No op that writes out could have a gradient."""
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("out is written and must not require grad while gradients are recorded: detach it")
    if out.shape != combined.shape or out.dtype != combined.dtype:
        raise RuntimeError(
            f"out must have shape {tuple(combined.shape)} and dtype {combined.dtype}; it has {tuple(out.shape)} and "
            f"{out.dtype}"
        )
    return out.copy_(combined)


def _combine(out_partial, lse_partial, out, out_dtype):
    if has_distributed((out_partial, lse_partial, out)):
        from flash_attn_3 import _distributed

        return _distributed.combine(flash_attn_combine, out_partial, lse_partial, out, out_dtype)
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    records = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (out_partial, lse_partial)
    )
    if not (is_traced or records):  # this op takes half as long, because autograd ignores it
        return tuple(call_op(ops.fwd_combine.default, out_partial, lse_partial, out, out_dtype))
    combined, lse = call_op(_combine_op, out_partial, lse_partial, out_dtype)
    return (combined if out is None else _copy_to(out, combined)), lse


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Optional[Tensor] = None, out_dtype: Optional[torch.dtype] = None
) -> tuple[Tensor, Tensor]:
    """Combines partial results over different keys of the same queries into the result over all keys.

        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) out_i

    Args:
        out_partial: fp32 ``[n, b, len, h, d]``, last dimension contiguous; n is at most 256.
        lse_partial: fp32 ``[n, b, len, h]`` with rows (the dimension of len) side by side in memory. A part whose lse
            is infinite, of either sign, saw no key and counts for nothing.
        out: ``[b, len, h, d]`` to write; None: a new tensor. It must not require grad while gradients are recorded.
        out_dtype: fp32 (the default), fp16 or bf16.
    Returns:
        ``(out, lse)``: lse is fp32 ``[b, len, h]``, a transposed view of memory ``[b, h, len]``. If every part has an
        infinite lse, out is 0 and lse is -inf. A NaN in lse_partial makes the row NaN.
    Raises:
        RuntimeError, TypeError: the message names the argument that does not fit, what came and what is allowed.
    Gradients for out_partial and lse_partial, through out and lse. Upstream drops them without a word. NOTE: the
    softmax_lse of ``flash_attn_func`` carries no gradient. So gradients through parts that it computed lack a term.

    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> parts = [flash_attn_func(q, k[:, x], v[:, x], return_attn_probs=True) for x in (slice(0, 4), slice(4, 6))]
    >>> outs, lses = (torch.stack(x) for x in zip(*parts))
    >>> out, lse = flash_attn_combine(outs, lses.transpose(-1, -2))
    >>> torch.allclose(out, flash_attn_func(q, k, v), atol=1e-6)
    True
    """
    return call_named(
        lambda: _combine(out_partial, lse_partial, out, out_dtype),
        lambda: {"out_partial": out_partial, "lse_partial": lse_partial, "out": out, "out_dtype": out_dtype},
    )
