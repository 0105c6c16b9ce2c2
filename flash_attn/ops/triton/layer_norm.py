"""Layer norm and RMS norm together with the operators before them in a transformer block:

    r = dropout(x * rowscale) + dropout(x1) + residual         the new residual
    y = norm(r) * weight + bias,  y1 = norm(r) * weight1 + bias1

r is summed and normalised in fp32 (fp64 for fp64). The results are rounded once, y to its dtype and a returned residual
to the residual's dtype. Layer norm: (r - mean) / sqrt(var + eps). RMS norm: r / sqrt(mean(r^2) + eps).
Source: arXiv 1607.06450, arXiv 1910.07467.
"""

from typing import Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from flash_attn._types import Device

__all__ = [
    "LayerNormFn",
    "LayerNormLinearFn",
    "RMSNorm",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor] = None,
    x1: Optional[Tensor] = None,
    weight1: Optional[Tensor] = None,
    bias1: Optional[Tensor] = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Optional[Tensor] = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: Optional[torch.dtype] = None,
    out: Optional[Tensor] = None,
    residual_out: Optional[Tensor] = None,
) -> Union[Tensor, tuple[Optional[Tensor], ...]]:
    """Add, drop out and normalise.

    Args:
        x: ``[..., n]``, any floating dtype; ``x1`` and ``residual`` likewise, or None.
        weight, bias: ``[n]``. weight1 and bias1 give a second output of the same normalised rows. All except weight may
            be None.
        eps: added to the variance, or to the mean square of RMS norm.
        dropout_p: applied to x and x1, each with its own mask.
        rowscale: ``[...]``, multiplies the rows of x. It cannot be combined with x1.
        prenorm: also return the new residual.
        residual_in_fp32: without ``residual``, the new residual is fp32 (fp64 for fp64); otherwise it has the dtype of
            ``residual``.
        zero_centered_weight: weights are stored minus one.
        is_rms_norm: RMS norm instead of layer norm.
        return_dropout_mask: also return two bool masks, True for kept values. A mask is None if nothing was dropped.
        out_dtype: dtype of y and y1, by default the dtype of x.
        out, residual_out: memory for y and the new residual. The results then have the dtypes of this memory.
    Returns:
        y, then the requested ones of y1, the new residual and the two masks, ``[..., n]`` each. A single value is not a
        tuple. Without ``residual`` and residual_in_fp32 the new residual has the dtype of x.
    Raises:
        AssertionError: rowscale together with x1, or residual or x1 of another shape than x.
        RuntimeError: a weight is not ``[n]``; for layer norm also if a bias is not.
    Gradients for x, x1, residual, rowscale and the parameters.

    >>> x, residual, weight, bias = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.ones(8), torch.zeros(8)
    >>> y, r = layer_norm_fn(x, weight, bias, residual, prenorm=True, eps=1e-5)
    >>> torch.allclose(y, torch.nn.functional.layer_norm(x + residual, (8,)), atol=1e-6), torch.equal(r, x + residual)
    (True, True)
    """
    assert x1 is None or rowscale is None, "rowscale is not supported together with x1"
    for name, other in (("residual", residual), ("x1", x1)):
        assert other is None or other.shape == x.shape, f"{name} is {tuple(other.shape)}, x is {tuple(x.shape)}"
    dtype = torch.promote_types(x.dtype, torch.float32)
    r, mask = dropout_and_mask(
        x.to(dtype) if rowscale is None else x.to(dtype) * rowscale[..., None].to(dtype), dropout_p
    )
    mask1 = None
    if x1 is not None:
        dropped, mask1 = dropout_and_mask(x1.to(dtype), dropout_p)
        r = r + dropped
    if residual is not None:
        r = r + residual

    outputs = [_into(out, _normalize(r, weight, bias, eps, zero_centered_weight, is_rms_norm), out_dtype or x.dtype)]
    if weight1 is not None:
        y1 = _normalize(r, weight1, bias1, eps, zero_centered_weight, is_rms_norm)
        outputs.append(y1.to(out_dtype or x.dtype))
    if prenorm:
        residual_dtype = residual.dtype if residual is not None else dtype if residual_in_fp32 else x.dtype
        outputs.append(_into(residual_out, r, residual_dtype))
    if return_dropout_mask:
        outputs += [mask, mask1]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor] = None,
    x1: Optional[Tensor] = None,
    weight1: Optional[Tensor] = None,
    bias1: Optional[Tensor] = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Optional[Tensor] = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: Optional[torch.dtype] = None,
    out: Optional[Tensor] = None,
    residual_out: Optional[Tensor] = None,
) -> Union[Tensor, tuple[Optional[Tensor], ...]]:
    """``layer_norm_fn`` with the RMS norm.

    Arguments, results, errors and gradients are those of ``layer_norm_fn``, without is_rms_norm.
    Source: arXiv 1910.07467.

    >>> x, weight = torch.randn(5, 8), torch.zeros(8)
    >>> y = rms_norm_fn(x, weight, None, zero_centered_weight=True)
    >>> torch.allclose(y, torch.nn.functional.rms_norm(x, (8,), eps=1e-6), atol=1e-6)
    True
    """
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        zero_centered_weight,
        True,
        return_dropout_mask,
        out_dtype,
        out,
        residual_out,
    )


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Optional[Tensor],
    linear_weight: Tensor,
    linear_bias: Optional[Tensor],
    residual: Optional[Tensor] = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Returns ``linear(norm(x + residual))``, and with ``prenorm`` the new residual.

    Under autocast the normalised rows and the linear layer have autocast's dtype.

    Args:
        x: ``[..., n]``; ``residual`` likewise or None.
        norm_weight, norm_bias: ``[n]``; norm_bias may be None.
        linear_weight: ``[out, n]``, cast to the dtype of the output.
        linear_bias: ``[out]`` or None, cast likewise.
        The others: see ``layer_norm_fn``.
    Returns:
        ``[..., out]`` in the dtype of x, or autocast's. With ``prenorm`` (output, new residual ``[..., n]``).
    Raises:
        AssertionError: the shapes of x and residual differ.
        RuntimeError: the shape of a parameter does not fit; the message is PyTorch's.
    Gradients for x, residual and the parameters.

    >>> x, weight, linear = torch.randn(5, 8), torch.ones(8), torch.randn(3, 8)
    >>> y, r = layer_norm_linear_fn(x, weight, None, linear, None, residual=x, prenorm=True)
    >>> y.shape, r.shape
    (torch.Size([5, 3]), torch.Size([5, 8]))
    """
    device_type = x.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else x.dtype
    y, r = layer_norm_fn(
        x,
        norm_weight,
        norm_bias,
        residual,
        eps=eps,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        out_dtype=dtype,
    )
    y = F.linear(y, linear_weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype))
    return (y, r) if prenorm else y


class LayerNormFn:
    """``apply`` is ``layer_norm_fn``, with the same arguments. PyTorch's operators record the gradients.

    >>> x, weight = torch.randn(5, 8), torch.ones(8)
    >>> torch.equal(LayerNormFn.apply(x, weight, None), layer_norm_fn(x, weight, None))
    True
    """

    apply = staticmethod(layer_norm_fn)


class LayerNormLinearFn:
    """``apply`` is ``layer_norm_linear_fn``, with the same arguments. PyTorch's operators record the gradients.

    >>> LayerNormLinearFn.apply(torch.randn(5, 8), torch.ones(8), None, torch.randn(3, 8), None).shape
    torch.Size([5, 3])
    """

    apply = staticmethod(layer_norm_linear_fn)


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, with the residual add and dropout of ``rms_norm_fn``.

    Args:
        hidden_size: n, the length of the weight. There is no bias.
        eps: added to the mean square.
        dropout_p: dropout of x. Dropout acts in training mode only.
        zero_centered_weight: the weight is stored minus one and starts as 0. Otherwise it starts as 1.
        device, dtype: of the weight.

    >>> y, r = RMSNorm(8, dropout_p=0.1)(torch.randn(5, 8), residual=torch.randn(5, 8), prenorm=True)
    >>> y.shape, r.shape
    (torch.Size([5, 8]), torch.Size([5, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_weight = eps, zero_centered_weight
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1, or to 0 if it is stored minus one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Optional[Tensor] = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """x ``[..., n]``; residual likewise or None.

        Returns:
            y ``[..., n]`` in the dtype of x, or (y, new residual) with ``prenorm``. ``layer_norm_fn`` tells the dtype
            of the new residual.
        Raises:
            AssertionError: the shapes of x and residual differ.
        Gradients for x, residual and the weight.
        """
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor] = None,
    x1: Optional[Tensor] = None,
    weight1: Optional[Tensor] = None,
    bias1: Optional[Tensor] = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Optional[Tensor] = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Optional[Tensor] = None,
    dropout_mask1: Optional[Tensor] = None,
    upcast: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """The definition for tests, step by step in the dtype of x. With ``upcast``, in fp32 and y rounded at the end.

    The arguments are those of ``layer_norm_fn``. Given masks replace random masks. Returns y, then y1 and the new
    residual if requested. y and y1 have the dtype of x. With ``upcast`` the new residual is fp32.

    Args:
        dropout_mask, dropout_mask1: bool, of the shape of x, True for kept values of x and of x1, or None.
        upcast: compute in fp32.
    Raises:
        AssertionError: rowscale together with x1.
    Gradients for x, x1, residual, rowscale and the parameters.

    >>> x, weight, bias = torch.randn(5, 8), torch.randn(8), torch.randn(8)
    >>> torch.allclose(layer_norm_ref(x, weight, bias), layer_norm_fn(x, weight, bias), atol=1e-5)
    True
    """
    values = (x, weight, bias, residual, x1, weight1, bias1)
    return _norm_ref(
        _layer_norm_formula,
        values,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        zero_centered_weight,
        (dropout_mask, dropout_mask1),
        upcast,
    )


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor] = None,
    x1: Optional[Tensor] = None,
    weight1: Optional[Tensor] = None,
    bias1: Optional[Tensor] = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Optional[Tensor] = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Optional[Tensor] = None,
    dropout_mask1: Optional[Tensor] = None,
    upcast: bool = False,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """``layer_norm_ref`` with the RMS norm. Arguments, results, errors and gradients are the same.

    >>> x, weight = torch.randn(5, 8), torch.randn(8)
    >>> torch.allclose(rms_norm_ref(x, weight, None), rms_norm_fn(x, weight, None), atol=1e-5)
    True
    """
    values = (x, weight, bias, residual, x1, weight1, bias1)
    return _norm_ref(
        _rms_norm_formula,
        values,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        zero_centered_weight,
        (dropout_mask, dropout_mask1),
        upcast,
    )


def _layer_norm_formula(r, eps):
    centered = r - r.mean(-1, keepdim=True)
    return centered / torch.sqrt(centered.square().mean(-1, keepdim=True) + eps)


def _rms_norm_formula(r, eps):
    return r / torch.sqrt(r.square().mean(-1, keepdim=True) + eps)


def _norm_ref(formula, values, eps, dropout_p, rowscale, prenorm, zero_centered_weight, masks, upcast):
    dtype = values[0].dtype
    x, weight, bias, residual, x1, weight1, bias1 = (t.float() if upcast and t is not None else t for t in values)
    assert x1 is None or rowscale is None, "rowscale is not supported together with x1"
    if rowscale is not None:
        x = x * rowscale[..., None]
    x = _dropout_with(x, dropout_p, masks[0])
    if x1 is not None:
        x = x + _dropout_with(x1, dropout_p, masks[1])
    if residual is not None:
        x = (x + residual).to(x.dtype)
    outputs = []
    for w, b in ((weight, bias), (weight1, bias1)):
        if w is not None:
            y = formula(x, eps) * (w + 1.0 if zero_centered_weight else w)
            outputs.append((y if b is None else y + b).to(dtype))
    if prenorm:
        outputs.append(x)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _normalize(r, weight, bias, eps, zero_centered, is_rms_norm):
    """norm(r) * weight + bias in the dtype of r."""
    weight = weight.to(r.dtype) + 1.0 if zero_centered else weight.to(r.dtype)
    bias = None if bias is None else bias.to(r.dtype)
    if not is_rms_norm:
        return F.layer_norm(r, r.shape[-1:], weight, bias, eps)
    y = F.rms_norm(r, r.shape[-1:], weight, eps)
    return y if bias is None else y + bias


def dropout_and_mask(x: Tensor, p: float) -> tuple[Tensor, Optional[Tensor]]:
    """Returns (x with dropout, mask of the kept values). The mask is None if p is 0."""
    if p == 0.0:
        return x, None
    mask = torch.rand_like(x) >= p
    return _dropout_with(x, p, mask), mask


def _dropout_with(x, p, mask):
    if p == 0.0:
        return x
    return F.dropout(x, p) if mask is None else x.masked_fill(~mask, 0.0) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


def _into(out, value, dtype):
    """Returns ``value`` as ``dtype``, in the memory of ``out`` if ``out`` is given."""
    return value.to(dtype) if out is None else out.copy_(value)
