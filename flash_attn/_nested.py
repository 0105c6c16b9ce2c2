"""Jagged nested tensors: their values are packed sequences.

torch.nested                     flash_attn
x.values()  [total, h, d]        the tensor
x.offsets() [b + 1], int64       cu_seqlens
x, [b, j, h, d]                  the result, with the offsets of q
"""

import torch

from flash_attn._arguments import NAMES
from flash_attn._ops import check_storage


def has_nested(tensors):
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.is_nested:
            return True
    return False


def _check(name, x, num_dims):
    if not isinstance(x, torch.Tensor) or not x.is_nested:
        raise TypeError(f"{name} must be a nested tensor, because another argument is one; it is of type {_type(x)}")
    if x.layout != torch.jagged:
        raise TypeError(f"{name} must be nested with layout torch.jagged; it has layout {x.layout}")
    if x.dim() != num_dims:
        raise RuntimeError(f"{name} must have {num_dims} dimensions, with the lengths in dimension 1; it has {x.dim()}")
    if x._ragged_idx != 1:
        raise RuntimeError(
            f"{name} must have its lengths in dimension 1, [b, length, h, d]; they are in dimension {x._ragged_idx}"
        )
    for part, of_part in ((name, x._values), (f"{name}.offsets()", x._offsets), (f"{name}.lengths()", x._lengths)):
        if of_part is not None:
            check_storage(part, of_part)


def _type(x):
    return type(x).__name__


def _without_holes(x):
    return x if x.lengths() is None else x.contiguous()


def _same_lengths(k, v):
    return k.offsets() is v.offsets() or torch.equal(k.offsets(), v.offsets())


def take_apart(tensors):
    """Returns (values, lengths, together): the packed tensors, the lengths of a varlen function, and a function.

    The function makes packed results jagged, with the lengths of q.
    """
    num_dims = {1: (5,), 2: (4, 5), 3: (4, 4, 4)}[len(tensors)]
    for name, x, num in zip(NAMES[len(tensors)], tensors, num_dims):
        _check(name, x, num)
    tensors = [_without_holes(x) for x in tensors]
    q, k, v = tensors[0], tensors[min(1, len(tensors) - 1)], tensors[-1]
    if k is not v and not _same_lengths(k, v):
        raise RuntimeError("k and v must have the same lengths; their offsets differ")
    if k.shape[0] != q.shape[0]:
        raise RuntimeError(f"k and v must have as many sequences as q, {q.shape[0]}; they have {k.shape[0]}")
    cu_seqlens_q = q.offsets().to(torch.int32)
    cu_seqlens_k = cu_seqlens_q if k.offsets() is q.offsets() else k.offsets().to(torch.int32)
    lengths = cu_seqlens_q, cu_seqlens_k, q._get_max_seqlen(), k._get_max_seqlen()

    def together(values):
        shortest, longest = q._maybe_min_seqlen, q._maybe_max_seqlen
        return torch.nested.nested_tensor_from_jagged(
            values, offsets=q.offsets(), min_seqlen=shortest, max_seqlen=longest
        )

    return [x.values() for x in tensors], lengths, together
