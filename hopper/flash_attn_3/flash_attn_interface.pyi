# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Literal, overload
from torch import Tensor
from flash_attn_3._arguments import Length, Window, maybe_contiguous, round_multiple
from flash_attn_3._combine import flash_attn_combine
from flash_attn_3._kvcache import flash_attn_with_kvcache, get_scheduler_metadata
from flash_attn_3._quantize import quantize

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
    "quantize",
    "round_multiple",
]
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: Window = ..., attention_chunk: int = ..., softcap: float = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., deterministic: bool = ..., sm_margin: int = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: Window = ..., attention_chunk: int = ..., softcap: float = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., deterministic: bool = ..., sm_margin: int = ..., *, return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: Window = ..., attention_chunk: int = ..., softcap: float = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., deterministic: bool = ..., sm_margin: int = ..., return_attn_probs: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: Length | None, max_seqlen_k: Length | None, seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ..., softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: Window = ..., attention_chunk: int = ..., softcap: float = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., deterministic: bool = ..., sm_margin: int = ...,
    return_attn_probs: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: Length | None, max_seqlen_k: Length | None, seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ..., softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: Window = ..., attention_chunk: int = ..., softcap: float = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., deterministic: bool = ..., sm_margin: int = ..., *, return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    max_seqlen_q: Length | None, max_seqlen_k: Length | None, seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ..., softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: Window = ..., attention_chunk: int = ..., softcap: float = ..., num_splits: int = ...,
    pack_gqa: bool | None = ..., deterministic: bool = ..., sm_margin: int = ..., return_attn_probs: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = ..., causal: bool = ..., q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ..., v_descale: Tensor | None = ..., window_size: Window = ...,
    attention_chunk: int = ..., softcap: float = ..., deterministic: bool = ..., num_heads_q: int | None = ...,
    sm_margin: int = ..., return_attn_probs: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = ..., causal: bool = ..., q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ..., v_descale: Tensor | None = ..., window_size: Window = ...,
    attention_chunk: int = ..., softcap: float = ..., deterministic: bool = ..., num_heads_q: int | None = ...,
    sm_margin: int = ..., *, return_attn_probs: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = ..., causal: bool = ..., q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ..., v_descale: Tensor | None = ..., window_size: Window = ...,
    attention_chunk: int = ..., softcap: float = ..., deterministic: bool = ..., num_heads_q: int | None = ...,
    sm_margin: int = ..., return_attn_probs: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = ..., v_new: Tensor | None = ..., qv: Tensor | None = ...,
    out_: Tensor | None = ..., cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    cu_seqlens_k_new: Tensor | None = ..., seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ...,
    max_seqlen_q: Length | None = ..., max_seqlen_k: Length | None = ..., page_table: Tensor | None = ...,
    kv_batch_idx: Tensor | None = ..., leftpad_k: Tensor | None = ..., rotary_cos: Tensor | None = ...,
    rotary_sin: Tensor | None = ..., seqlens_rotary: Tensor | None = ..., q_descale: Tensor | None = ...,
    k_descale: Tensor | None = ..., v_descale: Tensor | None = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size_left: int = ..., window_size_right: int = ..., attention_chunk: int = ...,
    softcap: float = ..., rotary_interleaved: bool = ..., scheduler_metadata: Tensor | None = ...,
    num_splits: int = ..., pack_gqa: bool | None = ..., sm_margin: int = ...,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ..., sequed_q: Tensor | None = ..., sequed_k: Tensor | None = ...,
    max_seqlen_q: Length | None = ..., max_seqlen_k: Length | None = ..., dq: Tensor | None = ...,
    dk: Tensor | None = ..., dv: Tensor | None = ..., softmax_scale: float | None = ..., is_causal: bool = ...,
    window_size_left: int = ..., window_size_right: int = ..., softcap: float = ..., deterministic: bool = ...,
    sm_margin: int = ...,
) -> Tensor: ...
