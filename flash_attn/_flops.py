"""Formulas for FLOPs, for ``torch.utils.flop_counter.FlopCounterMode`` and for Inductor.

They count as torch counts its own flash attention: all pairs of a row and a key, masked or not. A forward has two
matrix products, a backward five. Sequences of different lengths count with their lengths, or with the longest where the
lengths have no values: in graphs and on device "meta". With attn_bias, attn_mask, return_max_logits or a gradient of
the lse they count as one sequence, because the op does not know where they lie, and flex_attention counts all pairs,
too, whatever its mods and blocks say: torch does the same.
"""

import torch

_ops = torch.ops.flash_attn


def _pairs_product(num_pairs, q, v):
    """One product of q and k, and one of the probabilities and v."""
    h, d, d_v = q.shape[-2], q.shape[-1], v.shape[-1]
    return 2 * num_pairs * h * (d + d_v)


def _dense_pairs(q, k):
    return q.shape[0] * q.shape[1] * k.shape[1]


def _has_values(x):
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return not isinstance(x, (FakeTensor, FunctionalTensor)) and x.device.type != "meta"


def _lengths(cu_seqlens, longest):
    if _has_values(cu_seqlens):
        return cu_seqlens.diff().tolist()
    return [longest] * (cu_seqlens.shape[0] - 1)


def _packed_pairs(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    lengths = zip(_lengths(cu_seqlens_q, max_seqlen_q), _lengths(cu_seqlens_k, max_seqlen_k))
    return sum(len_q * len_k for len_q, len_k in lengths)


def _dense_forward(q, k, v, *_, out_val=None, **__):
    return _pairs_product(_dense_pairs(q, k), q, v)


def _packed_forward(q, k, v, *lengths_and_options, out_val=None, **__):
    return _pairs_product(_packed_pairs(*lengths_and_options[:4]), q, v)


def _written_dense(q, k, v, out, *_, out_val=None, **__):
    return _pairs_product(_dense_pairs(q, k), q, v)


def _written_packed(q, k, v, out, *lengths_and_options, out_val=None, **__):
    return _pairs_product(_packed_pairs(*lengths_and_options[:4]), q, v)


def _of_backward(num_pairs, q, v):
    """S again, dP and dV, dQ and dK."""
    h, d, d_v = q.shape[-2], q.shape[-1], v.shape[-1]
    return 2 * num_pairs * h * (3 * d + 2 * d_v)


def _dense_backward(dout, q, k, v, *_, out_val=None, **__):
    return _of_backward(_dense_pairs(q, k), q, v)


def _packed_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths_and_options, out_val=None, **__):
    return _of_backward(_packed_pairs(*lengths_and_options[:4]), q, v)


def _decoding(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, rotary_cos=None, rotary_sin=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, *_, out_val=None, **__,
):  # fmt: skip
    b, len_q = q.shape[:2]
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    has_lengths = cache_seqlens is not None and _has_values(cache_seqlens)
    ends = cache_seqlens + (0 if k is None else k.shape[1]) if has_lengths else None
    if cache_leftpad is not None and _has_values(cache_leftpad):
        num_keys = int(((room if ends is None else ends) - cache_leftpad).sum())
    else:
        num_keys = b * room if ends is None else int(ends.sum())
    return _pairs_product(len_q * num_keys, q, v_cache)


def _flex_pairs(q, k, sequences):
    """``[b, h, length, d]``, or pages of keys."""
    _, kv_len, block_table = sequences or (None, None, None)
    if kv_len is not None and _has_values(kv_len):
        return q.shape[2] * int(kv_len.sum())
    return q.shape[0] * q.shape[2] * k.shape[2] * (1 if block_table is None else block_table.shape[1])


def _flex_forward(q, k, v, *arguments, out_val=None, **__):
    return _pairs_product(_flex_pairs(q, k, arguments[12]), q.transpose(1, 2), v)


def _flex_backward(q, k, v, *arguments, out_val=None, **__):
    return _of_backward(_flex_pairs(q, k, arguments[12]), q.transpose(1, 2), v)


FORMULAS = {
    "_flash_attn_forward": _dense_forward,
    "_flash_attn_varlen_forward": _packed_forward,
    "fwd": _written_dense,
    "varlen_fwd": _written_packed,
    "_flash_attn_backward": _dense_backward,
    "_flash_attn_varlen_backward": _packed_backward,
    "fwd_kvcache": _decoding,
}


FORMULAS_OF_FLEX = {"flex_forward": _flex_forward, "flex_attend": _flex_forward, "flex_backward": _flex_backward}


def register(formulas=FORMULAS):
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in formulas.items():
        register_flop_formula(getattr(_ops, name), get_raw=True)(formula)
