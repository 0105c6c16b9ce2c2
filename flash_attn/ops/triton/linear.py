"""Linear layer and activation under the names of the fused kernels. PyTorch's operators do the work.

triton_linear_act   act(x @ weight.T + bias)
triton_dgrad_act    (g @ weight) * act'(z),  z the activation's input
"""

from typing import Optional, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn.ops.activations import gelu_bwd, gelu_fwd, sqrelu_bwd, sqrelu_fwd

__all__ = ["triton_dgrad_act", "triton_linear_act"]


def _gelu_bwd(g, x):
    return torch.ops.aten.gelu_backward(g, x)


# name: (activation, its backward)
ACTIVATIONS = {
    "id": (lambda x: x, lambda g, x: g),
    "gelu": (F.gelu, _gelu_bwd),
    "gelu_approx": (gelu_fwd, gelu_bwd),
    "squared_relu": (sqrelu_fwd, sqrelu_bwd),
}


def triton_linear_act(
    x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: str = "id", save_act_input: bool = False
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """``act(x @ weight.T + bias)``.

    Args:
        x: ``[..., in]``. weight: ``[out, in]``. bias: ``[out]`` or None. All have one dtype.
        activation: "id", "gelu" (erf), "gelu_approx" (tanh) or "squared_relu".
        save_act_input: return (output, the activation's input).
    Returns:
        ``[..., out]`` in the dtype of x. With save_act_input two of these.
    Raises:
        AssertionError: the dtypes differ, or the activation is not one of these.
        RuntimeError: the shapes do not fit; the message is PyTorch's.
    Gradients for x, weight and bias.

    >>> x, weight, bias = torch.randn(5, 8), torch.randn(16, 8), torch.randn(16)
    >>> y, z = triton_linear_act(x, weight, bias, activation="squared_relu", save_act_input=True)
    >>> torch.equal(y, z.relu().square())
    True
    """
    act = _activation(activation)[0]
    _check_dtypes(x=x, weight=weight, bias=bias)
    z = F.linear(x, weight, bias)
    return (act(z), z) if save_act_input else act(z)


def triton_dgrad_act(
    grad_output: Tensor, weight: Tensor, activation: str = "id", act_input: Optional[Tensor] = None
) -> Tensor:
    """``(grad_output @ weight) * act'(act_input)``: the gradient behind an activation and the linear layer after it.

    Args:
        grad_output: ``[..., out]``. weight: ``[out, in]``. Both have one dtype.
        activation: as of ``triton_linear_act``.
        act_input: ``[..., in]`` in this dtype; only "id" does without.
    Returns:
        ``[..., in]`` in the dtype of grad_output.
    Raises:
        AssertionError: the dtypes of grad_output and weight differ, the activation is not one of these, or act_input is
            missing.
        RuntimeError: the shapes do not fit; the message is PyTorch's.

    >>> grad_output, weight, z = torch.randn(5, 16), torch.randn(16, 8), torch.randn(5, 8)
    >>> triton_dgrad_act(grad_output, weight, activation="gelu", act_input=z).shape
    torch.Size([5, 8])
    """
    backward = _activation(activation)[1]
    _check_dtypes(grad_output=grad_output, weight=weight)
    assert activation == "id" or act_input is not None, f"activation {activation!r} needs act_input"
    return backward(grad_output @ weight, act_input)


def _activation(name):
    assert name in ACTIVATIONS, f"activation is {name!r}, allowed are {', '.join(ACTIVATIONS)}"
    return ACTIVATIONS[name]


def _check_dtypes(**tensors):
    (first, tensor), *others = tensors.items()
    for name, other in others:
        assert other is None or other.dtype == tensor.dtype, f"{name} is {other.dtype}, {first} is {tensor.dtype}"
