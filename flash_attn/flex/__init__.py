"""Programs of mods. Use :mod:`flash_attn.flex_attention`, which holds the public names."""

import torch


def _require_torch(oldest=(2, 9)):
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < oldest:
        raise ImportError(
            f"flex_attention, attn_mask, attn_bias, sinks and return_lse of flash_attn need PyTorch "
            f"{'.'.join(map(str, oldest))} or newer, and PyTorch {torch.__version__} is installed"
        )


_require_torch()
