"""Activations with the backward passes that clients call by name.

GELU is the tanh form, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). ``*_fwd`` and ``*_bwd`` are plain functions
of tensors. The first argument of a backward is the gradient g. ``bias_gelu_impl``, ``fast_gelu_impl`` and ``swiglu``
have gradients.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "FastGeLUFunction",
    "GeLUFunction",
    "SwiGLUFunction",
    "bias_gelu",
    "bias_gelu_back",
    "bias_gelu_impl",
    "fast_gelu_impl",
    "gelu_bwd",
    "gelu_fwd",
    "relu_bwd",
    "sqrelu_bwd",
    "sqrelu_fwd",
    "swiglu",
    "swiglu_bwd",
    "swiglu_fwd",
]


def gelu_fwd(x: Tensor) -> Tensor:
    """gelu(x)."""
    return F.gelu(x, approximate="tanh")


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g gelu'(x)."""
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh").to(x.dtype)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """gelu(y + bias), bias ``[n]``."""
    return gelu_fwd(y + bias)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias_gelu`` for y and for bias."""
    dy = gelu_bwd(g, y + bias)
    return dy, dy.sum(tuple(range(dy.dim() - 1)), dtype=bias.dtype)


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g where x >= 0, else 0."""
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return F.relu(x).square()


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """2 g relu(x)."""
    return (2.0 * g * F.relu(x)).to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) y, rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (F.silu(x.to(dtype)) * y.to(dtype)).to(x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``swiglu_fwd`` for x and for y."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x32, y32, g32 = x.to(dtype), y.to(dtype), g.to(dtype)
    dx = torch.ops.aten.silu_backward(g32 * y32, x32)
    return dx.to(x.dtype), (g32 * F.silu(x32)).to(y.dtype)


class GeLUFunction(torch.autograd.Function):
    """``bias_gelu`` that keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(input, bias)
        return bias_gelu(input, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return bias_gelu_back(grad, *ctx.saved_tensors)


class FastGeLUFunction(torch.autograd.Function):
    """``gelu_fwd``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return gelu_fwd(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return gelu_bwd(grad, *ctx.saved_tensors)


class SwiGLUFunction(torch.autograd.Function):
    """``swiglu_fwd`` that keeps x and y, not silu(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return swiglu_bwd(*ctx.saved_tensors, grad)


def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
    """``bias_gelu`` with gradients for input and bias."""
    return GeLUFunction.apply(input, bias)


def fast_gelu_impl(input: Tensor) -> Tensor:
    """``gelu_fwd`` with a gradient."""
    return FastGeLUFunction.apply(input)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """``swiglu_fwd`` with gradients for x and y."""
    return SwiGLUFunction.apply(x, y)
