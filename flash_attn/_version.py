"""The version of the distribution, written here and nowhere else: setup.py and ``flash_attn.__version__`` read it."""

__version__ = "2.8.3"
