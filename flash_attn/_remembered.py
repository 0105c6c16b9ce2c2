"""What was found out about a mask is kept for the next layer, which gets the same mask.

A mask is the same if it is the same part of the same memory, and nobody wrote into it. Its memory is not held.
"""

import collections
import os
import threading

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MOST = 16  # masks of which something is kept
MANY = 1 << 13  # bools that are compared faster as words

_kept = collections.OrderedDict()
_noted = {}
_lock = threading.RLock()  # a signal's handler may run while this thread has it


def _renew_lock():
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a thread that has the lock is not in the child
    os.register_at_fork(after_in_child=_renew_lock)


def _place(mask):
    return mask.untyped_storage()._cdata, mask.storage_offset(), tuple(mask.shape), mask.stride(), mask.dtype


def remembered(mask, what, make):
    """``make()``, or what it returned for the same ``what`` and the same mask. It must not hold the mask.

    PyTorch counts what it writes into a tensor. It counts nothing in inference mode, and NumPy, ``.data`` and other
    owners of the memory write uncounted. So masks of inference mode and of the CPU are compared with a copy.
    """
    storage = mask.untyped_storage()
    place = *_place(mask), what
    is_copied = mask.is_inference() or mask.is_cpu
    with _lock:
        entry = _kept.get(place)
    if entry is not None:
        storage_ref, state, found = entry
        is_alive = not storage_ref.expired()
        if is_alive and (torch.equal(state, once(mask)) if is_copied else state == mask._version):
            return found
    state = once(mask).detach().clone() if is_copied else mask._version
    with torch.inference_mode(False):  # a later call may record a gradient
        found = make()
    with _lock:
        for key in [key for key, (storage_ref, _, _) in _kept.items() if storage_ref.expired()]:
            del _kept[key]
        _kept[place] = StorageWeakRef(storage), state, found
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    return found


def once(mask):
    """The mask without the dimensions that repeat it, as words of 8 bytes if it is that, which compare fastest.

    The views of words take 3 us, so they must save more. Floats are always compared by their bits, because a NaN is not
    equal to itself.
    """
    if 0 in mask.stride():
        mask = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
    if (mask.numel() < MANY or mask.element_size() == 8) and not mask.is_floating_point():
        return mask
    per_word = 8 // mask.element_size()
    if mask.is_contiguous() and mask.dim() and mask.shape[-1] % per_word == 0 == mask.storage_offset() % per_word:
        return mask.view(-1).view(torch.int64)  # a size of 1 may have any stride, which a view of words would refuse
    return mask


def note(mask, value):
    """Keeps a value for ``noted`` as long as the memory of the mask lives."""
    with _lock:
        for place in [place for place, (storage_ref, _) in _noted.items() if storage_ref.expired()]:
            del _noted[place]
        _noted[_place(mask)] = StorageWeakRef(mask.untyped_storage()), value


def noted(mask):
    """The value that ``note`` kept for the same part of the same memory, or None. ``mask.detach()`` has it, too."""
    with _lock:
        storage_ref, value = _noted.get(_place(mask), (None, None))
    return value if storage_ref is not None and not storage_ref.expired() else None
