"""The module ``flash_attn_3.flash_attn_config`` under its other name."""

from flash_attn_3.flash_attn_config import CONFIG, show

__all__ = ["CONFIG", "show"]
