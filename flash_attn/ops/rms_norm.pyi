# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Literal, overload
import torch
import torch.nn as nn
from torch import Tensor
from flash_attn._types import Device
from flash_attn.ops.dropout_add_norm import DropoutAddNorm
from flash_attn.ops.layer_norm import DropoutAddLayerNormFn
from flash_attn.ops.layer_norm import DropoutAddLayerNormParallelResidualFn
from flash_attn.ops.layer_norm import DropoutAddLayerNormSubsetFn

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
@overload
def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> Tensor: ...
@overload
def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., *, return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., prenorm: bool = ..., residual_in_fp32: bool = ...,
    return_dropout_mask: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def dropout_add_rms_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    return_dropout_mask: Literal[False] = ...,
) -> Tensor: ...
@overload
def dropout_add_rms_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ..., *,
    return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., prenorm: bool = ..., residual_in_fp32: bool = ...,
    return_dropout_mask: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def dropout_add_rms_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def dropout_add_rms_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor | None, Tensor]: ...
@overload
def dropout_add_rms_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., *, return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]: ...
@overload
def dropout_add_rms_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, prenorm: bool = ...,
    residual_in_fp32: bool = ..., return_dropout_mask: bool = ...,
) -> tuple[Tensor | None, ...]: ...
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...
class RMSNorm(nn.Module):
    eps: float
    weight: nn.Parameter
    def __init__(
        self, hidden_size: int, eps: float = ..., device: Device = ..., dtype: torch.dtype | None = ...,
    ) -> None: ...
    def reset_parameters(self) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
class DropoutAddRMSNorm(DropoutAddNorm): ...
