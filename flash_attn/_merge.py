"""``merge_attention``: attention over parts of the keys becomes attention over all of them."""

from collections.abc import Sequence

import torch

from flash_attn._arguments import has_distributed
from flash_attn._dispatch import check_not_traced, transforms_are_active
from flash_attn._ops import (
    NO_JVP,
    check_layout,
    check_storage,
    check_tensor,
    forget_own_kernels,
    register_gradient,
    register_once,
)
from flash_attn._vmap import entries, parted

_combine = torch.ops.flash_attn._combine.default


def _combine_fake(out_partial, lse_partial, out_dtype=None):
    b, num_rows, h = lse_partial.shape[1:]
    out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype or torch.float32)
    return out, out_partial.new_empty((b, h, num_rows), dtype=torch.float32).transpose(1, 2)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx, dout, dlse):
    """The derivative of lse = log sum_i exp(lse_i) and out = sum_i p_i out_i, with p_i = exp(lse_i - lse):

        dout_i = p_i dout,  dlse_i = p_i (dlse + s_i - sum_j p_j s_j),  s_i = dout.out_i

    A softmax of the lses has all digits of p_i, where a large lse has lost them. A part that counts for nothing has
    gradients of 0, whatever it holds. Second derivatives exist.
    """
    outs, lses = ctx.saved_tensors
    is_used = lses.isfinite() | lses.isnan()
    top = torch.where(is_used, lses, -torch.inf).detach().amax(0)
    weights = torch.where(is_used, lses - torch.where(top == -torch.inf, 0, top), -torch.inf).exp()
    total = weights.sum(0)
    p = torch.where(is_used, weights / torch.where(total == 0, 1, total), 0)
    s = (dout.float() * torch.where(is_used[..., None], outs, 0)).sum(-1)
    dlses = p * (dlse + s - (p * s).sum(0))
    return p[..., None] * dout.float(), torch.where(is_used, dlses, 0), None


class _Combine(torch.autograd.Function):
    """The op with rules for the transforms of torch.func."""

    @staticmethod
    def forward(outs, lses, dtype):
        return _combine(outs, lses, dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    def vmap(info, in_dims, outs, lses, dtype):
        """Entries join the batch, which is the second dimension."""
        return _vmap_of_combine(_Combine.apply, info, in_dims, outs, lses, dtype)


def _vmap_of_combine(apply, info, in_dims, outs, lses, dtype):
    num = info.batch_size
    outs, lses = (entries(x, dim, num).transpose(0, 1) for x, dim in zip((outs, lses), in_dims))
    b = outs.shape[2]
    outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    lses = lses.transpose(-1, -2).contiguous().transpose(-1, -2)  # the op wants neighbouring rows
    return tuple(parted(x, num, b) for x in apply(outs.contiguous(), lses, dtype)), (0, 0)


def _rule_of_op(info, in_dims, out_partial, lse_partial, out_dtype=None):
    return _vmap_of_combine(_combine, info, in_dims, out_partial, lse_partial, out_dtype)


def _register():
    torch.library.register_fake("flash_attn::_combine", _combine_fake)
    register_gradient("flash_attn::_combine", _gradients, _save)
    if hasattr(torch.library, "register_vmap"):  # torch 2.5
        torch.library.register_vmap("flash_attn::_combine", _rule_of_op)
    forget_own_kernels(["_combine"], ("Meta", "Autograd", "FuncTorchBatched"))


register_once("fake and gradient of _combine", _register)


def _check(outs, lses):
    if not isinstance(outs, (list, tuple)) or not isinstance(lses, (list, tuple)):
        name, given = ("outs", outs) if not isinstance(outs, (list, tuple)) else ("lses", lses)
        raise TypeError(f"{name} must be a list of tensors; it is of type {type(given).__name__}")
    if len(outs) != len(lses):
        raise RuntimeError(f"lses must have a tensor for each tensor of outs; outs has {len(outs)}, lses {len(lses)}")
    if not outs or len(outs) > 256:
        raise RuntimeError(f"outs and lses must have 1 to 256 tensors each; they have {len(outs)}")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        check_tensor(f"outs[{i}]", out)
        check_tensor(f"lses[{i}]", lse)
        if out.dtype not in (torch.float32, torch.float16, torch.bfloat16) or lse.dtype != torch.float32:
            raise RuntimeError(
                f"outs must be fp32, fp16 or bf16, and lses fp32; outs[{i}] is {out.dtype}, lses[{i}] {lse.dtype}"
            )
        if out.dim() not in (3, 4):
            raise RuntimeError(f"outs[{i}] must be [b, len, h, d] or [total, h, d]; it has shape {tuple(out.shape)}")
        check_layout(f"outs[{i}]", out, *outs[0].shape)
        check_layout(f"lses[{i}]", lse, *outs[0].shape[:-3], outs[0].shape[-2], outs[0].shape[-3])
        for name, x in ((f"outs[{i}]", out), (f"lses[{i}]", lse)):
            check_storage(name, x)
            if x.device != outs[0].device or (x is out and out.dtype != outs[0].dtype):
                raise RuntimeError(
                    f"{name} must have the device and dtype of outs[0], {outs[0].device} and {outs[0].dtype}; it is on "
                    f"{x.device} and is {x.dtype}"
                )


def merge_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the same queries over parts of the keys becomes attention over all keys.

        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) out_i

    Args:
        outs: a list of up to 256 tensors ``[b, len_q, h, d]``, or packed ``[total_q, h, d]``, in fp32, fp16 or bf16.
            All have one shape, dtype and device.
        lses: for each of them its lse in natural units, fp32 ``[b, h, len_q]`` or ``[h, total_q]``, as
            ``return_lse=True`` gives it. A row whose lse is infinite, of either sign, saw no key of its part and counts
            for nothing.
    Returns:
        ``(out, lse)`` of these shapes; out has the dtype of outs and is rounded once, from fp32. Where no part saw a
        key, out is 0 and lse -inf. A NaN in an lse makes its row NaN.
    Raises:
        TypeError, RuntimeError: the message names the argument that does not fit.
    Gradients for all outs and lses, through out and lse. With ``return_lse=True`` they are those of attention over all
    keys.
    Source: section 3.1.2 of FlashAttention-2 (https://arxiv.org/abs/2307.08691) combines parts by these formulas.

    >>> q, k, v = torch.randn(3, 1, 6, 2, 8)
    >>> parts = [flash_attn_func(q, k[:, x], v[:, x], return_lse=True) for x in (slice(0, 4), slice(4, 6))]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> torch.allclose(out, flash_attn_func(q, k, v), atol=1e-6)
    True
    """
    _check(outs, lses)
    is_packed = outs[0].dim() == 3
    if has_distributed((*outs, *lses)):
        from flash_attn import _distributed  # imports torch.distributed.tensor, which a plain call does not need

        return _distributed.merge(merge_attention, outs, lses)
    parts, lse_parts = torch.stack([x.float() for x in outs]), torch.stack(list(lses))
    if is_packed:
        parts, lse_parts = parts[:, None], lse_parts[:, None]
    combine = _combine
    if transforms_are_active():
        check_not_traced()
        combine = _Combine.apply
    out, lse = combine(parts, lse_parts.transpose(-1, -2), outs[0].dtype)
    lse = lse.transpose(-1, -2)
    return (out[0], lse[0]) if is_packed else (out, lse)
