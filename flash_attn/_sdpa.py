"""PyTorch's ``scaled_dot_product_attention`` and ``varlen_attn`` on the kernels of this package.

PyTorch keeps a list of implementations of its attention ops (torch.nn.attention). This package adds itself under the
name "flash_attn" when it is imported. While it is active, C functions replace the kernels of the ops
(csrc/torch/sdpa.c). Calls, autograd, autocast, torch.compile and vmap stay PyTorch's.
"""

import contextlib
import os
import threading
import warnings

import torch
from torch.nn import attention as torchs

from flash_attn._ops import flash_attn_2_cuda

NAME = "flash_attn"

# In the order of csrc/torch/sdpa.c.
_OPS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
)


def _num_arguments():
    """The number of arguments of each op, or 0 if this PyTorch has no such op."""
    ops = [getattr(torch.ops.aten, name, None) for name in _OPS]
    return tuple(0 if op is None else len(op.default._schema.arguments) for op in ops)


def _strides():
    """What PyTorch's fakes promise: are the CPU's out, its gradients, and CUDA's gradients strided like the inputs?"""
    aten, x = torch.ops.aten, torch.empty(2, 3, 5, 8, device="meta")
    lse, rng = torch.empty(2, 3, 5, device="meta"), torch.empty(2, device="meta")
    out = aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]
    cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward(x, x, x, x, x, lse, 0.0, False)[0]
    cuda = aten._scaled_dot_product_flash_attention_backward(
        x, x, x, x, x, lse, None, None, 5, 5, 0.0, False, rng, rng
    )[0]
    return tuple(y.stride() == x.stride() for y in (out, cpu, cuda))


# ---- the preference of cuDNN ---------------------------------------------------------------------------------------


class _Priority:
    """Puts flash attention before cuDNN's attention, which PyTorch prefers on new GPUs.

    PyTorch makes its order at the first choice on a GPU. So a choice comes first, and changing the order waits for
    CUDA's start, because this module must not start CUDA.
    """

    def __init__(self):
        self.before, self.is_over = None, False
        if torch.cuda.is_available():
            torch.cuda._lazy_call(self._put_first)

    def _put_first(self):
        if self.is_over or not hasattr(torch._C, "_set_sdp_priority_order"):
            return
        x = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)
        self.before = torch._C._get_sdp_priority_order()
        flash = int(torchs.SDPBackend.FLASH_ATTENTION.value)
        torch._C._set_sdp_priority_order([flash, *(x for x in self.before if x != flash)])

    def restore(self):
        self.is_over = True
        if self.before is not None:
            torch._C._set_sdp_priority_order(self.before)


# ---- activation ----------------------------------------------------------------------------------------------------


class _Handle:
    """What PyTorch keeps while this package is active."""

    def __init__(self):
        _warn_now()
        flash_attn_2_cuda.sdpa_override(_num_arguments(), _strides())
        self.priority = _Priority() if _before_cudnn else None

    def remove(self):
        flash_attn_2_cuda.sdpa_restore()
        if self.priority is not None:
            self.priority.restore()


_before_cudnn = True  # the next activation puts flash attention before cuDNN's
_has_warned = False


def _warn_now():
    """PyTorch warns once per process that a kernel is replaced. Here the user asked for it, so the warning is spent."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl(_OPS[0], lambda *args, **kwargs: None, "CPU")
        library._destroy()


def add_to_torchs_list():
    torchs.register_flash_attention_impl(NAME, register_fn=_Handle)


def _activate(name):
    if name is not None:
        torchs.activate_flash_attention_impl(name)
    elif hasattr(torchs, "restore_flash_attention_impl"):
        torchs.restore_flash_attention_impl()
    else:  # PyTorch 2.10
        from torch.nn.attention import _registry

        _registry._FLASH_ATTENTION_ACTIVE[1].remove()
        _registry._FLASH_ATTENTION_ACTIVE = None


def is_active():
    return torchs.current_flash_attention_impl() == NAME


def register():
    torchs.activate_flash_attention_impl(NAME)


_lock = threading.Lock()
_depth, _before = 0, None


@contextlib.contextmanager
def sdpa():
    global _depth, _before
    with _lock:
        if _depth == 0:
            _before = torchs.current_flash_attention_impl()
            if _before != NAME:
                _activate(NAME)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _before != NAME and is_active():
                _activate(_before)
