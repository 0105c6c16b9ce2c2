"""Collectives with gradients for tensor and sequence parallelism, split along the first dimension:

    forward         backward
    all_gather      reduce_scatter     [n, ...] on each of w ranks <-> [w n, ...]
    reduce_scatter  all_gather
    all_reduce      identity           the gradient of a replicated output is replicated already

``*_raw`` are the plain collectives and return (output, handle). The handle is None unless ``async_op``.
"""

from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from flash_attn._types import Group

__all__ = [
    "AllGatherFunc",
    "AllReduceFunc",
    "ReduceScatterFunc",
    "all_gather",
    "all_gather_raw",
    "all_reduce",
    "all_reduce_raw",
    "allreduce_sequence_parallel_grad",
    "get_dim_for_local_rank",
    "reduce_scatter",
    "reduce_scatter_raw",
    "sync_shared_params",
]


def all_gather_raw(input_: Tensor, process_group: Group, async_op: bool = False) -> tuple[Tensor, Any]:
    """Joins the ranks' ``[n, ...]`` in order to ``[w n, ...]``.

    Args:
        input_: ``[n, ...]``, any strides.
        process_group: the w ranks; None is the default group.
        async_op: return before the result is there; ``handle.wait()`` waits for it.
    Returns:
        (``[w n, ...]`` in the dtype of input_, handle). The handle is None unless ``async_op``.
    There are no gradients; see ``all_gather``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> output, handle = all_gather_raw(torch.ones(2, 3), torch.distributed.group.WORLD)
    >>> output.shape, handle
    (torch.Size([2, 3]), None)
    >>> torch.distributed.destroy_process_group()
    """
    world_size = dist.get_world_size(process_group)
    output = input_.new_empty(world_size * input_.shape[0], *input_.shape[1:])
    gather = _first_of("all_gather_single", "all_gather_into_tensor")
    return output, gather(output, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: Tensor, process_group: Group, async_op: bool = False) -> tuple[Tensor, Any]:
    """Sums ``[w n, ...]`` over the ranks and returns this rank's ``[n, ...]``.

    Args:
        input_: ``[w n, ...]``, any strides.
        process_group: the w ranks; None is the default group.
        async_op: return before the result is there; ``handle.wait()`` waits for it.
    Returns:
        (``[n, ...]`` in the dtype of input_, handle). The handle is None unless ``async_op``.
    Raises:
        AssertionError: the first dimension is not a multiple of w.
    There are no gradients; see ``reduce_scatter``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> output, handle = reduce_scatter_raw(torch.ones(2, 3), torch.distributed.group.WORLD)
    >>> output.shape, handle
    (torch.Size([2, 3]), None)
    >>> torch.distributed.destroy_process_group()
    """
    world_size = dist.get_world_size(process_group)
    assert input_.shape[0] % world_size == 0, f"{input_.shape[0]} rows do not divide over {world_size} ranks"
    output = input_.new_empty(input_.shape[0] // world_size, *input_.shape[1:])
    scatter = _first_of("reduce_scatter_single", "reduce_scatter_tensor")
    return output, scatter(output, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(input_: Tensor, process_group: Group, async_op: bool = False) -> tuple[Tensor, Any]:
    """Returns the sum over ranks, written over ``input_`` if ``input_`` is contiguous.

    Args:
        input_: ``[...]``, any strides.
        process_group: the w ranks; None is the default group.
        async_op: return before the result is there; ``handle.wait()`` waits for it.
    Returns:
        (``[...]`` in the dtype of input_, handle). The handle is None unless ``async_op``.
    There are no gradients; see ``all_reduce``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> output, handle = all_reduce_raw(torch.ones(2, 3), torch.distributed.group.WORLD)
    >>> output.shape, handle
    (torch.Size([2, 3]), None)
    >>> torch.distributed.destroy_process_group()
    """
    output = input_.contiguous()
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)


class AllGatherFunc(torch.autograd.Function):
    """Gather sequence parallel activations: ``apply(input_, process_group)`` is ``all_gather``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> AllGatherFunc.apply(torch.ones(2, 3), torch.distributed.group.WORLD).shape
    torch.Size([2, 3])
    >>> torch.distributed.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Group) -> Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return reduce_scatter_raw(grad, ctx.process_group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    """Sum partial results and keep this rank's rows: ``apply(input_, process_group)`` is ``reduce_scatter``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> ReduceScatterFunc.apply(torch.ones(2, 3), torch.distributed.group.WORLD).shape
    torch.Size([2, 3])
    >>> torch.distributed.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Group) -> Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return all_gather_raw(grad, ctx.process_group)[0], None


