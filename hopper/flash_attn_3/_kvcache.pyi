# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Literal, overload
import torch
from torch import Tensor
from flash_attn_3._arguments import Length, Window

@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    qv: Tensor | None = ..., rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ...,
    page_table: Tensor | None = ..., cu_seqlens_q: Tensor | None = ..., cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: Length | None = ..., rotary_seqlens: Tensor | None = ..., q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ..., v_descale: Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., attention_chunk: int = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., scheduler_metadata: Tensor | None = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., sm_margin: int = ..., return_softmax_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    qv: Tensor | None = ..., rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ...,
    page_table: Tensor | None = ..., cu_seqlens_q: Tensor | None = ..., cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: Length | None = ..., rotary_seqlens: Tensor | None = ..., q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ..., v_descale: Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., attention_chunk: int = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., scheduler_metadata: Tensor | None = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., sm_margin: int = ..., *, return_softmax_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    qv: Tensor | None = ..., rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ...,
    page_table: Tensor | None = ..., cu_seqlens_q: Tensor | None = ..., cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: Length | None = ..., rotary_seqlens: Tensor | None = ..., q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ..., v_descale: Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., attention_chunk: int = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., scheduler_metadata: Tensor | None = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., sm_margin: int = ..., return_softmax_lse: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: Length, max_seqlen_k: Length, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = ..., headdim_v: int | None = ..., cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k_new: Tensor | None = ..., cache_leftpad: Tensor | None = ..., page_size: int | None = ...,
    max_seqlen_k_new: int = ..., causal: bool = ..., window_size: Window = ..., attention_chunk: int = ...,
    has_softcap: bool = ..., num_splits: int = ..., pack_gqa: bool | None = ..., sm_margin: int = ...,
) -> Tensor: ...
