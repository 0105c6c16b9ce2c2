# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Any, Literal, overload
import torch
import torch.nn as nn
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
@overload
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., is_rms_norm: bool = ..., return_dropout_mask: Literal[False] = ...,
    out_dtype: torch.dtype | None = ..., out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> Tensor: ...
@overload
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., is_rms_norm: bool = ..., return_dropout_mask: Literal[False] = ...,
    out_dtype: torch.dtype | None = ..., out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., is_rms_norm: bool = ..., return_dropout_mask: Literal[False] = ...,
    out_dtype: torch.dtype | None = ..., out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[True], residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., is_rms_norm: bool = ..., return_dropout_mask: Literal[False] = ...,
    out_dtype: torch.dtype | None = ..., out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., is_rms_norm: bool = ..., *, return_dropout_mask: Literal[True],
    out_dtype: torch.dtype | None = ..., out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
@overload
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., is_rms_norm: bool = ..., return_dropout_mask: Literal[True],
    out_dtype: torch.dtype | None = ..., out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...
@overload
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: Tensor | None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: bool = ..., residual_in_fp32: bool = ..., zero_centered_weight: bool = ...,
    is_rms_norm: bool = ..., return_dropout_mask: bool = ..., out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> Tensor | tuple[Tensor | None, ...]: ...
@overload
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., return_dropout_mask: Literal[False] = ..., out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> Tensor: ...
@overload
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., return_dropout_mask: Literal[False] = ..., out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., return_dropout_mask: Literal[False] = ..., out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[True], residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., return_dropout_mask: Literal[False] = ..., out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., *, return_dropout_mask: Literal[True], out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
@overload
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    zero_centered_weight: bool = ..., return_dropout_mask: Literal[True], out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ..., residual_out: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...
@overload
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: Tensor | None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: bool = ..., residual_in_fp32: bool = ..., zero_centered_weight: bool = ...,
    return_dropout_mask: bool = ..., out_dtype: torch.dtype | None = ..., out: Tensor | None = ...,
    residual_out: Tensor | None = ...,
) -> Tensor | tuple[Tensor | None, ...]: ...
@overload
def layer_norm_linear_fn(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, linear_weight: Tensor, linear_bias: Tensor | None,
    residual: Tensor | None = ..., eps: float = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    is_rms_norm: bool = ...,
) -> Tensor: ...
@overload
def layer_norm_linear_fn(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, linear_weight: Tensor, linear_bias: Tensor | None,
    residual: Tensor | None = ..., eps: float = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    is_rms_norm: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm_linear_fn(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, linear_weight: Tensor, linear_bias: Tensor | None,
    residual: Tensor | None = ..., eps: float = ..., prenorm: bool = ..., residual_in_fp32: bool = ...,
    is_rms_norm: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
class LayerNormFn:
    apply = staticmethod(layer_norm_fn)
class LayerNormLinearFn:
    apply = staticmethod(layer_norm_linear_fn)
class RMSNorm(nn.Module):
    eps: float
    zero_centered_weight: bool
    drop: Any
    weight: nn.Parameter
    def __init__(
        self, hidden_size: int, eps: float = ..., dropout_p: float = ..., zero_centered_weight: bool = ...,
        device: Device = ..., dtype: torch.dtype | None = ...,
    ) -> None: ...
    def reset_parameters(self) -> None: ...
    def forward(
        self, x: Tensor, residual: Tensor | None = ..., prenorm: bool = ..., residual_in_fp32: bool = ...,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> Tensor: ...
@overload
def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., *, prenorm: Literal[True], zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[True], zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def layer_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: Tensor | None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: bool = ..., zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def rms_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> Tensor: ...
@overload
def rms_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., *, prenorm: Literal[True], zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[False] = ..., zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ..., *,
    weight1: Tensor, bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: Literal[True], zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def rms_norm_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = ..., x1: Tensor | None = ...,
    weight1: Tensor | None = ..., bias1: Tensor | None = ..., eps: float = ..., dropout_p: float = ...,
    rowscale: Tensor | None = ..., prenorm: bool = ..., zero_centered_weight: bool = ...,
    dropout_mask: Tensor | None = ..., dropout_mask1: Tensor | None = ..., upcast: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
def dropout_and_mask(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]: ...
