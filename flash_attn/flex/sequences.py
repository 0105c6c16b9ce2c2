"""Where the sequences of a call lie: ``q_offset``, ``kv_len`` and ``block_table`` of ``flex_attention``.

Mods see logical indices: query i of batch b is ``q_offset[b] + i``, and a key keeps its index whatever its page.
"""

import typing

import torch

from .._imagined import is_on_cpu
from .._ops import is_freed


class Sequences(typing.NamedTuple):
    """int32 tensors on the device of the call, as the kernels take them. None: all offsets are 0, all keys are in use,
    key and value are dense. ``blocks_have_offset``: the rows of the block mask count from 0 in the sequence, too."""

    q_offset: typing.Optional[torch.Tensor]
    kv_len: typing.Optional[torch.Tensor]
    block_table: typing.Optional[torch.Tensor]
    blocks_have_offset: bool = False

    def refuse_gradients(self):
        name = "kv_len" if self.block_table is None else "block_table"
        if self.kv_len is not None or self.block_table is not None:
            raise NotImplementedError(
                f"flex_attention computes no gradients with {name}=: call it under torch.no_grad() or detach its inputs"
            )


def narrowed(tensor):
    """int32. A value that int32 lacks becomes its largest or least one, which no check takes for a place."""
    if tensor.dtype in (torch.int64, torch.uint64, torch.uint32):
        limits = torch.iinfo(torch.int32)
        tensor = tensor.to(torch.int64).clamp(limits.min, limits.max)
    return tensor.to(torch.int32)


def _index(name, value, query, shape):
    """An argument as an int32 tensor. None stays None."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or len(shape) != 1:
            raise TypeError(f"{name} must be a tensor of integers, not {type(value).__name__}")
        return torch.full(shape, value, dtype=torch.int32, device=query.device)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, not of {value.dtype}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, not of the layout {value.layout}")
    if value.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}; it is on {value.device}")
    if value.dim() == 0 and len(shape) == 1:
        value = value.expand(shape)
    if value.dim() != len(shape) or value.size(0) != shape[0]:
        words = "[B]" if len(shape) == 1 else "[B, pages of a sequence]"
        raise ValueError(f"{name} must have the shape {words} with B={shape[0]}, but has {tuple(value.shape)}")
    return narrowed(value).contiguous()


def are_ready(sequences, b):
    """Are the arguments of a caller None, or int32 tensors of the right shapes? Then C takes them, or says nothing."""
    for x, dims in zip(sequences, (1, 1, 2)):
        is_ready = x is None or (x.dtype is torch.int32 and x.layout is torch.strided and x.dim() == dims)
        if not is_ready or (x is not None and x.shape[0] != b):
            return False
    return True


def sequences_of(query, q_offset, kv_len, block_table):
    """The checked arguments, or None if no argument came."""
    if q_offset is None and kv_len is None and block_table is None:
        return None
    b = query.size(0)
    return Sequences(
        _index("q_offset", q_offset, query, (b,)),
        _index("kv_len", kv_len, query, (b,)),
        _index("block_table", block_table, query, (b, -1)),
    )


def key_length(key, sequences):
    """The keys that a sequence has room for."""
    is_paged = sequences is not None and sequences.block_table is not None
    return sequences.block_table.shape[1] * key.shape[2] if is_paged else key.shape[2]


def shift_of(len_q, len_kv, q_offset=None, kv_len=None):
    """The key beside a query less its q_idx, where the last query lies beside the last key of its sequence. None: it is
    not the same number for all, or a GPU holds it. The arguments are those of the caller."""
    for x in (q_offset, kv_len):
        if isinstance(x, torch.Tensor) and (not is_on_cpu(x) or is_freed(x)):
            return None  # the kernels name a tensor that is freed
    first, end = (x.long() if isinstance(x, torch.Tensor) else x for x in (q_offset, kv_len))
    shift = (len_kv if end is None else end) - len_q - (0 if first is None else first)
    if not isinstance(shift, torch.Tensor):
        return shift
    shifts = set(shift.flatten().tolist())
    return shifts.pop() if len(shifts) == 1 else None


def rows_of_mask(block_mask, query, len_kv, sequences):
    """Whether the block mask fits, and whether its rows count from 0 in the sequence.

    A block mask of as many rows as there are queries lists the blocks of these queries. One with more rows is that of
    the whole sequence. A cache may have room for more keys than the block mask has, up to the end of its last block.
    """
    rows, keys = block_mask.shape[-2:]
    is_cache = sequences is not None and (sequences.kv_len is not None or sequences.block_table is not None)
    size = block_mask.BLOCK_SIZE[1]
    fits = -(-keys // size) * size >= len_kv if is_cache else keys == len_kv
    has_offset = sequences is not None and sequences.q_offset is not None and rows > query.size(-2)
    return fits and (has_offset or rows == query.size(-2)), has_offset
