"""Autocast: tensors take its dtype, as they do in torch's scaled_dot_product_attention."""

import torch

from flash_attn._ops import check_storage


def _is_on(x):
    if not isinstance(x, torch.Tensor):  # the op refuses it
        return False
    device_type = "cpu" if x.is_cpu else "cuda" if x.is_cuda else None
    return device_type is not None and torch.is_autocast_enabled(device_type)


_CAST = torch.float32, torch.float16, torch.bfloat16


def _cast(name, x, device_type, dtype):
    if not isinstance(x, torch.Tensor) or x.device.type != device_type or x.dtype not in _CAST:
        return x
    check_storage(name, x)  # torch copies what lies behind a storage that was cut
    return x.to(dtype)


def follow_autocast(names, tensors):
    """Returns the tensors of these names in the dtype of autocast, if it is on. fp64 stays as it is."""
    if not _is_on(tensors[0]):
        return tensors
    device_type = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device_type)
    return [_cast(name, x, device_type, dtype) for name, x in zip(names, tensors)]


def follow_cache(cache, names, tensors):
    """Returns the tensors of these names in the dtype of a cache, if autocast is on. The cache is written, so it stays
    as it is."""
    if not _is_on(cache):
        return tensors
    return [_cast(name, x, cache.device.type, cache.dtype) for name, x in zip(names, tensors)]
