"""Every refusal of flash_attn_3: one sentence that begins as upstream's does and names the argument."""

import re

import flash_attn_3.flash_attn_interface as fa3
import pytest
import torch
from tensors3 import E4M3, i32

BF16 = torch.bfloat16


def t(*shape, dtype=BF16):
    return torch.zeros(shape).to(dtype)


def func(d=32, d_v=None, dtype=BF16, h=2, h_kv=2, **changes):
    given = {"q": t(2, 4, h, d, dtype=dtype), "k": t(2, 6, h_kv, d, dtype=dtype)}
    given["v"] = t(2, 6, h_kv, d if d_v is None else d_v, dtype=dtype)
    return fa3.flash_attn_func(**{**given, **changes})


def varlen(**changes):
    cu = i32(0, 2, 5)
    given = {"q": t(5, 2, 32), "k": t(5, 2, 32), "v": t(5, 2, 32), "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    return fa3.flash_attn_varlen_func(**{**given, "max_seqlen_q": 3, "max_seqlen_k": 3, **changes})


def cache(paged=False, **changes):
    given = {"q": t(2, 1, 2, 32), "k_cache": t(2, 8, 2, 32), "v_cache": t(2, 8, 2, 32), "cache_seqlens": i32(3, 8)}
    if paged:
        given.update(k_cache=t(5, 4, 2, 32), v_cache=t(5, 4, 2, 32), page_table=i32(0, 1, 2, 3).view(2, 2))
    return fa3.flash_attn_with_kvcache(**{**given, **changes})


def append(paged=False, **changes):
    given = {"k": t(2, 1, 2, 32), "v": t(2, 1, 2, 32), "cache_seqlens": i32(3, 4)}
    return cache(paged, **{**given, **changes})


def op(**changes):
    given = {"q": t(2, 4, 2, 32), "k": t(2, 6, 2, 32), "v": t(2, 6, 2, 32)}
    return fa3._flash_attn_forward(**{**given, **changes})


def combine(n=2, **changes):
    given = {"out_partial": t(n, 2, 3, 4, 8, dtype=torch.float32), "lse_partial": torch.zeros(n, 2, 4, 3).mT}
    return fa3.flash_attn_combine(**{**given, **changes})


def metadata(**changes):
    given = {"batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 8, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 64}
    return fa3.get_scheduler_metadata(**{**given, "cache_seqlens": i32(1, 2), **changes})


def backward(**changes):
    q = t(2, 4, 2, 32)
    given = {"dout": q, "q": q, "k": q, "v": q, "out": q, "softmax_lse": torch.zeros(2, 2, 4)}
    return fa3._flash_attn_backward(**{**given, **changes})


def train(error=RuntimeError, dtype=BF16, d=32, d_v=None, **options):
    q, k, v = (t(1, 4, 1, x, dtype=torch.float32).to(dtype).requires_grad_() for x in (d, d, d_v or d))
    fa3.flash_attn_func(q, k, v, **options).float().sum().backward()


def train_fp8(function):
    q, k, v = (t(1, 4, 1, 32, dtype=E4M3).requires_grad_() for _ in range(3))
    function(q, k, v).float().sum().backward()


NO_FP8 = "flash_attn_3 has no backward for FP8: detach q, k and v"
HEADDIM_V = (
    "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in (96, 128]"
)
cos = t(8, 8)

CASES = [
    # dtypes
    (lambda: func(dtype=torch.int32), "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"),
    (lambda: func(dtype=torch.float8_e5m2), "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"),
    (lambda: func(k=t(2, 6, 2, 32, dtype=torch.float16)), "query and key must have the same dtype"),
    (lambda: func(v=t(2, 6, 2, 32, dtype=torch.float16)), "query and value must have the same dtype"),
    (lambda: cache(k_cache=t(2, 8, 2, 32, dtype=E4M3)), "query and key must have the same dtype"),
    (lambda: op(out_=t(2, 4, 2, 32, dtype=torch.float16)), "Output must have the same dtype as inputs"),
    (lambda: op(**{x: t(2, 4, 2, 32, dtype=E4M3) for x in ("q", "k", "v", "out_")}),
     "For FP8 input, output must have dtype BF16"),
    (lambda: backward(q=t(2, 4, 2, 32, dtype=E4M3)), "FlashAttention only support fp16 and bf16 data type"),
    (lambda: backward(dout=t(2, 4, 2, 32, dtype=torch.float16)), "query and dout must have the same dtype"),
    (lambda: backward(dq=t(2, 4, 2, 32, dtype=torch.float16)), "dq must have the same dtype as q"),
    # head dimensions
    (lambda: func(d=264), "FlashAttention forward only supports head dimension at most 256"),
    (lambda: func(d=59), "head_size should be a multiple of 8"),
    (lambda: func(d=24, dtype=E4M3), "head_size should be a multiple of 16"),
    (lambda: func(d=32, d_v=12), "head_size_v should be a multiple of 8"),
    (lambda: func(d=32, d_v=24, dtype=E4M3), "head_size_v should be a multiple of 16"),
    (lambda: func(d=128, d_v=64), HEADDIM_V),
    (lambda: func(d=256, d_v=128), HEADDIM_V),
    (lambda: func(d=192, d_v=136), HEADDIM_V),
    (lambda: func(d=64, d_v=520), HEADDIM_V),
    (lambda: func(d=64, d_v=512, dtype=E4M3), "HeaddimV > 256 requires fp16 and bf16 data type"),
    (lambda: train(d=64, d_v=512), "FlashAttention backward only supports head dimension at most 256; v"),
    # qv
    (lambda: func(d=128, qv=t(2, 4, 2, 128)),
     "q_v is only supported for head_size <= 64; qv was passed, and q has 128"),
    (lambda: func(d=64, d_v=128, qv=t(2, 4, 2, 128)),
     "q_v is only supported for hdim_v >= 256. qv was passed, and v has 128"),
    (lambda: func(d=64, d_v=256, dtype=E4M3, qv=t(2, 4, 2, 256, dtype=E4M3)),
     "q_v is only supported for fp16 and bf16 data type; qv is"),
    (lambda: func(d=64, d_v=256, qv=t(2, 4, 2, 128)), "qv must have shape"),
    (lambda: func(d=64, d_v=256, qv=t(2, 4, 2, 256).requires_grad_()).sum().backward(),
     "flash_attn_3 has no backward with qv"),
    (lambda: train(d=64, d_v=256, qv=t(1, 4, 1, 256)), "flash_attn_3 has no backward with qv"),
    # FP8
    (lambda: train_fp8(fa3.flash_attn_func), NO_FP8),
    (lambda: train_fp8(lambda *x: torch.ops.flash_attn_3._flash_attn_forward(*x)[0]), NO_FP8),
    (lambda: train_fp8(lambda q, k, v: fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2))), NO_FP8),
    # shapes
    (lambda: func(h=3), "Number of heads in key/value must divide number of heads in query"),
    (lambda: func(k=t(2, 6, 2, 16)), "k must have shape (batch_size, seqlen_k, num_heads_k, head_size)"),
    (lambda: func(v=t(2, 5, 2, 32)), "v must have shape (batch_size, seqlen_k, num_heads_k, head_size_v)"),
    (lambda: func(q=t(4, 2, 32)), "q must have 4 dimensions"),
    (lambda: func(q=t(3, 4, 2, 32)), "batch_size must be equal to batch_size_k"),
    (lambda: varlen(cu_seqlens_k=None), "k must have 4 dimensions"),
    (lambda: op(out_=t(2, 4, 2, 64)), "out_ must have shape (batch_size, seqlen_q, num_heads, head_size_v)"),
    # descales
    (
        lambda: func(dtype=E4M3, q_descale=torch.ones(2, 2, requires_grad=True)),
        "q_descale gets no gradient, and it requires grad: detach it",
    ),
    (lambda: func(dtype=E4M3, q_descale=torch.ones(2, 4)), "q_descale must have shape (batch_size, num_heads_k)"),
    (lambda: func(dtype=E4M3, v_descale=torch.ones(2)), "v_descale must have 2 dimensions"),
    (lambda: func(dtype=E4M3, k_descale=torch.ones(2, 2).half()), "k_descale must have dtype fp32"),
    # lengths
    (lambda: varlen(max_seqlen_q=None), "max_seqlen_q must be provided if cu_seqlens_q is provided"),
    (lambda: varlen(max_seqlen_k=None), "max_seqlen_k must be provided if cu_seqlens_k is provided"),
    (lambda: varlen(max_seqlen_q=-1), "max_seqlen_q must be at least 0; it is -1"),
    (lambda: varlen(max_seqlen_k=-1), "max_seqlen_k must be at least 0; it is -1"),
    (lambda: varlen(max_seqlen_q=2), "max_seqlen_q is 2, less than the 3 rows"),
    (lambda: varlen(cu_seqlens_q=i32(0, 2, 5, dtype=torch.int64)), "cu_seqlens_q must have dtype int32"),
    (lambda: varlen(cu_seqlens_k=i32(0, 3, 6)), "cu_seqlens_k must end at or before the 5 rows"),
    (lambda: varlen(cu_seqlens_k=i32(0, 2)), "cu_seqlens_k must have shape (batch_size + 1)"),
    (lambda: varlen(seqused_q=i32(3, 1)), "seqused_q must be within the 2 queries"),
    (lambda: varlen(seqused_q=i32(-1, 1)), "seqused_q must be within the 2 queries"),
    (lambda: varlen(seqused_k=i32(3, 1)), "seqused_k must be at most the 2 keys"),
    (lambda: varlen(seqused_k=i32(1)), "seqused_k must have shape (batch_size)"),
    (lambda: varlen(seqused_q=i32(1, 1, dtype=torch.int64)), "seqused_q must have dtype int32"),
    (lambda: op(cu_seqlens_k=i32(0, 3, 6), max_seqlen_k=4, k=t(8, 2, 32), v=t(8, 2, 32),
                page_table=i32(0, 1).view(2, 1)),
     "If cu_seqlens_k is passed in, then page table is not supported"),
    (lambda: op(cu_seqlens_k=i32(0, 3, 6), max_seqlen_k=4, k=t(8, 2, 32), v=t(8, 2, 32), kv_batch_idx=i32(0, 1)),
     "If cu_seqlens_k is passed in, then kv_batch_idx is not supported"),
    (lambda: func(num_splits=257), "num_splits > 256 not supported"),
    (lambda: func(softmax_scale=1e31), "softmax_scale must be between"),
    # the KV cache
    (lambda: cache(k=t(2, 1, 2, 32)), "If k_new is supplied, v_new must also be passed in"),
    (lambda: cache(v=t(2, 1, 2, 32)), "If v_new is supplied, k_new must also be passed in"),
    (lambda: append(cache_seqlens=None), "If k_new is supplied, seqlens_k must also be passed in"),
    (lambda: append(k=t(2, 9, 2, 32), v=t(2, 9, 2, 32)),
     "If k_new is supplied, it must have seqlen <= the seqlen of the KV cache"),
    (lambda: append(cache_seqlens=i32(3, 8)), "cache_seqlens leaves no room to append"),
    (lambda: append(paged=True, cache_seqlens=i32(3, 8)), "page_table has 2 columns of pages of 4 keys"),
    (lambda: append(k=t(2, 1, 2, 16)), "k must have shape (batch_size, seqlen_new, num_heads_k, head_size)"),
    (lambda: append(cu_seqlens_k_new=i32(0, 1, 2)), "k must have 3 dimensions"),
    (lambda: append(cu_seqlens_k_new=i32(0, 1, 3), k=t(2, 2, 32), v=t(2, 2, 32)),
     "cu_seqlens_k_new must end at or before the 2 rows"),
    (lambda: append(cu_seqlens_k_new=i32(0, 99, 2), k=t(2, 2, 32), v=t(2, 2, 32)),
     "cu_seqlens_k_new must not decrease; element 2 is 2 after 99"),
    (lambda: append(cu_seqlens_k_new=i32(0, 9, 10), k=t(10, 2, 32), v=t(10, 2, 32)),
     "If k_new is supplied, it must have seqlen <= the seqlen of the KV cache; k has a sequence of 9, the cache 8"),
    (lambda: cache(cu_seqlens_k_new=i32(0, 1, 2)), "If cu_seqlens_k_new is passed in, k_new must also be passed in"),
    (lambda: cache(cache_seqlens=i32(3, 9)), "cache_seqlens must be at most the 8 keys"),
    (lambda: cache(cache_seqlens=i32(3, -1)), "cache_seqlens must be at least 0"),
    (lambda: cache(cache_seqlens=i32(3, 3, dtype=torch.int64)), "cache_seqlens must have dtype int32"),
    (lambda: cache(cache_seqlens=9), "cache_seqlens must be at most the 8 keys"),
    (lambda: cache(cache_seqlens=2**40), "cache_seqlens must be at most"),
    (lambda: cache(cache_seqlens=-(2**31)), "cache_seqlens must be at least 0"),
    (lambda: cache(cache_batch_idx=i32(0, 2)), "cache_batch_idx must be within the 2 rows of k_cache"),
    (lambda: cache(cache_batch_idx=i32(0, 1, dtype=torch.int64)), "cache_batch_idx must have dtype int32"),
    (lambda: cache(cache_leftpad=i32(4, 0)), "cache_leftpad must be within the 3 keys"),
    (lambda: cache(cache_leftpad=i32(0, 0, dtype=torch.int64)), "cache_leftpad must have dtype int32"),
    (lambda: cache(paged=True, page_table=i32(0, 5, 2, 3).view(2, 2), cache_seqlens=8), "page_table must name pages"),
    (lambda: cache(paged=True, page_table=i32(0, 1, dtype=torch.int64).view(2, 1)),
     "page_table must have dtype torch.int32"),
    (lambda: cache(paged=True, page_table=i32(0, 1).view(1, 2)), "batch_size must be equal to batch_size_k"),
    (lambda: cache(q=t(3, 1, 2, 32)), "batch_size must be equal to batch_size_k"),
    (lambda: cache(q=t(2, 2, 32), cu_seqlens_q=i32(0, 1, 2)), "max_seqlen_q must be provided"),
    (lambda: cache(rotary_cos=cos, rotary_sin=cos),
     "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be provided"),
    (lambda: append(rotary_cos=cos), "If rotary cos is provided, rotary sin must also be provided"),
    (lambda: append(rotary_cos=t(8, 24), rotary_sin=t(8, 24)), "rotary_dim must be <= headdim"),
    (lambda: append(rotary_cos=t(8, 4), rotary_sin=t(8, 4)), "Only rotary dimensions divisible by 16"),
    (lambda: append(paged=True, rotary_cos=t(7, 8), rotary_sin=t(7, 8)),
     "cos/sin seqlen must be at least the seqlen of KV cache"),
    (lambda: append(rotary_cos=cos.float(), rotary_sin=cos.float()), "rotary_cos must have the same dtype as query"),
    (lambda: append(rotary_cos=cos, rotary_sin=cos.float()),
     "rotary_cos must have the same dtype as query, and so must rotary_sin; q is bf16, rotary_sin is fp32"),
    (lambda: append(rotary_cos=cos, rotary_sin=cos, rotary_seqlens=i32(0, -1)), "rotary_seqlens must be at least 0"),
    (lambda: cache(num_splits=257), "num_splits > 256 not supported"),
    (lambda: cache(scheduler_metadata=torch.zeros(1)), "scheduler_metadata must have dtype int32"),
    # combine and metadata
    (lambda: combine(out_partial=t(2, 2, 3, 4, 8)), "Attention combine function only support fp32 data type"),
    (lambda: combine(lse_partial=torch.zeros(2, 2, 3, 4)), "LSE tensor must be contiguous in the seqlen dimension"),
    (lambda: combine(n=257), "FlashAttention combine only supports num_splits at most 256"),
    (lambda: combine(out_dtype=torch.float64), "Output type must be FP32, FP16 or BF16"),
    (lambda: combine(out=t(2, 3, 4, 8)), "out must have the dtype of out_dtype"),
    (lambda: combine(out=torch.zeros(2, 3, 4, 9)), "out must have shape"),
    (lambda: combine(lse_partial=torch.zeros(2, 2, 3, 3)), "lse_partial must have shape"),
    (lambda: fa3.get_scheduler_metadata(2, 1, 8, 4, 3, 64, i32(1, 2)), "Number of heads in key/value must divide"),
    (lambda: fa3.get_scheduler_metadata(3, 1, 8, 4, 2, 64, i32(1, 2)), "cache_seqlens must have shape (batch_size)"),
    (lambda: fa3.get_scheduler_metadata(2, 1, 8, 4, 2, 64, i32(1, 2).long()), "cache_seqlens must have dtype int32"),
    (lambda: fa3.get_scheduler_metadata(2, 1, 8, 4, 2, 64, i32(1, 2), torch.int8), "FlashAttention only supports fp16"),
    (lambda: metadata(max_seqlen_q=-1), "max_seqlen_q must be at least 0; it is -1"),
    (lambda: metadata(max_seqlen_k=-1), "max_seqlen_k must be at least 0; it is -1"),
    (lambda: metadata(max_seqlen_k_new=-3), "max_seqlen_k_new must be at least 0; it is -3"),
    (lambda: metadata(page_size=0), "page_size must be at least 1; it is 0"),
    (lambda: metadata(headdim=0), "headdim must be a multiple of 8 up to 256; it is 0"),
    (lambda: metadata(headdim=7), "headdim must be a multiple of 8 up to 256; it is 7"),
    (lambda: metadata(headdim=512), "headdim must be a multiple of 8 up to 256; it is 512"),
    (lambda: metadata(headdim=24, qkv_dtype=E4M3), "headdim must be a multiple of 16 up to 256; it is 24"),
    (lambda: metadata(headdim_v=9), "headdim_v must be headdim, or a multiple of 8 up to 128"),
    (lambda: metadata(headdim=96, headdim_v=128), "headdim_v must be headdim, or a multiple of 8 up to 128"),
]  # fmt: skip


