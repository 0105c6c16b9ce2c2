"""Autocast: tensors take its dtype, as they do in torch's scaled_dot_product_attention."""

import torch


def _is_on(x):
    if not isinstance(x, torch.Tensor):  # the op refuses it
        return False
    device_type = "cpu" if x.is_cpu else "cuda" if x.is_cuda else None
    return device_type is not None and torch.is_autocast_enabled(device_type)


_CAST = torch.float32, torch.float16, torch.bfloat16


def _cast(x, device_type, dtype):
    if (
        not isinstance(x, torch.Tensor)
        or x.device.type != device_type
        or x.dtype not in (torch.float32, torch.float16, torch.bfloat16)
    ):
        return x
    return x.to(dtype)


def follow_autocast(tensors):
    """Returns the tensors in the dtype of autocast, if it is on. fp64 stays as it is."""
    if not _is_on(tensors[0]):
        return tensors
    device_type = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device_type)
    return [_cast(x, device_type, dtype) for x in tensors]


def follow_cache(cache, tensors):
    """Returns the tensors in the dtype of a cache, if autocast is on. The cache is written, so it stays as it is."""
    return [_cast(x, cache.device.type, cache.dtype) for x in tensors] if _is_on(cache) else tensors
