"""Attention under the masks that other libraries make: a mask of keys, or one of rows and keys.

A mask of keys ``[b, len_kv]`` hides the padding of a batch. It has three ways to the kernels:

    all keys are seen                          flash_attn_func
    no gradient, and the keys lie together     flash_attn_with_kvcache: from cache_leftpad to cache_seqlens, no copies
    otherwise                                  flash_attn_varlen_func over the keys that are seen

Tensors are ``[b, len, h, d]`` here.
"""

import torch

from flash_attn._autocast import follow_autocast
from flash_attn._remembered import remembered
from flash_attn.bert_padding import index_first_axis, pad_input
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    maybe_contiguous,
)

ALL = (-1, -1)


class Keys:
    """What a mask of keys says, found once for all layers."""

    def __init__(self, mask):
        b, length = mask.shape
        num = mask.sum(-1, dtype=torch.int32)
        self.is_full = int(num.sum()) == b * length
        if self.is_full:
            return
        flags = mask.to(torch.int8)
        first = flags.argmax(-1).to(torch.int32)
        end = length - flags.flip(-1).argmax(-1).to(torch.int32)
        is_empty = num == 0
        self.first = torch.where(is_empty, 0, first)
        self.end = torch.where(is_empty, 0, end)
        self.lie_together = bool((self.end - self.first == num).all())
        self.start_at_0 = not bool(self.first.any())


def packed_places(mask):
    """The places of what a mask ``[b, len]`` shows in the flattened batch, cu_seqlens, and the longest length."""
    num = mask.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(num.cumsum(0, dtype=torch.int32), (1, 0))
    return mask.flatten().nonzero().flatten(), cu_seqlens, int(num.max()) if num.numel() else 0


def keys_of(mask):
    return remembered(mask, "keys", lambda: Keys(mask))


def packed_of(mask):
    return remembered(mask, "packed", lambda: packed_places(mask))


def beside_top_left(window, len_q, len_kv):
    """A window that counts from the key i beside row i, as the kernels take it, and the number of keys that it reaches.

    The kernels put the last row beside the last key.
    """
    left, right = window
    if right >= 0:
        len_kv = min(len_kv, len_q + right)
    shift = len_kv - len_q
    if left >= 0 and left + shift < 0:
        raise NotImplementedError(
            f"a window of {left} keys to the left, {len_q} rows and {len_kv} keys: rows see nothing"
        )
    return (left if left < 0 else left + shift, right if right < 0 else right - shift), len_kv


def wants_gradients(*tensors):
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def attend(q, k, v, key_mask, *, scale, window=ALL, softcap=0.0, dropout=0.0, sinks=None):
    """Attention under a mask of keys ``[b, len_kv]``, or None, and a window at the bottom right.

    With a window the rows are the last positions of the keys, as in self-attention. Then a row whose own position is
    hidden needs no result, and has any.
    """
    len_q, len_kv = q.shape[1], k.shape[1]
    if len_q == 1 and window == (-1, 0):
        window = ALL
    options = {"softmax_scale": scale, "window_size": window, "softcap": softcap or 0.0}
    if sinks is not None:
        options["sinks"] = sinks
    if key_mask is None:
        return flash_attn_func(q, k, v, dropout, **options)
    if torch.compiler.is_compiling():
        return flash_attn_func(q, k, v, dropout, attn_mask=key_mask[:, None, None], **options)
    keys = keys_of(key_mask)
    if keys.is_full:
        return flash_attn_func(q, k, v, dropout, **options)
    if not dropout and keys.lie_together and not wants_gradients(q, k, v, sinks):
        q, k, v = follow_autocast("qkv", (q, k, v))  # here k and v are no cache, whose dtype the rows would take
        k, v = map(maybe_contiguous, (k, v))
        left_pad = None if keys.start_at_0 else keys.first
        if window == ALL:
            return flash_attn_with_kvcache(q, k, v, cache_seqlens=keys.end, cache_leftpad=left_pad, **options)
        if window[1] == 0:  # only rows of padding see padding behind a sequence
            return flash_attn_with_kvcache(q, k, v, cache_seqlens=len_kv, cache_leftpad=left_pad, **options)
    has_far_rows = window != ALL and len_q > len_kv  # the first rows have no positions among the keys
    if has_far_rows or (window not in (ALL, (-1, 0)) and not keys.lie_together):
        return flash_attn_func(q, k, v, dropout, attn_mask=key_mask[:, None, None], **options)
    places, cu_seqlens, longest = packed_of(key_mask)
    k, v = (index_first_axis(x.flatten(0, 1), places) for x in (k, v))
    if window == ALL:
        cu_seqlens_q = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * len_q
        out = flash_attn_varlen_func(
            q.flatten(0, 1), k, v, cu_seqlens_q, cu_seqlens, len_q, longest, dropout, **options
        )  # fmt: skip
        return out.unflatten(0, (len(q), len_q))
    places_q, cu_seqlens_q, longest_q = packed_of(key_mask[:, len_kv - len_q :])
    out = flash_attn_varlen_func(
        index_first_axis(q.flatten(0, 1), places_q), k, v, cu_seqlens_q, cu_seqlens, longest_q, longest, dropout,
        **options,
    )  # fmt: skip
    return pad_input(out, places_q, len(q), len_q)


def key_mask_of(mask, b, len_kv):
    """The mask of keys ``[b, len_kv]`` that a bool mask ``[b, h, len_q, len_kv]`` repeats for all rows, or None."""
    if mask.dtype != torch.bool or any(mask.size(n) > 1 and mask.stride(n) for n in (1, 2)) or 0 in mask.shape:
        return None
    return mask[:, 0, 0].expand(b, len_kv)


def attend_under(q, k, v, mask, *, scale, window=ALL, softcap=0.0, dropout=0.0, sinks=None, bias=None):
    """Attention under a mask ``[b, h, len_q, len_kv]``, or 1 in place of a size: bool, or numbers to add.

    The window is at the bottom right.
    """
    if mask is not None and bias is None and window == ALL:
        key_mask = key_mask_of(mask, len(k), k.shape[1])
        if key_mask is not None:
            return attend(q, k, v, key_mask, scale=scale, softcap=softcap, dropout=dropout, sinks=sinks)
    is_bool = mask is not None and mask.dtype == torch.bool
    if mask is not None and not is_bool:
        bias = mask if bias is None else bias + mask
    return flash_attn_func(
        q, k, v, dropout, softmax_scale=scale, window_size=window, softcap=softcap or 0.0, sinks=sinks,
        attn_mask=mask if is_bool else None, attn_bias=bias,
    )  # fmt: skip
