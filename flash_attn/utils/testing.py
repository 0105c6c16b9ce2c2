"""Attention by its definition, and padded batches for tests of attention."""

import math

import torch

from flash_attn.bert_padding import pad_input, unpad_input

__all__ = ["attention_ref", "construct_local_mask", "generate_qkv", "generate_random_padding_mask"]


def generate_random_padding_mask(max_seqlen, batch_size, device, mode="random", zero_lengths=False):
    """Mask ``[b, s]`` of the present tokens: "full", "random" lengths, or lengths in the longest "third" of the range.

    With ``zero_lengths`` every fifth sequence, the last one too, is empty.
    """
    assert mode in ("full", "random", "third"), f"mode is {mode!r}"
    shortest = {"full": max_seqlen, "random": max(0 if zero_lengths else 1, max_seqlen - 20), "third": max_seqlen // 3}
    lengths = torch.randint(shortest[mode], max_seqlen + 1, (batch_size, 1), device=device)
    if zero_lengths:
        lengths[::5] = 0
        lengths[-1] = 0
    return torch.arange(max_seqlen, device=device) < lengths


def generate_qkv(q, k, v, query_padding_mask=None, key_padding_mask=None, kvpacked=False, qkvpacked=False):
    """Packed and padded forms of one input, with functions that pad results again.

    Args:
        q: ``[b, s_q, h, d]``. k, v: ``[b, s_k, h_kv, d]``. Masks ``[b, s]`` or None.
    Returns:
        default: q, k, v packed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, q, k, v padded,
            output_pad_fn, dq_pad_fn, dk_pad_fn.
        kvpacked: q and kv packed, the four lengths, q and kv padded, output_pad_fn, dq_pad_fn, dkv_pad_fn.
        qkvpacked: qkv packed, cu_seqlens, max_seqlen, qkv padded, output_pad_fn, dqkv_pad_fn.
    """
    assert not (kvpacked and qkvpacked), "kvpacked and qkvpacked exclude each other"
    q_packed, cu_q, max_q, pad_q = _pack(q, query_padding_mask)
    k_packed, cu_k, max_k, pad_k = _pack(k, key_padding_mask)
    v_packed = _pack(v, key_padding_mask)[0]
    if qkvpacked:
        assert cu_q.equal(cu_k), "qkvpacked needs equal masks of queries and keys"
        packed, padded = torch.stack([q_packed, k_packed, v_packed], 1), torch.stack([q, k, v], 2)
        return _leaf(packed), cu_q, max_q, _leaf(padded), pad_q, pad_q
    lengths = cu_q, cu_k, max_q, max_k
    if kvpacked:
        packed, padded = torch.stack([k_packed, v_packed], 1), torch.stack([k, v], 2)
        return _leaf(q_packed), _leaf(packed), *lengths, _leaf(q), _leaf(padded), pad_q, pad_q, pad_k
    packed, padded = (q_packed, k_packed, v_packed), (q, k, v)
    return *map(_leaf, packed), *lengths, *map(_leaf, padded), pad_q, pad_q, pad_k


def construct_local_mask(
    seqlen_q, seqlen_k, window_size=(-1, -1), query_padding_mask=None, key_padding_mask=None, device=None,
    key_leftpad=None,
):  # fmt: skip
    """True if key j is outside the window of query i: not i + D - L <= j <= i + D + R, D = keys - queries.

    The shape is ``[s_q, s_k]``. With masks or ``key_leftpad`` ``[b]`` the shape is ``[b, 1, s_q, s_k]``, and lengths
    are counted per sequence.
    """
    left, right = window_size
    row, key = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    len_q = seqlen_q if query_padding_mask is None else query_padding_mask.sum(-1)[:, None, None, None]
    len_k = seqlen_k if key_padding_mask is None else key_padding_mask.sum(-1)[:, None, None, None]
    if key_leftpad is not None:
        pad = key_leftpad[:, None, None, None]
        key = torch.where(key >= pad, key - pad, 2**32)
        len_k = len_k - pad if key_padding_mask is None else len_k  # the mask excludes left padding
    diagonal = row + len_k - len_q
    outside = key > diagonal + right if right >= 0 else key >= len_k
    return outside | (key < diagonal - left) if left >= 0 else outside


def attention_ref(
    q,
    k,
    v,
    query_padding_mask=None,
    key_padding_mask=None,
    attn_bias=None,
    dropout_p=0.0,
    dropout_mask=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    upcast=True,
    reorder_ops=False,
    key_leftpad=None,
):
    """Attention that stores its scores.

    Args:
        q: ``[b, s_q, h, d]``. k, v: ``[b, s_k, h_kv, d]``. Padding masks ``[b, s]``; attn_bias ``[b, h, s_q, s_k]``.
        dropout_mask: ``[b, h, s_q, s_k]``, true where kept; kept entries are scaled by 1 / (1 - dropout_p).
        upcast: compute in fp32. reorder_ops: scale k instead of q, which rounds differently and as correctly.
    Returns:
        (output ``[b, s_q, h, d]``, probabilities before dropout ``[b, h, s_q, s_k]``), in the dtype of q.
    """
    window_size = (window_size[0], 0) if causal else window_size
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    scores = torch.einsum("bthd,bshd->bhts", *((q, k * scale) if reorder_ops else (q * scale, k)))
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if attn_bias is not None:
        scores = scores + attn_bias
    masks = query_padding_mask, key_padding_mask
    hidden = construct_local_mask(q.shape[1], k.shape[1], window_size, *masks, q.device, key_leftpad)
    if key_padding_mask is not None:
        hidden = hidden | ~key_padding_mask[:, None, None]
    p = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).to(v.dtype)
    p = p.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # a query that sees nothing attends to nothing
    if query_padding_mask is not None:
        p = p.masked_fill(~query_padding_mask[:, None, :, None], 0.0)
    kept = p if dropout_mask is None else p.masked_fill(~dropout_mask, 0.0)
    output = torch.einsum("bhts,bshd->bthd", kept, v * (1.0 / (1 - dropout_p)))
    return output.to(dtype), p.to(dtype)


def _pack(x, mask):
    """Returns (tokens ``[t, h, d]``, cu_seqlens, max_seqlen, function that pads tokens again)."""
    batch, seqlen = x.shape[:2]
    if mask is not None:
        tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, mask)
        return tokens, cu_seqlens, max_seqlen, lambda y: pad_input(y, indices, batch, seqlen)
    cu_seqlens = seqlen * torch.arange(batch + 1, dtype=torch.int32, device=x.device)
    return x.flatten(0, 1), cu_seqlens, seqlen, lambda y: y.unflatten(0, (batch, seqlen))


def _leaf(x):
    return x.detach().requires_grad_()
