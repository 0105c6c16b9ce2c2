"""Feed-forward blocks:

    Mlp        fc2(act(fc1(x)))
    GatedMlp   fc2(y * act(gate)),  y and gate the halves of fc1(x)

The parallel forms split the hidden features over the ranks of a process group.
"""

from typing import Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from flash_attn._types import Activation, Device, Group
from flash_attn.ops.activations import swiglu
from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedMLP, ParallelFusedMLP, RowParallelLinear

__all__ = ["FusedMLP", "GatedMlp", "Mlp", "ParallelFusedMLP", "ParallelGatedMlp", "ParallelMLP"]


class Mlp(nn.Module):
    """Two linear layers; hidden_features is 4 x in_features by default. ``return_residual``: return (output, x).

    Args:
        out_features: in_features by default.
        activation: function of a tensor, between the layers.
        bias1, bias2: whether ``fc1`` and ``fc2`` have a bias.
        device, dtype: of the parameters.

    >>> Mlp(64)(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Optional[int] = None,
        out_features: Optional[int] = None,
        activation: Activation = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        hidden_features, out_features = hidden_features or 4 * in_features, out_features or in_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """x ``[..., in]`` -> ``[..., out]``, or (output, x). Gradients for x and the parameters."""
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class ParallelMLP(nn.Module):
    """``Mlp`` over the ranks of a process group.

    Args:
        process_group: ranks that share the hidden features. None is refused.
        sequence_parallel: each rank passes and gets its own rows. Otherwise every rank passes and gets all rows.
        The others: see ``Mlp``.
    Raises:
        AssertionError: there is no process group.
    Source: tensor parallelism, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> ParallelMLP(64, process_group=torch.distributed.group.WORLD)(torch.randn(10, 64)).shape
    torch.Size([10, 64])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Optional[int] = None,
        out_features: Optional[int] = None,
        activation: Activation = F.gelu,
        process_group: Group = None,
        sequence_parallel: bool = True,
        bias1: bool = True,
        bias2: bool = True,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        assert process_group is not None, "ParallelMLP needs a process_group"
        hidden_features, out_features = hidden_features or 4 * in_features, out_features or in_features
        self.activation = activation
        parallel = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        self.fc1 = ColumnParallelLinear(in_features, hidden_features, process_group, bias=bias1, **parallel)
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[rows, ..., in]`` -> ``[rows, ..., out]``. If sequence parallel, both hold this rank's rows.

        Gradients for x and the parameters, summed over the ranks for x.
        """
        return self.fc2(self.activation(self.fc1(x)))


class GatedMlp(nn.Module):
    """GLU (sigmoid), SwiGLU (silu) and similar. hidden_features is 8/3 x in_features by default, rounded up.

    Args:
        hidden_features: columns of y and of the gate, rounded up to a multiple of ``multiple_of``, also if given.
        out_features: in_features by default.
        activation: function of the gate.
        bias1, bias2: whether ``fc1`` and ``fc2`` have a bias.
        return_residual: return (output, x).
        device, dtype: of the parameters.
    Source: arXiv 2002.05202.

    >>> mlp = GatedMlp(96, activation=torch.nn.functional.silu)
    >>> mlp(torch.randn(2, 5, 96)).shape, mlp.fc2.in_features
    (torch.Size([2, 5, 96]), 256)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Optional[int] = None,
        out_features: Optional[int] = None,
        activation: Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        hidden_features = _gated_width(in_features, hidden_features, multiple_of)
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features or in_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """x ``[..., in]`` -> ``[..., out]``, or (output, x). Gradients for x and the parameters."""
        y = self.fc2(_gate(self.fc1(x), self.activation))
        return (y, x) if self.return_residual else y


class ParallelGatedMlp(nn.Module):
    """``GatedMlp`` over the ranks of a process group. Each rank's part of fc1 holds the rank's y and gate.

    Args:
        process_group: ranks that share the hidden features.
        sequence_parallel: each rank passes and gets its own rows. Otherwise every rank passes and gets all rows.
        The others: see ``GatedMlp``.
    Source: tensor parallelism, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> ParallelGatedMlp(64, torch.distributed.group.WORLD)(torch.randn(10, 64)).shape
    torch.Size([10, 64])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        process_group: Group,
        hidden_features: Optional[int] = None,
        out_features: Optional[int] = None,
        activation: Activation = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        sequence_parallel: bool = True,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        hidden_features, out_features = (
            _gated_width(in_features, hidden_features, multiple_of),
            out_features or in_features,
        )
        self.activation = activation
        parallel = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        # NOTE: an odd number of features on one rank could not be halved. So ranks get features of y and gate in pairs.
        self.fc1 = ColumnParallelLinear(
            in_features, 2 * hidden_features, process_group, bias=bias1, multiple_of=2, **parallel
        )
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **parallel)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[rows, ..., in]`` -> ``[rows, ..., out]``. If sequence parallel, both hold this rank's rows.

        Gradients for x and the parameters, summed over the ranks for x.
        """
        return self.fc2(_gate(self.fc1(x), self.activation))


def _gated_width(in_features, hidden_features, multiple_of):
    hidden_features = int(8 * in_features / 3) if hidden_features is None else hidden_features
    return -(-hidden_features // multiple_of) * multiple_of


def _gate(y_and_gate, activation):
    """y * activation(gate)."""
    if activation is F.sigmoid:
        return F.glu(y_and_gate, dim=-1)
    y, gate = y_and_gate.chunk(2, dim=-1)
    return swiglu(gate, y) if activation is F.silu else y * activation(gate)
