"""Attention by its definition, and padded batches for tests of attention."""

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from flash_attn._types import Device
from flash_attn.bert_padding import pad_input, unpad_input

__all__ = [
    "attention_ref",
    "construct_chunk_mask",
    "construct_local_mask",
    "generate_qkv",
    "generate_random_padding_mask",
]


def generate_random_padding_mask(
    max_seqlen: int, batch_size: int, device: Device, mode: str = "random", zero_lengths: bool = False
) -> Tensor:
    """Bool mask ``[b, s]`` of the present tokens, which come first in each sequence.

    Args:
        max_seqlen, batch_size: s and b.
        mode: "full": s tokens in each sequence. "random": s - 20 to s tokens, at least 1. "third": s // 3 to s tokens.
        zero_lengths: the first sequence, every fifth after it and the last are empty. Other "random" ones may be empty,
            too.
    Raises:
        AssertionError: mode is not one of these.

    >>> generate_random_padding_mask(4, 2, "cpu", mode="full")
    tensor([[True, True, True, True],
            [True, True, True, True]])
    """
    assert mode in ("full", "random", "third"), f"mode is {mode!r}"
    shortest = {"full": max_seqlen, "random": max(0 if zero_lengths else 1, max_seqlen - 20), "third": max_seqlen // 3}
    lengths = torch.randint(shortest[mode], max_seqlen + 1, (batch_size, 1), device=device)
    if zero_lengths:
        lengths[::5] = 0
        lengths[-1] = 0
    return torch.arange(max_seqlen, device=device) < lengths


def generate_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    kvpacked: bool = False,
    qkvpacked: bool = False,
    query_unused_mask: Optional[Tensor] = None,
    key_unused_mask: Optional[Tensor] = None,
) -> tuple[Any, ...]:
    """Packed and padded forms of one input, with functions that pad results again.

    Args:
        q: ``[b, s_q, h, d]``. k: ``[b, s_k, h_kv, d]``. v: ``[b, s_k, h_kv, d_v]``. qv: ``[b, s_q, h, d_v]`` or None.
        query_padding_mask, key_padding_mask: ``[b, s]`` or None, true for the tokens in use.
        kvpacked, qkvpacked: return one of the forms below instead of the default.
        query_unused_mask, key_unused_mask: ``[b, s]`` or None, true for tokens that have a place but are not in use.
            They need the padding mask, and exclude the packed forms.
    Returns:
        default: q, k, v, qv packed, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, q, k,
            v, qv padded, output_pad_fn, dq_pad_fn, dk_pad_fn. A seqused is None without its padding mask.
        kvpacked: q and kv packed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q and kv padded,
            output_pad_fn, dq_pad_fn, dkv_pad_fn.
        qkvpacked: qkv packed, cu_seqlens, max_seqlen, qkv padded, output_pad_fn, dqkv_pad_fn.
        packed: ``[t, ...]``. padded: ``[b, s, ...]``. Except qv they are leaves that require grad. cu_seqlens: int32
            ``[b + 1]``. A pad function takes ``[t, ...]`` and returns ``[b, s, ...]``.
    Raises:
        AssertionError: options that exclude each other, an unused mask without its padding mask, or qkvpacked with
            different lengths of queries and keys.

    >>> q, k, v = torch.randn(3, 2, 4, 3, 8)
    >>> qkv, cu_seqlens, longest, *_ = generate_qkv(q, k, v, qkvpacked=True)
    >>> qkv.shape, cu_seqlens
    (torch.Size([8, 3, 3, 8]), tensor([0, 4, 8], dtype=torch.int32))
    """
    assert not (kvpacked and qkvpacked), "kvpacked and qkvpacked exclude each other"
    for name, unused, mask in (
        ("query", query_unused_mask, query_padding_mask),
        ("key", key_unused_mask, key_padding_mask),
    ):
        assert unused is None or not (kvpacked or qkvpacked), f"{name}_unused_mask and packed forms exclude each other"
        assert unused is None or mask is not None, f"{name}_unused_mask needs {name}_padding_mask"
    q_packed, cu_q, max_q, used_q, pad_q = _pack(q, query_padding_mask, query_unused_mask)
    k_packed, cu_k, max_k, used_k, pad_k = _pack(k, key_padding_mask, key_unused_mask)
    v_packed = _pack(v, key_padding_mask, key_unused_mask)[0]
    if qkvpacked:
        assert cu_q.equal(cu_k), "qkvpacked needs equal masks of queries and keys"
        packed, padded = torch.stack([q_packed, k_packed, v_packed], 1), torch.stack([q, k, v], 2)
        return _leaf(packed), cu_q, max_q, _leaf(padded), pad_q, pad_q
    if kvpacked:
        packed, padded = torch.stack([k_packed, v_packed], 1), torch.stack([k, v], 2)
        return _leaf(q_packed), _leaf(packed), cu_q, cu_k, max_q, max_k, _leaf(q), _leaf(padded), pad_q, pad_q, pad_k
    qv_packed = None if qv is None else _pack(qv, query_padding_mask, query_unused_mask)[0].detach()
    lengths = cu_q, cu_k, used_q, used_k, max_q, max_k
    packed, padded = map(_leaf, (q_packed, k_packed, v_packed)), map(_leaf, (q, k, v))
    return *packed, qv_packed, *lengths, *padded, None if qv is None else qv.detach(), pad_q, pad_q, pad_k


