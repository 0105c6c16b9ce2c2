"""Every argument of every public function refuses values of a wrong kind, in one sentence that names the argument."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


CU = torch.tensor([0, 2, 5], dtype=torch.int32)
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": 0.5, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "attn_bias": None, "attn_mask": None,
    "sinks": None, "return_lse": False, "return_max_logits": False,
}  # fmt: skip
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
X, ROWS, NEW, CACHE = ones(1, 5, 2, 16), ones(5, 2, 16), ones(1, 1, 2, 16), ones(1, 8, 2, 16)
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

WRONG = {
    "str": "a",
    "None": None,
    "list": [1.5, 2],
    "dict": {},
    "object": object(),
    "complex": 1 + 2j,
    "float": 23.5,
    "pair of floats": (1.5, 2),
    "int": 4,
    "seven elements": torch.ones(7),
    "complex tensor": X.to(torch.complex64),
    "fp8 tensor": X.to(torch.float8_e5m2),
    "sparse tensor": X.to_sparse(),
    "bytes": b"x",
}
TENSORS = {"complex tensor", "fp8 tensor", "sparse tensor", "seven elements"}
FLOATS = {"float", "int"}
FLAGS = {"causal", "deterministic", "return_attn_probs", "return_lse", "return_max_logits", "return_softmax_lse"} | {
    "rotary_interleaved"
}
# What is no wrong kind of an argument. An int is refused as a flag, unless it is 0 or 1.
RIGHT = {
    **dict.fromkeys(FLAGS, {"None"}),
    "dropout_p": FLOATS,
    "softcap": FLOATS,
    "softmax_scale": {*FLOATS, "None"},
    "max_seqlen": {"int"},
    "max_seqlen_q": {"int"},
    "max_seqlen_k": {"int"},
    "num_splits": {"int"},
    "cache_seqlens": {"int", "None"},
    **dict.fromkeys(["alibi_slopes", "attn_bias", "attn_mask", "sinks", "block_table"], {"None"}),
    **dict.fromkeys(["rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"], {"None"}),
}
ROWS_OF_TABLE = [
    pytest.param(function, name, kind, id=f"{function.__name__}-{name}-{kind}")
    for function, arguments in CALLS.items()
    for name in arguments
    for kind in WRONG
    if kind not in RIGHT.get(name, ())
    if not (name in ("k", "v") and kind == "None" and function is flash_attn_with_kvcache)
]


def test_the_table_is_complete():
    for function, arguments in CALLS.items():
        assert set(inspect.signature(function).parameters) == set(arguments)
        function(**arguments)
    assert len(WRONG) - max(map(len, RIGHT.values())) >= 10


def sentence(call, *words):
    with pytest.raises((TypeError, RuntimeError, ValueError, AssertionError, NotImplementedError)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300, text
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)
    for word in words:
        assert word in text, text
    return text


@pytest.mark.parametrize("function, name, kind", ROWS_OF_TABLE)
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
