"""Cases of flash_attn_with_kvcache, and their comparison with the oracle."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields

import torch
from compare import DTYPES, check, check_lse, largest, size_of_values
from oracle import kvcache

from flash_attn import flash_attn_with_kvcache

NAN = math.nan


@dataclass(frozen=True, repr=False)
class Cache:
    """seqlens: keys before the append, one number per entry. page 0: not paged."""

    len_q: int = 1
    seqlens: tuple[int, ...] | int | None = (5, 40, 0)
    capacity: int = 64
    len_new: int = 0
    h: int = 4
    h_kv: int = 2
    d: int = 32
    dtype: str = "fp32"
    page: int = 0
    rotary: float = 0.0  # share of d that is rotated
    interleaved: bool = True
    leftpad: bool = False
    batch_idx: bool = False
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""
    num_splits: int = 0
    b: int = 3

    def __repr__(self):
        changed = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Cache({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


def run(case, device="cpu"):
    gen = torch.Generator().manual_seed(5)
    dtype = DTYPES[case.dtype]

    def normal(*shape):
        return torch.randn(*shape, generator=gen).to(dtype)

    b, d = case.b, case.d
    seqlens = case.seqlens if isinstance(case.seqlens, tuple) else (case.seqlens,) * b
    entries = 2 * b if case.batch_idx else b
    batch_idx = torch.randperm(entries, generator=gen)[:b].tolist() if case.batch_idx else None
    old = [case.capacity if n is None else n for n in seqlens]
    pads = [min(n // 3 + i, n) for i, n in enumerate(old)] if case.leftpad else None
    if case.page:
        columns = -(-case.capacity // case.page)
        capacity = columns * case.page
        if case.seqlens is None:
            old = [capacity] * b
        shape = (entries * columns + 2, case.page, case.h_kv, d)
        order = torch.randperm(entries * columns + 2, generator=gen)
        table = order[: entries * columns].view(entries, columns).clone()
        for n in range(b):  # pages that the entry does not need are not allocated
            row = n if batch_idx is None else batch_idx[n]
            table[row, -(-(old[n] + case.len_new) // case.page) :] = -1
    else:
        shape, table = (entries, case.capacity, case.h_kv, d), None
    # Only rows that belong to an entry hold numbers.
    k_cache, v_cache = (torch.full(shape, NAN, dtype=dtype) for _ in range(2))
    for n in range(b):
        row = n if batch_idx is None else batch_idx[n]
        for j in range(0 if pads is None else pads[n], old[n]):
            place = (row, j) if table is None else (int(table[row, j // case.page]), j % case.page)
            k_cache[place], v_cache[place] = normal(case.h_kv, d), normal(case.h_kv, d)
    q = normal(b, case.len_q, case.h, d)
    k, v = (normal(b, case.len_new, case.h_kv, d) if case.len_new else None for _ in range(2))
    cos = sin = None
    if case.rotary:
        half = int(d * case.rotary) // 16 * 16 // 2
        positions = -(-case.capacity // case.page) * case.page if case.page else case.capacity  # as many rows as needed
        angle = torch.rand(positions, half, generator=gen) * 2 * math.pi
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    slopes = None
    if case.alibi:
        slopes = torch.rand((b, case.h) if case.alibi == "bh" else (case.h,), generator=gen) * 0.3
    options = {"scale": d**-0.5, "causal": case.causal, "window": case.window, "softcap": case.softcap}
    known = dict(
        k=k, v=v, cos=cos, sin=sin, seqlens=None if case.seqlens is None else old, batch_idx=batch_idx, leftpad=pads,
        block_table=None if table is None else table.tolist(), interleaved=case.interleaved,
        slopes=None if slopes is None else slopes.expand(b, case.h), **options,
    )  # fmt: skip
    ref, ref_lse, k_after, v_after = kvcache(q, k_cache, v_cache, **known)
    plain, _, _, _ = kvcache(q, k_cache, v_cache, **known, dtype=dtype)
    _, plain_lse, _, _ = kvcache(q, k_cache, v_cache, **known, dtype=torch.float32)

    def int32(x):
        return None if x is None else torch.tensor(x, dtype=torch.int32, device=device)

    q, k_cache, v_cache, k, v, cos, sin, table, slopes = (
        None if x is None else x.to(device) for x in (q, k_cache, v_cache, k, v, cos, sin, table, slopes)
    )
    q_before = q.clone()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin,
        cache_seqlens=case.seqlens if isinstance(case.seqlens, int) or case.seqlens is None else int32(old),
        cache_batch_idx=int32(batch_idx), cache_leftpad=int32(pads),
        block_table=None if table is None else table.to(torch.int32), causal=case.causal, window_size=case.window,
        softcap=case.softcap, rotary_interleaved=case.interleaved, alibi_slopes=slopes, num_splits=case.num_splits,
        return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(q, q_before), "q was modified"
    out, lse, k_cache, v_cache = (x.cpu() for x in (out, lse, k_cache, v_cache))
    same_bits(v_cache, v_after, "v_cache")
    if case.rotary:
        assert torch.equal(k_cache.isnan(), k_after.isnan()), "k_cache: a row outside the append was written"
        ulp = torch.finfo(dtype).eps  # an fma or two roundings: the products of a rotation differ by at most one unit
        got, want = k_cache.nan_to_num().double(), k_after.nan_to_num().double()
        assert ((got - want).abs() <= ulp * (want.abs() + 1e-1)).all(), "k_cache: rotated keys"
    else:
        same_bits(k_cache, k_after, "k_cache")
    m = (5.0 if case.alibi else 3.0) if dtype != torch.float32 else 2.0
    if case.rotary and dtype == torch.float32:
        m = 4.0  # q and k were rounded after the rotation, possibly in different directions
    check("out", out, ref, plain, m=m, scale=max(largest(ref), size_of_values(v_after)))
    check_lse(lse, ref_lse, plain_lse, torch.float16 if case.rotary else dtype)


def same_bits(x, y, name):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    differ = (x.view(bits) != y.view(bits)).flatten(2).any(-1).nonzero().tolist()
    assert not differ, f"{name}: rows {differ[:5]} differ"


BASE = [
    Cache(),
    Cache(seqlens=None),
    Cache(seqlens=17),
    Cache(seqlens=0),
    Cache(seqlens=(64, 64, 64), h_kv=1),
    Cache(len_q=5, causal=True),
    Cache(len_q=33, h_kv=4, causal=True, d=59),
    Cache(len_q=3, window=(4, 2), d=64),
    Cache(len_q=3, window=(4, 0), causal=True, softcap=5.0, alibi="h"),
    Cache(len_q=2, alibi="bh", d=40),
    Cache(len_q=1, seqlens=(500, 1, 129), capacity=512, d=128, causal=True),
    Cache(len_q=1, seqlens=(500, 1, 129), capacity=512, h=8, h_kv=1, d=80),
    Cache(len_q=0, len_new=2),
    Cache(d=256, h_kv=4),
    Cache(d=1),
    Cache(b=0, seqlens=None),
    Cache(capacity=0, seqlens=None),
    Cache(len_new=1),
    Cache(len_new=3, len_q=3, causal=True),
    Cache(len_new=7, len_q=3, causal=True, d=59),
    Cache(len_new=2, len_q=9, causal=True),
    Cache(len_new=24, len_q=1),  # exactly full
]

ROTARY = [
    Cache(len_new=3, len_q=3, rotary=rotary, interleaved=interleaved, causal=causal, window=window, d=64)
    for rotary in (0.5, 1.0)
    for interleaved in (True, False)
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (9, 3)), (False, (64, 64)), (False, (63, -1)))
] + [
    Cache(len_new=1, rotary=1.0, causal=True, d=16),
    Cache(len_new=5, len_q=1, rotary=1.0, window=(5, 0), d=80),
    Cache(len_new=1, len_q=40, rotary=0.5, causal=True, d=64),  # queries past the last row of cos
]

WHERE = [
    Cache(leftpad=True, len_q=3, causal=True),
    Cache(leftpad=True, len_new=2, len_q=2, alibi="h", window=(7, 3)),
    Cache(batch_idx=True),
    Cache(batch_idx=True, len_new=4, len_q=2, leftpad=True, causal=True),
    Cache(batch_idx=True, len_new=4, rotary=1.0, interleaved=False),
]

PAGES = [
    case
    for page in (1, 3, 16, 256)
    for case in (
        Cache(page=page, len_q=3, causal=True),
        Cache(page=page, len_new=5, len_q=5, causal=True, seqlens=(5, 40, 0), capacity=45),
        Cache(page=page, len_new=2, leftpad=True, batch_idx=True, window=(9, 2)),
        Cache(page=page, len_new=2, rotary=0.5, causal=True, len_q=2, d=64),
    )
] + [Cache(page=16, seqlens=None), Cache(page=256, seqlens=(255, 256, 257), capacity=512, len_new=1)]

CASES = BASE + ROTARY + WHERE + PAGES


def random_prompt(seed):
    """More than a tile of queries. TMA reads pages of multiples of 8 keys, or copies of others. Some end inside a key
    tile."""
    r = random.Random(seed)
    b, len_new = r.randint(1, 4), r.choice((0, 0, 1, 70, 300))
    h_kv, group = r.choice(((1, 4), (2, 1), (3, 2)))
    len_q = len_new if len_new > 1 and r.random() < 0.7 else r.choice((64, 129, 200, 300))
    capacity = r.choice((320, 500, 700))
    page = r.choice((0, 0, 1, 5, 8, 12, 16, 24, 64, 80, 128, 256))
    return Cache(
        len_q, tuple(r.randint(0, capacity - len_new) for _ in range(b)), capacity, len_new, h_kv * group, h_kv,
        r.choice((32, 64, 72, 96, 128, 192, 256)), r.choice(("bf16", "fp16")), page,
        r.choice((0.0, 0.5, 1.0)) if len_new else 0.0, r.random() < 0.5, r.random() < 0.3,
        r.random() < 0.3, r.random() < 0.6, r.choice(((-1, -1), (-1, -1), (100, -1), (30, 5))),
        r.choice((0.0, 0.0, 7.0)), r.choice(("", "", "h", "bh")), r.choice((0, 1)), b,
    )  # fmt: skip
