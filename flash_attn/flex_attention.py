"""Programmable attention with the names of ``torch.nn.attention.flex_attention``. docs/flex.md says what it can do."""

from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from .flex.attention import flex_attention
from .flex.block_mask import and_masks, create_block_mask, create_mask, noop_mask, or_masks

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]
