# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Literal, overload
from torch import Tensor
from flash_attn.ops.dropout_add_norm import DropoutAddNorm

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
@overload
def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> Tensor: ...
@overload
def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., *, return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    rowscale: Tensor | None = ..., layerscale: Tensor | None = ..., prenorm: bool = ..., residual_in_fp32: bool = ...,
    return_dropout_mask: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def dropout_add_layer_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ...,
    return_dropout_mask: Literal[False] = ...,
) -> Tensor: ...
@overload
def dropout_add_layer_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., prenorm: Literal[False] = ..., residual_in_fp32: bool = ..., *,
    return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., *, prenorm: Literal[True], residual_in_fp32: bool = ...,
    return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm_subset(
    x0: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, dropout_p: float, epsilon: float,
    layerscale: Tensor | None = ..., x0_subset: Tensor | None = ..., out_subset: Tensor | None = ...,
    rowscale_const: float = ..., out_numrows: int = ..., prenorm: bool = ..., residual_in_fp32: bool = ...,
    return_dropout_mask: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def dropout_add_layer_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def dropout_add_layer_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[False] = ...,
) -> tuple[Tensor, Tensor | None, Tensor]: ...
@overload
def dropout_add_layer_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, prenorm: Literal[False] = ...,
    residual_in_fp32: bool = ..., *, return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, *, prenorm: Literal[True],
    residual_in_fp32: bool = ..., return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]: ...
@overload
def dropout_add_layer_norm_parallel_residual(
    x0: Tensor, x1: Tensor | None, residual: Tensor | None, weight0: Tensor, bias0: Tensor | None,
    weight1: Tensor | None, bias1: Tensor | None, dropout_p: float, epsilon: float, prenorm: bool = ...,
    residual_in_fp32: bool = ..., return_dropout_mask: bool = ...,
) -> tuple[Tensor | None, ...]: ...
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor: ...
class DropoutAddLayerNormFn:
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, rowscale: Tensor | None,
        colscale: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ...,
        prenorm: Literal[False] = ..., is_rms_norm: bool = ..., return_dmask: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, rowscale: Tensor | None,
        colscale: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ..., *,
        prenorm: Literal[True], is_rms_norm: bool = ..., return_dmask: Literal[False] = ...,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, rowscale: Tensor | None,
        colscale: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ...,
        prenorm: Literal[False] = ..., is_rms_norm: bool = ..., *, return_dmask: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, rowscale: Tensor | None,
        colscale: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ..., *,
        prenorm: Literal[True], is_rms_norm: bool = ..., return_dmask: Literal[True],
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, rowscale: Tensor | None,
        colscale: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ..., prenorm: bool = ...,
        is_rms_norm: bool = ..., return_dmask: bool = ...,
    ) -> Tensor | tuple[Tensor, ...]: ...
class DropoutAddLayerNormSubsetFn:
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, colscale: Tensor | None,
        x0_subset: Tensor | None, out_subset: Tensor | None, dropout_p: float, epsilon: float, rowscale_const: float,
        out_numrows: int, residual_in_fp32: bool = ..., prenorm: Literal[False] = ..., is_rms_norm: bool = ...,
        return_dmask: Literal[False] = ...,
    ) -> Tensor: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, colscale: Tensor | None,
        x0_subset: Tensor | None, out_subset: Tensor | None, dropout_p: float, epsilon: float, rowscale_const: float,
        out_numrows: int, residual_in_fp32: bool = ..., *, prenorm: Literal[True], is_rms_norm: bool = ...,
        return_dmask: Literal[False] = ...,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, colscale: Tensor | None,
        x0_subset: Tensor | None, out_subset: Tensor | None, dropout_p: float, epsilon: float, rowscale_const: float,
        out_numrows: int, residual_in_fp32: bool = ..., prenorm: Literal[False] = ..., is_rms_norm: bool = ..., *,
        return_dmask: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, colscale: Tensor | None,
        x0_subset: Tensor | None, out_subset: Tensor | None, dropout_p: float, epsilon: float, rowscale_const: float,
        out_numrows: int, residual_in_fp32: bool = ..., *, prenorm: Literal[True], is_rms_norm: bool = ...,
        return_dmask: Literal[True],
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, colscale: Tensor | None,
        x0_subset: Tensor | None, out_subset: Tensor | None, dropout_p: float, epsilon: float, rowscale_const: float,
        out_numrows: int, residual_in_fp32: bool = ..., prenorm: bool = ..., is_rms_norm: bool = ...,
        return_dmask: bool = ...,
    ) -> Tensor | tuple[Tensor, ...]: ...
class DropoutAddLayerNormParallelResidualFn:
    @overload
    @staticmethod
    def apply(
        x0: Tensor, x1: Tensor | None, residual: Tensor | None, gamma0: Tensor, beta0: Tensor | None,
        gamma1: Tensor | None, beta1: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ...,
        prenorm: Literal[False] = ..., is_rms_norm: bool = ..., return_dmask: Literal[False] = ...,
    ) -> tuple[Tensor, Tensor | None]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, x1: Tensor | None, residual: Tensor | None, gamma0: Tensor, beta0: Tensor | None,
        gamma1: Tensor | None, beta1: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ..., *,
        prenorm: Literal[True], is_rms_norm: bool = ..., return_dmask: Literal[False] = ...,
    ) -> tuple[Tensor, Tensor | None, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, x1: Tensor | None, residual: Tensor | None, gamma0: Tensor, beta0: Tensor | None,
        gamma1: Tensor | None, beta1: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ...,
        prenorm: Literal[False] = ..., is_rms_norm: bool = ..., *, return_dmask: Literal[True],
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, x1: Tensor | None, residual: Tensor | None, gamma0: Tensor, beta0: Tensor | None,
        gamma1: Tensor | None, beta1: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ..., *,
        prenorm: Literal[True], is_rms_norm: bool = ..., return_dmask: Literal[True],
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x0: Tensor, x1: Tensor | None, residual: Tensor | None, gamma0: Tensor, beta0: Tensor | None,
        gamma1: Tensor | None, beta1: Tensor | None, dropout_p: float, epsilon: float, residual_in_fp32: bool = ...,
        prenorm: bool = ..., is_rms_norm: bool = ..., return_dmask: bool = ...,
    ) -> tuple[Tensor | None, ...]: ...
class DropoutAddLayerNorm(DropoutAddNorm): ...
