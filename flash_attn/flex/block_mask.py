"""Block masks of mask mods, found without an array of all queries and keys.

A block of queries and keys is *empty*, *full* or *partial*. Bounds of the mask over the block tell most of the time
which one it is. Other blocks are evaluated element by element, until an allowed and a masked element were seen.
"""

import inspect
from collections.abc import Sequence
from typing import Optional, Union

import flash_attn_2_cuda
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention.flex_attention import BlockMask

from .._imagined import is_imagined, stand_in
from .._kinds import check_kinds
from .._types import Device, MaskMod, ScoreMod
from . import calls, ops
from .kept_walks import KeptWalks
from .tracer import PARAMETERS, place_of, program_of

NAMES = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
NAMES += tuple("full_" + name for name in NAMES)
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """The mask that allows everything.

    >>> create_mask(noop_mask, 1, 1, 2, 3, "cpu").all()
    tensor(True)
    """
    return batch.new_ones((), dtype=torch.bool, device=batch.device)


def _check_callable(mask_mods):
    if not all(callable(mod) for mod in mask_mods):
        raise RuntimeError(f"All inputs should be callable mask_mods: {mask_mods}")


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a mask_mod that allows what all of the mask_mods allow.

    >>> causal, near = lambda b, h, i, j: i >= j, lambda b, h, i, j: i - j < 2
    >>> create_mask(and_masks(causal, near), 1, 1, 3, 3, "cpu")[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    _check_callable(mask_mods)

    def and_mask(b, h, q_idx, kv_idx):
        result = b.new_ones((), dtype=torch.bool)
        for mask in mask_mods:
            result = result & mask(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Returns a mask_mod that allows what any of the mask_mods allows.

    >>> causal, prefix = lambda b, h, i, j: i >= j, lambda b, h, i, j: j < 2
    >>> create_mask(or_masks(causal, prefix), 1, 1, 3, 3, "cpu")[0, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    _check_callable(mask_mods)

    def or_mask(b, h, q_idx, kv_idx):
        result = b.new_zeros((), dtype=torch.bool)
        for mask in mask_mods:
            result = result | mask(b, h, q_idx, kv_idx)
        return result

    return or_mask


def _num_arguments(mod):
    """The positional arguments without a default: 4 of a mask_mod, 5 of a score_mod."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(mod).parameters.values()
    except (TypeError, ValueError):
        return 0
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _device_of(device, types):
    """The device that the caller means: with its number, and of one of these types."""
    device = torch.device(device if device is not None else torch.accelerator.current_accelerator() or "cpu")
    if device.type not in types:
        raise NotImplementedError(f'a mask is made on {" or ".join(types)}: pass device="cpu" instead of "{device}"')
    if device.type == "cuda" and not torch.compiler.is_dynamo_compiling() and is_imagined():
        return torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def mod_of(mod, score_dtype, device):
    """``(program, tensors, numbers)`` of a mod, with its tensors on the device."""
    program, tensors, numbers = program_of(mod, score_dtype)
    return program, tuple(on_device(x, device) for x in tensors), numbers


def on_device(tensor, device):
    if tensor.device == device:
        return tensor
    if is_imagined():
        return stand_in(tensor, device)
    if tensor.dim() == 0:  # a number that a mod holds as a tensor
        return tensor.to(device)
    raise RuntimeError(f"a mod's tensors must be on {device}, where it is computed; one is on {tensor.device}")


def _check_is_plain(function, tensor):
    """Within torch.func.grad and the like, new tensors are of torch.func, too."""
    if torch._C._are_functorch_transforms_active() and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{function} makes no mask within a function that torch.func transforms: make the mask outside of it"
        )


def _sizes(**sizes):
    if not torch.compiler.is_dynamo_compiling():
        check_kinds(sizes)
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be positive, but is {size}")
    return [1 if size is None else int(size) for size in sizes.values()]


def create_mask(
    mod_fn: Union[MaskMod, ScoreMod], B: Optional[int], H: Optional[int], Q_LEN: int, KV_LEN: int, device: Device = None
) -> Tensor:
    """Evaluates a mod for every query and key.

    Args:
        mod_fn: a mask_mod, or a score_mod. Of a score_mod the mask is false where it turns a score of 0 into -inf.
        B, H: numbers of batches and heads; None is 1.
        Q_LEN, KV_LEN: numbers of queries and keys.
        device: the CPU; None is the current accelerator, or the CPU.
    Returns:
        ``[B, H, Q_LEN, KV_LEN]``, bool.

    >>> create_mask(lambda b, h, i, j: i >= j, 1, 1, 2, 4, "cpu")[0, 0].int()  # aligned to the top left corner
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0]], dtype=torch.int32)
    """
    device = _device_of(device, ["cpu"])
    shape = _sizes(B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    num = _num_arguments(mod_fn)
    if num not in (4, 5):
        raise AssertionError(
            f"a mask_mod has 4 arguments, a score_mod has 5; {PARAMETERS}: {place_of(mod_fn)} has {num}"
        )
    scores = torch.zeros(shape, device=device) if num == 5 else None
    program, tensors, numbers = mod_of(mod_fn, torch.float32 if num == 5 else None, device)
    if get_proxy_mode() is not None:
        raise RuntimeError("create_mask cannot be recorded: it is no op; make the mask outside of make_fx")
    out = torch.empty(shape, dtype=getattr(torch, flash_attn_2_cuda.flex_check(program.text)), device=device)
    _check_is_plain("create_mask", out)
    flash_attn_2_cuda.flex_evaluate(program.text, tensors, numbers, out, scores)
    return ~torch.isneginf(out) if num == 5 else out.to(program.dtype)


def create_block_mask(
    mask_mod: MaskMod,
    B: Optional[int],
    H: Optional[int],
    Q_LEN: int,
    KV_LEN: int,
    device: Device = None,
    BLOCK_SIZE: Union[int, Sequence[int]] = 128,
    _compile: bool = False,
) -> BlockMask:
    """Lists the full and the partial blocks of a mask. Memory grows with the number of blocks.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, true where a query may attend to a key.
        B, H: numbers of batches and heads of the mask; None is 1.
        Q_LEN, KV_LEN: numbers of queries and keys.
        device: the CPU or a GPU, where mask_mod's tensors lie; None is the current accelerator, or the CPU.
        BLOCK_SIZE: the size of a block, or a pair: queries and keys.
        _compile: has no effect.
    Returns:
        ``torch.nn.attention.flex_attention.BlockMask`` with the lists that torch makes.
    Raises:
        NotImplementedError: the device is no CPU and no GPU, or mask_mod uses an operation that is not supported.
        RuntimeError: mask_mod branches on its indices, or one of its tensors is on another device.

    >>> mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, "cpu")
    >>> mask.kv_num_blocks  # partial blocks of each row of blocks
    tensor([[[1, 1, 1, 1]]], dtype=torch.int32)
    >>> mask.full_kv_num_blocks
    tensor([[[0, 1, 2, 3]]], dtype=torch.int32)
    """
    from . import graph

    if graph.is_exported():
        return graph.exported(create_block_mask, mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    if not torch.compiler.is_dynamo_compiling() and _num_arguments(mask_mod) != 4:
        raise AssertionError(f"create-block_mask requires a mask_mod function! Got {place_of(mask_mod)}; {PARAMETERS}")
    device = _device_of(device, ["cpu", "cuda"])
    if not torch.compiler.is_dynamo_compiling():
        check_kinds({"BLOCK_SIZE": BLOCK_SIZE})
    block = tuple(BLOCK_SIZE) if isinstance(BLOCK_SIZE, Sequence) else (BLOCK_SIZE, BLOCK_SIZE)
    b, h, len_q, len_kv = _sizes(B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    block = tuple(_sizes(BLOCK_SIZE=block[0]) + _sizes(BLOCK_SIZE=block[1]))
    if torch.compiler.is_dynamo_compiling():
        lists = graph.find_blocks(mask_mod, device, (b, h, len_q, len_kv), block)
        return BlockMask(seq_lengths=(Q_LEN, KV_LEN), BLOCK_SIZE=block, mask_mod=mask_mod, **dict(zip(NAMES, lists)))
    mask = mod_of(mask_mod, None, device)
    if mask[0].dtype != torch.bool:
        raise AssertionError(f"mask.dtype must be torch.bool, got {mask[0].dtype}: {place_of(mask_mod)}")
    lists = find_blocks(mask, device, b, h, len_q, len_kv, *block)
    block_mask = BlockMask(seq_lengths=(Q_LEN, KV_LEN), BLOCK_SIZE=block, mask_mod=mask_mod, **lists)
    if not torch.is_inference_mode_enabled():  # its tensors do not tell whether they were changed
        block_mask.lists_of_mask_mod = _state_of(block_mask, mask)
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            block_mask.kept_walks = KeptWalks()
        ops.note_lists([lists[name] for name in LISTS], (mask[0].text, mask[1], mask[2]), len_q, len_kv, block)
    return block_mask


def find_blocks(mask, device, b, h, len_q, len_kv, block_q, block_kv):
    """The lists of the blocks of a mask: ``mask`` is a program with its tensors and numbers. Returns a dict by name.

    On a GPU the host does not wait for the lists.
    """
    program, tensors, numbers = mask
    if ops.is_watched(*tensors):
        return dict(
            zip(NAMES, ops.classify(device, program, tensors, numbers, [b, h, len_q, len_kv], [block_q, block_kv]))
        )
    rows, columns = -(-len_q // block_q), -(-len_kv // block_kv)
    shapes = [(b, h, rows), (b, h, rows, columns), (b, h, columns), (b, h, columns, rows)]
    lists = tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes * 2)
    _check_is_plain("create_block_mask", lists[0])
    sizes = (b, h, len_q, len_kv, block_q, block_kv)
    calls.classify(program.text, tensors, numbers, lists, *sizes, None)
    return dict(zip(NAMES, lists))


def _state_of(block_mask, mask):
    """What must not change, so that the lists of a block mask say the same as its mask_mod."""
    lists, (program, _, numbers) = [getattr(block_mask, name) for name in LISTS], mask
    sizes = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    return (block_mask.mask_mod, *sizes, program.text, numbers), lists, [x._version for x in lists]


def is_own(block_mask, mask):
    """Did create_block_mask make the lists of this block mask from its mask_mod, with this program and its numbers?"""
    state = getattr(block_mask, "lists_of_mask_mod", None)
    if state is None:
        return False
    (mask_mod, lengths, block_size, text, numbers), lists, versions = state
    num, places, full_num, full_places = lists
    return (
        block_mask.mask_mod == mask_mod
        and block_mask.seq_lengths == lengths
        and block_mask.BLOCK_SIZE == block_size
        and numbers == mask[2]
        and text == mask[0].text
        and block_mask.kv_num_blocks is num
        and block_mask.kv_indices is places
        and block_mask.full_kv_num_blocks is full_num
        and block_mask.full_kv_indices is full_places
        and versions == [num._version, places._version, full_num._version, full_places._version]
    )
