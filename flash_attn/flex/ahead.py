"""Compiles the kernels of a call on threads of their own, before the call needs them.

The call is rehearsed on an imagined GPU, which tells the kernels that the disk cache lacks. Threads compile all of them
at once: those of the forward, and those of the backward if autograd records the call. Meanwhile the call goes on, and
waits where it needs a kernel. So a first step takes as long as its slowest kernel, instead of the sum of all.
"""

import os
import threading

import flash_attn_2_cuda
import torch

from .._imagined import PENDING, SMS, imagined_gpu, stand_in

MOST_BYTES = 1 << 28  # of memory on the host that a rehearsal may write
_rehearsed = set()


def _num_threads():
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num - 1)


def _compile_pending():
    while flash_attn_2_cuda.compile_pending_kernel():
        pass


def _bytes_written(call, tensors, inputs, wanted):
    """Stand-ins of integers, and gradients of captures, are filled with zeros. torch may fill everything else, too."""
    fills_all = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    captured = [x for x in (*tensors, *call.tensors()) if x is not None]
    filled = [x for x in captured if fills_all or not x.is_floating_point()]
    num_bytes = sum(x.numel() * x.element_size() for x in filled) + sum(8 * x.numel() for x in wanted)
    return num_bytes + fills_all * sum(3 * x.numel() * x.element_size() for x in inputs)


def _in_place_of(x):
    """The same on the CPU, with memory that means nothing."""
    if isinstance(x, torch.Tensor):
        return stand_in(x.detach(), "cpu").requires_grad_(x.requires_grad)
    if isinstance(x, (tuple, list)):
        return getattr(x, "_make", type(x))([_in_place_of(item) for item in x])
    return x


def rehearse(call, query, key, value, tensors, is_recorded, capability):
    """Makes the kernels pending that the call would load, and are absent. Returns their number.

    A call that cannot run has the same error afterwards, when it is no rehearsal.
    """
    from . import attention

    wanted = [x.requires_grad for x in (query, key, value, *tensors)]
    learned = [x for x in tensors if is_recorded and x.requires_grad]
    if _bytes_written(call, tensors, (query, key, value), learned) > MOST_BYTES:
        return 0
    with imagined_gpu(capability, PENDING):
        try:
            copy = attention.Call(
                call.scale, None, None, _in_place_of(call.blocks and call.blocks[:6]), call.wants_max, call.plain,
                _in_place_of(call.sequences), _in_place_of(call.dropout),
            )  # fmt: skip
            copy.score, copy.score_numbers, copy.mask = call.score, call.score_numbers, _in_place_of(call.mask)
            query, key, value = inputs = [_in_place_of(attention.rows_of(x)) for x in (query, key, value)]
            tensors = _in_place_of(tuple(tensors))
            with torch.no_grad():
                out, lse, *_ = attention.attend(copy, *inputs, tensors)
                if is_recorded:
                    attention.gradients(copy, inputs, tensors, out, lse, out, None, wanted)
        except RuntimeError:
            pass
        return sum(not was_there for _, _, _, was_there, _ in flash_attn_2_cuda.asked_kernels())


def compile_kernels(call, query, key, value, tensors, is_recorded):
    """Starts to compile what a call on a GPU will need, once for each kind of call."""
    mask = None if call.mask is None else call.mask[0]
    score = None if call.score is None else call.score.text
    plain = tuple(x > 0 for x in call.plain)
    sizes = *query.shape[3:], *value.shape[3:], query.size(2).bit_length(), key.size(2).bit_length()
    grads = is_recorded and tuple(x.requires_grad for x in (query, key, value, *tensors))
    options = call.wants_max, call.sequences is None, call.dropout is None
    kind = score, mask, plain, query.device, query.dtype, sizes, grads, options
    if kind in _rehearsed or flash_attn_2_cuda.only_plans():
        return
    _rehearsed.add(kind)
    major, minor = torch.cuda.get_device_capability(query.device)
    if 10 * major + minor not in SMS:
        return
    num = rehearse(call, query, key, value, tensors, is_recorded, 10 * major + minor)
    try:
        for _ in range(min(num, _num_threads())):
            threading.Thread(target=_compile_pending, name="flash_attn compiles").start()
    except RuntimeError:  # no more threads can start: the call compiles what it needs
        pass