def construct_local_mask(
    seqlen_q: int,
    seqlen_k: int,
    window_size: Sequence[Optional[int]] = (None, None),
    sink_token_length: int = 0,
    query_padding_mask: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    key_leftpad: Optional[Tensor] = None,
    device: Device = None,
) -> Tensor:
    """True if key j is outside the window of query i.

    The window is i + D - L <= j <= i + D + R with D = keys - queries. The shape is ``[s_q, s_k]``. With masks or
    ``key_leftpad`` ``[b]`` the shape is ``[b, 1, s_q, s_k]``, and lengths are counted per sequence.

    Args:
        seqlen_q, seqlen_k: s_q and s_k.
        window_size: ``(L, R)``; None or a negative number is unlimited.
        sink_token_length: so many first keys are visible whatever L says.
        query_padding_mask, key_padding_mask: bool ``[b, s_q]`` and ``[b, s_k]``, true for the tokens in use.
        key_leftpad: ``[b]``, so many first keys of a sequence are padding and outside.
        device: of the result.

    >>> construct_local_mask(2, 4, window_size=(1, 0)).int()  # 1 is outside
    tensor([[1, 0, 0, 1],
            [1, 1, 0, 0]], dtype=torch.int32)
    >>> construct_local_mask(4, 2, window_size=(None, 0)).int()
    tensor([[1, 1],
            [1, 1],
            [0, 1],
            [0, 0]], dtype=torch.int32)
    """
    left, right = (None if side is None or side < 0 else int(side) for side in window_size)
    diagonal, key, len_k = _positions(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, device)
    outside = (key >= len_k).expand_as(key - diagonal) if right is None else key > diagonal + right
    return outside if left is None else outside | (key < diagonal - left) & (key >= sink_token_length)


def construct_chunk_mask(
    seqlen_q: int,
    seqlen_k: int,
    attention_chunk: int,
    query_padding_mask: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    key_leftpad: Optional[Tensor] = None,
    device: Device = None,
) -> Tensor:
    """True if key j is outside the chunk of query i.

    The chunk is c <= j < c + attention_chunk, where c is i + D rounded down to a multiple of attention_chunk. D, the
    shapes and the other arguments are those of ``construct_local_mask``.

    >>> construct_chunk_mask(4, 4, attention_chunk=2).int()  # 1 is outside
    tensor([[0, 0, 1, 1],
            [0, 0, 1, 1],
            [1, 1, 0, 0],
            [1, 1, 0, 0]], dtype=torch.int32)
    """
    diagonal, key, _ = _positions(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, device)
    first = diagonal.div(attention_chunk, rounding_mode="floor") * attention_chunk
    return (key < first) | (key >= first + attention_chunk)


def attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_padding_mask: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    key_leftpad: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    dropout_mask: Optional[Tensor] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Sequence[Optional[int]] = (None, None),
    attention_chunk: int = 0,
    sink_token_length: int = 0,
    learnable_sink: Optional[Tensor] = None,
    softcap: float = 0.0,
    upcast: bool = True,
    reorder_ops: bool = False,
    intermediate_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Tensor]:
    """Attention that stores its scores.

    The causal mask is aligned to the bottom right corner. Fewer queries than keys, and more:

        x x x .      . .
        x x x x      . .
                     x .
                     x x

    Args:
        q: ``[b, s_q, h, d]``. k: ``[b, s_k, h_kv, d]``. v: ``[b, s_k, h_kv, d_v]``. Padding masks ``[b, s]``.
        key_leftpad: ``[b]``, so many first keys are hidden. attn_bias: ``[b, h, s_q, s_k]``, is added to the scores.
        dropout_mask: ``[b, h, s_q, s_k]``, true where kept; kept entries are scaled by 1 / (1 - dropout_p).
        qv: ``[b, s_q, h, d_v]``, adds ``qv @ v.T`` to ``q @ k.T``.
        q_descale, k_descale, v_descale: ``[b, h_kv]``, factors of q and qv, of k and of v.
        window_size, sink_token_length: as of ``construct_local_mask``. attention_chunk: 0 is off.
        learnable_sink: ``[h]``, the score of one more key without a value.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the bias; 0 is off.
        upcast: compute in fp32. reorder_ops: scale k instead of q, which rounds differently and as correctly.
        intermediate_dtype: the probabilities are rounded to it before they meet v.
    Returns:
        (output ``[b, s_q, h, d_v]``, probabilities before dropout ``[b, h, s_q, s_k]``), in the dtype of q. Rows that
        see no key, and rows of padding, are 0.
    Gradients for q, k, v, qv, attn_bias and learnable_sink.

    >>> q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    >>> output, probabilities = attention_ref(q, k, v, causal=True)
    >>> output.shape, probabilities.shape
    (torch.Size([2, 5, 4, 8]), torch.Size([2, 4, 5, 7]))
    """
    dtype, device, groups = q.dtype, q.device, q.shape[2] // k.shape[2]
    if upcast:
        q, k, v, qv = (x if x is None else x.float() for x in (q, k, v, qv))
    q, qv = (_descaled(x, q_descale, groups) for x in (q, qv))
    k, v = (_descaled(x, scale).repeat_interleave(groups, 2) for x, scale in ((k, k_descale), (v, v_descale)))
    scale = 1 / math.sqrt(q.shape[-1] if qv is None else q.shape[-1] + v.shape[-1])
    scores = torch.einsum("bthd,bshd->bhts", *((q, k * scale) if reorder_ops else (q * scale, k)))
    if qv is not None:
        scores = scores + torch.einsum("bthd,bshd->bhts", qv * scale, v)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if attn_bias is not None:
        scores = scores + attn_bias
    sizes, masks = (q.shape[1], k.shape[1]), (query_padding_mask, key_padding_mask, key_leftpad, device)
    window_size = (window_size[0], 0) if causal else window_size
    hidden = construct_local_mask(*sizes, window_size, sink_token_length, *masks)
    if attention_chunk > 0:
        hidden = hidden | construct_chunk_mask(*sizes, attention_chunk, *masks)
    if key_padding_mask is not None:
        hidden = hidden | ~key_padding_mask[:, None, None]
    p = _softmax(scores.masked_fill(hidden, float("-inf")), learnable_sink).to(v.dtype)
    p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # a query that sees nothing attends to nothing
    if query_padding_mask is not None:
        p = p.masked_fill(~query_padding_mask[:, None, :, None], 0.0)
    kept = p if dropout_mask is None else p.masked_fill(~dropout_mask, 0.0)
    if intermediate_dtype is not None:
        kept = kept.to(intermediate_dtype).to(kept.dtype)
    output = torch.einsum("bhts,bshd->bthd", kept, v * (1.0 / (1 - dropout_p)))
    return output.to(dtype), p.to(dtype)


def _positions(seqlen_q, seqlen_k, query_padding_mask, key_padding_mask, key_leftpad, device):
    """(key on the diagonal of each query, index of each key behind its left padding, number of keys)."""
    row, key = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    len_q = seqlen_q if query_padding_mask is None else query_padding_mask.sum(-1)[:, None, None, None]
    len_k = seqlen_k if key_padding_mask is None else key_padding_mask.sum(-1)[:, None, None, None]
    if key_leftpad is not None:
        pad = key_leftpad[:, None, None, None]
        key = torch.where(key >= pad, key - pad, 2**32)
        len_k = len_k - pad if key_padding_mask is None else len_k  # the mask excludes left padding
    return row + len_k - len_q, key, len_k


def _descaled(x, scale, groups=1):
    """x ``[b, s, h, d]`` times scale ``[b, h / groups]``, in the dtype of x; either may be None."""
    if x is None or scale is None:
        return x
    return (x.float() * scale.repeat_interleave(groups, 1)[:, None, :, None]).to(x.dtype)


def _softmax(scores, sink):
    """Softmax over the last dimension of ``[b, h, s_q, s_k]``; sink ``[h]`` is the score of one more column."""
    if sink is None:
        return torch.softmax(scores, dim=-1)
    column = sink.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores.float(), column], -1), dim=-1)[..., :-1]


def _pack(x, mask, unused=None):
    """Returns (tokens ``[t, h, d]``, cu_seqlens, max_seqlen, seqused, function that pads tokens again)."""
    batch, seqlen = x.shape[:2]
    if mask is not None:
        tokens, indices, cu_seqlens, max_seqlen, used = unpad_input(x, mask, unused)
        return tokens, cu_seqlens, max_seqlen, used, lambda y: pad_input(y, indices, batch, seqlen)
    cu_seqlens = seqlen * torch.arange(batch + 1, dtype=torch.int32, device=x.device)
    return x.flatten(0, 1), cu_seqlens, seqlen, None, lambda y: y.unflatten(0, (batch, seqlen))


def _leaf(x):
    return x.detach().requires_grad_()
