"""Every argument of every function of flash_attn_3 refuses values of a wrong kind, in a sentence that names it."""

import inspect

import flash_attn_3.flash_attn_interface as fa3
import numpy as np
import pytest
import torch
from harness_kinds import FLAGS, FLOATS, WRONG, X, check_table, ones, rows, sentence
from tensors3 import E4M3, i32

CU = i32(0, 2, 5)


def call(function, **given):
    """The arguments of a right call. Those that are not given have their defaults."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return {**defaults, **given}


ROWS, NEW, CACHE = ones(5, 2, 16), ones(1, 1, 2, 16), ones(1, 8, 2, 16)
CALLS = {
    function: call(function, **given)
    for function, given in {
        fa3.flash_attn_func: {"q": X, "k": X, "v": X},
        fa3.flash_attn_varlen_func: {
            "q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3,
            "max_seqlen_k": 3,
        },
        fa3.flash_attn_qkvpacked_func: {"qkv": ones(1, 5, 3, 2, 16)},
        fa3.flash_attn_with_kvcache: {
            "q": NEW, "k_cache": CACHE, "v_cache": CACHE.clone(), "k": NEW, "v": NEW, "rotary_cos": ones(8, 8),
            "rotary_sin": ones(8, 8), "cache_seqlens": 3,
        },
        fa3.flash_attn_combine: {"out_partial": ones(2, 1, 5, 2, 16), "lse_partial": ones(2, 1, 2, 5).mT},
        fa3.get_scheduler_metadata: {
            "batch_size": 1, "max_seqlen_q": 1, "max_seqlen_k": 8, "num_heads_q": 2, "num_heads_kv": 2, "headdim": 16,
            "cache_seqlens": i32(3),
        },
        fa3.quantize: {"q": X, "k": X, "v": X},
    }.items()
}  # fmt: skip

DESCALES = "q_descale", "k_descale", "v_descale"
TENSORS = {"seven elements", "complex tensor", "fp8 tensor", "float tensor"}
INTS = "attention_chunk", "num_splits", "sm_margin", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "headdim"
# What is no wrong kind of an argument. A number is refused as a flag, unless it is 0, 1 or a tensor.
RIGHT = {
    **dict.fromkeys([*FLAGS, "pack_gqa", "hadamard", "has_softcap"], {"None", "bool", "float tensor"}),
    **dict.fromkeys([*INTS, "max_seqlen_k_new"], {"int"}),
    **dict.fromkeys(["headdim_v", "page_size", "cache_seqlens"], {"int", "None"}),
    ("get_scheduler_metadata", "cache_seqlens"): (),
    ("flash_attn_with_kvcache", "max_seqlen_q"): {"int", "None"},
    ("flash_attn_qkvpacked_func", "num_heads_q"): {"None"},
    **dict.fromkeys(DESCALES, {"None", *TENSORS}),  # ignored unless the tensors are FP8; see below
    "qv": {"None", *TENSORS},  # the sentence is about the width of v, as upstream's
    "softmax_scale": {*FLOATS, "None"},
    "softcap": FLOATS,
    ("quantize", "cu_seqlens"): {"None", *TENSORS},  # see below
    "out_dtype": {"None"},
    **dict.fromkeys(["out", "seqused_q", "seqused_k", "rotary_cos", "rotary_sin", "cache_batch_idx"], {"None"}),
    **dict.fromkeys(["cache_leftpad", "page_table", "rotary_seqlens", "scheduler_metadata"], {"None"}),
    "cu_seqlens_k_new": {"None"},
    **dict.fromkeys(["cu_seqlens_q", "cu_seqlens_k"], {"None"}),  # of dense tensors
    **{("flash_attn_with_kvcache", name): {"None"} for name in ("k", "v")},
}


def test_the_table_is_complete():
    check_table(CALLS, RIGHT)


@pytest.mark.parametrize("function, name, kind", rows(CALLS, RIGHT))
def test_wrong_kinds(function, name, kind):
    text = sentence(lambda: function(**{**CALLS[function], name: WRONG[kind]}), name)
    if kind == "sparse tensor" and name in ("q", "k", "v", "qkv", "k_cache", "out_partial"):
        assert "it has layout torch.sparse_coo" in text


@pytest.mark.parametrize("name", DESCALES)
@pytest.mark.parametrize("kind", [kind for kind in WRONG if kind != "None"])
def test_descales_of_8_bits(name, kind):
    x = X.to(E4M3)
    sentence(lambda: fa3.flash_attn_func(x, x, x, **{name: WRONG[kind]}), name)


@pytest.mark.parametrize("shape", [(2,), (1, 1), (2, 1), (1, 2, 1), ()])
def test_descales_of_other_shapes(shape):
    x = X.to(E4M3)
    for name in DESCALES:
        sentence(lambda name=name: fa3.flash_attn_func(x, x, x, **{name: ones(*shape)}), f"{name} must have ")
        sentence(
            lambda name=name: fa3.flash_attn_func(x, x, x, **{name: torch.empty(1, 2, device="meta")}),
            f"{name} must be on cpu, where q is; it is on meta",
        )


def test_examples():
    func, q = fa3.flash_attn_func, X.clone().requires_grad_()
    for x in (X, q):  # with and without a record for the backward
        for given in ({}, {"return_attn_probs": True}):
            for window in ((1.5, 2), (1, 2.5), torch.tensor([1.5, 2.0])):
                with pytest.raises(ValueError, match=r"^window_size must be \(left, right\), two integers; it is "):
                    func(x, X, X, window_size=window, **given)
            sentence(
                lambda x=x, given=given: func(x, X, X, num_splits=1.0, **given), "num_splits must be an integer; it"
            )
            sentence(
                lambda x=x, given=given: func(x, X, X, num_splits=torch.tensor(1.5), **given),
                "num_splits must be an integer; it is a tensor of shape () and dtype float32",
            )
            sentence(lambda x=x, given=given: func(x, X, X, causal=2, **given), "causal must be True or False; it is 2")
    sentence(lambda: func(X, X, X, deterministic="no"), "deterministic must be True or False; it is 'no', of type str")
    sentence(lambda: func(X, X, X, sm_margin=2**64), "sm_margin must be an integer; it is an int of 65 bits")
    sentence(lambda: func(X, X, X, pack_gqa=3), "pack_gqa must be True, False or None; it is 3")
    sentence(lambda: func(X, X.numpy(), X), "k must be a tensor; it is of type ndarray")
    qkv = ones(1, 5, 3, 2, 16)
    sentence(lambda: fa3.flash_attn_qkvpacked_func(qkv.to_sparse()), "qkv must be a dense tensor; it has layout")
    sentence(lambda: fa3.flash_attn_qkvpacked_func(qkv[:, :, 0], num_heads_q=1.0), "num_heads_q must be an integer or")
    sentence(lambda: fa3.flash_attn_varlen_func(ROWS, ROWS, ROWS, CU, [0, 5], 3, 3), "cu_seqlens_k must be a tensor or")
    varlen = {**CALLS[fa3.flash_attn_varlen_func], "max_seqlen_q": 3.0}
    sentence(
        lambda: fa3.flash_attn_varlen_func(**varlen), "max_seqlen_q must be an integer, or a tensor of one, or None"
    )
    given = CALLS[fa3.get_scheduler_metadata]
    sentence(lambda: fa3.get_scheduler_metadata(**{**given, "headdim": 64.5}), "headdim must be an integer; it is 64.5")
    sentence(
        lambda: fa3.get_scheduler_metadata(**{**given, "cache_leftpad": CU.long()}),
        "cache_leftpad must have dtype int32",
    )
    sentence(lambda: fa3.quantize(X, X, X, per=None), 'per must be "head" or "tensor"; it is of type NoneType')
    sentence(lambda: fa3.quantize(ROWS, ROWS, ROWS, (CU,)), "cu_seqlens must be a tensor, a pair of tensors or None")
    sentence(lambda: fa3.quantize(ROWS, ROWS, ROWS, (CU, [0, 5])), "cu_seqlens_k must be a tensor or None; it is of")
    for wrong in (CU.float(), torch.ones(7), torch.tensor(1.5)):
        sentence(lambda wrong=wrong: fa3.quantize(ROWS, ROWS, ROWS, wrong), "cu_seqlens must have ")
    sentence(lambda: fa3.flash_attn_with_kvcache(torch.tensor(1.0), CACHE, CACHE, cache_seqlens=3), "q must have 4 dim")


def test_kinds_that_are_right():
    want = fa3.flash_attn_func(X, X, X, 0.5, True, window_size=(2, 0), softcap=3.0)
    for got in (
        fa3.flash_attn_func(X, X, X, np.float32(0.5), np.bool_(True), window_size=[2, 0], softcap=3),
        fa3.flash_attn_func(X, X, X, torch.tensor(0.5), 1, window_size=torch.tensor([2, 0]), num_splits=np.int64(1)),
        fa3.flash_attn_func(X, X, X, 0.5, True, window_size=(np.int64(2), torch.tensor(0)), sm_margin=torch.tensor(0)),
    ):
        assert torch.equal(got, want)
    cache = torch.randn(1, 9, 2, 16)
    got, want = (fa3.flash_attn_with_kvcache(X, cache, cache, cache_seqlens=n, causal=True) for n in (np.int64(7), 7))
    assert torch.equal(got, want)
