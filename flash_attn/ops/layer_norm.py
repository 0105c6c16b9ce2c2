"""Layer norm under the names of the fused kernels; see ``ops.dropout_add_norm``."""

from typing import Optional, Union

from torch import Tensor

from flash_attn.ops.dropout_add_norm import (
    DropoutAddNorm,
    dropout_add_norm,
    dropout_add_norm_parallel_residual,
    dropout_add_norm_subset,
)
from flash_attn.ops.triton.layer_norm import layer_norm_fn

__all__ = [
    "DropoutAddLayerNorm",
    "DropoutAddLayerNormFn",
    "DropoutAddLayerNormParallelResidualFn",
    "DropoutAddLayerNormSubsetFn",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "dropout_add_layer_norm_subset",
    "layer_norm",
]


def dropout_add_layer_norm(
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
    """Dropout, residual add and layer norm: ``dropout_add_norm``.

    Args:
        x0: ``[..., n]``; ``residual`` likewise or None.
        weight, bias: ``[n]``; bias may be None.
        The others: see ``ops.dropout_add_norm.dropout_add_norm``, also for errors and gradients.
    Returns:
        y in the dtype of x0. With ``prenorm`` r follows, with ``return_dropout_mask`` the uint8 mask.

    >>> x0, residual, weight, bias = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.ones(8), torch.zeros(8)
    >>> y, r = dropout_add_layer_norm(x0, residual, weight, bias, 0.0, 1e-5, prenorm=True)
    >>> torch.allclose(y, torch.nn.functional.layer_norm(x0 + residual, (8,)), atol=1e-6), torch.equal(r, x0 + residual)
    (True, True)
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
        is_rms_norm=False,
    )


def dropout_add_layer_norm_subset(
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
    >>> subset = torch.tensor([1, 0, 2])  # the second row of the residual gets nothing
    >>> dropout_add_layer_norm_subset(x0, residual, weight, None, 0.0, 1e-5, x0_subset=subset).shape
    torch.Size([3, 8])
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
        is_rms_norm=False,
    )


def dropout_add_layer_norm_parallel_residual(
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
    >>> y0, y1 = dropout_add_layer_norm_parallel_residual(x0, x1, None, weight, None, 2 * weight, None, 0.0, 1e-5)
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
        is_rms_norm=False,
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Optional[Tensor], epsilon: float) -> Tensor:
    """``[..., n]`` normalised over the last dimension.

    Args:
        x: ``[..., n]``, any floating dtype.
        weight, bias: ``[n]``; bias may be None.
        epsilon: added to the variance.
    Returns:
        ``[..., n]`` in the dtype of x.
    Raises:
        RuntimeError: weight or bias is not ``[n]``.
    Gradients for x, weight and bias.
    Source: arXiv 1607.06450.

    >>> x, weight, bias = torch.randn(5, 8), torch.ones(8), torch.zeros(8)
    >>> torch.allclose(layer_norm(x, weight, bias, 1e-5), torch.nn.functional.layer_norm(x, (8,)))
    True
    """
    return layer_norm_fn(x, weight, bias, eps=epsilon)


class DropoutAddLayerNormFn:
    """``apply`` is ``dropout_add_norm`` with the argument order of the fused kernels.

    ``apply(x0, residual, gamma, beta, rowscale, colscale, dropout_p, epsilon, residual_in_fp32=False, prenorm=False,
    is_rms_norm=False, return_dmask=False)``. Here weight and bias are gamma and beta, and layerscale is colscale.

    >>> x0, weight = torch.randn(5, 8), torch.ones(8)
    >>> DropoutAddLayerNormFn.apply(x0, x0, weight, None, None, None, 0.1, 1e-5).shape
    torch.Size([5, 8])
    """

    @staticmethod
    def apply(
        x0: Tensor,
        residual: Optional[Tensor],
        gamma: Tensor,
        beta: Optional[Tensor],
        rowscale: Optional[Tensor],
        colscale: Optional[Tensor],
        dropout_p: float,
        epsilon: float,
        residual_in_fp32: bool = False,
        prenorm: bool = False,
        is_rms_norm: bool = False,
        return_dmask: bool = False,
    ) -> Union[Tensor, tuple[Tensor, ...]]:
        return dropout_add_norm(
            x0,
            residual,
            gamma,
            beta,
            dropout_p,
            epsilon,
            rowscale,
            colscale,
            prenorm,
            residual_in_fp32,
            return_dmask,
            is_rms_norm=is_rms_norm,
        )


class DropoutAddLayerNormSubsetFn:
    """``apply`` is ``dropout_add_norm_subset`` with the argument order of the fused kernels.

    ``apply(x0, residual, gamma, beta, colscale, x0_subset, out_subset, dropout_p, epsilon, rowscale_const, out_numrows,
    residual_in_fp32=False, prenorm=False, is_rms_norm=False, return_dmask=False)``. Here weight and bias are gamma and
    beta, and layerscale is colscale.

    >>> x0, weight = torch.randn(5, 8), torch.ones(8)
    >>> DropoutAddLayerNormSubsetFn.apply(x0, x0, weight, None, None, None, None, 0.1, 1e-5, 1.0, 0).shape
    torch.Size([5, 8])
    """

    @staticmethod
    def apply(
        x0: Tensor,
        residual: Optional[Tensor],
        gamma: Tensor,
        beta: Optional[Tensor],
        colscale: Optional[Tensor],
        x0_subset: Optional[Tensor],
        out_subset: Optional[Tensor],
        dropout_p: float,
        epsilon: float,
        rowscale_const: float,
        out_numrows: int,
        residual_in_fp32: bool = False,
        prenorm: bool = False,
        is_rms_norm: bool = False,
        return_dmask: bool = False,
    ) -> Union[Tensor, tuple[Tensor, ...]]:
        return dropout_add_norm_subset(
            x0,
            residual,
            gamma,
            beta,
            dropout_p,
            epsilon,
            colscale,
            x0_subset,
            out_subset,
            rowscale_const,
            out_numrows,
            prenorm,
            residual_in_fp32,
            return_dmask,
            is_rms_norm=is_rms_norm,
        )


class DropoutAddLayerNormParallelResidualFn:
    """``apply`` is ``dropout_add_norm_parallel_residual`` with the argument order of the fused kernels.

    ``apply(x0, x1, residual, gamma0, beta0, gamma1, beta1, dropout_p, epsilon, residual_in_fp32=False, prenorm=False,
    is_rms_norm=False, return_dmask=False)``. Here weights and biases are gamma and beta.

    >>> x, weight = torch.randn(5, 8), torch.ones(8)
    >>> y0, y1 = DropoutAddLayerNormParallelResidualFn.apply(x, None, x, weight, None, None, None, 0.1, 1e-5)
    >>> y0.shape, y1
    (torch.Size([5, 8]), None)
    """

    @staticmethod
    def apply(
        x0: Tensor,
        x1: Optional[Tensor],
        residual: Optional[Tensor],
        gamma0: Tensor,
        beta0: Optional[Tensor],
        gamma1: Optional[Tensor],
        beta1: Optional[Tensor],
        dropout_p: float,
        epsilon: float,
        residual_in_fp32: bool = False,
        prenorm: bool = False,
        is_rms_norm: bool = False,
        return_dmask: bool = False,
    ) -> tuple[Optional[Tensor], ...]:
        return dropout_add_norm_parallel_residual(
            x0,
            x1,
            residual,
            gamma0,
            beta0,
            gamma1,
            beta1,
            dropout_p,
            epsilon,
            prenorm,
            residual_in_fp32,
            return_dmask,
            is_rms_norm=is_rms_norm,
        )


class DropoutAddLayerNorm(DropoutAddNorm):
    """Dropout, residual add and layer norm.

    Arguments, results and errors are those of ``ops.dropout_add_norm.DropoutAddNorm``. There are a weight and a bias.

    >>> norm = DropoutAddLayerNorm(8, prenorm=True, p=0.1)
    >>> y, r = norm(torch.randn(5, 8), torch.randn(5, 8))
    >>> y.shape, r.shape
    (torch.Size([5, 8]), torch.Size([5, 8]))
    """

    is_rms_norm = False
