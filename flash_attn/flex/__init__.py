"""Programs of mods. Use :mod:`flash_attn.flex_attention`, which holds the public names."""
