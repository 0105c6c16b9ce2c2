"""Random calls of decoders, their caches in pages, and their specification in fp64."""

import torch
from oracle_attention import attention

NAN = float("nan")
LENGTH = 160  # of the tables below: more than any key


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q >= k) & (q - k <= 17)


def documents(rng):
    table = torch.tensor([rng.randint(0, 3) for _ in range(LENGTH)]).sort().values
    return lambda b, h, q, k: (table[q] == table[k]) & (q >= k)


def alibi(rng):
    slopes = torch.tensor([2.0**-n for n in range(1, 9)])
    return lambda s, b, h, q, k: s + slopes[h] * (k - q)


def per_batch(rng):
    starts = torch.tensor([rng.randint(0, 9) for _ in range(8)])
    return lambda b, h, q, k: (k >= starts[b]) & (q >= k)


MASKS = {"none": lambda rng: None, "causal": lambda rng: causal, "window": lambda rng: window}
MASKS |= {"documents": documents, "per batch": per_batch}


def tensors(rng, b, h, h_kv, len_q, len_kv, d, d_v, dtype):
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    shapes = [(b, h, len_q, d), (b, h_kv, len_kv, d), (b, h_kv, len_kv, d_v)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def in_pages(rng, k, v, kv_len, page):
    """The keys and values as pages in any order, NaN where no key is; and the block table, with -1 behind its end."""
    b, _, len_kv, _ = k.shape
    columns = -(-len_kv // page)
    num = sum(-(-n // page) for n in kv_len) + 2
    free = list(range(num))
    rng.shuffle(free)
    pages = [torch.full((num, x.size(1), page, x.size(3)), NAN, dtype=x.dtype) for x in (k, v)]
    table = torch.full((b, columns), -1, dtype=torch.int32)
    for b_idx, n in enumerate(kv_len):
        for first in range(0, n, page):
            table[b_idx, first // page] = at = free.pop()
            for to, x in zip(pages, (k, v)):
                rows = x[b_idx, :, first : min(first + page, n)]
                to[at, :, : rows.size(1)] = rows
    return *pages, table


def want_of(q, k, v, kv_len, q_offset, score_mod=None, mask_mod=None, scale=None):
    """The specification in fp64: one batch after the other, the rows of a query at their places in the sequence."""
    found = []
    for b_idx, (n, offset) in enumerate(zip(kv_len, q_offset)):
        len_q, total = q.size(2), int(offset) + q.size(2)
        rows = q.new_zeros(1, q.size(1), total, q.size(3)).double()
        rows[:, :, offset:] = q[b_idx]
        mask = None
        if mask_mod is not None:
            h, i, j = torch.arange(q.size(1)), torch.arange(total), torch.arange(n)
            at = torch.broadcast_tensors(h.view(-1, 1, 1), i.view(-1, 1), j)
            mask = mask_mod(torch.full_like(at[0], b_idx), *at).expand(at[0].shape)[None]
        mod = None if score_mod is None or n == 0 else (lambda s, b, *rest, b_idx=b_idx: score_mod(s, b + b_idx, *rest))
        parts = (x[b_idx : b_idx + 1, :, :n].double() for x in (k, v))
        found.append([x[:, :, total - len_q :] for x in attention(rows, *parts, mod, mask, scale)])
    return [torch.cat(x) for x in zip(*found)]


def draw(rng, len_q, dtype=None):
    """A random call: its tensors, the lengths and the offsets."""
    b, h_kv = rng.randint(1, 3), rng.choice([1, 2])
    h = h_kv * rng.choice([1, 2, 4])
    d = rng.choice([16, 40, 64])
    len_kv = rng.choice([rng.randint(1, 40), rng.randint(41, 150), 128, 129])
    dtype = dtype or rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    kv_len = [rng.choice([0, 1, len_kv, rng.randint(0, len_kv)]) for _ in range(b)]
    q_offset = [max(n - len_q, 0) if rng.random() < 0.7 else rng.randint(0, LENGTH - len_q) for n in kv_len]
    return tensors(rng, b, h, h_kv, len_q, len_kv, d, rng.choice([d, 24]), dtype), kv_len, q_offset


def int32(values):
    return torch.tensor(values, dtype=torch.int32)
