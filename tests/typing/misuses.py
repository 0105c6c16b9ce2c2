"""One mistake a line, for type checkers (tests/test_types.py). Nothing runs this file."""

from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def wrong(q: Tensor) -> None:
    flash_attn_func(q, q)
    flash_attn_func(q, q, q, softmax_scale="a")
    flash_attn_func(q, q, q, softcap=None)
    flash_attn_func(q, q, q, window_size=4)
    flash_attn_func(q, q, q, window_size=(1.5, 2))
    flash_attn_func(q, q, [1.0])
    flash_attn_func(q, q, q, is_causal=True)
    flash_attn_varlen_func(q, q, q, [0, 4], q, 4, 4)
    flash_attn_varlen_func(q, q, q, q, q, 23.0, 4)
    flash_attn_with_kvcache(q, q, q, cache_seqlens=[4])
