"""``custom_fwd`` and ``custom_bwd`` of torch.amp for CUDA, under the names that older code imports."""

from typing import Any, Callable, Optional, TypeVar, overload

import torch

__all__ = ["custom_bwd", "custom_fwd"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def custom_fwd(fwd: F, *, cast_inputs: Optional[torch.dtype] = None) -> F: ...
@overload
def custom_fwd(fwd: None = None, *, cast_inputs: Optional[torch.dtype] = None) -> Callable[[F], F]: ...
def custom_fwd(fwd: Optional[Callable[..., Any]] = None, *, cast_inputs: Optional[torch.dtype] = None) -> Any:
    """Decorates the forward of an autograd function, with or without arguments: ``torch.amp.custom_fwd`` on CUDA.

    Args:
        fwd: the forward; None: return a decorator.
        cast_inputs: under autocast floating CUDA tensors come in this dtype, and autocast is off inside.
    Returns:
        The decorated forward, or a decorator.

    >>> class Twice(torch.autograd.Function):
    ...     @staticmethod
    ...     @custom_fwd(cast_inputs=torch.float16)
    ...     def forward(ctx, x):
    ...         return 2 * x
    >>> Twice.apply(torch.ones(2))
    tensor([2., 2.])
    """
    return torch.amp.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


@overload
def custom_bwd(bwd: F) -> F: ...
@overload
def custom_bwd(bwd: None = None) -> Callable[[F], F]: ...
def custom_bwd(bwd: Optional[Callable[..., Any]] = None) -> Any:
    """Decorates the backward of such a function: ``torch.amp.custom_bwd`` on CUDA.

    The backward runs with the forward's state of autocast. Returns the decorated backward, or a decorator if bwd is
    None.

    >>> class Twice(torch.autograd.Function):
    ...     forward = staticmethod(custom_fwd(lambda ctx, x: 2 * x))
    ...     backward = staticmethod(custom_bwd(lambda ctx, grad: 2 * grad))
    >>> x = torch.ones(2, requires_grad=True)
    >>> torch.autograd.grad(Twice.apply(x).sum(), x)
    (tensor([2., 2.]),)
    """
    return torch.amp.custom_bwd(bwd, device_type="cuda")
