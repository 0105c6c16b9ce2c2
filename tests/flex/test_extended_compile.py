"""attn_bias, attn_mask, sinks, return_lse and return_max_logits in graphs: equal to eager calls, gradients too."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn import flash_attn_func, flash_attn_varlen_func

HAS_CXX = any(map(shutil.which, ("c++", "g++", "clang++")))
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not HAS_CXX, reason="Inductor needs a C++ compiler"))
BOTH = {"return_lse": True, "return_max_logits": True}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def leaf(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


def same(function, compiled, leaves, *args):
    found = []
    for each in (function, compiled):
        torch.manual_seed(3)
        results = each(*args)
        results = results if isinstance(results, tuple) else (results,)
        total = results[0].sin().sum()
        if len(results) > 1 and results[1].requires_grad:
            total = total + torch.where(results[1].isinf(), 0.0, results[1]).cos().sum()
        found.append([*results, *torch.autograd.grad(total, leaves)])
    for want, got in zip(*found, strict=True):
        assert want.stride() == got.stride() and want.dtype == got.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def tensors_of(names, is_packed, n):
    """q, k, v, the lengths and the tensors of the options."""
    shapes = [(2 * n, h, 16) if is_packed else (2, n + extra, h, 16) for h, extra in ((4, 0), (2, 5), (2, 5))]
    inputs = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    rows, columns = (40, 40) if is_packed else (n, n + 5)
    made = {
        "attn_bias": leaf(4, rows, columns), "sinks": leaf(4), "alibi_slopes": torch.rand(4),
        "attn_mask": leaf(rows, columns, seed=9).detach() > -0.5,
    }  # fmt: skip
    with torch.no_grad():
        made["attn_bias"][1, 2] = -1e9  # a row that is wholly masked
    cu_seqlens = torch.tensor([0, n - 3, 2 * n], dtype=torch.int32)
    return inputs, cu_seqlens, {name: made[name] for name in names}


CASES = [
    (("sinks",), {}),
    (("sinks",), {"dropout_p": 0.3}),
    ((), {"return_lse": True}),
    (("attn_bias",), {}),
    (("attn_mask", "sinks"), BOTH),
    (("attn_bias", "attn_mask", "sinks", "alibi_slopes"), {**BOTH, "softcap": 3.0}),
]


# Cases of dense and of packed tensors, and whether all sizes vary in the graph or lengths alone. If all vary, the scale
# varies, too, and torch needs four times as long. aot_eager begins with eager's graphs, and inductor with those of
# aot_eager. The last case has all options but dropout. test_one_graph_for_changing_tensors has every case, too.
CASES_OF = {
    ("eager", False): [(CASES[-1], False)],
    ("eager", True): [(CASES[-1], False)],
    ("aot_eager", False): [*((case, False) for case in CASES[1::2]), (CASES[1], True)],
    ("aot_eager", True): [*((case, False) for case in (*CASES[::2], CASES[-1])), (CASES[1], True)],
    ("inductor", False): [(CASES[-1], False)],
    ("inductor", True): [(CASES[-1], True)],
}


def let_lengths_vary(inputs, given, is_packed):
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0 if is_packed else 1)
    for name in {"attn_bias", "attn_mask"} & given.keys() if not is_packed else ():
        torch._dynamo.mark_dynamic(given[name], (given[name].dim() - 2, given[name].dim() - 1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled_results_and_gradients(is_packed, backend):
    for (names, options), all_vary in CASES_OF[backend, is_packed]:
        torch._dynamo.reset()

        def function(q, k, v, cu_seqlens, given, options=options):
            if is_packed:
                lengths = cu_seqlens, cu_seqlens, 40, 40
                return flash_attn_varlen_func(q, k, v, *lengths, causal=True, **given, **options)
            return flash_attn_func(q, k, v, causal=True, **given, **options)

        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=all_vary or None)
        for n in (20, 33):
            inputs, cu_seqlens, given = tensors_of(names, is_packed, n)
            if not all_vary:
                let_lengths_vary(inputs, given, is_packed)
            leaves = [*inputs, *(x for x in given.values() if x.requires_grad)]
            same(function, compiled, leaves, *inputs, cu_seqlens, given)
        assert all_vary or counter.frame_count == 1


@pytest.mark.parametrize("names, options", CASES, ids=str)
def test_one_graph_for_changing_tensors(names, options):
    counter = CompileCounterWithBackend("aot_eager")

    def function(q, k, v, given):
        return flash_attn_func(q, k, v, **given, **options)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for seed in range(3):
        inputs, _, given = tensors_of(names, False, 20)
        inputs = [(x + seed).detach().requires_grad_() for x in inputs]
        same(function, compiled, inputs, *inputs, given)
    assert counter.frame_count == 1


@pytest.mark.parametrize("needs_grad", [False, True])
def test_sinks_without_gradients(needs_grad):
    q, k, v, sinks = (leaf(*s).detach().requires_grad_(needs_grad) for s in ((2, 9, 4, 16), *[(2, 9, 2, 16)] * 2, (4,)))
    compiled = torch.compile(flash_attn_func, backend="eager", fullgraph=True)
    for grads in (False, True):
        with torch.set_grad_enabled(grads):
            torch.testing.assert_close(compiled(q, k, v, sinks=sinks), flash_attn_func(q, k, v, sinks=sinks))


def test_autocast_as_in_other_calls():
    q, bias = leaf(1, 9, 4, 8), leaf(9, 9)

    def function(q, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attn_func(q, q, q, attn_bias=bias)

    out = torch.compile(function, backend="aot_eager", fullgraph=True)(q, bias)
    assert out.dtype == torch.bfloat16 and torch.equal(out, function(q, bias))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.sinks = torch.nn.Parameter(leaf(4, 1, 1)), torch.nn.Parameter(leaf(4))

    def forward(self, q, k, v):
        out = flash_attn_func(q, k, v, sinks=self.sinks)
        return out, *flash_attn_func(q, k, v, causal=True, attn_bias=self.bias, sinks=self.sinks, **BOTH)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    model, length = Model(), {1: torch.export.Dim("length", min=2, max=99)}
    made = {n: [leaf(2, n, h, 16, seed=n).detach() for h in (4, 2, 2)] for n in (20, 57)}
    program = torch.export.export(model, tuple(made[20]), dynamic_shapes=dict.fromkeys("qkv", length), strict=strict)
    for inputs in made.values():
        for got, want in zip(program.module()(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_tensor_of_a_fixed_size_beside_lengths_that_vary():
    """A parameter has a fixed shape in a graph, and so has what comes for the first time."""

    def function(q, k, v, attn_bias, attn_mask):
        return flash_attn_func(q, k, v, attn_bias=attn_bias, attn_mask=attn_mask)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    bias = torch.nn.Parameter(leaf(4, 7, 3).detach())
    mask = leaf(7, 3).detach() > -0.5
    for n, m, options in ((8, 5, (None, None)), (7, 3, (None, mask)), (7, 3, (bias, mask)), (9, 4, (None, None))):
        q, k, v = leaf(1, n, 4, 16), leaf(1, m, 2, 16), leaf(1, m, 2, 16, seed=1)
        same(function, compiled, [q, k, v, *([] if options[0] is None else [bias])], q, k, v, *options)
    with pytest.raises(Exception, match="attn_bias must have the shape"):
        compiled(leaf(1, 6, 4, 16), k, v, bias, None)
