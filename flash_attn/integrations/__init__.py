"""Other libraries with this package as their attention, on every device. Each module has ``register()``.

    flash_attn.integrations.transformers    ``attn_implementation="flash_attn"``
    flash_attn.integrations.diffusers       the backends flash, flash_varlen, _flash_3, _flash_varlen_3 and flex
    flash_attn.integrations.flex            ``torch.nn.attention.flex_attention``

A library is imported when its ``register()`` is called, and not before.
"""
