"""The operators between two blocks of a transformer, for either norm, with the fused kernels' names and arguments:

    r = dropout(x0 * rowscale * layerscale) + residual        y = norm(r) * weight + bias

``rowscale`` is a factor per row, ``layerscale`` one per column. ``ops.layer_norm`` and ``ops.rms_norm`` bind the norm.
"""

from typing import Optional, Union

import torch
import torch.nn as nn
from torch import Tensor

from flash_attn._types import Device
from flash_attn.ops.triton.layer_norm import dropout_and_mask, layer_norm_fn

__all__ = ["DropoutAddNorm", "dropout_add_norm", "dropout_add_norm_parallel_residual", "dropout_add_norm_subset"]


def dropout_add_norm(
    x0: Tensor,
    residual: Optional[Tensor],
    weight: Tensor,
    bias: Optional[Tensor],
    dropout_p: float,
    epsilon: float,
    rowscale: Optional[Tensor] = None,
    layerscale: Optional[Tensor] = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    is_rms_norm: bool,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """Drop out, add and normalise.

    Args:
        x0: ``[..., n]``, any floating dtype.
        residual: of the shape of x0, any floating dtype, or None.
        weight, bias: ``[n]``; bias may be None.
        dropout_p: probability to drop a value of x0. The kept values grow by ``1 / (1 - dropout_p)``. The mask comes
            from torch's default generator of the device.
        epsilon: added to the variance, or to the mean square of RMS norm.
        rowscale, layerscale: ``[...]`` and ``[n]`` factors of x0, or None.
        prenorm: also return r.
        residual_in_fp32: without a residual, r is fp32; otherwise r has the residual's dtype.
        return_dropout_mask: also return the mask.
        is_rms_norm: RMS norm instead of layer norm.
    Returns:
        y, then r and the mask if requested. A single value is not a tuple.
        y: ``[..., n]`` in the dtype of x0.
        r: ``[..., n]`` in the dtype of the residual. Without a residual, fp32 or the dtype of x0.
        mask: uint8 ``[..., n]``, 1 for kept values. All are 1 if dropout_p is 0.
    Raises:
        AssertionError: the shapes of x0 and the residual differ.
        RuntimeError: weight is not ``[n]``; for layer norm also if bias is not.
    Gradients for x0, residual, rowscale, layerscale, weight and bias.
    Source: layer norm, arXiv 1607.06450; RMS norm, arXiv 1910.07467. Names and arguments are those of upstream's
    ``flash_attn.ops.layer_norm``.

    >>> x0, weight = torch.randn(2, 5, 8), torch.ones(8)
    >>> y, mask = dropout_add_norm(x0, None, weight, None, 0.5, 1e-5, return_dropout_mask=True, is_rms_norm=True)
    >>> y.shape, mask.dtype
    (torch.Size([2, 5, 8]), torch.uint8)
    """
    y, r, mask, _ = layer_norm_fn(
        _scale_columns(x0, layerscale),
        weight,
        bias,
        residual,
        eps=epsilon,
        dropout_p=dropout_p,
        rowscale=rowscale,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=True,
        out_dtype=x0.dtype,
    )
    return _results(
        (y,), r.to(_residual_dtype(x0, residual, residual_in_fp32)), (mask,), x0, prenorm, return_dropout_mask
    )


def dropout_add_norm_subset(
    x0: Tensor,
    residual: Optional[Tensor],
    weight: Tensor,
    bias: Optional[Tensor],
    dropout_p: float,
    epsilon: float,
    layerscale: Optional[Tensor] = None,
    x0_subset: Optional[Tensor] = None,
    out_subset: Optional[Tensor] = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    is_rms_norm: bool,
) -> Union[Tensor, tuple[Tensor, ...]]:
    """``dropout_add_norm`` if x0 holds only some rows and only some results are needed (stochastic depth).

    Args:
        x0: ``[k, ..., n]``. All results have these dimensions behind the first one.
        residual: ``[m, ..., n]`` or None.
        x0_subset: ``[m, ...]`` integers. For each row of the residual, 1 + the row of x0, or 0 for no row. None if x0
            has all rows; then m is k.
        out_subset: ``[m, ...]`` integers. For each row of the residual, 1 + the row of y, or 0 for no result. None: all
            results.
        rowscale_const: factor of x0.
        out_numrows: rows of y, each of n numbers, if ``out_subset`` is given.
        The others: see ``dropout_add_norm``.
    Returns:
        y, then r and the mask if requested. A single value is not a tuple.
        y: ``[m, ..., n]`` in the dtype of x0. With out_subset there are out_numrows rows. Rows that out_subset does not
            name are 0.
        r: ``[m, ..., n]`` in the dtype of the residual. Without a residual, fp32 or the dtype of x0.
        mask: uint8 ``[k, ..., n]``, 1 for kept values.
    Raises:
        AssertionError: out_numrows does not fill the dimensions behind the first one, or the residual does not fit.
        RuntimeError: weight or bias does not fit as above, or x0_subset does not fill the dimensions behind the first
            one.
        IndexError: on CPU, a subset names a row that does not exist.
    Gradients for x0, residual, layerscale, weight and bias.
    Source: stochastic depth, arXiv 1603.09382; the others as of ``dropout_add_norm``.

    >>> x0, weight, subset = torch.randn(3, 8), torch.ones(8), torch.tensor([1, 0, 2])
    >>> y = dropout_add_norm_subset(
    ...     x0, None, weight, None, 0.0, 1e-5, out_subset=subset, out_numrows=2, is_rms_norm=False
    ... )
    >>> y.shape
    torch.Size([2, 8])
    """
    inner = x0.shape[1:]
    assert out_subset is None or out_numrows % max(inner[:-1].numel(), 1) == 0, (
        f"out_numrows is {out_numrows}, but x0 {tuple(x0.shape)} allows multiples of {inner[:-1].numel()} only"
    )
    x, mask = dropout_and_mask(_scale_columns(x0, layerscale) * rowscale_const, dropout_p)
    if x0_subset is not None:
        x = _rows(x, x0_subset).reshape(-1, *inner)
    y, r = layer_norm_fn(
        x, weight, bias, residual, eps=epsilon, prenorm=True, is_rms_norm=is_rms_norm, out_dtype=x0.dtype
    )
    if out_subset is not None:
        # Row 0 takes all rows without a result, and is cut off.
        y = y.new_zeros(1 + out_numrows, y.shape[-1]).index_copy(0, out_subset.flatten().long(), y.flatten(0, -2))
        y = y[1:].reshape(-1, *inner)
    return _results(
        (y,), r.to(_residual_dtype(x0, residual, residual_in_fp32)), (mask,), x0, prenorm, return_dropout_mask
    )


def dropout_add_norm_parallel_residual(
    x0: Tensor,
    x1: Optional[Tensor],
    residual: Optional[Tensor],
    weight0: Tensor,
    bias0: Optional[Tensor],
    weight1: Optional[Tensor],
    bias1: Optional[Tensor],
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
    *,
    is_rms_norm: bool,
) -> tuple[Optional[Tensor], ...]:
    """r = dropout(x0) + dropout(x1) + residual, and two norms of it.

    Args:
        x0: ``[..., n]``, any floating dtype.
        x1, residual: of the shape of x0, or None.
        weight0, bias0: ``[n]`` of the first norm; bias0 may be None.
        weight1, bias1: ``[n]`` of the second norm, or None.
        dropout_p: applied to x0 and x1, each with its own mask.
        The others: see ``dropout_add_norm``.
    Returns:
        (y0, y1), then r and the two masks if requested.
        y0, y1: ``[..., n]`` in the dtype of x0. Without weight1, y1 is None.
        r: ``[..., n]`` in the dtype of the residual. Without a residual, fp32 (fp64 for fp64) or the dtype of x0.
        masks: uint8 ``[..., n]`` for x0 and for x1, 1 for kept values. All are 1 without dropout or without x1.
    Raises:
        AssertionError: the shape of x1 or of the residual is not that of x0.
        RuntimeError: a weight is not ``[n]``; for layer norm also if a bias is not.
    Gradients for x0, x1, residual, weight0, bias0, weight1 and bias1.
    Source: as of ``dropout_add_norm``.

    >>> x0, weight = torch.randn(5, 8), torch.ones(8)
    >>> y0, y1, r = dropout_add_norm_parallel_residual(
    ...     x0, x0, x0, weight, None, weight, None, 0.0, 1e-5, prenorm=True, is_rms_norm=True
    ... )
    >>> torch.equal(y0, y1), torch.allclose(r, 3 * x0)
    (True, True)
    """
    y0, *y1, r, mask0, mask1 = layer_norm_fn(
        x0,
        weight0,
        bias0,
        residual,
        x1,
        weight1,
        bias1,
        epsilon,
        dropout_p,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=True,
    )
    outputs = (y0, y1[0] if y1 else None)
    return _results(outputs, r, (mask0, mask1), x0, prenorm, return_dropout_mask)


class DropoutAddNorm(nn.Module):
    """``dropout_add_norm`` with its parameters; the subclasses say which norm.

    Args:
        hidden_size: n, the length of weight and bias. The weight starts as 1 and the bias as 0. RMS norm has no bias.
        prenorm: return (y, r) instead of y.
        p: dropout probability. Dropout acts in training mode only.
        eps: added to the variance, or to the mean square of RMS norm.
        residual_in_fp32: without a residual, r is fp32; otherwise r has the residual's dtype.
        device, dtype: of the parameters.

    >>> class Norm(DropoutAddNorm):
    ...     is_rms_norm = True
    >>> Norm(8, p=0.1)(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """

    is_rms_norm = None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.prenorm, self.p, self.eps, self.residual_in_fp32 = prenorm, p, eps, residual_in_fp32
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        bias = None if self.is_rms_norm else nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Optional[Tensor] = None) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """x0 and residual ``[..., n]``; residual may be None.

        Returns:
            y ``[..., n]`` in the dtype of x0, or (y, r) with ``prenorm``; see ``dropout_add_norm``, also for the
            errors.
        Gradients for x0, residual and the parameters.
        """
        return dropout_add_norm(
            x0,
            residual,
            self.weight,
            self.bias,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
            is_rms_norm=self.is_rms_norm,
        )


def _rows(x, subset):
    """The rows of ``[..., n]`` that ``subset`` names, counted from 1. A row is zero where ``subset`` is 0."""
    rows = torch.cat([x.new_zeros(1, x.shape[-1]), x.flatten(0, -2)])
    return rows.index_select(0, subset.flatten().long())


def _scale_columns(x0, layerscale):
    """x0 * layerscale, in fp32 at least."""
    x = x0.to(torch.promote_types(x0.dtype, torch.float32))
    return x if layerscale is None else x * layerscale


def _residual_dtype(x0, residual, residual_in_fp32):
    return residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x0.dtype


def _results(outputs, residual, masks, x0, prenorm, return_dropout_mask):
    """Returns the outputs, then the residual and the masks if requested. A single value is not a tuple."""
    if prenorm:
        outputs += (residual,)
    if return_dropout_mask:
        outputs += tuple(torch.ones_like(x0, dtype=torch.uint8) if m is None else m.byte() for m in masks)
    return outputs if len(outputs) > 1 else outputs[0]
