"""Programmable masks with the names of ``torch.nn.attention.flex_attention``. docs/flex.md tells what they can do."""

from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from .flex.block_mask import and_masks, create_block_mask, create_mask, noop_mask, or_masks

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "noop_mask",
    "or_masks",
]
