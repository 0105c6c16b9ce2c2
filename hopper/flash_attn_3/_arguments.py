"""What every function does with its arguments before an op is called, and the call of an op."""

from collections.abc import Sequence
from typing import Any, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_3._kinds import check_kinds, in_names_of_the_caller
from flash_attn_3._ops import _C, NO_GRADIENTS, refuse_tangents

Window = Union[Sequence[int], Tensor]  # (left, right)
Length = Union[int, Tensor]  # a tensor has one element


def maybe_contiguous(x: Any) -> Any:
    """Returns ``x`` if its last dimension is contiguous or ``x`` is no tensor, otherwise a contiguous copy.

    >>> maybe_contiguous(torch.ones(2, 3).t()).is_contiguous()
    True
    """
    if isinstance(x, torch.Tensor) and x.dim() > 0 and x.stride(-1) != 1:
        return x.contiguous()
    return x


def has_distributed(values: Any) -> bool:
    """Is any of the values a DTensor? torch.distributed.tensor is not imported for this question."""
    for x in values:
        if isinstance(x, torch.Tensor) and type(x) is not torch.Tensor and hasattr(x, "device_mesh"):
            return True
    return False


def round_multiple(x: int, m: int) -> int:
    """Rounds ``x`` up to a multiple of ``m``.

    >>> round_multiple(130, 128)
    256
    """
    return (x + m - 1) // m * m


def _of_numpy(x):
    """A NumPy array without dimensions gives its number, because the caller may write it. All else stays."""
    if torch.compiler.is_compiling() or getattr(x, "ndim", None) != 0:
        return x
    return x.item() if getattr(x.dtype, "kind", None) in ("b", "i", "u", "f") else x


def as_int(x, name):
    """Returns a Python integer or None. A tensor of one element gives its value; a CUDA tensor waits for the device."""
    if not isinstance(x, torch.Tensor):
        return _of_numpy(x)
    if x.numel() != 1:
        raise RuntimeError(f"{name} must be one integer; it is a tensor of shape {tuple(x.shape)}")
    return x.item()


def as_number(x, name):
    """Returns the number of a tensor of one element. A tensor of another size stays, for the op to refuse.

    The backward needs the number of the forward, and the tensor may be written in between.
    """
    if not isinstance(x, torch.Tensor) or torch.compiler.is_compiling():
        return _of_numpy(x)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} gets no gradient, and it requires grad: detach it. A factor of q has a gradient")
    return x.item() if x.numel() == 1 else x


def as_window(window_size):
    """Returns ``(left, right)`` as Python integers, from a tuple, a list or a tensor of two."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be (left, right), two integers; it is {window_size!r}") from None
    return as_int(left, "window_size"), as_int(right, "window_size")


def check_tensors(**tensors):
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor; it is of type {type(x).__name__}")


def is_int(x):
    return type(x) is int


def _has_others(flags, integers):
    """Is any of the values one that torch's parser would cut to a flag or to an integer without a word?"""
    for x in flags:
        if x is not True and x is not False and x is not None:
            return True
    for x in integers:
        if type(x) is not int and x is not None:
            return True
    return False


def call_named(function, named, optional=(), flags=(), integers=(), renamed=None):
    """Returns ``function()``. If the call fails, the error names the argument of the caller.

    Args:
        named: a function without arguments that returns the caller's arguments by name.
        optional: names of those that may be None, although _kinds.py says something else.
        flags, integers: values that are looked at before the call, because torch's parser takes nearly everything.
        renamed: maps the op's names of arguments to the caller's.
    """
    if torch.compiler.is_compiling():
        return function()
    try:
        if _has_others(flags, integers):
            check_kinds(named(), optional)
        return function()
    except Exception as error:
        failure = error
    check_kinds(named(), optional)
    raise failure if renamed is None else in_names_of_the_caller(failure, renamed)


def distinct(*arguments):
    """Returns the arguments. While compiling, a repeated tensor is replaced by a view of itself.

    torch.compile refuses an autograd.Function if two arguments are the same tensor, like cu_seqlens of self attention.
    """
    if not torch.compiler.is_compiling():
        return arguments
    distinct = []
    for x in arguments:
        repeated = isinstance(x, torch.Tensor) and any(x is y for y in distinct)
        distinct.append(x.view_as(x) if repeated else x)
    return distinct


def refuse_transforms(arguments):
    """Refuses the transforms of torch.func, whose own sentence speaks of classes that the caller cannot see."""
    if forward_ad._current_level >= 0:
        refuse_tangents(arguments)
    if not torch._C._are_functorch_transforms_active():
        return
    raise NotImplementedError(NO_GRADIENTS)


def call_op(op, *arguments):
    """Returns ``op(*arguments)``. The dispatcher makes exceptions RuntimeErrors; here they are restored."""
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        exception = _C.mended_exception(error)
        if exception is error:
            raise
        raise exception from None
