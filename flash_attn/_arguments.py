"""What callers pass becomes what the ops take: tensors, lengths, masks and scales."""

import numbers
from typing import Any

import torch
from torch.compiler import is_compiling

from flash_attn._ops import check_layout, check_storage, check_tensor, is_freed


def maybe_contiguous(x: Any) -> Any:
    """Returns ``x`` if its last dimension is contiguous or ``x`` is no tensor, otherwise a contiguous copy.

    A tensor of a freed storage is returned, too. The op names it.
    """
    if isinstance(x, torch.Tensor) and x.dim() > 0 and x.stride(-1) != 1 and not is_freed(x):
        return x.contiguous()
    return x


_USUAL = (torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, tuple, list)


def has_distributed(values):
    """Is any of the values a DTensor? torch.distributed.tensor is not imported for this question.

    isinstance() of what is no tensor takes 0.3 us.
    """
    for x in values:
        if type(x) not in _USUAL and isinstance(x, torch.Tensor) and hasattr(x, "device_mesh"):
            return True
    return False


def _of_numpy(x):
    """A NumPy array without dimensions gives its number, because the caller may write it. All else stays."""
    if type(x) in _USUAL or is_compiling() or getattr(x, "ndim", None) != 0:
        return x
    return x.item() if getattr(x.dtype, "kind", None) in ("b", "i", "u", "f") else x


def as_int(x, name):
    """Returns a Python integer. A tensor of one element gives its value, and a CUDA tensor waits for the device."""
    if not isinstance(x, torch.Tensor):
        return _of_numpy(x)
    if x.numel() != 1:
        raise RuntimeError(f"{name} must be one integer; it is a tensor of shape {tuple(x.shape)}")
    check_storage(name, x)
    return x.item()


def _is_pair(x):
    """Does ``x`` already consist of two Python integers?"""
    return type(x) in (tuple, list) and len(x) == 2 and type(x[0]) is type(x[1]) is int


def as_window(window_size):
    """Returns ``(left, right)`` as Python integers, from a tuple, a list or a tensor of two.

    A backward needs the numbers of its forward, and the caller may write a list in between.
    """
    if _is_pair(window_size):
        return tuple(window_size)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be (left, right), two integers; it is {window_size!r}") from None
    sides = as_int(left, "window_size"), as_int(right, "window_size")
    if not is_compiling() and any(isinstance(x, numbers.Real) and int(x) != x for x in sides):
        raise ValueError(f"window_size must be (left, right), two integers; it is {window_size!r}")
    return sides


def as_number(x, name):
    """Returns the number of a tensor of one element. A tensor of another size stays, for the op to refuse.

    The backward needs the number of the forward, and the tensor may be written in between.
    """
    if not isinstance(x, torch.Tensor) or is_compiling():
        return _of_numpy(x)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} gets no gradient, and it requires grad: detach it. A factor of q has a gradient")
    return x.item() if x.numel() == 1 else x


def as_scale(softmax_scale, q):
    """Returns the given scale, or 1 / sqrt(d). The op reports errors of q."""
    if softmax_scale is not None:
        return as_number(softmax_scale, "softmax_scale")
    return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0


def unfold(mask):
    """Flattens ``(softmax_scale, causal, (left, right), softcap)`` for the ops."""
    softmax_scale, causal, (left, right), softcap = mask
    return softmax_scale, causal, left, right, softcap


def fold(mask):
    """Does the inverse of ``unfold``."""
    softmax_scale, causal, left, right, softcap = mask
    return softmax_scale, causal, (left, right), softcap


def split(tensors):
    """Returns q, k, v as views of (q, k, v), (q, kv) or (qkv,). Nothing is copied. A packed None gives Nones."""
    if len(tensors) == 3:
        return tensors
    *given, packed = tensors
    parts = 3 - len(given)
    return (*given, *(None if packed is None else packed.select(-3, i) for i in range(parts)))


def pack(tensors, num):
    """Does the inverse of ``split`` and returns q, k, v as num tensors."""
    if num == 3:
        return tensors
    given, parts = tensors[: num - 1], tensors[num - 1 :]
    return [*given, None if parts[0] is None else torch.stack(parts, -3)]


NAMES = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}


def check_given(tensors, varlen):
    """Checks that the tensors can be split into q, k and v. The op checks everything else."""
    if not all(map(torch.is_tensor, tensors)):
        for name, x in zip(NAMES[len(tensors)], tensors):
            check_tensor(name, x)
    if len(tensors) == 3:
        return
    rows = ("total",) if varlen else ("batch_size", "seqlen")
    if len(tensors) == 1:
        check_layout("qkv", tensors[0], *rows, 3, "num_heads", "head_size")
    else:
        check_layout("kv", tensors[1], *rows, 2, "num_heads_k", "head_size")


def distinct(*arguments):
    """Returns the arguments. While compiling, a repeated tensor is replaced by a view of itself.

    torch.compile refuses an autograd.Function if two arguments are the same tensor, like cu_seqlens of self attention.
    """
    if not is_compiling():
        return arguments
    found = []
    for x in arguments:
        repeated = isinstance(x, torch.Tensor) and any(x is y for y in found)
        found.append(x.view_as(x) if repeated else x)
    return found
