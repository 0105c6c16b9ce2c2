"""The module ``flash_attn_3.flash_attn_interface`` under its other name."""

from flash_attn_3.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    maybe_contiguous,
    quantize,
    round_multiple,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
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
