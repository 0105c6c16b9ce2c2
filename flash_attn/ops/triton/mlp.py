"""Two linear layers with the squared relu between them, under the names of the fused kernels."""

from typing import Optional

import torch
import torch.nn as nn
from torch import Tensor

from flash_attn._types import Device
from flash_attn.ops.fused_dense import fused_mlp_func

__all__ = ["FusedDenseSqreluDense", "FusedDenseSqreluDenseFunc", "fused_dense_sqrelu_dense_function"]


def fused_dense_sqrelu_dense_function(
    x: Tensor,
    weight1: Tensor,
    bias1: Optional[Tensor],
    weight2: Tensor,
    bias2: Optional[Tensor],
    checkpoint_lvl: int = 0,
) -> Tensor:
    """``relu(x @ weight1.T + bias1)^2 @ weight2.T + bias2``.

    Args:
        x: ``[..., in]``. weight1: ``[hidden, in]``. weight2: ``[out, hidden]``. All have one dtype.
        bias1, bias2: ``[hidden]`` and ``[out]``, or None.
        checkpoint_lvl: 0 keeps the hidden activations for backward, 1 and 2 compute them again.
    Returns:
        ``[..., out]`` in the dtype of x, or autocast's.
    Raises:
        AssertionError: checkpoint_lvl is not 0, 1 or 2.
        RuntimeError: shapes or dtypes do not fit; the message is PyTorch's.
    Gradients for x, weight1, bias1, weight2 and bias2.
    Source: squared relu, arXiv 2109.08668.

    >>> x, weight1, weight2 = torch.randn(5, 8), torch.randn(32, 8), torch.randn(8, 32)
    >>> y = fused_dense_sqrelu_dense_function(x, weight1, None, weight2, None)
    >>> torch.allclose(y, (x @ weight1.T).relu().square() @ weight2.T, rtol=1e-4, atol=1e-3)
    True
    """
    return fused_mlp_func(x, weight1, weight2, bias1, bias2, activation="sqrelu", checkpoint_lvl=checkpoint_lvl)


class FusedDenseSqreluDenseFunc:
    """``apply`` is ``fused_dense_sqrelu_dense_function``. PyTorch's operators record the gradients.

    ``apply(x, weight1, bias1, weight2, bias2, checkpoint_lvl=0)``.

    >>> weight1, weight2 = torch.randn(32, 8), torch.randn(8, 32)
    >>> FusedDenseSqreluDenseFunc.apply(torch.randn(5, 8), weight1, None, weight2, None).shape
    torch.Size([5, 8])
    """

    apply = staticmethod(fused_dense_sqrelu_dense_function)


class FusedDenseSqreluDense(nn.Module):
    """``fused_dense_sqrelu_dense_function`` with its parameters, ``fc1`` and ``fc2``.

    Args:
        in_features, hidden_features, out_features: sizes; 4 x in_features and in_features by default.
        bias1, bias2: whether ``fc1`` and ``fc2`` have a bias.
        checkpoint_lvl: 0 keeps the hidden activations for backward, 1 and 2 compute them again.
        device, dtype: of the parameters.
    Raises:
        AssertionError: checkpoint_lvl is not 0, 1 or 2.

    >>> FusedDenseSqreluDense(8, checkpoint_lvl=1)(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Optional[int] = None,
        out_features: Optional[int] = None,
        bias1: bool = True,
        bias2: bool = True,
        checkpoint_lvl: int = 0,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        assert checkpoint_lvl in (0, 1, 2), f"checkpoint_lvl is {checkpoint_lvl}, allowed are 0, 1 and 2"
        hidden_features, out_features = hidden_features or 4 * in_features, out_features or in_features
        self.checkpoint_lvl = checkpoint_lvl
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., in]`` -> ``[..., out]``. Gradients for x and the parameters."""
        return fused_dense_sqrelu_dense_function(
            x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias, self.checkpoint_lvl
        )