@pytest.mark.parametrize("call, begin", CASES, ids=[f"{i}-{begin[:40]}" for i, (_, begin) in enumerate(CASES)])
def test_message(call, begin):
    with pytest.raises(RuntimeError, match="^" + re.escape(begin)):
        call()


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: train(dtype=torch.float32, attention_chunk=2), AssertionError,
         "FA3 backward does not support attention_chunk"),
        (lambda: cache(k_cache=t(2, 8, 32, 2).mT), AssertionError, "k_cache must have contiguous last dimension"),
        (lambda: cache(v_cache=t(2, 8, 32, 2).mT), AssertionError, "v_cache must have contiguous last dimension"),
        (lambda: fa3.flash_attn_qkvpacked_func(t(2, 4, 2, 32)), AssertionError, "qkv must have shape"),
        (lambda: fa3.flash_attn_qkvpacked_func(t(2, 4, 5, 32), num_heads_q=2), AssertionError, "qkv must have shape"),
        (lambda: fa3.flash_attn_func(None, None, None), TypeError, "q must be a tensor"),
        (lambda: func(window_size=3), ValueError, "window_size must be (left, right)"),
    ],
)  # fmt: skip
def test_other_exceptions(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_a_refused_append_writes_nothing():
    k_cache = torch.randn(2, 8, 2, 32).bfloat16()
    before = k_cache.clone()
    with pytest.raises(RuntimeError):
        append(k_cache=k_cache, cache_seqlens=i32(0, 8))
    assert torch.equal(before, k_cache)


def test_a_leaf_is_not_written():
    leaf = t(2, 8, 2, 32).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        append(k_cache=leaf)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 1], ids=["leaf", "computed"])
