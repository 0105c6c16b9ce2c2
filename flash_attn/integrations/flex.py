"""``torch.nn.attention.flex_attention`` with this package's functions, for programs that look it up when they call it.

Diffusers' backend "flex" does so. A program that has imported the name before keeps PyTorch's function.
"""

import torch.nn.attention.flex_attention as theirs

from flash_attn import flex_attention as ours
from flash_attn.integrations import _registration

__all__ = ["register", "unregister"]

NAMES = ("flex_attention", "create_block_mask")
_active = None


def register() -> _registration.Registration:
    """Replaces ``flex_attention`` and ``create_block_mask`` of ``torch.nn.attention.flex_attention``.

    So they have a backward on the CPU, need no ``torch.compile``, and make no array of all queries and keys.

    Returns:
        A Registration. Its text says what was changed. ``unregister()``, or the end of ``with register():``, undoes it.

    >>> with register() as changes:
    ...     print('flex_attention' in str(changes))
    True
    """
    global _active
    with _registration.lock:
        unregister()
        _active = _registration.Registration("torch.nn.attention.flex_attention")
        for name in NAMES:
            _active.set(theirs, name, getattr(ours, name), f"{name} is that of flash_attn.flex_attention")
        return _active


def unregister() -> None:
    """Undoes the last ``register()``, if there is one.

    >>> changes = register()
    >>> unregister()
    """
    global _active
    with _registration.lock:
        if _active is not None:
            _active.unregister()
        _active = None
