"""Exact attention for PyTorch with the API of FlashAttention-3. The functions are in ``flash_attn_interface``."""

from importlib import metadata


def _version():
    try:
        return metadata.version("flash_attn_3")
    except metadata.PackageNotFoundError:
        return "3.0.0"


def _require_torch(oldest=(2, 4)):
    need = f"flash_attn_3 needs PyTorch {'.'.join(map(str, oldest))} or newer"
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ImportError(f"{need}, and PyTorch is not installed") from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < oldest:
        raise ImportError(f"{need}, and PyTorch {torch.__version__} is installed")


__version__ = _version()
_require_torch()


def __getattr__(name):
    """``flash_attn_3.quantize`` loads the extension at its first use, so that importing the package stays cheap."""
    if name == "quantize":
        from flash_attn_3.flash_attn_interface import quantize

        return quantize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
