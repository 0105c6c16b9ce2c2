"""Attention written from its definition, in plain PyTorch, one sequence at a time. All kernels are compared with this
file.

    s = scale q.k -> softcap tanh(s / softcap) -> s - slope |i + shift - j| -> mask -> softmax -> dropout -> P V

The code is plain and slow. In float64 its results are the truth, with gradients by autograd. In the inputs' dtype they
are the results of plain PyTorch, whose error the tolerance allows twice (compare.py).
"""

import math

import numpy as np
import torch


def visible(len_q, len_kv, causal=False, window=(-1, -1)):
    """[len_q, len_kv] bool. Row i sees key j iff i + shift - left <= j <= i + shift + right; shift = len_kv - len_q."""
    left, right = window
    if causal:
        right = 0
    i = torch.arange(len_q)[:, None] + (len_kv - len_q)
    j = torch.arange(len_kv)[None, :]
    see = torch.ones(len_q, len_kv, dtype=torch.bool)
    if left >= 0:
        see &= j >= i - left
    if right >= 0:
        see &= j <= i + right
    return see


def alibi_bias(slopes, len_q, len_kv):
    """[h, len_q, len_kv]: -slope |i + shift - j|."""
    i = torch.arange(len_q)[:, None] + (len_kv - len_q)
    j = torch.arange(len_kv)[None, :]
    return -slopes[:, None, None] * (i - j).abs()


