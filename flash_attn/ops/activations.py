"""Activations with the backward passes that clients call by name.

GELU is the tanh form, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). ``*_fwd`` and ``*_bwd`` are plain functions of
tensors. The first argument of ``gelu_bwd``, ``relu_bwd``, ``sqrelu_bwd`` and ``bias_gelu_back`` is the gradient g. The
last argument of ``swiglu_bwd`` is g. ``bias_gelu_impl``, ``fast_gelu_impl`` and ``swiglu`` have gradients. Tensors have
any shape and any floating dtype.
Source: GELU, arXiv 1606.08415; SwiGLU, arXiv 2002.05202; squared relu, arXiv 2109.08668.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn._dispatch import recorded

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
    """gelu(x), of the shape and dtype of x.

    >>> gelu_fwd(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1588,  0.0000,  0.8412])
    """
    return F.gelu(x, approximate="tanh")


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g gelu'(x), of the shape of x and g, in the dtype of x.

    >>> gelu_bwd(torch.ones(3), torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.0830,  0.5000,  1.0830])
    """
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh").to(x.dtype)


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """gelu(y + bias): y ``[..., n]``, bias ``[n]`` -> ``[..., n]``, in the dtype of y + bias.

    >>> y, bias = torch.randn(5, 8), torch.randn(8)
    >>> torch.equal(bias_gelu(y, bias), gelu_fwd(y + bias))
    True
    """
    return gelu_fwd(y + bias)


def bias_gelu_back(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``bias_gelu`` for y and for bias.

    g and y are ``[..., n]``, and bias is ``[n]``. Returns dy ``[..., n]`` in the dtype of y + bias, and dbias ``[n]``
    in the dtype of bias.

    >>> dy, dbias = bias_gelu_back(torch.ones(5, 8), torch.randn(5, 8), torch.randn(8))
    >>> dy.shape, dbias.shape
    (torch.Size([5, 8]), torch.Size([8]))
    """
    dy = gelu_bwd(g, y + bias)
    return dy, dy.sum(tuple(range(dy.dim() - 1)), dtype=bias.dtype)


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """g where x >= 0, else 0; in the dtype of x. At x = 0 torch's own gradient is 0.

    >>> relu_bwd(torch.tensor([5.0, 5.0, 5.0]), torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0., 5., 5.])
    """
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x)^2, of the shape and dtype of x.

    >>> sqrelu_fwd(torch.tensor([-1.0, 0.0, 3.0]))
    tensor([0., 0., 9.])
    """
    return F.relu(x).square()


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """2 g relu(x), of the shape of x and g, in the dtype of x.

    >>> sqrelu_bwd(torch.ones(3), torch.tensor([-1.0, 0.0, 3.0]))
    tensor([0., 0., 6.])
    """
    return (2.0 * g * F.relu(x)).to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) y, rounded once.

    x and y have one shape. The result is computed in fp32 (fp64 for fp64) and has the dtype of x.

    >>> x, y = torch.randn(2, 5, 8)
    >>> torch.allclose(swiglu_fwd(x, y), torch.nn.functional.silu(x) * y)
    True
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (F.silu(x.to(dtype)) * y.to(dtype)).to(x.dtype)


def swiglu_bwd(x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``swiglu_fwd`` for x and for y.

    x, y and g have one shape. Returns dx in the dtype of x and dy in the dtype of y, computed in fp32 (fp64 for fp64).

    >>> dx, dy = swiglu_bwd(torch.zeros(3), torch.ones(3), torch.ones(3))
    >>> dx, dy
    (tensor([0.5000, 0.5000, 0.5000]), tensor([0., 0., 0.]))
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x32, y32, g32 = x.to(dtype), y.to(dtype), g.to(dtype)
    dx = torch.ops.aten.silu_backward(g32 * y32, x32)
    return dx.to(x.dtype), (g32 * F.silu(x32)).to(y.dtype)


class GeLUFunction(torch.autograd.Function):
    """``bias_gelu`` that keeps its inputs only: ``apply(input, bias)``. Gradients for both.

    >>> y, bias = torch.randn(5, 8), torch.randn(8)
    >>> torch.equal(GeLUFunction.apply(y, bias), bias_gelu(y, bias))
    True
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(input, bias)
        return bias_gelu(input, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return bias_gelu_back(grad, *ctx.saved_tensors)


class FastGeLUFunction(torch.autograd.Function):
    """``gelu_fwd`` that keeps its input only: ``apply(input)``. Gradient for the input.

    >>> x = torch.randn(5, 8)
    >>> torch.equal(FastGeLUFunction.apply(x), gelu_fwd(x))
    True
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return gelu_fwd(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gelu_bwd(grad, *ctx.saved_tensors)


class SwiGLUFunction(torch.autograd.Function):
    """``swiglu_fwd`` that keeps x and y, not silu(x): ``apply(x, y)``. Gradients for both.

    >>> x, y = torch.randn(2, 5, 8)
    >>> torch.equal(SwiGLUFunction.apply(x, y), swiglu_fwd(x, y))
    True
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return swiglu_bwd(*ctx.saved_tensors, grad)


def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
    """``bias_gelu`` with gradients for input and bias.

    input is ``[..., n]``, and bias is ``[n]``. Returns ``[..., n]`` in the dtype of input + bias.

    >>> y, bias = torch.randn(5, 8), torch.randn(8, requires_grad=True)
    >>> bias_gelu_impl(y, bias).sum().backward()
    >>> bias.grad.shape
    torch.Size([8])
    """
    return recorded(GeLUFunction, input, bias)


def fast_gelu_impl(input: Tensor) -> Tensor:
    """``gelu_fwd`` with a gradient. Returns the shape and dtype of the input.

    >>> x = torch.zeros(2, requires_grad=True)
    >>> fast_gelu_impl(x).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000])
    """
    return recorded(FastGeLUFunction, input)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """``swiglu_fwd`` with gradients for x and y, which have one shape. Returns this shape in the dtype of x.

    >>> x, y = torch.zeros(2, requires_grad=True), torch.ones(2)
    >>> swiglu(x, y).sum().backward()
    >>> x.grad
    tensor([0.5000, 0.5000])
    """
    return recorded(SwiGLUFunction, x, y)
