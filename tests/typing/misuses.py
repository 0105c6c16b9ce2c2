"""One mistake a line, for type checkers (tests/guards/test_types.py). Nothing runs this file."""

from flash_attn_3.flash_attn_interface import quantize
from torch import Tensor

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, merge_attention
from flash_attn.bert_padding import unpad_input
from flash_attn.flex_attention import create_block_mask, flex_attention
from flash_attn.modules.mha import MHA
from flash_attn.ops.fused_dense import fused_dense_func
from flash_attn.ops.triton.layer_norm import layer_norm_fn


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
    out, lse = flash_attn_func(q, q, q, return_attn_probs=True)
    flash_attn_func(q, q, q, return_lse=True).sum()
    print(flash_attn_func(q, q, q).lse)
    merge_attention(q, [q])
    tokens, indices, cu_seqlens, longest = unpad_input(q, q)
    create_block_mask(q, 1, 1, 8, 8)
    flex_attention(q, q, q, score_mod=1.0)
    flex_attention(q, q, q, return_lse=True).sum()
    layer_norm_fn(q, q, None, prenorm=True).sum()
    layer_norm_fn(q, q, None, eps="1e-5")
    fused_dense_func(q, q, return_residual=True).sum()
    MHA(512, 8, causal="yes")
    quantize(q, q, q, per="row")
