"""Layer norm under the names of the fused kernels; see ``ops.dropout_add_norm``."""

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
    x0,
    residual,
    weight,
    bias,
    dropout_p,
    epsilon,
    rowscale=None,
    layerscale=None,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    """Dropout, residual add and layer norm: ``dropout_add_norm``."""
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
    x0,
    residual,
    weight,
    bias,
    dropout_p,
    epsilon,
    layerscale=None,
    x0_subset=None,
    out_subset=None,
    rowscale_const=1.0,
    out_numrows=0,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    """The same for some rows only: ``dropout_add_norm_subset``."""
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
    x0,
    x1,
    residual,
    weight0,
    bias0,
    weight1,
    bias1,
    dropout_p,
    epsilon,
    prenorm=False,
    residual_in_fp32=False,
    return_dropout_mask=False,
):
    """The same for two inputs and two norms: ``dropout_add_norm_parallel_residual``."""
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


def layer_norm(x, weight, bias, epsilon):
    """``[..., n]`` normalised over the last dimension."""
    return layer_norm_fn(x, weight, bias, eps=epsilon)


class DropoutAddLayerNormFn:
    """``apply`` is ``dropout_add_norm`` with the argument order of the fused kernels."""

    @staticmethod
    def apply(
        x0,
        residual,
        gamma,
        beta,
        rowscale,
        colscale,
        dropout_p,
        epsilon,
        residual_in_fp32=False,
        prenorm=False,
        is_rms_norm=False,
        return_dmask=False,
    ):
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
    """``apply`` is ``dropout_add_norm_subset`` with the argument order of the fused kernels."""

    @staticmethod
    def apply(
        x0,
        residual,
        gamma,
        beta,
        colscale,
        x0_subset,
        out_subset,
        dropout_p,
        epsilon,
        rowscale_const,
        out_numrows,
        residual_in_fp32=False,
        prenorm=False,
        is_rms_norm=False,
        return_dmask=False,
    ):
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
    """``apply`` is ``dropout_add_norm_parallel_residual`` with the argument order of the fused kernels."""

    @staticmethod
    def apply(
        x0,
        x1,
        residual,
        gamma0,
        beta0,
        gamma1,
        beta1,
        dropout_p,
        epsilon,
        residual_in_fp32=False,
        prenorm=False,
        is_rms_norm=False,
        return_dmask=False,
    ):
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
    """Dropout, residual add and layer norm."""

    is_rms_norm = False
