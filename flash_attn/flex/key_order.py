"""Copies of captured tensors in which the values of neighbouring keys lie side by side.

The threads of a warp, or the lanes of a vector, take neighbouring keys. Where their values lie apart, each value costs
an access to memory of its own. A bias of T5, ``[rows, keys, heads].permute(2, 0, 1)``, takes a kernel three times as
long as its copy. So a large tensor is copied before the kernels, and the copy is dropped behind them. A backward makes
the copy again, because the layers of a model share such a tensor, and kept copies would fill the memory.

On a CPU of two threads copies saved up to a third of a forward in bf16, and cost up to a quarter of one in fp32. So
CPUs read the tensor as it lies.
"""

import torch

from .._ops import is_freed

LEAST = {"cuda": 1 << 20}  # elements that pay for the launch of a copy; other devices make none
LEAST_STRIDE = 4
FEW_ROWS = 16  # a decoder reads each element once

_dims = {}  # text of a program: (dimension of a tensor that kv_idx walks over, rank) for each of its tensors, or None


def note_program(text, builder, captures):
    """Notes which dimensions of a program's tensors kv_idx walks over. ``captures``: the numbers of its tensors."""
    found = {}
    for op, _, words, operands in builder.nodes:
        if op == "gather":
            dims = [dim for dim, node in enumerate(operands) if _walks(builder, node)]
            found.setdefault(words[0], set()).add((dims[0], len(operands)) if len(dims) == 1 else None)
    dims = tuple(next(iter(found[i])) if len(found.get(i, ())) == 1 else None for i in captures)
    if any(dims):
        _dims[text] = dims


def _walks(builder, node):
    """Is an index kv_idx plus what does not depend on kv_idx? Then neighbouring keys have neighbouring indices."""
    op, _, _, operands = builder.nodes[node]
    if op == "kv_idx":
        return True
    if op not in ("add", "sub"):
        return False
    a, b = operands
    is_first = _walks(builder, a) and _is_fixed(builder, b)
    return is_first or (op == "add" and _walks(builder, b) and _is_fixed(builder, a))


def _is_fixed(builder, node):
    return not any(builder.nodes[x][0] == "kv_idx" for x in builder.ancestors(node))


def copied(tensor, dim, rows):
    """A copy in which dimension ``dim`` lies innermost, or the tensor itself where a copy does not pay.

    Dimensions that repeat the tensor stay expanded. ``rows``: the queries of the call.
    """
    least = LEAST.get(tensor.device.type)
    if least is None or rows <= FEW_ROWS or tensor.layout is not torch.strided:
        return tensor
    sizes, strides = tensor.shape, tensor.stride()
    if sizes[dim] < 2 or strides[dim] < LEAST_STRIDE:
        return tensor
    num, last, least_stride = 1, 0, strides[dim]
    for size, stride in zip(sizes, strides):
        if stride and size > 1:
            num *= size
            last += (size - 1) * stride
            least_stride = min(least_stride, stride)
    is_overlapping = num > last // least_stride + 1  # many elements in little memory
    if num < least or is_overlapping or is_freed(tensor):
        return tensor
    x = tensor.detach()
    if 0 in strides:
        x = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    return x.movedim(dim, -1).contiguous().movedim(-1, dim).expand(sizes)


def _of_program(tensor, place, rows):
    """:func:`copied` of a tensor of a program. The kernels pass over its dimensions of size 1 that no index reads."""
    if place is None:
        return tensor
    dim, rank = place
    if tensor.dim() != rank:
        dims = [n for n, size in enumerate(tensor.shape) if size != 1]
        if len(dims) != rank:
            return tensor
        dim = dims[dim]
    return copied(tensor, dim, rows)


def in_key_order(mod, rows):
    """A mod ``(text, tensors, numbers)`` with copies in place of tensors for which a copy pays. None stays None."""
    dims = None if mod is None else _dims.get(mod[0])
    if dims is None:
        return mod
    text, tensors, numbers = mod
    return text, tuple(_of_program(x, place, rows) for x, place in zip(tensors, dims)), numbers
