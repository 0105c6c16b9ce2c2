"""Every possible error of a caller raises an exception that names the argument, and nothing is written.

A row is a name, the arguments that change a correct call, the exception, and words that its text must contain.
"""

import math

import flash_attn_2_cuda
import pytest
import torch
from harness import offsets

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

HALF = torch.float16
# Clients match on these texts.
DATA_TYPE = "FlashAttention only support fp16 and bf16 data type"
K_DTYPE = "query and key must have the same dtype"
V_DTYPE = "query and value must have the same dtype"
HEADS = "Number of heads in key/value must divide number of heads in query"
HEAD_DIM = "FlashAttention forward only supports head dimension at most 256"
HEAD_DIM_BWD = "FlashAttention backward only supports head dimension at most 256"
LAST_DIM = "Input tensor must have contiguous last dimension"
ALIBI = "ALiBi slopes must have dtype fp32"
S_DMASK = "return_softmax is only supported when p_dropout > 0.0"
TABLE_DTYPE = "block_table must have dtype torch.int32"
TABLE_LAST_DIM = "block_table must have contiguous last dimension"
NEW_WITHOUT = "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be provided"
TOO_LONG = "If key is supplied, it must have seqlen <= the seqlen of the KV cache"
COS_DTYPE = "rotary_cos must have the same dtype as query"
K_SHAPE = "k must have shape (batch_size, seqlen_k, num_heads_k, head_size)"
V_SHAPE = "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)"


def half(*shape):
    return torch.ones(shape, dtype=HALF)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def strided(x):
    """The same values, with a last dimension that is not contiguous."""
    return torch.stack((x, x), -1)[..., 0]


def refuse(call, arguments, changes, words, unchanged=(), exception=RuntimeError):
    before = [x.clone() for x in unchanged]
    with pytest.raises(exception) as caught:
        call(**{**arguments, **changes})
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is missing in {text!r}"
    for x, y in zip(unchanged, before):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), "something was written"


def rows(table):
    return pytest.mark.parametrize(
        "changes, words", [pytest.param(*row[1:], id=row[0]) for row in table]
    )  # fmt: skip


# ---- dense forward -------------------------------------------------------------------------------------------------


