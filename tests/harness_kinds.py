"""Values of wrong kinds, for every argument of the public functions, and the sentence that refuses them."""

import inspect

import numpy as np
import pytest
import torch


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


X = ones(1, 5, 2, 16)
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
    "bool": True,
    "long int": 2**70,
    "dtype": torch.int8,
    "numpy array": np.ones((1, 5, 2, 16), np.float32),
    "list of tensors": [X, X, X],
    "float tensor": torch.tensor(1.5),
    "quantized tensor": torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
}
FLOATS = {"float", "int", "bool", "long int", "float tensor"}
FLAGS = {"causal", "deterministic", "return_attn_probs", "return_lse", "return_max_logits", "return_softmax_lse"} | {
    "rotary_interleaved"
}


def rows(calls, right):
    """Parameters (function, name, kind) of a test: each argument with each kind that is wrong for it.

    ``calls`` maps functions to right arguments. ``right`` maps an argument, or a pair of a function's name and an
    argument, to the kinds that are not wrong.
    """
    return [
        pytest.param(function, name, kind, id=f"{function.__name__}-{name}-{kind}")
        for function, arguments in calls.items()
        for name in arguments
        for kind in WRONG
        if kind not in right.get((function.__name__, name), right.get(name, ()))
    ]


def check_table(calls, right):
    """Every argument is in the table, the right calls work, and few kinds are right."""
    for function, arguments in calls.items():
        assert set(inspect.signature(function).parameters) == set(arguments)
        function(**arguments)
    assert len(WRONG) - max(map(len, right.values())) >= 10


def sentence(call, *words):
    with pytest.raises((TypeError, RuntimeError, ValueError, AssertionError, NotImplementedError)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300, text
    assert caught.value.__cause__ is None and (caught.value.__context__ is None or caught.value.__suppress_context__)
    for word in words:
        assert word in text, text
    return text
