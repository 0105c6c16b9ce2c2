# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Literal, overload
import torch
import torch.nn as nn
from torch import Tensor
from flash_attn._types import Device, Group

__all__ = [
    "ColumnParallelLinear",
    "FusedDense",
    "FusedDenseFunc",
    "FusedMLP",
    "FusedMLPFunc",
    "ParallelFusedMLP",
    "RowParallelLinear",
    "fused_dense_func",
    "fused_mlp_func",
]
@overload
def fused_dense_func(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., return_residual: Literal[False] = ...,
    process_group: Group = ..., sequence_parallel: bool = ...,
) -> Tensor: ...
@overload
def fused_dense_func(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., *, return_residual: Literal[True], process_group: Group = ...,
    sequence_parallel: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_dense_func(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., return_residual: bool = ..., process_group: Group = ...,
    sequence_parallel: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def fused_mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None = ..., bias2: Tensor | None = ...,
    activation: str = ..., save_pre_act: bool = ..., return_residual: Literal[False] = ..., checkpoint_lvl: int = ...,
    heuristic: int | str = ..., process_group: Group = ..., sequence_parallel: bool = ...,
) -> Tensor: ...
@overload
def fused_mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None = ..., bias2: Tensor | None = ...,
    activation: str = ..., save_pre_act: bool = ..., *, return_residual: Literal[True], checkpoint_lvl: int = ...,
    heuristic: int | str = ..., process_group: Group = ..., sequence_parallel: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_mlp_func(
    x: Tensor, weight1: Tensor, weight2: Tensor, bias1: Tensor | None = ..., bias2: Tensor | None = ...,
    activation: str = ..., save_pre_act: bool = ..., return_residual: bool = ..., checkpoint_lvl: int = ...,
    heuristic: int | str = ..., process_group: Group = ..., sequence_parallel: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
class FusedDenseFunc:
    @overload
    @staticmethod
    def apply(
        x: Tensor, weight: Tensor, bias: Tensor | None, return_residual: Literal[False] = ...,
        process_group: Group = ..., sequence_parallel: bool = ...,
    ) -> Tensor: ...
    @overload
    @staticmethod
    def apply(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, return_residual: Literal[True], process_group: Group = ...,
        sequence_parallel: bool = ...,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x: Tensor, weight: Tensor, bias: Tensor | None, return_residual: bool = ..., process_group: Group = ...,
        sequence_parallel: bool = ...,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
class FusedMLPFunc:
    @overload
    @staticmethod
    def apply(
        x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str = ...,
        save_pre_act: bool = ..., return_residual: Literal[False] = ..., checkpoint_lvl: int = ...,
        heuristic: int | str = ..., process_group: Group = ..., sequence_parallel: bool = ...,
    ) -> Tensor: ...
    @overload
    @staticmethod
    def apply(
        x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str = ...,
        save_pre_act: bool = ..., *, return_residual: Literal[True], checkpoint_lvl: int = ...,
        heuristic: int | str = ..., process_group: Group = ..., sequence_parallel: bool = ...,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    @staticmethod
    def apply(
        x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str = ...,
        save_pre_act: bool = ..., return_residual: bool = ..., checkpoint_lvl: int = ..., heuristic: int | str = ...,
        process_group: Group = ..., sequence_parallel: bool = ...,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
class FusedDense(nn.Linear):
    return_residual: bool
    def __init__(
        self, in_features: int, out_features: int, bias: bool = ..., return_residual: bool = ..., device: Device = ...,
        dtype: torch.dtype | None = ...,
    ) -> None: ...
    def forward(self, x: Tensor, process_group: Group = ...) -> Tensor | tuple[Tensor, Tensor]: ...
class ColumnParallelLinear(nn.Linear):
    process_group: Group
    sequence_parallel: bool
    def __init__(
        self, in_features: int, out_features: int, process_group: Group, bias: bool = ...,
        sequence_parallel: bool = ..., multiple_of: int = ..., device: Device = ..., dtype: torch.dtype | None = ...,
    ) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
class RowParallelLinear(nn.Linear):
    process_group: Group
    sequence_parallel: bool
    def __init__(
        self, in_features: int, out_features: int, process_group: Group, bias: bool = ...,
        sequence_parallel: bool = ..., multiple_of: int = ..., device: Device = ..., dtype: torch.dtype | None = ...,
    ) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
class FusedMLP(nn.Module):
    activation: str
    return_residual: bool
    checkpoint_lvl: int
    heuristic: int | str
    fc1: nn.Linear
    fc2: nn.Linear
    def __init__(
        self, in_features: int, hidden_features: int | None = ..., out_features: int | None = ..., bias1: bool = ...,
        bias2: bool = ..., activation: str = ..., return_residual: bool = ..., checkpoint_lvl: int = ...,
        heuristic: int | str = ..., device: Device = ..., dtype: torch.dtype | None = ...,
    ) -> None: ...
    def forward(self, x: Tensor, process_group: Group = ...) -> Tensor | tuple[Tensor, Tensor]: ...
class ParallelFusedMLP(nn.Module):
    activation: str
    process_group: Group
    sequence_parallel: bool
    checkpoint_lvl: int
    heuristic: int | str
    fc1: ColumnParallelLinear
    fc2: RowParallelLinear
    def __init__(
        self, in_features: int, hidden_features: int | None = ..., out_features: int | None = ...,
        activation: str = ..., process_group: Group = ..., bias1: bool = ..., bias2: bool = ...,
        sequence_parallel: bool = ..., checkpoint_lvl: int = ..., heuristic: int | str = ..., device: Device = ...,
        dtype: torch.dtype | None = ...,
    ) -> None: ...
    def forward(self, x: Tensor) -> Tensor: ...
