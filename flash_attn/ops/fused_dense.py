"""Linear layers and two-layer MLPs, on one device or split over the ranks of a process group (tensor parallel).

    column parallel   weight [out / w, in]   every rank sees the whole input, makes some of the outputs
    row parallel      weight [out, in / w]   every rank sees some of the inputs, partial outputs are summed

With sequence parallelism, tokens are split between the layers along the first dimension. A column parallel layer
gathers the tokens first. A row parallel layer scatters its sums. The names say "fused", but PyTorch's linear does the
work.
"""

from typing import Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_attn._types import Device, Group
from flash_attn.ops.activations import gelu_fwd, sqrelu_fwd
from flash_attn.utils.distributed import all_gather, all_reduce, copy_to_ranks, get_dim_for_local_rank, reduce_scatter

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

ACTIVATIONS = {"gelu_approx": gelu_fwd, "relu": F.relu, "sqrelu": sqrelu_fwd}


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    return_residual: bool = False,
    process_group: Group = None,
    sequence_parallel: bool = True,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """``x @ weight.T + bias``.

    Args:
        x: ``[..., in]``; with a process group and ``sequence_parallel`` this rank's rows of the first dimension.
        weight: ``[out, in]`` in the dtype of x, this rank's outputs with a process group.
        bias: ``[out]`` or None.
        return_residual: return (output, x), for a residual branch.
        process_group: ranks that share the outputs, or None.
        sequence_parallel: gather the rows of all ranks first. Otherwise every rank passes all rows.
    Returns:
        ``[..., out]`` in the dtype of x, or autocast's. With a process group it holds all rows.
    Raises:
        RuntimeError: shapes or dtypes do not fit; the message is PyTorch's.
    Gradients for x, weight and bias, summed over the ranks for x.
    Source: tensor parallelism, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.

    >>> x, weight, bias = torch.randn(5, 8), torch.randn(16, 8), torch.randn(16)
    >>> y, residual = fused_dense_func(x, weight, bias, return_residual=True)
    >>> torch.allclose(y, x @ weight.T + bias, atol=1e-5), residual is x
    (True, True)
    """
    y = F.linear(_to_columns(x, process_group, sequence_parallel), weight, bias)
    return (y, x) if return_residual else y


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Optional[Tensor] = None,
    bias2: Optional[Tensor] = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: Union[int, str] = 0,
    process_group: Group = None,
    sequence_parallel: bool = True,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """``act(x @ weight1.T + bias1) @ weight2.T + bias2``; with a process group the second product is this rank's part.

    Args:
        x: as of ``fused_dense_func``.
        weight1: ``[hidden, in]``; with a process group this rank's hidden features.
        weight2: ``[out, hidden]``, likewise.
        bias1: ``[hidden]`` or None.
        bias2: ``[out]`` or None. It is added to this rank's part.
        activation: "gelu_approx" (tanh), "relu" or "sqrelu".
        checkpoint_lvl: 0 keeps the hidden activations for backward, 1 and 2 compute them again.
        save_pre_act, heuristic: choices of fused kernels, without effect.
        return_residual: return (output, x).
        process_group, sequence_parallel: as of ``fused_dense_func``.
    Returns:
        ``[..., out]`` in the dtype of x, or autocast's. With a process group the caller sums it over the ranks.
    Raises:
        AssertionError: the activation or checkpoint_lvl is not one of these.
        RuntimeError: shapes or dtypes do not fit; the message is PyTorch's.
    Gradients for x, weight1, weight2, bias1 and bias2, summed over the ranks for x.

    >>> x, weight1, weight2 = torch.randn(5, 8), torch.randn(32, 8), torch.randn(8, 32)
    >>> fused_mlp_func(x, weight1, weight2, activation="sqrelu", checkpoint_lvl=1).shape
    torch.Size([5, 8])
    """
    assert activation in ACTIVATIONS, f"activation is {activation!r}, allowed are {', '.join(ACTIVATIONS)}"
    assert checkpoint_lvl in (0, 1, 2), f"checkpoint_lvl is {checkpoint_lvl}, allowed are 0, 1 and 2"

    def mlp(x):
        hidden = F.linear(_to_columns(x, process_group, sequence_parallel), weight1, bias1)
        return F.linear(ACTIVATIONS[activation](hidden), weight2, bias2)

    y = checkpoint(mlp, x, use_reentrant=False) if checkpoint_lvl and torch.is_grad_enabled() else mlp(x)
    return (y, x) if return_residual else y


