# Made by `python docs/generate_stubs.py` from the annotations. Changes belong there.
# fmt: off
# ruff: noqa: I001
from typing import Any, Literal, overload
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from .._types import MaskMod, ScoreMod

class Call: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = ..., block_mask: BlockMask | None = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ...,
    kernel_options: dict[str, Any] | None = ..., *, return_aux: None = ..., mask_mod: MaskMod | None = ...,
    q_offset: int | Tensor | None = ..., kv_len: int | Tensor | None = ..., block_table: Tensor | None = ...,
    dropout_p: float = ...,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = ..., block_mask: BlockMask | None = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = ..., return_aux: None = ..., mask_mod: MaskMod | None = ...,
    q_offset: int | Tensor | None = ..., kv_len: int | Tensor | None = ..., block_table: Tensor | None = ...,
    dropout_p: float = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = ..., block_mask: BlockMask | None = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ...,
    kernel_options: dict[str, Any] | None = ..., *, return_aux: AuxRequest, mask_mod: MaskMod | None = ...,
    q_offset: int | Tensor | None = ..., kv_len: int | Tensor | None = ..., block_table: Tensor | None = ...,
    dropout_p: float = ...,
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = ..., block_mask: BlockMask | None = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: bool = ...,
    kernel_options: dict[str, Any] | None = ..., *, return_aux: AuxRequest | None = ..., mask_mod: MaskMod | None = ...,
    q_offset: int | Tensor | None = ..., kv_len: int | Tensor | None = ..., block_table: Tensor | None = ...,
    dropout_p: float = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...
