"""Checks of the arguments of ``flex_attention``. What PyTorch refuses, too, is refused in PyTorch's words."""

import torch
from torch.nn.attention import flex_attention as upstream

from .._arguments import as_number, has_distributed
from .._imagined import is_imagined
from .._kinds import check_kinds
from .._ops import check_storage
from .sequences import narrowed, rows_of_mask

WHOLE = 1 << 30  # PyTorch's block size for "no block mask"


def _is_whole(block_mask):
    return tuple(block_mask.BLOCK_SIZE) == (WHOLE, WHOLE)


def check_arguments(query, key, value, score_mod, mask_mod, block_mask):
    """Raises for an argument of a wrong kind. A nested tensor has a sentence of its own in ``check_tensors``."""
    if torch.compiler.is_dynamo_compiling():  # Dynamo looks at kinds itself
        return
    tensors = {"query": query, "key": key, "value": value}
    check_kinds({name: x for name, x in tensors.items() if not getattr(x, "is_nested", False)})
    check_kinds({"score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask})


def check_tensors(query, key, value, enable_gqa, block_mask, is_paged):
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotImplementedError("flex_attention does not support NestedTensor inputs: convert them to dense tensors")
    if has_distributed((query, key, value)):
        raise NotImplementedError(
            "flex_attention takes no DTensors, because its functions would count the heads and batch entries of one "
            "rank: call it on local tensors, as torch.distributed.tensor.experimental.local_map does"
        )
    differ = query.dtype != key.dtype or query.dtype != value.dtype
    if differ and len({_dtype_in_autocast(x) for x in (query, key, value)}) > 1:
        raise ValueError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{query.dtype}, key.dtype: {key.dtype}, and value.dtype: {value.dtype} instead."
        )
    if query.device != key.device or query.device != value.device:
        raise ValueError(
            "Expected query, key, and value to have the same device type, but got query.device: "
            f"{query.device}, key.device: {key.device}, and value.device: {value.device} instead."
        )
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        raise ValueError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if query.size(-1) != key.size(-1):
        raise ValueError(
            "Expect query and key/value to have the same embedding dimension "
            f"but got E={query.size(-1)} and E={key.size(-1)}."
        )
    if query.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"flex_attention is only supported on CUDA and CPU devices. Found input tensors on {query.device.type} "
            "device."
        )
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    (b, h, _, _), (b_kv, h_kv, len_kv, _) = query.shape, key.shape
    if not enable_gqa and h != h_kv:
        raise ValueError(
            "Expect query and key/value to have the same number of heads "
            f"but got Hq={h} and Hkv={h_kv}. Try setting enable_gqa=True for GQA."
        )
    if h_kv and h % h_kv != 0:
        raise ValueError(
            f"Expect number of query heads to be a multiple of kv heads for GQA but got Hq={h} and Hkv={h_kv}."
        )
    if value.shape[:3] != (b_kv, h_kv, len_kv):
        raise ValueError(
            "Expect key and value to have the same batch size, heads and length "
            f"but got key of shape {tuple(key.shape)} and value of shape {tuple(value.shape)}."
        )
    if b == b_kv or is_paged:
        return
    if block_mask is None:
        raise ValueError(
            "Expect query and key/value to have the same batch size, or non-none block_mask, "
            f"but got block_mask=None, Bq={b}, and Bkv={b_kv}."
        )
    if block_mask.kv_num_blocks.size(0) != b or b_kv != 1:
        raise ValueError(
            "Expect query and key/value to have the same batch size, or block_mask and query to have the same batch "
            f"size and key/value a batch size of 1, but got Bq={b}, Bkv={b_kv}, "
            f"B_block_mask={block_mask.kv_num_blocks.size(0)}."
        )


