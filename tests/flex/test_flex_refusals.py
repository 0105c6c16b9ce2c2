"""Arguments of flex_attention that are refused, and the words of the errors."""

import warnings
from contextlib import nullcontext

import flash_attn_2_cuda
import numpy
import pytest
import torch
from harness_flex import causal, make
from oracle_attention import close
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask

from flash_attn.flex import tracer
from flash_attn.flex.derivative import derivative_of
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention


def call(q=(1, 4, 8, 16), k=(1, 4, 8, 16), v=None, dtypes=(torch.float32,) * 3, **kwargs):
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip((q, k, v or k), dtypes)]
    return flex_attention(*tensors, **kwargs)


def masked(shape, **kwargs):
    return create_block_mask(causal, *shape, device="cpu", **kwargs)


ERRORS = [
    ({"dtypes": (torch.float32, torch.float16, torch.float32)}, ValueError, "to have the same dtype"),
    ({"k": (1, 4, 8, 32)}, ValueError, "same embedding dimension but got E=16 and E=32"),
    ({"q": (4, 8, 16), "k": (4, 8, 16)}, NotImplementedError, "must be 4D tensors"),
    ({"k": (1, 2, 8, 16)}, ValueError, "same number of heads but got Hq=4 and Hkv=2. Try setting enable_gqa=True"),
    ({"k": (1, 3, 8, 16), "enable_gqa": True}, ValueError, "multiple of kv heads for GQA but got Hq=4 and Hkv=3"),
    ({"q": (2, 4, 8, 16)}, ValueError, "or non-none block_mask"),
    ({"q": (2, 4, 8, 16), "block_mask": (1, 1, 8, 8)}, ValueError, "B_block_mask=1"),
    ({"block_mask": (1, 1, 7, 8)}, ValueError, "smaller length"),
    ({"block_mask": (1, 1, 9, 8)}, ValueError, r"block_mask\._adjust"),
    ({"v": (1, 4, 9, 16)}, ValueError, "key and value to have the same batch size, heads and length"),
    ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError, "both return_lse and return_aux"),
    ({"block_mask": (1, 1, 8, 8), "mask_mod": causal}, ValueError, "not both"),
    ({"kernel_options": {"BACKEND": "MAGIC"}}, ValueError, "Invalid BACKEND value 'MAGIC'"),
    ({"kernel_options": {"OUTPUT_MAX": True}}, AssertionError, "OUTPUT_MAX"),
    ({"k": (1, 4, 8, 300), "q": (1, 4, 8, 300)}, NotImplementedError, "at most 256"),
    ({"dtypes": (torch.float8_e4m3fn,) * 3}, NotImplementedError, "q is float8_e4m3fn"),
    ({"dtypes": (torch.int32,) * 3}, NotImplementedError, "q is int32"),
    ({"scale": 1e31}, RuntimeError, "scale must be between"),
    ({"scale": "a"}, TypeError, "scale must be a number or None; it is 'a', of type str"),
    ({"scale": torch.tensor(0.3, requires_grad=True)}, RuntimeError, "scale gets no gradient"),
    (
        {"mask_mod": lambda b, h, q, k: q - k},
        AssertionError,
        "must return torch.bool, but returns torch.int64: .*py, line",
    ),
    ({"mask_mod": lambda i, j: i >= j}, TypeError, r"a mask_mod takes \(b, h, q_idx, kv_idx\).*py, line .* takes 2"),
    ({"score_mod": lambda b, h, i, j: i}, TypeError, r"a score_mod \(score, b, h.*py, line .* takes 4 positional"),
    ({"score_mod": lambda s, *_: (lambda: 0)(s)}, TypeError, r"^[^:]*takes 0 positional arguments"),
    ({"score_mod": lambda s, *_: numpy.tanh(s)}, TypeError, "cannot call functions of NumPy.* torch: .*py, line"),
    ({"kernel_options": "AUTO"}, TypeError, "kernel_options must be a dict or None; it is 'AUTO', of type str"),
    ({"return_aux": True}, TypeError, "return_aux must be an AuxRequest or None; it is True, of type bool"),
    ({"return_aux": {"lse": True}}, TypeError, "return_aux must be an AuxRequest or None; it is of type dict"),
    ({"score_mod": "relu"}, TypeError, "score_mod must be a function or None; it is 'relu', of type str"),
    ({"score_mod": 3}, TypeError, "score_mod must be a function or None; it is 3, of type int"),
    ({"mask_mod": masked((1, 1, 8, 8))}, TypeError, "mask_mod must be a function or None; it is of type BlockMask"),
    ({"block_mask": causal}, TypeError, "block_mask must be a BlockMask or None; it is of type function"),
    ({"block_mask": torch.ones(8, 8)}, TypeError, r"block_mask must be a BlockMask or None; it is a tensor of shape"),
]


@pytest.mark.parametrize("arguments, error, text", ERRORS, ids=[text for _, _, text in ERRORS])
def test_errors(arguments, error, text):
    arguments = dict(arguments)
    if isinstance(arguments.get("block_mask"), tuple):
        arguments["block_mask"] = masked(arguments["block_mask"])
    with pytest.raises(error, match=text):
        call(**arguments)