def dense():
    return dict(  # noqa: C408
        q=half(2, 5, 4, 16), k=half(2, 7, 2, 16), v=half(2, 7, 2, 16), dropout_p=0.0, softmax_scale=0.25, causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip


FORWARD = [
    ("q_integer", {"q": half(2, 5, 4, 16).int()}, [DATA_TYPE]),
    ("q_bool", {"q": half(2, 5, 4, 16).bool()}, [DATA_TYPE]),
    ("q_complex", {"q": half(2, 5, 4, 16).to(torch.complex64)}, [DATA_TYPE]),
    ("k_dtype", {"k": half(2, 7, 2, 16).float()}, [K_DTYPE]),
    ("v_dtype", {"v": half(2, 7, 2, 16).bfloat16()}, [V_DTYPE]),
    ("q_rank_3", {"q": half(5, 4, 16)}, ["q ", "4", "3"]),
    ("q_rank_5", {"q": half(1, 2, 5, 4, 16)}, ["q ", "4", "5"]),
    ("k_rank", {"k": half(7, 2, 16)}, ["k ", "4", "3"]),
    ("v_rank", {"v": half(7, 2, 16)}, ["v ", "4", "3"]),
    ("k_rank_0", {"k": half()}, ["k ", "4", "0"]),
    ("k_batch", {"k": half(3, 7, 2, 16)}, [K_SHAPE, "3"]),
    ("k_head_dim", {"k": half(2, 7, 2, 8)}, [K_SHAPE, "8"]),
    ("v_length", {"v": half(2, 6, 2, 16)}, [V_SHAPE, "6"]),
    ("v_heads", {"v": half(2, 7, 4, 16)}, [V_SHAPE]),
    ("v_head_dim", {"v": half(2, 7, 2, 24)}, [V_SHAPE, "24"]),
    ("heads", {"k": half(2, 7, 3, 16), "v": half(2, 7, 3, 16)}, [HEADS, "3", "4"]),
    ("more_heads_in_k", {"k": half(2, 7, 8, 16), "v": half(2, 7, 8, 16)}, [HEADS]),
    ("no_heads_in_k", {"k": half(2, 7, 0, 16), "v": half(2, 7, 0, 16)}, ["k", "0"]),
    ("head_dim_0", {"q": half(2, 5, 4, 0), "k": half(2, 7, 2, 0), "v": half(2, 7, 2, 0)}, ["q", "0"]),
    ("head_dim_257", {"q": half(2, 5, 4, 257), "k": half(2, 7, 2, 257), "v": half(2, 7, 2, 257)}, [HEAD_DIM, "257"]),
    ("alibi_dtype", {"alibi_slopes": half(4)}, [ALIBI]),
    (
        "alibi_last_dim",
        {"alibi_slopes": strided(torch.ones(2, 4))},
        ["ALiBi slopes tensor must have contiguous last dimension"],
    ),
    ("alibi_heads", {"alibi_slopes": torch.ones(5)}, ["alibi_slopes", "5", "4"]),
    ("alibi_batch", {"alibi_slopes": torch.ones(3, 4)}, ["alibi_slopes", "3"]),
    ("alibi_rank", {"alibi_slopes": torch.ones(1, 2, 4)}, ["alibi_slopes"]),
    ("dropout_1", {"dropout_p": 1.0}, ["p_dropout < 1"]),
    ("dropout_2", {"dropout_p": 2.0}, ["p_dropout < 1"]),
    ("dropout_negative", {"dropout_p": -0.1}, ["dropout"]),
    ("dropout_nan", {"dropout_p": math.nan}, ["dropout"]),
    ("scale_nan", {"softmax_scale": math.nan}, ["softmax_scale", "nan"]),
    ("scale_beyond_fp32", {"softmax_scale": -1e39}, ["softmax_scale", "-1e+39"]),
    ("softcap_nan", {"softcap": math.nan}, ["softcap", "nan"]),
    ("softcap_beyond_fp32", {"softcap": 1e39}, ["softcap", "1e+39"]),
    ("softcap_below_fp32", {"softcap": 1e-40}, ["softcap", "1e-40"]),
    ("scale_far_above_softcap", {"softcap": 1e-10, "softmax_scale": 1e25}, ["softmax_scale", "1e+25", "softcap"]),
]

PRIVATE_FORWARD = [
    ("s_dmask_without_dropout", {"return_softmax": True}, [S_DMASK]),
]


@rows(FORWARD + PRIVATE_FORWARD)
def test_private_forward(changes, words):
    refuse(_flash_attn_forward, dense(), changes, words)


@rows(FORWARD)
def test_public_forward(changes, words):
    private = "causal", "window_size_left", "window_size_right", "return_softmax"
    arguments = {k: v for k, v in dense().items() if k not in private}
    refuse(flash_attn_func, arguments, changes, words)


PACKED_FORMS = [
    ("qkv_rank", flash_attn_qkvpacked_func, (half(2, 5, 4, 16),), ["qkv"]),
    ("qkv_three", flash_attn_qkvpacked_func, (half(2, 5, 2, 4, 16),), ["qkv"]),
    ("kv_rank", flash_attn_kvpacked_func, (half(2, 5, 4, 16), half(2, 5, 4, 16)), ["kv"]),
    ("kv_two", flash_attn_kvpacked_func, (half(2, 5, 4, 16), half(2, 5, 3, 4, 16)), ["kv"]),
    (
        "window_of_three",
        lambda q: flash_attn_func(q, q, q, window_size=(1, 2, 3)),
        (half(2, 5, 4, 16),),
        ["window_size"],
    ),
]


@pytest.mark.parametrize("call, arguments, words", [pytest.param(*row[1:], id=row[0]) for row in PACKED_FORMS])
def test_packed_forms(call, arguments, words):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call(*arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_arguments_that_the_ops_parser_refuses():
    q = half(1, 2, 1, 8)
    for arguments in (
        (),
        (q, q),
        (q, q, None, 0.0, 1.0, False, -1, -1, 0.0, None, False),
        (q, q, q, "0.1", 1.0, False, -1, -1, 0.0, None, False),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            torch.ops.flash_attn._flash_attn_forward(*arguments)


META = torch.ones(2, 7, 2, 16, dtype=HALF, device="meta")
DEVICES = [
    ("k", lambda: flash_attn_func(half(2, 5, 4, 16), META, META), "k"),
    ("v", lambda: flash_attn_func(half(2, 5, 4, 16), half(2, 7, 2, 16), META), "v"),
    ("q", lambda: flash_attn_func(META, half(2, 7, 2, 16), half(2, 7, 2, 16)), "k"),
    ("lengths", lambda: _flash_attn_varlen_forward(**{**packed(), "cu_seqlens_k": META.int()}), "cu_seqlens_k"),
    ("cache", lambda: flash_attn_with_kvcache(half(2, 5, 4, 16), META, META), "k_cache"),
    ("dq", lambda: _flash_attn_backward(**{**dense_backward(), "dq": META}), "dq"),
]


@pytest.mark.parametrize("call, name", [pytest.param(*row[1:], id=row[0]) for row in DEVICES])
def test_tensors_of_several_devices(call, name):
    """Tensors of device meta have no memory, so statements about their shapes must not count as a result."""
    with pytest.raises(RuntimeError, match=f"{name} must be on (cpu|meta), where q is; it is on (cpu|meta)"):
        call()


# ---- varlen forward ------------------------------------------------------------------------------------------------


def packed():
    return dict(  # noqa: C408
        q=half(9, 4, 16), k=half(11, 2, 16), v=half(11, 2, 16), cu_seqlens_q=i32(0, 4, 9), cu_seqlens_k=i32(0, 5, 11),
        max_seqlen_q=5, max_seqlen_k=6, dropout_p=0.0, softmax_scale=0.25, causal=False,
    )  # fmt: skip


VARLEN = [
    ("q_rank", {"q": half(1, 9, 4, 16)}, ["q ", "3", "4"]),
    ("k_rank", {"k": half(11, 16)}, ["k ", "3", "2"]),
    ("k_shape", {"k": half(11, 2, 8)}, ["k must have shape (total_k, num_heads_k, head_size)"]),
    ("v_shape", {"v": half(10, 2, 16)}, ["v must have shape (total_k, num_heads_k, head_size)"]),
    ("k_dtype", {"k": half(11, 2, 16).float()}, [K_DTYPE]),
    ("cu_q_dtype", {"cu_seqlens_q": i32(0, 4, 9).long()}, ["cu_seqlens_q must have dtype int32"]),
    ("cu_k_dtype", {"cu_seqlens_k": i32(0, 5, 11).long()}, ["cu_seqlens_k must have dtype int32"]),
    ("cu_q_layout", {"cu_seqlens_q": strided(i32(0, 4, 9))}, ["cu_seqlens_q must be contiguous"]),
    ("cu_k_layout", {"cu_seqlens_k": strided(i32(0, 5, 11))}, ["cu_seqlens_k must be contiguous"]),
    ("cu_q_rank", {"cu_seqlens_q": i32(0, 4, 9)[None]}, ["cu_seqlens_q", "1", "2"]),
    ("cu_q_empty", {"cu_seqlens_q": i32()}, ["cu_seqlens_q"]),
    ("cu_k_batch", {"cu_seqlens_k": i32(0, 11)}, ["cu_seqlens_k must have shape (batch_size + 1)"]),
    ("cu_q_start", {"cu_seqlens_q": i32(1, 4, 9)}, ["cu_seqlens_q", "0", "1"]),
    ("cu_k_start", {"cu_seqlens_k": i32(-1, 5, 11)}, ["cu_seqlens_k", "-1"]),
    ("cu_q_decreasing", {"cu_seqlens_q": i32(0, 9, 4), "max_seqlen_q": 9}, ["cu_seqlens_q", "9", "4"]),
    ("cu_k_decreasing", {"cu_seqlens_k": i32(0, 5, -11)}, ["cu_seqlens_k", "-11"]),
    ("cu_q_beyond", {"cu_seqlens_q": i32(0, 4, 10), "max_seqlen_q": 9}, ["cu_seqlens_q", "10", "9"]),
    ("cu_k_beyond", {"cu_seqlens_k": i32(0, 5, 12), "max_seqlen_k": 9}, ["cu_seqlens_k", "12", "11"]),
    ("cu_k_huge", {"cu_seqlens_k": i32(0, 5, 2**31 - 1), "max_seqlen_k": 2**31 - 1}, ["cu_seqlens_k", "2147483647"]),
    ("max_q_low", {"max_seqlen_q": 4}, ["max_seqlen_q", "4", "5"]),
    ("max_k_low", {"max_seqlen_k": 0}, ["max_seqlen_k", "0", "5"]),
    ("max_q_negative", {"max_seqlen_q": -1}, ["max_seqlen_q", "-1"]),
    ("dropout", {"dropout_p": 1.0}, ["p_dropout < 1"]),
]
ENORMOUS = {"max_seqlen_q": 2**63 - 1, "max_seqlen_k": 2**63 - 1, "dropout_p": 0.1}

PAGED = {"k": half(4, 3, 2, 16), "v": half(4, 3, 2, 16)}
TABLE = [
    ("dtype", {"block_table": i32(0, 1, 2, 3).view(2, 2).long()}, [TABLE_DTYPE]),
    ("last_dim", {"block_table": strided(i32(0, 1, 2, 3).view(2, 2))}, [TABLE_LAST_DIM]),
    ("rank", {"block_table": i32(0, 1, 2, 3)}, ["block_table", "2", "1"]),
    ("rows", {"block_table": i32(0, 1, 2, 3).view(1, 4)}, ["block_table"]),
    ("too_few_columns", {"block_table": i32(0, 1).view(2, 1)}, ["block_table"]),
    ("page_too_large", {"block_table": i32(0, 1, 2, 4).view(2, 2)}, ["block_table", "4"]),
    ("page_missing", {"block_table": i32(0, 1, 2, -1).view(2, 2)}, ["block_table", "-1"]),
    ("k_rank", {"block_table": i32(0, 1, 2, 3).view(2, 2), "k": half(11, 2, 16)}, ["k ", "4", "3"]),
    ("v_pages", {"block_table": i32(0, 1, 2, 3).view(2, 2), "v": half(5, 3, 2, 16)}, ["v must have shape"]),
    (
        "page_size_0",
        {"block_table": i32(0, 1, 2, 3).view(2, 2), "k": half(4, 0, 2, 16), "v": half(4, 0, 2, 16)},
        ["page", "0"],
    ),
]

PRIVATE_VARLEN = [
    ("seqused_dtype", {"seqused_k": i32(1, 2).long()}, ["seqused_k must have dtype int32"]),
    ("seqused_layout", {"seqused_k": strided(i32(1, 2))}, ["seqused_k must be contiguous"]),
    ("seqused_shape", {"seqused_k": i32(1, 2, 3)}, ["seqused_k must have shape (batch_size)"]),
    ("seqused_negative", {"seqused_k": i32(1, -2)}, ["seqused_k", "-2"]),
    ("seqused_beyond", {"seqused_k": i32(6, 2)}, ["seqused_k", "6", "5"]),
    ("leftpad_dtype", {"leftpad_k": i32(1, 2).long()}, ["leftpad_k must have dtype int32"]),
    ("leftpad_layout", {"leftpad_k": strided(i32(1, 2))}, ["leftpad_k must be contiguous"]),
    ("leftpad_shape", {"leftpad_k": i32(1)}, ["leftpad_k must have shape (batch_size)"]),
    ("leftpad_negative", {"leftpad_k": i32(-1, 2)}, ["leftpad_k", "-1"]),
    ("leftpad_beyond", {"leftpad_k": i32(0, 7)}, ["leftpad_k", "7", "6"]),
    ("num_splits", {"num_splits": 129}, ["num_splits > 128 not supported"]),
    (
        "num_splits_paged",
        {**PAGED, "block_table": i32(0, 1, 2, 3).view(2, 2), "num_splits": 2},
        ["num_splits > 1 is not supported for varlen paged KV"],
    ),
    ("s_dmask_without_dropout", {"return_softmax": True}, [S_DMASK]),
    ("s_dmask_too_large", {**ENORMOUS, "return_softmax": True}, ["S_dmask", "memory"]),
]


@rows(VARLEN + PRIVATE_VARLEN)
def test_private_varlen(changes, words):
    refuse(_flash_attn_varlen_forward, packed(), changes, words)


@rows(VARLEN)
def test_public_varlen(changes, words):
    arguments = {k: v for k, v in packed().items() if k not in ("softmax_scale", "causal")}
    refuse(flash_attn_varlen_func, arguments, changes, words)


@rows(TABLE)
def test_pages(changes, words):
    refuse(_flash_attn_varlen_forward, {**packed(), **PAGED}, changes, words)
    refuse(flash_attn_varlen_func, {**packed(), **PAGED}, changes, words)


def test_pages_have_no_backward():
    arguments = {**packed(), **PAGED, "block_table": i32(0, 1, 2, 3).view(2, 2)}
    arguments["q"] = arguments["q"].requires_grad_()
    with pytest.raises((RuntimeError, NotImplementedError), match="block_table|paged"):
        flash_attn_varlen_func(**arguments).sum().backward()


# ---- backward ------------------------------------------------------------------------------------------------------


def dense_backward():
    q, k = half(2, 5, 4, 16), half(2, 7, 2, 16)
    return dict(  # noqa: C408
        dout=half(2, 5, 4, 16), q=q, k=k, v=k.clone(), out=half(2, 5, 4, 16), softmax_lse=torch.ones(2, 4, 5),
        dq=torch.full_like(q, 7), dk=torch.full_like(k, 7), dv=torch.full_like(k, 7), dropout_p=0.0, softmax_scale=0.25,
        causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip


WIDE = {
    "dout": half(2, 5, 4, 257), "q": half(2, 5, 4, 257), "k": half(2, 7, 2, 257), "v": half(2, 7, 2, 257),
    "out": half(2, 5, 4, 257), "dq": half(2, 5, 4, 257), "dk": half(2, 7, 2, 257), "dv": half(2, 7, 2, 257),
}  # fmt: skip

BACKWARD = [
    ("q_dtype", {"q": half(2, 5, 4, 16).int()}, [DATA_TYPE]),
    ("k_dtype", {"k": half(2, 7, 2, 16).float()}, [K_DTYPE]),
    ("v_dtype", {"v": half(2, 7, 2, 16).float()}, [V_DTYPE]),
    ("out_dtype", {"out": half(2, 5, 4, 16).float()}, ["query and out must have the same dtype"]),
    ("dout_dtype", {"dout": half(2, 5, 4, 16).float()}, ["query and dout must have the same dtype"]),
    ("dq_dtype", {"dq": half(2, 5, 4, 16).float()}, ["dq must have the same dtype as q"]),
    ("dk_dtype", {"dk": half(2, 7, 2, 16).float()}, ["dk must have the same dtype as q"]),
    ("dv_dtype", {"dv": half(2, 7, 2, 16).float()}, ["dv must have the same dtype as q"]),
    ("dq_last_dim", {"dq": strided(half(2, 5, 4, 16))}, ["dq must have contiguous last dimension"]),
    ("dk_last_dim", {"dk": strided(half(2, 7, 2, 16))}, ["dk must have contiguous last dimension"]),
    ("dv_last_dim", {"dv": strided(half(2, 7, 2, 16))}, ["dv must have contiguous last dimension"]),
    ("dout_shape", {"dout": half(2, 6, 4, 16)}, ["dout must have shape"]),
    ("dout_rank", {"dout": half(5, 4, 16)}, ["dout", "4", "3"]),
    ("out_shape", {"out": half(2, 5, 2, 16)}, ["out must have shape"]),
    ("k_shape", {"k": half(3, 7, 2, 16)}, ["k must have shape"]),
    ("v_shape", {"v": half(2, 8, 2, 16)}, ["v must have shape"]),
    ("dq_shape", {"dq": half(2, 5, 4, 8)}, ["dq must have shape"]),
    ("dk_shape", {"dk": half(2, 7, 4, 16)}, ["dk must have shape"]),
    ("dv_shape", {"dv": half(2, 6, 2, 16)}, ["dv must have shape"]),
    ("lse_shape", {"softmax_lse": torch.ones(2, 5, 4)}, ["softmax_lse"]),
    ("lse_dtype", {"softmax_lse": torch.ones(2, 4, 5, dtype=HALF)}, ["softmax_lse"]),
    ("heads", {"k": half(2, 7, 3, 16), "v": half(2, 7, 3, 16)}, [HEADS]),
    ("head_dim_257", WIDE, [HEAD_DIM_BWD]),
    ("alibi", {"alibi_slopes": half(4)}, [ALIBI]),
    ("dropout", {"dropout_p": 1.0}, ["p_dropout < 1"]),
    ("rng_state_dtype", {"dropout_p": 0.1, "rng_state": torch.zeros(2)}, ["rng_state"]),
    ("rng_state_shape", {"dropout_p": 0.1, "rng_state": torch.zeros(1, dtype=torch.int64)}, ["rng_state"]),
]


@rows(BACKWARD)
def test_private_backward(changes, words):
    arguments = dense_backward()
    grads = [{**arguments, **changes}[name] for name in ("dq", "dk", "dv")]
    refuse(_flash_attn_backward, arguments, changes, words, [x for x in grads if x.is_contiguous()])


VARLEN_BACKWARD = [
    ("cu_q_dtype", {"cu_seqlens_q": i32(0, 4, 9).long()}, ["cu_seqlens_q must have dtype int32"]),
    ("cu_k_layout", {"cu_seqlens_k": strided(i32(0, 5, 11))}, ["cu_seqlens_k must be contiguous"]),
    ("cu_q_beyond", {"cu_seqlens_q": i32(0, 4, 10), "max_seqlen_q": 9}, ["cu_seqlens_q", "10", "9"]),
    ("cu_k_decreasing", {"cu_seqlens_k": i32(0, 12, 11)}, ["cu_seqlens_k", "12"]),
    ("max_q_low", {"max_seqlen_q": 4}, ["max_seqlen_q", "4", "5"]),
    ("lse_shape", {"softmax_lse": torch.ones(9, 4)}, ["softmax_lse"]),
    ("dout_shape", {"dout": half(8, 4, 16)}, ["dout must have shape"]),
    ("dq_shape", {"dq": half(8, 4, 16)}, ["dq must have shape"]),
    ("dk_shape", {"dk": half(9, 2, 16)}, ["dk must have shape"]),
    ("dv_shape", {"dv": half(9, 2, 16)}, ["dv must have shape"]),
]


@rows(VARLEN_BACKWARD)
def test_private_varlen_backward(changes, words):
    arguments = packed()
    grads = {"dq": half(9, 4, 16), "dk": half(11, 2, 16), "dv": half(11, 2, 16)}
    arguments.update(
        grads, dout=half(9, 4, 16), out=half(9, 4, 16), softmax_lse=torch.ones(4, 9), window_size_left=-1,
        window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    refuse(_flash_attn_varlen_backward, arguments, changes, words, grads.values())


# ---- the ops themselves do not copy tensors that are not contiguous ------------------------------------------------

IN_PLACE = [
    ("q", {"q": strided(half(2, 5, 4, 16))}, [LAST_DIM, "q"]),
    ("k", {"k": strided(half(2, 7, 2, 16))}, [LAST_DIM, "k"]),
    ("v", {"v": strided(half(2, 7, 2, 16))}, [LAST_DIM, "v"]),
]
IN_PLACE_BACKWARD = [
    ("out", {"out": strided(half(2, 5, 4, 16))}, ["out tensor must have contiguous last dimension"]),
    ("dout", {"dout": strided(half(2, 5, 4, 16))}, ["dout tensor must have contiguous last dimension"]),
]


@rows(IN_PLACE)
def test_forward_op(changes, words):
    refuse(torch.ops.flash_attn._flash_attn_forward, dense(), changes, words)


@rows(IN_PLACE + IN_PLACE_BACKWARD)
def test_backward_op(changes, words):
    arguments = dense_backward()
    refuse(torch.ops.flash_attn._flash_attn_backward, arguments, changes, words, [arguments["dq"], arguments["dk"]])


def test_varlen_op():
    refuse(torch.ops.flash_attn._flash_attn_varlen_forward, packed(), {"q": strided(half(9, 4, 16))}, [LAST_DIM])


def test_kvcache_op():
    names = "q k_cache v_cache k v cache_seqlens rotary_cos rotary_sin cache_batch_idx leftpad block_table".split()
    for changes, words in (
        ({"block_table": strided(IN_PAGES["block_table"])}, [TABLE_LAST_DIM]),
        ({**ROOM, **COS, "rotary_cos": half(16, 32)[:, ::2]}, ["rotary_cos", "contiguous"]),
        ({"k_cache": strided(IN_PAGES["k_cache"])}, [LAST_DIM]),
    ):
        given = {**cache(), **IN_PAGES, **changes}
        with pytest.raises(RuntimeError) as caught:
            flash_attn_2_cuda.fwd_kvcache(
                *(given.get(name) for name in names), None, None, 0.2, False, -1, -1, 0.0, True, 0
            )
        assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- key/value cache -----------------------------------------------------------------------------------------------


def cache():
    caches = {"k_cache": half(3, 10, 2, 32), "v_cache": half(3, 10, 2, 32)}
    return {"q": half(2, 1, 4, 32), **caches, "cache_batch_idx": i32(0, 2)}


NEW = {"k": 2 * half(2, 3, 2, 32), "v": 2 * half(2, 3, 2, 32)}
ROOM = {**NEW, "cache_seqlens": i32(1, 7)}
COS = {"rotary_cos": half(16, 16), "rotary_sin": half(16, 16)}
IN_PAGES = {
    "k_cache": half(6, 5, 2, 32), "v_cache": half(6, 5, 2, 32), "cache_batch_idx": None,
    "block_table": i32(0, 1, 2, 3).view(2, 2),
}  # fmt: skip

CACHE = [
    ("k_cache_last_dim", {"k_cache": strided(half(3, 10, 2, 32))}, ["k_cache must have contiguous last dimension"]),
    ("v_cache_last_dim", {"v_cache": strided(half(3, 10, 2, 32))}, ["v_cache must have contiguous last dimension"]),
    ("q_dtype", {"q": half(2, 1, 4, 32).int()}, [DATA_TYPE]),
    ("k_cache_dtype", {"k_cache": half(3, 10, 2, 32).float()}, [K_DTYPE]),
    ("v_cache_dtype", {"v_cache": half(3, 10, 2, 32).float()}, [V_DTYPE]),
    ("q_rank", {"q": half(2, 4, 32)}, ["q ", "4", "3"]),
    ("k_cache_rank", {"k_cache": half(10, 2, 32)}, ["k", "4", "3"]),
    (
        "head_dim_257",
        {"q": half(2, 1, 4, 257), "k_cache": half(3, 10, 2, 257), "v_cache": half(3, 10, 2, 257)},
        [HEAD_DIM],
    ),
    ("heads", {"k_cache": half(3, 10, 3, 32), "v_cache": half(3, 10, 3, 32)}, [HEADS]),
    ("cache_head_dim", {"k_cache": half(3, 10, 2, 16)}, ["must have shape"]),
    ("v_cache_shape", {"v_cache": half(3, 11, 2, 32)}, ["must have shape"]),
    ("cache_of_one", {**ROOM, "cache_batch_idx": None, "k_cache": half(1, 10, 2, 32)}, ["must have shape"]),
    ("k_without_v", {**ROOM, "v": None}, ["If key is supplied, value must also be passed in"]),
    ("v_without_k", {**ROOM, "k": None}, ["v", "k"]),
    ("k_without_seqlens", NEW, ["If key is supplied, seqlens_k must also be passed in"]),
    (
        "k_longer_than_cache",
        {"k": half(2, 11, 2, 32), "v": half(2, 11, 2, 32), "cache_seqlens": i32(0, 0)},
        [TOO_LONG, "11", "10"],
    ),
    ("k_dtype", {**ROOM, "k": NEW["k"].float()}, ["same dtype"]),
    ("v_dtype", {**ROOM, "v": NEW["v"].float()}, ["same dtype"]),
    ("k_shape", {**ROOM, "k": half(2, 3, 1, 32)}, ["must have shape"]),
    ("k_batch", {**ROOM, "k": half(3, 3, 2, 32)}, ["must have shape"]),
    ("v_length", {**ROOM, "v": half(2, 2, 2, 32)}, ["must have shape"]),
    ("seqlens_dtype", {"cache_seqlens": i32(1, 2).long()}, ["cache_seqlens must have dtype int32"]),
    ("seqlens_shape", {"cache_seqlens": i32(1, 2, 3)}, ["seqlens"]),
    ("seqlens_negative", {"cache_seqlens": i32(1, -2)}, ["cache_seqlens", "-2"]),
    ("seqlens_int_negative", {"cache_seqlens": -1}, ["cache_seqlens", "-1"]),
    ("seqlens_int_beyond_int32", {"cache_seqlens": 2**31}, ["cache_seqlens", "2147483648"]),
    ("seqlens_int_below_int32", {"cache_seqlens": -(2**31)}, ["cache_seqlens", "at least 0", "-2147483648"]),
    ("seqlens_int_beyond_int64", {"cache_seqlens": -(2**70)}, ["cache_seqlens", "-1180591620717411303424"]),
    ("seqlens_beyond", {"cache_seqlens": i32(11, 2)}, ["cache_seqlens", "11", "10"]),
    ("append_beyond", {**NEW, "cache_seqlens": i32(0, 8)}, ["cache_seqlens", "10"]),
    ("append_wraps", {**NEW, "cache_seqlens": i32(0, 2**31 - 1)}, ["cache_seqlens"]),
    ("idx_dtype", {"cache_batch_idx": i32(0, 2).long()}, ["cache_batch_idx must have dtype int32"]),
    ("idx_shape", {"cache_batch_idx": i32(0, 1, 2)}, ["cache_batch_idx"]),
    ("idx_beyond", {**ROOM, "cache_batch_idx": i32(0, 3)}, ["cache_batch_idx", "3"]),
    ("idx_negative", {**ROOM, "cache_batch_idx": i32(-1, 1)}, ["cache_batch_idx", "-1"]),
    ("leftpad_dtype", {"cache_leftpad": i32(0, 2).long()}, ["cache_leftpad must have dtype int32"]),
    ("leftpad_shape", {"cache_leftpad": i32(0)}, ["leftpad"]),
    ("leftpad_negative", {**ROOM, "cache_leftpad": i32(0, -1)}, ["leftpad", "-1"]),
    ("leftpad_beyond", {**ROOM, "cache_leftpad": i32(0, 11)}, ["leftpad", "11"]),
    ("rotary_without_k", COS, [NEW_WITHOUT]),
    (
        "cos_without_sin",
        {**ROOM, "rotary_cos": COS["rotary_cos"]},
        ["If rotary cos is provided, rotary sin must also be provided"],
    ),
    ("sin_without_cos", {**ROOM, "rotary_sin": COS["rotary_sin"]}, ["rotary"]),
    (
        "rotary_too_wide",
        {**ROOM, "rotary_cos": half(16, 24), "rotary_sin": half(16, 24)},
        ["rotary_dim must be <= headdim", "48", "32"],
    ),
    (
        "rotary_not_16",
        {**ROOM, "rotary_cos": half(16, 12), "rotary_sin": half(16, 12)},
        ["Only rotary dimensions divisible by 16 are currently supported", "24"],
    ),
    (
        "rotary_too_short",
        {**ROOM, "rotary_cos": half(9, 16), "rotary_sin": half(9, 16)},
        ["cos/sin seqlen must be at least the seqlen of KV cache", "9", "10"],
    ),
    ("cos_dtype", {**ROOM, **COS, "rotary_cos": torch.ones(16, 16)}, [COS_DTYPE]),
    ("sin_dtype", {**ROOM, **COS, "rotary_sin": torch.ones(16, 16)}, [COS_DTYPE, "and so must rotary_sin"]),
    ("sin_shape", {**ROOM, **COS, "rotary_sin": half(16, 8)}, ["rotary_sin must have shape"]),
    ("cos_rank", {**ROOM, **COS, "rotary_cos": half(16, 16, 1)}, ["rotary_cos"]),
    ("num_splits", {"num_splits": 129}, ["num_splits > 128 not supported"]),
    ("alibi", {"alibi_slopes": half(4)}, [ALIBI]),
    ("table_dtype", {**IN_PAGES, "block_table": IN_PAGES["block_table"].long()}, [TABLE_DTYPE]),
    ("table_rows", {**IN_PAGES, "block_table": i32(0, 1).view(1, 2)}, ["block_table"]),
    ("table_rank", {**IN_PAGES, "block_table": i32(0, 1)}, ["block_table", "2", "1"]),
    (
        "page_missing",
        {**IN_PAGES, "block_table": i32(0, 1, 2, -1).view(2, 2), "cache_seqlens": i32(3, 6)},
        ["block_table", "-1"],
    ),
    (
        "page_missing_for_new",
        {**IN_PAGES, **NEW, "block_table": i32(0, 1, 2, -1).view(2, 2), "cache_seqlens": i32(1, 3)},
        ["block_table", "-1"],
    ),
    ("page_beyond", {**IN_PAGES, **ROOM, "block_table": i32(0, 1, 2, 6).view(2, 2)}, ["block_table", "6"]),
    ("pages_full", {**IN_PAGES, **NEW, "cache_seqlens": i32(0, 8)}, ["block_table", "10"]),
    ("pages_too_short", {**IN_PAGES, "cache_seqlens": i32(0, 11)}, ["block_table", "10"]),
    ("table_idx_beyond", {**IN_PAGES, **ROOM, "cache_batch_idx": i32(0, 2)}, ["cache_batch_idx", "2"]),
]


@rows(CACHE)
def test_kvcache(changes, words):
    arguments = {**cache(), **changes}
    exception = AssertionError if words[0].endswith("_cache must have contiguous last dimension") else RuntimeError
    caches = [arguments[name] for name in ("k_cache", "v_cache") if arguments[name].is_contiguous()]
    refuse(flash_attn_with_kvcache, arguments, {}, words, caches, exception)


def test_kvcache_entries_nobody_needs_are_not_checked():
    table = i32(0, 6, 2, 3).view(2, 2)  # page 6 does not exist, and entry 0 needs one page
    flash_attn_with_kvcache(**{**cache(), **IN_PAGES, **ROOM, "block_table": table})


def test_exactly_full_is_legal():
    out = flash_attn_with_kvcache(**{**cache(), **IN_PAGES, **NEW, "cache_seqlens": i32(0, 7)})
    assert out.isfinite().all()
    out = flash_attn_with_kvcache(**{**cache(), **NEW, "cache_seqlens": i32(0, 7)})
    assert out.isfinite().all()


def test_unknown_instruction_set():
    with pytest.raises((ValueError, RuntimeError), match="reference"):
        flash_attn_2_cuda.set_cpu_isa("mmx")


def test_empty_sequences_are_no_error():
    cu = offsets(())
    out = flash_attn_varlen_func(half(0, 4, 16), half(0, 2, 16), half(0, 2, 16), cu, cu, 0, 0)
    assert out.shape == (0, 4, 16)
