"""Diffusers' backends with this package, on every device: flash, flash_varlen, _flash_3, _flash_varlen_3 and flex.

    import flash_attn.integrations.diffusers as ours
    ours.register()
    model.set_attention_backend("flash")

Diffusers' list of backends is closed, so a backend of its own name gets another function. The function takes what
Diffusers' own functions for these names refuse or drop: masks, grouped heads, lse, and gradients of _flash_3.
"""

from collections.abc import Sequence

import torch
from torch.nn.attention.flex_attention import BlockMask

from flash_attn.flash_attn_interface import flash_attn_func
from flash_attn.flex_attention import AuxRequest, flex_attention
from flash_attn.integrations import _registration
from flash_attn.integrations._attend import ALL, attend, attend_under, beside_top_left

__all__ = ["BACKENDS", "register", "unregister"]

BACKENDS = ("flash", "flash_varlen", "_flash_3", "_flash_varlen_3", "flex")
PACKAGES = (  # Diffusers' answer whether a package is there, and the backends that need it
    ("flash_attn", "_CAN_USE_FLASH_ATTN", ("flash", "flash_varlen")),
    ("flash_attn_3", "_CAN_USE_FLASH_ATTN_3", ("_flash_3", "_flash_varlen_3")),
)


def mask_of(mask, query, key):
    """A mask ``[b, h, len_q, len_kv]``, or 1 in place of a size, with Diffusers' meanings of fewer dimensions."""
    b, len_q, len_kv = len(query), query.shape[1], key.shape[1]
    shape = tuple(mask.shape)
    if mask.dim() == 1:
        mask = mask[None, None, None]
    elif mask.dim() == 2 and shape in ((b, len_kv), (1, len_kv)):
        mask = mask[:, None, None]
    elif mask.dim() == 2:
        mask = mask[None, None]
    elif mask.dim() == 3:
        mask = mask[:, None]
    wanted = b, query.shape[2], len_q, len_kv
    if mask.dim() != 4 or any(has not in (1, want) for has, want in zip(mask.shape, wanted)):
        raise ValueError(
            f"attn_mask must be (len_kv,), (b, len_kv), (len_q, len_kv), (b, len_q, len_kv) or (b, h, len_q, len_kv) "
            f"with b, h, len_q, len_kv = {wanted}, or 1 in place of a size; it has the shape {shape}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask must be bool, or floating numbers to add; it is {mask.dtype}")
    return mask


def _window_at_the_end(window_size, is_causal, query, key):
    """The bounds of a row beside the last key, as flash-attn counts them, and all keys."""
    return (window_size[0], 0 if is_causal else window_size[1]), key.shape[1]


def _window_at_the_start(window_size, is_causal, query, key):
    """The bounds of row 0 beside key 0, as PyTorch counts them, and the number of keys that rows see."""
    return beside_top_left((window_size[0], 0) if is_causal else window_size, query.shape[1], key.shape[1])


def _backend(name, place_window, theirs, lse_has_heads_first):
    """The function of a backend. Diffusers passes what its parameters name, and drops anything else."""

    def attention(
        query,
        key,
        value,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
        window_size=ALL,
        return_lse=False,
        _parallel_config=None,
    ):
        if _parallel_config is not None:
            if theirs is None:
                raise NotImplementedError(f'backend "{name}" has no context parallelism: use "flash" or "native"')
            return theirs(
                query=query, key=key, value=value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                scale=scale, window_size=window_size, return_lse=return_lse, _parallel_config=_parallel_config,
            )  # fmt: skip
        if isinstance(attn_mask, BlockMask):
            if is_causal or tuple(window_size) != ALL:
                raise NotImplementedError("a BlockMask says all: no is_causal or window_size beside it")
            aux = AuxRequest(lse=True) if return_lse else None
            found = flex_attention(
                *(x.transpose(1, 2) for x in (query, key, value)), None, attn_mask, scale, True, return_aux=aux,
                dropout_p=dropout_p,
            )  # fmt: skip
            out, lse = (found[0], found[1].lse) if return_lse else (found, None)
            out = out.transpose(1, 2)
        else:
            mask = None if attn_mask is None else mask_of(attn_mask, query, key)
            window, num_keys = place_window(tuple(window_size), is_causal, query, key)
            key, value = key[:, :num_keys], value[:, :num_keys]
            mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :num_keys]
            out, lse = _attend(query, key, value, mask, window, dropout_p, scale, return_lse)
        if not return_lse:
            return out
        return out, lse if lse_has_heads_first else lse.transpose(1, 2)

    return attention


def _attend(query, key, value, mask, window, dropout, scale, return_lse):
    if return_lse:
        is_bool = mask is not None and mask.dtype == torch.bool
        return flash_attn_func(
            query, key, value, dropout, scale, window_size=window, return_lse=True,
            attn_mask=mask if is_bool else None, attn_bias=None if is_bool else mask,
        )  # fmt: skip
    if mask is None:
        return attend(query, key, value, None, scale=scale, window=window, dropout=dropout), None
    return attend_under(query, key, value, mask, scale=scale, window=window, dropout=dropout), None


_active = None


def register(backends: Sequence[str] = BACKENDS) -> _registration.Registration:
    """Gives functions of this package to backends of Diffusers, in its registry.

    Args:
        backends: some of "flash", "flash_varlen", "_flash_3", "_flash_varlen_3" and "flex".
    Returns:
        A Registration. Its text says what was changed. ``unregister()``, or the end of ``with register():``, undoes it.
    Raises:
        ImportError: Diffusers is missing or too old.
        ValueError: a backend is none of the five.

    >>> with register() as changes:
    ...     print('backend "flash"' in str(changes))
    True
    """
    global _active
    dispatch = _dispatch()
    if isinstance(backends, str) or any(name not in BACKENDS for name in backends):
        raise ValueError(f"backends must be some of {BACKENDS}, as a list; {backends!r} came")
    registry = dispatch._AttentionBackendRegistry
    with _registration.lock:
        unregister()
        made = _registration.Registration("Diffusers")
        for name in backends:
            member = dispatch.AttentionBackendName(name)
            old = registry._backends[member]
            place = _window_at_the_start if name == "flex" else _window_at_the_end
            function = _backend(name, place, old if name == "flash" else None, name != "_flash_3")
            checks = [dispatch._check_device]
            made.set(registry._backends, member, function, f'backend "{name}" runs on the kernels of flash_attn')
            made.set(registry._constraints, member, checks)
            made.set(registry._supported_arg_names, member, set(_parameters(function)))
        for package, flag, names in PACKAGES:
            if not set(names).isdisjoint(backends) and not getattr(dispatch, flag):
                made.set(dispatch, flag, True, f"Diffusers does not look for the package {package}")
        _active = made
    return made


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


def _parameters(function):
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _dispatch():
    try:
        import diffusers.models.attention_dispatch as dispatch
    except ImportError as error:
        raise ImportError(f"flash_attn.integrations.diffusers needs Diffusers 0.36 or newer: {error}") from error
    needed = {
        dispatch: ("AttentionBackendName", "_check_device", "_CAN_USE_FLASH_ATTN", "_CAN_USE_FLASH_ATTN_3"),
        getattr(dispatch, "_AttentionBackendRegistry", None): ("_backends", "_constraints", "_supported_arg_names"),
    }
    missing = [name for place, names in needed.items() for name in names if not hasattr(place, name)]
    missing = missing or [name for name in BACKENDS if name not in {x.value for x in dispatch.AttentionBackendName}]
    if missing:
        raise ImportError(f"flash_attn.integrations.diffusers needs Diffusers 0.36 or newer; this one lacks {missing}")
    return dispatch