@pytest.mark.parametrize("name, place", [("query", 0), ("key", 1), ("value", 2)])
@pytest.mark.parametrize(
    "change, text",
    [
        (lambda x: None, "must be a tensor; it is of type NoneType"),
        (lambda x: x.numpy(), "must be a tensor; it is of type ndarray"),
        (lambda x: x.to_sparse(), "must be a dense tensor; it has layout torch.sparse_coo"),
    ],
)
def test_tensors_of_other_kinds_are_named(name, place, change, text):
    tensors = [torch.ones(1, 4, 8, 16) for _ in range(3)]
    tensors[place] = change(tensors[place])
    with pytest.raises(TypeError, match=f"{name} {text}"):
        flex_attention(*tensors)


def test_a_mask_that_requires_grad_is_refused():
    bias = torch.zeros(8, requires_grad=True)
    with pytest.raises(
        AssertionError, match="from mask mod that require grad are not supported. Use detach\\(\\): .*py, line"
    ):
        call(mask_mod=lambda b, h, q, k: bias[q] > 0)


def test_a_changed_input_is_noticed():
    q, k, v = make(1, 1, 1, 8, 8, 16)
    q.requires_grad_()
    out = flex_attention(q, k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_nested_capture_is_refused():
    """At the first call, and when the program of the mod is known."""
    nested = torch.nested.nested_tensor([torch.ones(8), torch.ones(4)])
    for table in (nested, torch.ones(2, 8), nested):
        with pytest.raises(RuntimeError, match="a capture is a nested tensor") if table is nested else nullcontext():
            call(score_mod=lambda s, b, h, q, k: s + table[h % 2, k % 8])  # noqa: B023


def test_a_freed_capture_is_noticed():
    table = torch.zeros(100)
    table.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="a capture has shape"):
        call(score_mod=lambda s, b, h, q, k: s + table[k])


def test_the_kernels_of_torch_on_demand():
    q, k, v = make(1, 2, 2, 16, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = flex_attention(q, k, v, kernel_options={"BACKEND": "TRITON"})
    close(flex_attention(q, k, v, kernel_options={"BLOCK_M": 64, "fwd_num_warps": 4}), want, 1e-5)


def test_transforms_are_refused():
    q, k, v = make(1, 1, 1, 8, 8, 16)
    table = torch.zeros(8)
    with forward_ad.dual_level():
        dual, dual_table = forward_ad.make_dual(q, q), forward_ad.make_dual(table, table)
        for arguments in ({"query": dual}, {"score_mod": lambda s, b, h, i, j: s + dual_table[j]}):
            with pytest.raises(NotImplementedError, match="has no jvp"):
                flex_attention(**{"query": q, "key": k, "value": v, **arguments})
    for transformed in (
        torch.func.vmap(lambda q: flex_attention(q, k, v)),
        torch.func.grad(lambda q: flex_attention(q[0], k, v).sum()),
    ):
        with pytest.raises(NotImplementedError, match="flex_attention takes no tensors of torch.func"):
            transformed(torch.stack([q, q]))
    want = flex_attention(q, k, v)
    torch.func.vmap(lambda x: close(flex_attention(q, k, v), want, 1e-6) or x)(q)  # its tensors are of no transform


def test_a_mod_must_not_switch_gradients_off():
    def mod(s, b, h, i, j):
        with torch.no_grad():
            return s * 2

    with pytest.raises(NotImplementedError, match="use detach"):
        call(score_mod=mod)


class Doubled(torch.autograd.Function):
    """A gradient of its own, which the tracer does not know."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_a_mod_must_not_call_a_function_with_a_gradient_of_its_own():
    """The error names the line of the mod, not one of torch's files."""
    doubled = Doubled.apply
    for mod in (lambda s, b, h, i, j: doubled(s), lambda s, b, h, i, j: Doubled.apply(s)):
        with pytest.raises(NotImplementedError, match="autograd.Function does; use .*test_flex_refusals.py, line"):
            call(score_mod=mod)


def test_lists_of_floats_are_refused():
    num, places = torch.ones(1, 1, 1), torch.zeros(1, 1, 1, 1)
    block_mask = BlockMask.from_kv_blocks(num.int(), places.int(), BLOCK_SIZE=8, seq_lengths=(8, 8))
    block_mask.kv_num_blocks = num
    with pytest.raises(TypeError, match="must be integers"):
        call(block_mask=block_mask)


def test_programs_of_another_kind_are_refused():
    q, k, v = make(1, 1, 1, 8, 8, 16)
    out, lse = torch.empty_like(q), torch.empty(1, 1, 8)
    program = tracer.program_of(causal)[0].text
    score = tracer.program_of(lambda s, b, h, i, j: s + i, torch.float32)[0]
    wide = tracer.program_of(lambda s, b, h, i, j: s + i, torch.float64)[0].text
    derivative = derivative_of(score)[0]
    for mods in ((program, None), (wide, None), (derivative, None), (None, score.text), (None, derivative)):
        of = [None if text is None else (text, (), ()) for text in mods]
        with pytest.raises(RuntimeError, match="is no score_mod, mask_mod or derivative for fp32"):
            flash_attn_2_cuda.flex_forward(q, k, v, out, lse, None, 1.0, (-1, -1, 0.0), *of, None, None)


def test_a_compiled_mask_of_integers_is_named():
    q = torch.ones(1, 2, 8, 16)
    for function in (
        lambda q: flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i - j),
        lambda q: create_block_mask(lambda b, h, i, j: i - j, 1, 1, 8, 8, "cpu").kv_indices,
    ):
        with pytest.raises(Exception, match="must .*torch.bool.* torch.int64: File .*test_flex_refusals.py"):
            torch.compile(function, backend="eager", fullgraph=True)(q)
