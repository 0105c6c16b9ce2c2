# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Literal, overload
from torch import Tensor

__all__ = [
    "triton_dgrad_act",
    "triton_linear_act",
]
@overload
def triton_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., activation: str = ..., save_act_input: Literal[False] = ...,
) -> Tensor: ...
@overload
def triton_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., activation: str = ..., *, save_act_input: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def triton_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = ..., activation: str = ..., save_act_input: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def triton_dgrad_act(
    grad_output: Tensor, weight: Tensor, activation: str = ..., act_input: Tensor | None = ...,
) -> Tensor: ...
