"""RMS norm under the names of the fused kernels; see ``ops.dropout_add_norm``."""

from typing import Optional, Union

import torch
import torch.nn as nn
from torch import Tensor

from flash_attn._types import Device
from flash_attn.ops.dropout_add_norm import (
    DropoutAddNorm,
    dropout_add_norm,
    dropout_add_norm_parallel_residual,
    dropout_add_norm_subset,
)
from flash_attn.ops.layer_norm import (
    DropoutAddLayerNormFn,
    DropoutAddLayerNormParallelResidualFn,
    DropoutAddLayerNormSubsetFn,
)
from flash_attn.ops.triton.layer_norm import rms_norm_fn

__all__ = [
    "DropoutAddLayerNormFn",
    "DropoutAddLayerNormParallelResidualFn",
    "DropoutAddLayerNormSubsetFn",
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
    "dropout_add_rms_norm_subset",
    "rms_norm",
]


def dropout_add_rms_norm(
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
) -> Union[Tensor, tuple[Tensor, ...]]:
    """Dropout, residual add and RMS norm: ``dropout_add_norm``.

    Args:
        x0: ``[..., n]``; ``residual`` likewise or None.
        weight, bias: ``[n]``; bias may be None.
        The others: see ``ops.dropout_add_norm.dropout_add_norm``, also for errors and gradients.
    Returns:
        y in the dtype of x0. With ``prenorm`` r follows, with ``return_dropout_mask`` the uint8 mask.

    >>> x0, residual, weight = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.ones(8)
    >>> y = dropout_add_rms_norm(x0, residual, weight, None, 0.0, 1e-5)
    >>> torch.allclose(y, torch.nn.functional.rms_norm(x0 + residual, (8,), eps=1e-5), atol=1e-6)
    True
    """
    return dropout_add_norm(
        x0,
        residual,
        weight,
        bias,
        dropout_p,
        epsilon,
        rowscale,
        layerscale,
        prenorm,
        residual_in_fp32,
        return_dropout_mask,
        is_rms_norm=True,
    )


def dropout_add_rms_norm_subset(
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
) -> Union[Tensor, tuple[Tensor, ...]]:
    """The same for some rows only: ``dropout_add_norm_subset``.

    Args:
        x0: ``[k, ..., n]``. residual: ``[m, ..., n]`` or None.
        x0_subset: ``[m, ...]`` integers. For each row of the residual, 1 + the row of x0, or 0 for no row.
        out_subset: ``[m, ...]`` integers. For each row of the residual, 1 + the row of y, or 0 for no result.
        out_numrows: rows of y, if ``out_subset`` is given.
        The others: see ``ops.dropout_add_norm.dropout_add_norm_subset``, also for errors and gradients.
    Returns:
        y in the dtype of x0. With ``prenorm`` r follows, with ``return_dropout_mask`` the uint8 mask of x0.

    >>> x0, residual, weight = torch.randn(2, 8), torch.randn(3, 8), torch.ones(8)
    >>> subset = torch.tensor([1, 0, 2])  # the second row of the residual has no result
    >>> dropout_add_rms_norm_subset(residual, None, weight, None, 0.0, 1e-5, out_subset=subset, out_numrows=2).shape
    torch.Size([2, 8])
    """
    return dropout_add_norm_subset(
        x0,
        residual,
        weight,
        bias,
        dropout_p,
        epsilon,
        layerscale,
        x0_subset,
        out_subset,
        rowscale_const,
        out_numrows,
        prenorm,
        residual_in_fp32,
        return_dropout_mask,
        is_rms_norm=True,
    )


def dropout_add_rms_norm_parallel_residual(
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
) -> tuple[Optional[Tensor], ...]:
    """The same for two inputs and two norms: ``dropout_add_norm_parallel_residual``.

    Args:
        x0: ``[..., n]``; ``x1`` and ``residual`` likewise or None.
        weight0, bias0, weight1, bias1: ``[n]`` of the two norms. All except weight0 may be None.
        The others: see ``ops.dropout_add_norm.dropout_add_norm_parallel_residual``, also for errors and gradients.
    Returns:
        (y0, y1) in the dtype of x0; without weight1, y1 is None. With ``prenorm`` r follows, with
        ``return_dropout_mask`` two uint8 masks.

    >>> x0, x1, weight = torch.randn(5, 8), torch.randn(5, 8), torch.ones(8)
    >>> y0, y1 = dropout_add_rms_norm_parallel_residual(x0, x1, None, weight, None, 2 * weight, None, 0.0, 1e-5)
    >>> torch.allclose(y1, 2 * y0)
    True
    """
    return dropout_add_norm_parallel_residual(
        x0,
        x1,
        residual,
        weight0,
        bias0,
        weight1,
        bias1,
        dropout_p,
        epsilon,
        prenorm,
        residual_in_fp32,
        return_dropout_mask,
        is_rms_norm=True,
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``[..., n]`` divided by the root of its mean square over the last dimension, times weight.

    Args:
        x: ``[..., n]``, any floating dtype.
        weight: ``[n]``.
        epsilon: added to the mean square.
    Returns:
        ``[..., n]`` in the dtype of x.
    Raises:
        RuntimeError: weight is not ``[n]``.
    Gradients for x and weight.
    Source: arXiv 1910.07467.

    >>> rms_norm(torch.tensor([3.0, 3.0, 3.0]), torch.ones(3), 0.0)
    tensor([1., 1., 1.])
    """
    return rms_norm_fn(x, weight, None, eps=epsilon)


class RMSNorm(nn.Module):
    """``rms_norm`` with its weight.

    Args:
        hidden_size: n, the length of the weight, which starts as 1. There is no bias.
        eps: added to the mean square.
        device, dtype: of the weight.

    >>> RMSNorm(8)(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: Device = None, dtype: Optional[torch.dtype] = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., n]`` -> ``[..., n]`` in the dtype of x. Gradients for x and the weight."""
        return rms_norm(x, self.weight, self.eps)


class DropoutAddRMSNorm(DropoutAddNorm):
    """Dropout, residual add and RMS norm.

    Arguments, results and errors are those of ``ops.dropout_add_norm.DropoutAddNorm``. There is a weight and no bias.

    >>> norm = DropoutAddRMSNorm(8, prenorm=True, residual_in_fp32=True)
    >>> y, r = norm(torch.randn(5, 8, dtype=torch.bfloat16))
    >>> y.dtype, r.dtype
    (torch.bfloat16, torch.float32)
    """

    is_rms_norm = True