def check_block_mask(block_mask, query, len_kv, sequences):
    """Returns whether the rows of the block mask count from 0 in the sequence."""
    if getattr(block_mask, "mask_mod", None) is upstream._sliced_mask_mod_error:
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    is_here = block_mask.kv_num_blocks.device == query.device
    if not is_here and (torch.compiler.is_dynamo_compiling() or not is_imagined()):
        raise RuntimeError(
            "Expect q/k/v and block_mask to be on the same device "
            f"but got {query.device} and {block_mask.kv_num_blocks.device}."
        )
    if _is_whole(block_mask):
        return False
    lengths = tuple(block_mask.shape[-2:])
    fits, has_offset = rows_of_mask(block_mask, query, len_kv, sequences)
    if fits:
        return has_offset
    text = (
        f"block_mask was created for block_mask.shape={block_mask.shape} but got q_len={query.size(-2)} and "
        f"kv_len={len_kv}. "
    )
    if query.size(-2) > lengths[0] or len_kv > lengths[1]:
        text += "As the block mask was created for a smaller length than you're using it for, you likely need to "
        raise ValueError(text + "create a new block mask.")
    text += "As the block mask was created for a larger length than you're using it for, you can either 1. create a "
    text += "new block mask with the correct length, or 2. 'adjust' the existing block mask to the correct length by "
    text += "calling block_mask._adjust(q_len, kv_len). This essentially 'crops' the block mask to the upper left "
    raise ValueError(text + "corner, which does not work for all mask_mods!")


BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


def check_kernel_options(options):
    """All options are hints, but for wrong ones. Returns whether PyTorch's own kernels are asked for."""
    if not isinstance(options, dict):
        check_kinds({"kernel_options": options})
    for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX"):
        if name in options:
            raise AssertionError(f"{name} must not be in kernel_options")
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise RuntimeError(
            "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION. BACKEND supersedes the legacy knob; "
            "please drop FORCE_USE_FLEX_ATTENTION and only specify the desired BACKEND."
        )
    backend = options.get("BACKEND", "AUTO")
    if backend not in BACKENDS:
        raise ValueError(f"Invalid BACKEND value '{backend}'. Must be one of {BACKENDS}")
    return backend in ("TRITON", "TRITON_DECODE")


def int32(tensor):
    if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"the lists of a block mask must be integers, not {tensor.dtype}")
    return tensor if tensor is None or tensor.dtype == torch.int32 else narrowed(tensor)


def as_lists(num, places, full_num, full_places, block_kv, len_kv):
    """The lists of a block mask as the kernels take them: int32, with a place for each column of blocks.

    Lists that name few blocks of each row may have fewer places. The others are -1 then, which is outside of the mask.
    """
    lists = [int32(x) for x in (num, places, full_num, full_places)]
    width = -(-len_kv // max(block_kv, 1))
    for x in lists[1::2]:
        if x is not None and x.dim() == 4:
            width = max(width, x.size(3))
    for i in (1, 3):
        if lists[i] is not None and lists[i].dim() == 4 and lists[i].size(3) < width:
            lists[i] = torch.nn.functional.pad(lists[i], (0, width - lists[i].size(3)), value=-1)
    return lists


def _dtype_in_autocast(tensor):
    device = tensor.device.type
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else tensor.dtype


def in_autocast(*tensors):
    """The tensors as autocast wants them for matrix products."""
    found = []
    for name, x in zip(("query", "key", "value"), tensors):
        dtype = _dtype_in_autocast(x)
        if dtype != x.dtype:
            check_storage(name, x)  # torch copies what lies behind a storage that was cut
        found.append(x.to(dtype))
    return found


def check_dropout_p(dropout_p):
    """A float. Raises unless it is a probability below 1."""
    if type(dropout_p) is not float:
        check_kinds({"dropout_p": dropout_p})
        dropout_p = float(as_number(dropout_p, "dropout_p"))
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1; it is {dropout_p}")
    return dropout_p


def number_of(scale):
    """A float. A tensor of one element gives its value, and raises if its gradient would be lost."""
    if type(scale) is float:
        return scale
    check_kinds({"scale": scale})
    return float(as_number(scale, "scale"))