def attention(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, keep=None, dropout_p=0.0):
    """One sequence: q [len_q, h, d], k and v [len_kv, h_kv, d] -> out [len_q, h, d], lse [h, len_q], in q's dtype.

    slopes: [h] in float32 or float64, or None. keep: [h, len_q, len_kv] bool, False where dropout drops, or None. The
    scale multiplies k. So in 16 bit the rounding differs from kernels that scale the product.
    """
    len_q, h, d = q.shape
    len_kv, h_kv, _ = k.shape
    scale = d**-0.5 if scale is None else scale
    k, v = (x.repeat_interleave(h // h_kv, dim=1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k * scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        s = s + alibi_bias(slopes, len_q, len_kv)
    see = visible(len_q, len_kv, causal, window)
    s = s.masked_fill(~see, -math.inf)
    blind = (s == -math.inf).all(dim=-1)  # rows without a key, or without a score above -inf
    s = s.masked_fill(blind[..., None], 0)
    p = torch.softmax(s, dim=-1).masked_fill(blind[..., None], 0)
    lse = torch.logsumexp(s, dim=-1).masked_fill(blind, math.inf) if len_kv else s.new_full((h, len_q), math.inf)
    if keep is not None:
        p = p.masked_fill(~keep, 0) / (1 - dropout_p)
    return torch.einsum("hij,jhd->ihd", p.to(v.dtype), v), lse


FP32_MAX = torch.finfo(torch.float32).max


def by_pairs(
    q, k, v, dout, scale, causal, window, softcap, slopes=None, keep=None, dropout_p=0.0, fp32_scores=True, saved=None
):
    """attention() and its gradients pair by pair, in float64. A masked pair is left out and not multiplied by 0.

    This function serves inputs with infinities and NaN. fp32_scores: scores beyond fp32 in units of log2 are infinite.
    saved: the rounded out that the backward gets. Returns out, lse, dq, dk, dv. Every element of every pair is a number
    in memory, so problems must be small.
    """
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    (len_q, h, _), (len_kv, h_kv, _) = q.shape, k.shape
    q, dout = (x.transpose(0, 1)[:, :, None] for x in (q, dout))  # [h, len_q, 1, d]
    k, v = (x.repeat_interleave(h // h_kv, dim=1).transpose(0, 1)[:, None] for x in (k, v))  # [h, 1, len_kv, d]

    def in_range(x, most):
        return torch.where(x.abs() > most, x.sign() * math.inf, x) if fp32_scores else x

    s = scale * in_range((q * k).sum(-1), FP32_MAX)
    capped = torch.tanh(s / softcap) if softcap > 0 else torch.zeros_like(s)
    if softcap > 0:
        s = softcap * capped
    if slopes is not None:
        s = s + alibi_bias(slopes.double(), len_q, len_kv)
    s = in_range(s, FP32_MAX * math.log(2))
    see = visible(len_q, len_kv, causal, window).expand(s.shape)
    largest = s.masked_fill(~see | s.isnan(), -math.inf).amax(-1) if len_kv else s.new_full((h, len_q), -math.inf)
    shift = largest.masked_fill(largest == -math.inf, 0)[..., None]
    weight = torch.exp(s - shift).masked_fill(~see, 0)
    total = weight.sum(-1)
    blind = total == 0
    z = torch.ones_like(s) if keep is None else keep.double() / (1 - dropout_p)
    out = ((weight * z)[..., None] * v).masked_fill(~see[..., None], 0).sum(2) / total[..., None]
    out = out.masked_fill(blind[..., None], 0)
    lse = (largest + total.log()).masked_fill(blind, math.inf)

    alive = (see & ~blind[..., None])[..., None]
    prob = torch.exp(s - lse[..., None])
    delta = (dout[:, :, 0] * (out if saved is None else saved.double().transpose(0, 1))).sum(-1, keepdim=True)
    ds = prob * (z * (dout * v).sum(-1) - delta) * (1 - capped * capped)
    dq = scale * (ds[..., None] * k).masked_fill(~alive, 0).sum(2)
    dk = scale * (ds[..., None] * q).masked_fill(~alive, 0).sum(1)
    dv = ((prob * z)[..., None] * dout).masked_fill(~alive, 0).sum(1)
    dk, dv = (x.unflatten(0, (h_kv, h // h_kv)).sum(1).transpose(0, 1) for x in (dk, dv))
    return out.transpose(0, 1), lse, dq.transpose(0, 1), dk, dv


# ---- dropout: which elements the generator keeps -------------------------------------------------------------------

U32 = np.uint64(0xFFFFFFFF)


def philox4x32(counter, key, rounds):
    """counter: four uint64 arrays that hold 32-bit words. key: two ints. Returns the four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a = np.uint64(0xD2511F53) * c0
        b = np.uint64(0xCD9E8D57) * c2
        c0, c2 = (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = b & U32, a & U32
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_max(dropout_p):
    """The largest random byte that keeps its element: floor(255 (1 - p)) in float32."""
    return int(np.floor(np.float32(255) * (np.float32(1) - np.float32(dropout_p))))


def dropout_keep(seed, offset, b_idx, h, len_q, len_kv, dropout_p):
    """[h, len_q, len_kv] bool of sequence b_idx: the mapping from (head, row, column) to one byte of the generator."""
    row = np.arange(len_q, dtype=np.uint64)[:, None]
    col = np.arange(len_kv, dtype=np.uint64)[None, :]
    r, c = row % np.uint64(16), col % np.uint64(32)
    lane = np.uint64(4) * (r % np.uint64(8)) + (c % np.uint64(8)) // np.uint64(2)
    byte = np.uint64(4) * (c // np.uint64(8)) + np.uint64(2) * (r // np.uint64(8)) + c % np.uint64(2)
    zero = np.zeros((len_q, len_kv), dtype=np.uint64)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    keep = np.empty((h, len_q, len_kv), dtype=bool)
    for head in range(h):
        low = np.uint64(offset) + np.uint64((b_idx * h + head) * 32) + lane
        counter = (low & U32, low >> np.uint64(32), row // np.uint64(16) + zero, col // np.uint64(32) + zero)
        words = np.stack(philox4x32(counter, key, rounds=7)).astype(np.uint32)
        word = np.take_along_axis(words, (byte // np.uint64(4)).astype(np.int64)[None], axis=0)[0]
        drawn = (word >> (np.uint32(8) * (byte % np.uint64(4)).astype(np.uint32))) & np.uint32(255)
        keep[head] = drawn <= keep_max(dropout_p)
    return torch.from_numpy(keep)


# ---- the key/value cache -------------------------------------------------------------------------------------------


def rotate(x, cos, sin, positions, interleaved):
    """Rotary embedding of x [rows, heads, d]. Row t is rotated by positions[t]; positions past the last row of cos do
    nothing.

    The result is computed in float64 and rounded once to the dtype of x.
    """
    r = 2 * cos.shape[1]
    past = positions >= cos.shape[0]
    at = positions.clamp(max=cos.shape[0] - 1)
    c = torch.where(past[:, None], 1.0, cos[at].double())[:, None]
    s = torch.where(past[:, None], 0.0, sin[at].double())[:, None]
    y = x.double()
    first, second = (slice(0, r, 2), slice(1, r, 2)) if interleaved else (slice(0, r // 2), slice(r // 2, r))
    y0, y1 = y[..., first], y[..., second]
    turned = y.clone()
    turned[..., first] = y0 * c - y1 * s
    turned[..., second] = y0 * s + y1 * c
    return turned.to(x.dtype)


def kvcache(
    q, k_cache, v_cache, k=None, v=None, cos=None, sin=None, seqlens=None, batch_idx=None, leftpad=None,
    block_table=None, interleaved=True, slopes=None, dtype=torch.float64, **options,
):  # fmt: skip
    """flash_attn_with_kvcache, entry by entry and row by row. seqlens, batch_idx, leftpad, block_table are lists of
    ints.

    Returns out [b, len_q, h, d] and lse [b, h, len_q], computed in dtype, and the caches after the call. options:
    scale, causal, window, softcap of attention(). slopes: [b, h] or None.
    """
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    b, len_q, h, _ = q.shape
    outs, lses = [], []
    for n in range(b):
        entry = n if batch_idx is None else batch_idx[n]
        if block_table is None:
            places = [(entry, row) for row in range(k_cache.shape[1])]
        else:
            page_size = k_cache.shape[1]
            places = [(page, row) for page in block_table[entry] for row in range(page_size)]
        old = len(places) if seqlens is None else seqlens[n]
        pad = 0 if leftpad is None else leftpad[n]
        end = old
        if k is not None:
            new = k[n] if cos is None else rotate(k[n], cos, sin, old + torch.arange(k.shape[1]), interleaved)
            for t in range(k.shape[1]):
                k_cache[places[old + t]] = new[t]
                v_cache[places[old + t]] = v[n, t]
            end += k.shape[1]
        q_n = q[n]
        if cos is not None:
            left, right = options.get("window", (-1, -1))
            capacity = len(places)
            causal = options.get("causal", False) and len_q > 1
            local = 0 <= left < capacity or 0 <= right < capacity
            steps = torch.arange(len_q) if causal or local else torch.zeros(len_q, dtype=torch.long)
            q_n = rotate(q_n, cos, sin, old + steps, interleaved)
        keys = [k_cache[place] for place in places[pad:end]]
        values = [v_cache[place] for place in places[pad:end]]
        empty = k_cache.new_zeros(0, *k_cache.shape[2:])
        out, lse = attention(
            q_n.to(dtype),
            (torch.stack(keys) if keys else empty).to(dtype),
            (torch.stack(values) if values else empty).to(dtype),
            slopes=None if slopes is None else slopes[n].to(torch.float64 if dtype == torch.float64 else torch.float32),
            **options,
        )
        outs.append(out)
        lses.append(lse)
    out = torch.stack(outs) if b else q.to(dtype)
    lse = torch.stack(lses) if b else q.new_zeros(0, h, len_q, dtype=dtype)
    return out, lse, k_cache, v_cache
