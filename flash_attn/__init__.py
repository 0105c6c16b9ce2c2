"""Exact attention for PyTorch, forward and backward, without storing the scores: the API of flash-attn 2."""

from pkgutil import extend_path

from flash_attn._version import __version__

# Another distribution may add subpackages to flash_attn.
__path__ = extend_path(__path__, __name__)


def _require_torch(oldest=(2, 4)):
    need = f"flash_attn {__version__} needs PyTorch {'.'.join(map(str, oldest))} or newer"
    try:
        import torch
    except ModuleNotFoundError:
        raise ImportError(f"{need}, and PyTorch is not installed") from None
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < oldest:
        raise ImportError(f"{need}, and PyTorch {torch.__version__} is installed")


_require_torch()

from flash_attn._merge import merge_attention  # noqa: E402
from flash_attn._prebuild import kernel_root, prebuild, prebuild_call  # noqa: E402
from flash_attn._sdpa import register, sdpa  # noqa: E402
from flash_attn.explain import explain  # noqa: E402
from flash_attn.flash_attn_interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "__version__",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "kernel_root",
    "merge_attention",
    "prebuild",
    "prebuild_call",
    "register",
    "sdpa",
]
