"""Every argument of every public function refuses values of a wrong kind, in one sentence that names the argument."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from harness_kinds import FLAGS, FLOATS, WRONG, X, check_table, ones, rows, sentence

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

CU = torch.tensor([0, 2, 5], dtype=torch.int32)
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": 0.5, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "attn_bias": None, "attn_mask": None,
    "sinks": None, "return_lse": False, "return_max_logits": False,
}  # fmt: skip
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
ROWS, NEW, CACHE = ones(5, 2, 16), ones(1, 1, 2, 16), ones(1, 8, 2, 16)
CALLS = {
    flash_attn_func: {"q": X, "k": X, "v": X, **OPTIONS},
    flash_attn_kvpacked_func: {"q": X, "kv": ones(1, 5, 2, 2, 16), **OPTIONS},
    flash_attn_qkvpacked_func: {"qkv": ones(1, 5, 3, 2, 16), **OPTIONS},
    flash_attn_varlen_func: {"q": ROWS, "k": ROWS, "v": ROWS, **LENGTHS, **OPTIONS, "block_table": None},
    flash_attn_varlen_kvpacked_func: {"q": ROWS, "kv": ones(5, 2, 2, 16), **LENGTHS, **OPTIONS},
    flash_attn_varlen_qkvpacked_func: {"qkv": ones(5, 3, 2, 16), "cu_seqlens": CU, "max_seqlen": 3, **OPTIONS},
    flash_attn_with_kvcache: {
        "q": NEW, "k_cache": CACHE, "v_cache": CACHE.clone(), "k": NEW, "v": NEW,
        "rotary_cos": ones(8, 8), "rotary_sin": ones(8, 8), "cache_seqlens": 3, "cache_batch_idx": None,
        "cache_leftpad": None, "block_table": None, "softmax_scale": 0.5, "causal": False, "window_size": (-1, -1),
        "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0,
        "return_softmax_lse": False, "sinks": None,
    },
}  # fmt: skip

# What is no wrong kind of an argument. A number is refused as a flag, unless it is 0, 1 or a tensor.
RIGHT = {
    **dict.fromkeys(FLAGS, {"None", "bool", "float tensor"}),
    "dropout_p": FLOATS,
    "softcap": FLOATS,
    "softmax_scale": {*FLOATS, "None"},
    "max_seqlen": {"int"},
    "max_seqlen_q": {"int"},
    "max_seqlen_k": {"int"},
    "num_splits": {"int"},
    "cache_seqlens": {"int", "None"},
    **dict.fromkeys(["alibi_slopes", "attn_mask", "sinks", "block_table"], {"None"}),
    "attn_bias": {"None", "float tensor"},
    **dict.fromkeys(["rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"], {"None"}),
    **{("flash_attn_with_kvcache", name): {"None"} for name in ("k", "v")},
}


def test_the_table_is_complete():
    check_table(CALLS, RIGHT)


@pytest.mark.parametrize("function, name, kind", rows(CALLS, RIGHT))
def test_wrong_kinds(function, name, kind):
    arguments = {**CALLS[function], name: WRONG[kind]}
    if name == "block_table" and function is flash_attn_varlen_func:
        arguments["k"] = arguments["v"] = ones(2, 4, 2, 16)
    text = sentence(lambda: function(**arguments), name)
    if kind == "sparse tensor" and name in ("q", "k", "v", "kv", "qkv", "k_cache"):
        assert "it has layout torch.sparse_coo" in text
    if kind == "fp8 tensor" and name == "q":
        assert "q is float8_e5m2" in text
    if kind == "complex tensor" and name == "q":
        assert "q is complex64" in text


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex32,
        torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    ],
)  # fmt: skip
def test_the_names_of_dtypes(dtype):
    x = torch.zeros(1, 5, 2, 16 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    name = str(dtype).removeprefix("torch.")
    sentence(lambda: flash_attn_func(x, x, x), f"fp32, and on the CPU fp64; q is {name}")


def test_examples():
    sentence(lambda: flash_attn_func(X, X, X, softcap=None), "softcap must be a number", "NoneType")
    sentence(lambda: flash_attn_func(X, X, X, window_size=(1.5, 2)), "window_size must be (left, right), two integers")
    sentence(lambda: flash_attn_func(X, X, X, softmax_scale="a"), "softmax_scale must be a number or None; it is 'a'")
    sentence(lambda: flash_attn_func(X, X, X, softmax_scale=10**400), "must be a number or None; it is an int of 1329")
    sentence(lambda: flash_attn_func(X, X, X, window_size=(2**63, 0)), "it has an integer of more than 64 bits")
    sentence(lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, [0, 5], CU, 3, 3), "cu_seqlens_q must be a tensor; it")
    sentence(lambda: flash_attn_varlen_qkvpacked_func(ones(5, 3, 2, 16), [0, 5], 3), "cu_seqlens must be a tensor; it")
    qkv = ones(5, 3, 2, 16)
    sentence(lambda: flash_attn_varlen_qkvpacked_func(qkv, CU, 23.0), "max_seqlen must be an integer", "it is 23.0")
    sentence(lambda: flash_attn_varlen_qkvpacked_func(qkv, CU.long(), 3), "cu_seqlens must have dtype int32")
    sentence(lambda: flash_attn_varlen_qkvpacked_func(qkv, CU, 2), "max_seqlen ")
    used = torch.tensor([3])
    sentence(
        lambda: flash_attn_with_kvcache(X, CACHE, CACHE, cache_seqlens=used),
        "cache_seqlens must have dtype int32; it is int64",
    )


@pytest.mark.parametrize("option", ["attn_bias", "attn_mask", "sinks", "return_lse", "return_max_logits"])
def test_beside_options(option):
    """These calls do not hand all numbers to an op, whose parser knows their kinds."""
    values = {"attn_bias": torch.zeros(1, 1), "attn_mask": torch.ones(1, 1) > 0, "sinks": ones(2)}
    given = {option: values.get(option, True)}
    for window in ((1.5, 2), (1, 2.5), torch.tensor([1.5, 2.0])):
        with pytest.raises(ValueError, match=r"^window_size must be \(left, right\), two integers; it is "):
            flash_attn_func(X, X, X, window_size=window, **given)
    sentence(lambda: flash_attn_func(X, X, X, dropout_p=None, **given), "dropout_p must be a number", "NoneType")
    sentence(lambda: flash_attn_func(X, X, X, softcap=None, **given), "softcap must be a number", "NoneType")


def test_quantized_tensors():
    x = torch.quantize_per_tensor(X.float(), 0.1, 0, torch.qint8)
    sentence(lambda: flash_attn_func(x, x, x), "q must be a plain tensor; it is quantized, of dtype torch.qint8")


def test_packed_tensors_are_named():
    qkv, kv = ones(1, 5, 3, 2, 16), ones(1, 5, 2, 2, 16)
    for dtype in (torch.complex64, torch.float8_e5m2, torch.int16):
        name = str(dtype).removeprefix("torch.")
        sentence(lambda dtype=dtype: flash_attn_qkvpacked_func(qkv.to(dtype)), f"qkv is {name}")
        sentence(lambda dtype=dtype: flash_attn_kvpacked_func(X, kv.to(dtype)), f"kv is {name}")
    sentence(lambda: flash_attn_kvpacked_func(X, ones(1, 5, 2, 2, 8)), "kv must have shape")
    sentence(lambda: flash_attn_qkvpacked_func(ones(1, 5, 3, 2, 257)), "qkv has")


def test_kinds_that_are_right():
    want = flash_attn_func(X, X, X, 0.0, 0.5, True, (2, 0), 3.0)
    for got in (
        flash_attn_func(X, X, X, 0, np.float32(0.5), np.bool_(True), [2, 0], 3),
        flash_attn_func(X, X, X, torch.tensor(0.0), torch.tensor(0.5), 1, torch.tensor([2, 0]), np.float64(3)),
        flash_attn_func(X, X, X, softmax_scale=0.5, causal=True, window_size=(np.int64(2), torch.tensor(0)), softcap=3),
    ):
        assert torch.equal(got, want)
    cache = torch.randn(1, 9, 2, 16)
    got, want = (flash_attn_with_kvcache(X, cache, cache, cache_seqlens=n, causal=True) for n in (np.int64(7), 7))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "code, words",
    [
        ("sys.modules['torch'] = None", "needs PyTorch 2.4 or newer, and PyTorch is not installed"),
        (
            "import types; sys.modules['torch'] = types.SimpleNamespace(__version__='2.3.1+cpu')",
            "needs PyTorch 2.4 or newer, and PyTorch 2.3.1+cpu is installed",
        ),
        ("sys.modules['flash_attn_2_cuda'] = None", "needs its compiled module flash_attn_2_cuda, which is not"),
    ],
)
def test_what_is_not_installed(code, words):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; import flash_attn"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: flash_attn") and words in done.stderr
