"""RMS norm under the names of the fused kernels; see ``ops.dropout_add_norm``."""

import torch
import torch.nn as nn

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
    """Dropout, residual add and RMS norm: ``dropout_add_norm``."""
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
        is_rms_norm=True,
    )


def dropout_add_rms_norm_parallel_residual(
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
        is_rms_norm=True,
    )


def rms_norm(x, weight, epsilon):
    """``[..., n]`` divided by the root of its mean square over the last dimension, times weight."""
    return rms_norm_fn(x, weight, None, eps=epsilon)


class RMSNorm(nn.Module):
    """``rms_norm`` with its weight."""

    def __init__(self, hidden_size, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class DropoutAddRMSNorm(DropoutAddNorm):
    """Dropout, residual add and RMS norm."""

    is_rms_norm = True
