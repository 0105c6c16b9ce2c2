"""Layer norm under the names of the fused kernels; see ``ops.dropout_add_norm``."""

from functools import partial

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

dropout_add_layer_norm = partial(dropout_add_norm, is_rms_norm=False)
dropout_add_layer_norm_subset = partial(dropout_add_norm_subset, is_rms_norm=False)
dropout_add_layer_norm_parallel_residual = partial(dropout_add_norm_parallel_residual, is_rms_norm=False)


def layer_norm(x, weight, bias, epsilon):
    """``[..., n]`` normalised over the last dimension."""
    return layer_norm_fn(x, weight, bias, eps=epsilon)


class DropoutAddLayerNorm(DropoutAddNorm):
    """Dropout, residual add and layer norm."""

    is_rms_norm = False
