"""Calls of a GPU that need not be here. They are checked and planned, their kernels are compiled, and nothing runs."""

import contextlib
import threading

import flash_attn_2_cuda
import torch

# Multiprocessors of the largest GPU of each compute capability. Kernels over caches, and of few queries on Hopper,
# depend on their number. WIDTHS has those of Hopper's products: H100 SXM and H200, H100 PCIe, H20.
SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 160, 120: 188, 121: 48}
WIDTHS = {90: (132, 114, 78)}


class _State(threading.local):
    is_on = False
    capability = 0


_state = _State()

NOTED, COMPILED, PENDING = range(3)  # what becomes of kernels that the disk cache lacks


@contextlib.contextmanager
def imagined_gpu(capability, absent, sms=None):
    """This thread's calls, of tensors on the CPU too, are those of a GPU of this compute capability, 90 for 9.0.

    It has sms multiprocessors, or those of the largest such GPU. The kernels of the calls are noted, compiled into the
    disk cache, or left to compile_pending_kernel(). Backwards run in this thread.
    """
    if _state.is_on:
        raise RuntimeError("prebuild_call() must not call itself")
    _state.is_on, _state.capability = True, capability
    flash_attn_2_cuda.imagine_gpu(capability, sms or SMS[capability], absent)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _state.is_on = False
        flash_attn_2_cuda.imagine_gpu(0, 0, NOTED)


def is_imagined():
    return _state.is_on


def capability_of(device):
    """The compute capability of the GPU of a call: 90 for 9.0."""
    if _state.is_on:
        return _state.capability
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_on_cpu(tensor):
    """Does the CPU compute a call with this tensor?"""
    return tensor.device.type == "cpu" and not _state.is_on


def stand_in(tensor, device):
    """A tensor whose contents mean nothing, in place of one on another device, such as "meta".

    It begins at an address that is as aligned as that of the tensor in its storage: loads and TMA ask for 16 bytes.
    """
    sizes, strides = tensor.shape, tensor.stride()
    first = tensor.storage_offset() % 16
    num = first + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if tensor.numel() else first
    memory = torch.empty(num, dtype=tensor.dtype, device=device)
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        memory.zero_()
    found = memory.as_strided(sizes, strides, first)
    return found.requires_grad_(tensor.requires_grad)
