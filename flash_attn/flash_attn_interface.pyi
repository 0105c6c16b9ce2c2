# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Literal, overload
from torch import Tensor
from flash_attn._arguments import as_int as _as_int
from flash_attn._arguments import as_number as _as_number
from flash_attn._arguments import as_scale as _as_scale
from flash_attn._arguments import as_window as _as_window
from flash_attn._arguments import distinct as _distinct
from flash_attn._arguments import maybe_contiguous
from flash_attn._attention import backward as _backward
from flash_attn._ops import round_multiple
from flash_attn._private_functions import FlashAttnFunc
from flash_attn._private_functions import FlashAttnKVPackedFunc
from flash_attn._private_functions import FlashAttnQKVPackedFunc
from flash_attn._private_functions import FlashAttnVarlenFunc
from flash_attn._private_functions import FlashAttnVarlenKVPackedFunc
from flash_attn._private_functions import FlashAttnVarlenQKVPackedFunc
from flash_attn._private_functions import _flash_attn_backward
from flash_attn._private_functions import _flash_attn_forward
from flash_attn._private_functions import _flash_attn_varlen_backward
from flash_attn._private_functions import _flash_attn_varlen_forward
from flash_attn._private_functions import _get_block_size_n
from flash_attn._private_functions import _wrapped_flash_attn_backward
from flash_attn._private_functions import _wrapped_flash_attn_forward
from flash_attn._private_functions import _wrapped_flash_attn_varlen_backward
from flash_attn._private_functions import _wrapped_flash_attn_varlen_forward
from flash_attn._types import Length, Window

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_as_int",
    "_as_number",
    "_as_scale",
    "_as_window",
    "_backward",
    "_distinct",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: bool = ..., return_max_logits: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: bool = ..., return_max_logits: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: bool = ..., return_max_logits: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], block_table: Tensor | None = ..., attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
    return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., block_table: Tensor | None = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: bool = ..., return_max_logits: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ...,
    sinks: Tensor | None = ..., return_lse: Literal[True], return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
    *, attn_bias: Tensor | None = ..., attn_mask: Tensor | None = ..., sinks: Tensor | None = ...,
    return_lse: bool = ..., return_max_logits: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
) -> Tensor: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
    return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: Window = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., *, attn_bias: Tensor | None = ...,
    attn_mask: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: bool = ..., return_max_logits: bool = ...,
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: Literal[False] = ..., *, sinks: Tensor | None = ...,
) -> Tensor: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ..., *,
    return_softmax_lse: Literal[True], sinks: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ..., cache_seqlens: int | Tensor | None = ...,
    cache_batch_idx: Tensor | None = ..., cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: Window = ..., softcap: float = ...,
    rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ..., num_splits: int = ...,
    return_softmax_lse: bool = ..., *, sinks: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
