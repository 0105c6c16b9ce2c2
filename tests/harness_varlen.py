"""Parts of packed sequences: seqused_k, leftpad_k and pages, and their comparison with the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from compare import DTYPES, check, check_lse, largest, size_of_values
from harness import offsets
from oracle import attention

from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

NAN = math.nan


def paged(parts, page_size, dtype, seed=0, spare_columns=2):
    """Sequences [len, h_kv, d] scattered over pages in random order. Memory of no sequence is NaN. Table entries that
    no sequence needs are -1."""
    gen = torch.Generator().manual_seed(seed)
    need = [-(-len(part) // page_size) for part in parts]
    pages = torch.randperm(sum(need) + 3, generator=gen).tolist()
    heads, d = parts[0].shape[1:]
    memory = torch.full((sum(need) + 3, page_size, heads, d), NAN, dtype=dtype)
    table = torch.full((len(parts), max(need) + spare_columns), -1, dtype=torch.int32)
    for n, part in enumerate(parts):
        for column in range(need[n]):
            page = pages.pop()
            rows = part[column * page_size : (column + 1) * page_size]
            memory[page, : len(rows)] = rows
            table[n, column] = page
    return memory, table


@dataclass(frozen=True)
class Parts:
    """Packed queries over the keys [pad, used) of each sequence; page 0: packed keys."""

    len_q: tuple[int, ...] = (33, 5, 0, 20, 7)
    len_kv: tuple[int, ...] = (70, 33, 5, 40, 9)
    used: tuple[int, ...] = (64, 33, 3, 0, 5)
    pad: tuple[int, ...] = (3, 0, 1, 0, 5)
    page: int = 0
    h: int = 4
    h_kv: int = 2
    d: int = 24
    dtype: str = "fp32"
    causal: bool = True
    window: tuple[int, int] = (40, 0)
    softcap: float = 0.0


def run(case):
    """Masks align to the remaining keys of each sequence. All other keys are NaN."""
    gen = torch.Generator().manual_seed(0)
    dtype = DTYPES[case.dtype]
    q = torch.randn(sum(case.len_q), case.h, case.d, generator=gen).to(dtype)
    parts = []
    for _ in range(2):
        parts.append([torch.randn(n, case.h_kv, case.d, generator=gen).to(dtype) for n in case.len_kv])
        for x, begin, end in zip(parts[-1], case.pad, case.used):
            x[:begin], x[end:] = NAN, NAN
    if case.page:
        k, table = paged(parts[0], case.page, dtype)
        v, _ = paged(parts[1], case.page, dtype)
    else:
        k, v, table = torch.cat(parts[0]), torch.cat(parts[1]), None
    cu_q, cu_k = offsets(case.len_q), offsets(case.len_kv)
    used, pad = torch.tensor(case.used, dtype=torch.int32), torch.tensor(case.pad, dtype=torch.int32)
    out, lse, _, _ = _flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, max(case.len_q), max(case.len_kv), 0.0, 0.2, case.causal, *case.window, case.softcap, None,
        False, table, pad, used,
    )  # fmt: skip
    options = {"scale": 0.2, "causal": case.causal, "window": case.window, "softcap": case.softcap}
    for n, rows in enumerate(zip(cu_q[:-1], cu_q[1:])):
        rows = slice(*rows)
        keys, values = (x[n][case.pad[n] : max(case.used[n], case.pad[n])] for x in parts)
        ref, ref_lse = attention(q[rows].double(), keys.double(), values.double(), **options)
        plain, _ = attention(q[rows], keys, values, **options)
        _, plain_lse = attention(q[rows].float(), keys.float(), values.float(), **options)
        scale = max(largest(ref), size_of_values(values))
        check(f"out of sequence {n}", out[rows], ref, plain, scale=scale)
        check_lse(lse[:, rows], ref_lse, plain_lse, dtype)
