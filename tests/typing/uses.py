"""Typical uses, for type checkers (tests/test_types.py). Nothing runs this file."""

from typing import Optional

import torch
from torch import Tensor, nn

import flash_attn
from flash_attn import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    merge_attention,
)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, cu_seqlens: Optional[Tensor] = None, max_seqlen: int = 0) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        dropout_p = self.dropout if self.training else 0.0
        if cu_seqlens is None:
            out: Tensor = flash_attn_qkvpacked_func(qkv, dropout_p, causal=True)
        else:
            out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p, causal=True)
        return self.out(out.flatten(-2))


def dense(q: Tensor, k: Tensor, v: Tensor, slopes: Optional[Tensor]) -> Tensor:
    out: Tensor = flash_attn_func(q, k, v, 0.1, softmax_scale=None, causal=True, window_size=(256, 0), softcap=30)
    out = out + flash_attn_kvpacked_func(q, torch.stack([k, v], 2), window_size=[4, 0], alibi_slopes=slopes)
    results, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    parts, lses = zip(*(flash_attn_func(q, x, x, return_lse=True) for x in k.chunk(2, 1)))
    merged, _ = merge_attention(list(parts), list(lses))
    return out + results + merged + lse.sum()


def packed(rows: Tensor, cu_seqlens: Tensor, longest: Tensor) -> Tensor:
    out: Tensor = flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, 23, longest, deterministic=True)
    kv = torch.stack([rows, rows], 1)
    return out + flash_attn_varlen_kvpacked_func(rows, kv, cu_seqlens, cu_seqlens, 23, 23)


def decode(q: Tensor, cache: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
    out, lse = flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lengths, return_softmax_lse=True)
    more: Tensor = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7, num_splits=2)
    return out + more + lse.sum()


def version() -> str:
    print(explain(flash_attn_func, *[torch.ones(1, 2, 1, 8)] * 3))
    return flash_attn.__version__