class AllReduceFunc(torch.autograd.Function):
    """Sum partial results onto every rank: ``apply(input_, process_group)`` is ``all_reduce``.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> AllReduceFunc.apply(torch.ones(2, 3), torch.distributed.group.WORLD).shape
    torch.Size([2, 3])
    >>> torch.distributed.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Group) -> Tensor:
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return grad, None


class CopyToRanksFunc(torch.autograd.Function):
    """A replicated input of a split layer. The forward is the identity, and the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: Group) -> Tensor:
        ctx.process_group = process_group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        return all_reduce_raw(grad.clone(), ctx.process_group)[0], None


def all_gather(input_: Tensor, process_group: Group) -> Tensor:
    """``all_gather_raw`` with a gradient, which is summed over the ranks and scattered.

    input_ ``[n, ...]`` -> ``[w n, ...]`` in the same dtype, in the order of the ranks.
    Gradient for input_.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> all_gather(torch.ones(2, 3), torch.distributed.group.WORLD).shape  # [2 w, 3] on w ranks
    torch.Size([2, 3])
    >>> torch.distributed.destroy_process_group()
    """
    return AllGatherFunc.apply(input_, process_group)


def reduce_scatter(input_: Tensor, process_group: Group) -> Tensor:
    """``reduce_scatter_raw`` with a gradient, which is gathered.

    input_ ``[w n, ...]`` -> ``[n, ...]`` in the same dtype.

    Raises:
        AssertionError: the first dimension is not a multiple of w.
    Gradient for input_.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> reduce_scatter(torch.ones(2, 3), torch.distributed.group.WORLD).shape  # [2 / w, 3] on w ranks
    torch.Size([2, 3])
    >>> torch.distributed.destroy_process_group()
    """
    return ReduceScatterFunc.apply(input_, process_group)


def all_reduce(input_: Tensor, process_group: Group) -> Tensor:
    """The sum over the ranks in new memory, with a gradient, which passes unchanged.

    input_ ``[...]`` -> the same shape and dtype. Gradient for input_.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> all_reduce(torch.ones(2, 3), torch.distributed.group.WORLD).sum()  # 6 w on w ranks
    tensor(6.)
    >>> torch.distributed.destroy_process_group()
    """
    return AllReduceFunc.apply(input_, process_group)


def copy_to_ranks(input_: Tensor, process_group: Group) -> Tensor:
    """The input, of the same shape and dtype, whose gradient is summed over the ranks."""
    return CopyToRanksFunc.apply(input_, process_group)


def sync_shared_params(model: nn.Module, process_group: Group) -> None:
    """Copy the parameters marked ``_shared_params`` from the group's first rank to the others.

    All ranks call it with models whose parameters have the same names, shapes and marks. The copy is in place. Without
    a process_group the source is rank 0.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.LayerNorm(8)
    >>> model.weight._shared_params = True
    >>> sync_shared_params(model, torch.distributed.group.WORLD)
    >>> torch.distributed.destroy_process_group()
    """
    first = dist.get_global_rank(process_group, 0) if process_group is not None else 0
    for param in _marked(model, "_shared_params"):
        with torch.no_grad():
            dist.broadcast(param, src=first, group=process_group)


def allreduce_sequence_parallel_grad(model: nn.Module, process_group: Group) -> None:
    """Sum over ranks the gradients of parameters marked ``_sequence_parallel``, in one message per dtype.

    All ranks call it after the backward, with the same marks. The sums replace the gradients in place. Parameters
    without a gradient are left out.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.LayerNorm(8)
    >>> model.weight._sequence_parallel, model.weight.grad = True, torch.ones(8)
    >>> allreduce_sequence_parallel_grad(model, torch.distributed.group.WORLD)
    >>> torch.distributed.destroy_process_group()
    """
    grads = [param.grad for param in _marked(model, "_sequence_parallel") if param.grad is not None]
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        group = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.flatten() for grad in group])
        dist.all_reduce(flat, group=process_group)
        for grad, summed in zip(group, flat.split([grad.numel() for grad in group])):
            grad.copy_(summed.view_as(grad))


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """Returns a rank's share of ``dim`` in multiples of ``multiple_of``. The first ranks may get one multiple more.

    If dim is not a multiple of multiple_of, the rest belongs to no rank.

    >>> [get_dim_for_local_rank(640, 4, rank, multiple_of=64) for rank in range(4)]
    [192, 192, 128, 128]
    """
    units = dim // multiple_of
    return multiple_of * (units // world_size + (local_rank < units % world_size))


def _first_of(*names):
    """Returns the collective under the newest name that this torch has. Torch 2.13 renamed two collectives."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _marked(model, flag):
    """Returns parameters with a true attribute ``flag``, in the order of their names, which all ranks share."""
    return [param for _, param in sorted(model.named_parameters()) if getattr(param, flag, False)]
