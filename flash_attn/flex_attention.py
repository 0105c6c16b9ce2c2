"""Programmable attention with the names of ``torch.nn.attention.flex_attention``. docs/flex.md says what it can do."""

from .flex.attention import flex_attention  # the first import: it says which PyTorch is needed
from .flex.block_mask import and_masks, create_block_mask, create_mask, noop_mask, or_masks
from .flex.snippets import c_mod

from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask  # isort: skip

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "c_mod",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]