class FusedDenseFunc:
    """``apply`` is ``fused_dense_func``. PyTorch's operators record the gradients.

    ``apply(x, weight, bias, return_residual=False, process_group=None, sequence_parallel=True)``.

    >>> FusedDenseFunc.apply(torch.randn(5, 8), torch.randn(16, 8), None).shape
    torch.Size([5, 16])
    """

    @staticmethod
    def apply(
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        return_residual: bool = False,
        process_group: Group = None,
        sequence_parallel: bool = True,
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        return fused_dense_func(x, weight, bias, return_residual, process_group, sequence_parallel)


class FusedMLPFunc:
    """``apply`` is ``fused_mlp_func`` with each bias behind its weight.

    ``apply(x, weight1, bias1, weight2, bias2, activation="gelu_approx", save_pre_act=True, return_residual=False,
    checkpoint_lvl=0, heuristic=0, process_group=None, sequence_parallel=True)``.

    >>> FusedMLPFunc.apply(torch.randn(5, 8), torch.randn(32, 8), None, torch.randn(8, 32), None).shape
    torch.Size([5, 8])
    """

    @staticmethod
    def apply(
        x: Tensor,
        weight1: Tensor,
        bias1: Optional[Tensor],
        weight2: Tensor,
        bias2: Optional[Tensor],
        activation: str = "gelu_approx",
        save_pre_act: bool = True,
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: Union[int, str] = 0,
        process_group: Group = None,
        sequence_parallel: bool = True,
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        return fused_mlp_func(
            x,
            weight1,
            weight2,
            bias1,
            bias2,
            activation,
            save_pre_act,
            return_residual,
            checkpoint_lvl,
            heuristic,
            process_group,
            sequence_parallel,
        )


class FusedDense(nn.Linear):
    """``nn.Linear`` that can return its input beside its output.

    Args:
        in_features, out_features, bias, device, dtype: as of ``nn.Linear``.
        return_residual: return (output, x).

    >>> y, x = FusedDense(8, 16, return_residual=True)(torch.randn(5, 8))
    >>> y.shape, x.shape
    (torch.Size([5, 16]), torch.Size([5, 8]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Group = None) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """x ``[..., in]`` -> ``[..., out]``, or (output, x) with ``return_residual``.

        With a process group, x holds this rank's rows, and the output holds all rows: ``fused_dense_func``.
        Gradients for x, weight and bias.
        """
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


class ColumnParallelLinear(nn.Linear):
    """This rank's outputs of a linear layer of ``out_features``, split in units of ``multiple_of``.

    Args:
        in_features, out_features: sizes of the whole layer. The weight is ``[out of this rank, in]``.
        process_group: ranks that share the outputs. The first ranks may get one unit more.
        bias: a bias for this rank's outputs.
        sequence_parallel: each rank passes its own rows of x. Otherwise every rank passes all rows.
        device, dtype: of the parameters.
    Raises:
        AssertionError: out_features is not a multiple of multiple_of.
    Source: tensor parallelism, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> ColumnParallelLinear(8, 16, torch.distributed.group.WORLD)(torch.randn(5, 8)).shape
    torch.Size([5, 16])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Group,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        out_features = _share(out_features, process_group, multiple_of)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x ``[rows, ..., in]`` -> ``[rows, ..., out of this rank]``.

        If sequence parallel, w ranks pass ``[rows / w, ..., in]`` each, and the output holds all rows.
        Gradients for x, weight and bias, summed over the ranks for x.
        """
        return F.linear(_to_columns(x, self.process_group, self.sequence_parallel), self.weight, self.bias)


class RowParallelLinear(nn.Linear):
    """A linear layer over this rank's share of ``in_features``. The outputs are summed, and rank 0 adds the bias.

    Args:
        in_features, out_features: sizes of the whole layer. The weight is ``[out, in of this rank]``.
        process_group: ranks that share the inputs. The first ranks may get one unit of ``multiple_of`` more.
        bias: a bias, which the group's first rank holds. On the other ranks the bias is None.
        sequence_parallel: each rank gets its own rows of the sum. Otherwise every rank gets all rows.
        device, dtype: of the parameters.
    Raises:
        AssertionError: in_features is not a multiple of multiple_of.
    Source: tensor parallelism, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> RowParallelLinear(16, 8, torch.distributed.group.WORLD)(torch.randn(5, 16)).shape
    torch.Size([5, 8])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: Group,
        bias: bool = True,
        sequence_parallel: bool = True,
        multiple_of: int = 1,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        bias = bias and torch.distributed.get_rank(process_group) == 0
        in_features = _share(in_features, process_group, multiple_of)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.process_group, self.sequence_parallel = process_group, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x ``[rows, ..., in of this rank]`` -> ``[rows, ..., out]``.

        If sequence parallel, each of w ranks gets ``[rows / w, ..., out]``.

        Raises:
            AssertionError: sequence parallel, and rows is not a multiple of w.
        Gradients for x, weight and bias.
        """
        return _from_rows(F.linear(x, self.weight, self.bias), self.process_group, self.sequence_parallel)


class FusedMLP(nn.Module):
    """``fused_mlp_func`` with its parameters, ``fc1`` and ``fc2``; hidden_features is 4 x in_features by default.

    Args:
        in_features, out_features: sizes of x and of the output; out_features is in_features by default.
        bias1, bias2: whether ``fc1`` and ``fc2`` have a bias.
        activation: "gelu_approx" (tanh), "relu" or "sqrelu".
        return_residual: return (output, x).
        checkpoint_lvl: 0 keeps the hidden activations for backward, 1 and 2 compute them again.
        heuristic: without effect.
        device, dtype: of the parameters.
    Raises:
        AssertionError: the activation is not one of these.

    >>> FusedMLP(8, activation="relu")(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Optional[int] = None,
        out_features: Optional[int] = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: Union[int, str] = "auto",
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        assert activation in ACTIVATIONS, f"activation is {activation!r}, allowed are {', '.join(ACTIVATIONS)}"
        hidden_features, out_features = hidden_features or 4 * in_features, out_features or in_features
        self.activation, self.return_residual, self.checkpoint_lvl = activation, return_residual, checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor, process_group: Group = None) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """x ``[..., in]`` -> ``[..., out]``, or (output, x) with ``return_residual``.

        With a process group, x and the output hold this rank's rows of the first dimension. Each rank's ``fc1`` and
        ``fc2`` are its part of the hidden features.

        Raises:
            AssertionError: checkpoint_lvl is not 0, 1 or 2.
        Gradients for x and the parameters.
        """
        y = fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            activation=self.activation,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=process_group,
        )
        if process_group is not None:
            y = reduce_scatter(y, process_group)
        return (y, x) if self.return_residual else y


class ParallelFusedMLP(nn.Module):
    """``FusedMLP`` with the hidden features split over the ranks: ``fc1`` column parallel, ``fc2`` row parallel.

    Args:
        process_group: ranks that share the hidden features. None is refused.
        sequence_parallel: each rank passes and gets its own rows. Otherwise every rank passes and gets all rows.
        The others: see ``FusedMLP``.
    Raises:
        AssertionError: there is no process group, or the activation is not one of those of ``FusedMLP``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> ParallelFusedMLP(8, process_group=torch.distributed.group.WORLD)(torch.randn(10, 8)).shape
    torch.Size([10, 8])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: Optional[int] = None,
        out_features: Optional[int] = None,
        activation: str = "gelu_approx",
        process_group: Group = None,
        bias1: bool = True,
        bias2: bool = True,
        sequence_parallel: bool = True,
        checkpoint_lvl: int = 0,
        heuristic: Union[int, str] = "auto",
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        assert process_group is not None, "ParallelFusedMLP needs a process_group"
        assert activation in ACTIVATIONS, f"activation is {activation!r}, allowed are {', '.join(ACTIVATIONS)}"
        hidden_features, out_features = hidden_features or 4 * in_features, out_features or in_features
        self.activation, self.process_group, self.sequence_parallel = activation, process_group, sequence_parallel
        self.checkpoint_lvl, self.heuristic = checkpoint_lvl, heuristic
        layout = {"device": device, "dtype": dtype}
        self.fc1 = ColumnParallelLinear(in_features, hidden_features, process_group, bias=bias1, **layout)
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **layout)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[rows, ..., in]`` -> ``[rows, ..., out]``. If sequence parallel, both hold this rank's rows.

        Raises:
            AssertionError: checkpoint_lvl is not 0, 1 or 2.
        Gradients for x and the parameters, summed over the ranks for x.
        """
        y = fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            activation=self.activation,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=self.process_group,
            sequence_parallel=self.sequence_parallel,
        )
        return _from_rows(y, self.process_group, self.sequence_parallel)


def _share(features, process_group, multiple_of):
    """Features of this rank; the total must be a multiple of ``multiple_of``."""
    assert features % multiple_of == 0, f"{features} features are not a multiple of {multiple_of}"
    world_size, rank = torch.distributed.get_world_size(process_group), torch.distributed.get_rank(process_group)
    return get_dim_for_local_rank(features, world_size, rank, multiple_of)


def _to_columns(x, process_group, sequence_parallel):
    """The whole input of a column parallel layer."""
    if process_group is None:
        return x
    return all_gather(x, process_group) if sequence_parallel else copy_to_ranks(x, process_group)


def _from_rows(y, process_group, sequence_parallel):
    """The sum of the outputs of a row parallel layer, or this rank's rows of it."""
    return reduce_scatter(y, process_group) if sequence_parallel else all_reduce(y, process_group)
