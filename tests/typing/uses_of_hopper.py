"""Typical uses of flash_attn_3, for type checkers (tests/guards/test_types.py). Nothing runs this file."""

from typing import Union

import flash_attn_3
import flash_attn_config
import flash_attn_interface
import torch
from flash_attn_3.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    quantize,
)
from torch import Tensor
from typing_extensions import assert_type

Pair = tuple[Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, wants_lse: bool) -> Tensor:
    q8, k8, v8, q_descale, k_descale, v_descale = quantize(q, k, v, per="tensor", hadamard=True)
    out = flash_attn_func(q8, k8, v8, causal=True, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    assert_type(out, Tensor)
    assert_type(flash_attn_func(q, k, v, window_size=(128, 0), return_attn_probs=True), Pair)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=wants_lse), Union[Tensor, Pair])
    out = out + flash_attn_varlen_func(q, k, v, cu_seqlens, None, 128, None, pack_gqa=True)
    assert_type(flash_attn_qkvpacked_func(q, num_heads_q=8), Tensor)
    assert_type(flash_attn_interface.flash_attn_func(q, k, v), Tensor)
    return out


def decode(q: Tensor, cache: Tensor, lengths: Tensor, parts: Tensor, lses: Tensor) -> Tensor:
    hint = get_scheduler_metadata(2, 1, 512, 8, 2, 64, lengths, qkv_dtype=torch.float16, causal=True)
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, scheduler_metadata=hint)
    assert_type(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, return_softmax_lse=True), Pair)
    combined, _ = flash_attn_combine(parts, lses, out_dtype=torch.bfloat16)
    return out + combined


def tools() -> str:
    flash_attn_config.show()
    return f"{flash_attn_3.__version__} {flash_attn_3.quantize}"
