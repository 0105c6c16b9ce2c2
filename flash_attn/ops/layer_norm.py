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
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "dropout_add_layer_norm_subset",
    "layer_norm",
]


def dropout_add_layer_norm(
    x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, layerscale=None, prenorm=False,
    residual_in_fp32=False, return_dropout_mask=False,
):  # fmt: skip
    """``dropout_add_norm`` with layer norm."""
    return dropout_add_norm(
        x0, residual, weight, bias, dropout_p, epsilon, rowscale, layerscale, prenorm, residual_in_fp32,
        return_dropout_mask, is_rms_norm=False,
    )  # fmt: skip


def dropout_add_layer_norm_subset(
    x0, residual, weight, bias, dropout_p, epsilon, layerscale=None, x0_subset=None, out_subset=None,
    rowscale_const=1.0, out_numrows=0, prenorm=False, residual_in_fp32=False, return_dropout_mask=False,
):  # fmt: skip
    """``dropout_add_norm_subset`` with layer norm."""
    return dropout_add_norm_subset(
        x0, residual, weight, bias, dropout_p, epsilon, layerscale, x0_subset, out_subset, rowscale_const, out_numrows,
        prenorm, residual_in_fp32, return_dropout_mask, is_rms_norm=False,
    )  # fmt: skip


def dropout_add_layer_norm_parallel_residual(
    x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm=False, residual_in_fp32=False,
    return_dropout_mask=False,
):  # fmt: skip
    """``dropout_add_norm_parallel_residual`` with layer norm."""
    return dropout_add_norm_parallel_residual(
        x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm, residual_in_fp32,
        return_dropout_mask, is_rms_norm=False,
    )  # fmt: skip


def layer_norm(x, weight, bias, epsilon):
    """``[..., n]`` normalised over the last dimension."""
    return layer_norm_fn(x, weight, bias, eps=epsilon)


class DropoutAddLayerNorm(DropoutAddNorm):
    """Dropout, residual add and layer norm."""

    is_rms_norm = False