def test_out_that_requires_grad_is_not_written(make):
    q, out = t(2, 4, 2, 32), make(t(2, 4, 2, 32).requires_grad_())
    parts, total = torch.randn(2, 2, 3, 4, 8), make(torch.zeros(2, 3, 4, 8, requires_grad=True))
    for call in (
        lambda: torch.ops.flash_attn_3.fwd(q, q, q, out=out),
        lambda: op(out_=out),
        lambda: combine(out_partial=parts, out=total),
        lambda: torch.ops.flash_attn_3.fwd_combine(parts, torch.zeros(2, 2, 4, 3).mT, total),
    ):
        with pytest.raises(RuntimeError, match="grad"):
            call()
        assert (total == 0).all()
        with torch.no_grad():
            call()
            total.zero_()


def test_lengths_are_not_overwritten():
    memory = torch.zeros(6, 2, 32)
    cu = memory.view(torch.int32).view(-1)[2:4]
    cu[1] = 6
    q = t(6, 2, 32, dtype=torch.float32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": i32(0, 6), "max_seqlen_q": 6, "max_seqlen_k": 6}
    with pytest.raises(RuntimeError, match="out_ is written and must not share memory with cu_seqlens_q"):
        fa3._flash_attn_forward(q, q, q, out_=memory, **lengths)
