"""RMS norm under the names of the fused kernels; see ``ops.dropout_add_norm``."""

from functools import partial

import torch
import torch.nn as nn

from flash_attn.ops.dropout_add_norm import (
    DropoutAddNorm,
    dropout_add_norm,
    dropout_add_norm_parallel_residual,
    dropout_add_norm_subset,
)
from flash_attn.ops.triton.layer_norm import rms_norm_fn

__all__ = [
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
    "dropout_add_rms_norm_subset",
    "rms_norm",
]

dropout_add_rms_norm = partial(dropout_add_norm, is_rms_norm=True)
dropout_add_rms_norm_subset = partial(dropout_add_norm_subset, is_rms_norm=True)
dropout_add_rms_norm_parallel_residual = partial(dropout_add_norm_parallel_residual, is_rms_norm=True)


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
