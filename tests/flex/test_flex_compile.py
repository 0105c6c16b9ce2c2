"""flex_attention inside of torch.compile: equal to the call outside, in one graph for all lengths and closures."""

import functools
import random
import shutil

import pytest
import torch
from catalogue import top_blocks
from score_catalogue import rope_products
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables.builder import VariableBuilder
from torch.utils.checkpoint import checkpoint

from flash_attn.flex import graph
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention

HAS_CXX = any(map(shutil.which, ("c++", "g++", "clang++")))
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not HAS_CXX, reason="Inductor needs a C++ compiler"))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def inputs(length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, h, length, 16, generator=generator).to(dtype).requires_grad_() for h in (4, 2, 2)]


def same(function, compiled, leaves, *args):
    found = []
    for each in (function, compiled):
        out, lse = each(*args)
        total = (out.float() ** 2).sum() + lse.sum()
        found.append([out, lse, *torch.autograd.grad(total, leaves)])
    for want, got in zip(*found, strict=True):
        assert want.stride() == got.stride()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_compiled_results_and_gradients(backend):
    table = torch.randn(4, 100, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def function(q, k, v, window, block_mask):
        def score_mod(score, b, h, i, j):
            return score + 2 * table[h, i - j] * table[h][j]

        def mask_mod(b, h, i, j):
            return (i >= j) & (i - j < window)

        inside = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device="cpu")
        aux = AuxRequest(lse=True)
        out, stats = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=aux)
        out = out + flex_attention(q, k, v, mask_mod=mask_mod, enable_gqa=True)
        return out + flex_attention(q, k, v, score_mod, inside, enable_gqa=True), stats.lse

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for length in (40, 41, 57):
        tensors = inputs(length)
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
        same(function, compiled, [*tensors, table], *tensors, length // 3, block_mask)
    assert counter.frame_count == 1


def test_one_graph_for_lengths_and_closures():
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, mod):
        return flex_attention(q, k, v, mod, enable_gqa=True)

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)

    def make(slopes, shift):
        return lambda score, b, h, i, j: score + slopes[h] * (j - i + shift)

    for step in range(60):
        q, k, v = (x.detach() for x in inputs(20 + step % 50))
        mod = make(torch.full((4,), step / 7), 5 + step)
        torch.testing.assert_close(compiled(q, k, v, mod), call(q, k, v, mod), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def _by_place(shift, factor):
    return lambda score, b, h, i, j, shift=shift, factor=factor: score * factor + (j - i + shift)


def _by_name(shift, factor):
    def mod(score, b, h, i, j, *, shift=shift, factor=factor):
        return score * factor + (j - i + shift)

    return mod


@pytest.mark.parametrize("make", [_by_place, _by_name])
def test_numbers_of_defaults(make):
    """Dynamo of PyTorch 2.11 has no guards for them."""

    def call(q, k, v, mod, seen):
        out = flex_attention(q, k, v, mod, enable_gqa=True)
        return out + flex_attention(q, k, v, mask_mod=seen, enable_gqa=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for step in range(4):
        q, k, v = (x.detach() for x in inputs(20 + step))
        mods = make(0.1 * step, 1.0 + step), lambda b, h, i, j, most=2 * step: j <= i + most
        torch.testing.assert_close(compiled(q, k, v, *mods), call(q, k, v, *mods), rtol=1e-5, atol=1e-5)


def test_autocast_in_a_graph():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, k, v, enable_gqa=True, mask_mod=lambda b, h, i, j: i >= j)

    q, k, v = inputs(33)
    out = torch.compile(function, backend="aot_eager", fullgraph=True)(q, k, v)
    assert out.dtype == torch.bfloat16 and torch.equal(out, function(q, k, v))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
def test_lists_of_blocks_that_a_graph_changes(backend):
    """The lists are no longer those of the mask, although Inductor computes them in the memory of the old ones."""

    def function(q, k, v, is_in_place):
        blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
        if is_in_place:
            blocks.full_kv_num_blocks.sub_(1).clamp_(min=0)
        else:
            blocks.full_kv_num_blocks = (blocks.full_kv_num_blocks - 1).clamp(min=0)
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    q, k, v = (x.detach() for x in inputs(300))
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for is_in_place in (True, False):
        torch.testing.assert_close(compiled(q, k, v, is_in_place), function(q, k, v, is_in_place))


@pytest.mark.parametrize("dynamic", [None, True])
def test_short_vectors_of_captures(dynamic):
    """Rows of captures that are summed, and compared as a whole."""
    rng, shape = random.Random(0), (2, 4, 40, 40)
    (score_mod, leaves), mask_mod, tensors = rope_products(rng, shape), top_blocks(rng, shape), inputs(40)

    def function(q, k, v):
        block_mask = create_block_mask(mask_mod, *shape, device="cpu", BLOCK_SIZE=8)
        aux = AuxRequest(lse=True)
        out, stats = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=aux)
        return out, stats.lse

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    same(function, compiled, [*tensors, *leaves], *tensors)


class Slopes(torch.nn.Module):
    """A mod with a state, and a model."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5, 1.0]))

    def mod(self, score, b, h, i, j):
        return score + self.slopes[h] * (j - i) / 8

    def forward(self, q, k, v):
        inside = create_block_mask(lambda b, h, i, j: i - j < 9, None, None, q.shape[2], k.shape[2], device="cpu")
        aux = AuxRequest(lse=True, max_scores=True)
        out, stats = flex_attention(q, k, v, self.mod, inside, enable_gqa=True, return_aux=aux)
        return out, stats.lse, stats.max_scores


class Callable:
    def __init__(self, slopes):
        self.slopes = slopes

    def __call__(self, score, b, h, i, j):
        return score * 2 + self.slopes[h]


def with_slopes(slopes, factor, score, b, h, i, j):
    return score * factor + slopes[h]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["object", "partial", "method"])
def test_mods_that_are_objects(kind, dtype):
    model = Slopes()
    slopes = model.slopes
    mods = {"object": Callable(slopes), "partial": functools.partial(with_slopes, slopes, 0.5), "method": model.mod}

    def function(q, k, v):
        out, aux = flex_attention(q, k, v, mods[kind], enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    tensors = inputs(33, dtype)
    same(function, compiled, [*tensors, slopes], *tensors)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_a_graph(use_reentrant):
    model, tensors = Slopes(), inputs(33)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for function in (model, lambda *args: checkpoint(compiled, *args, use_reentrant=use_reentrant)):
        leaves = [*tensors, model.slopes]
        for x in leaves:
            x.grad = None
        out, lse, _ = function(*tensors)
        (out.sin().sum() + lse.sum()).backward()
        found.append([out, lse, *(x.grad for x in leaves)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    model, tensors = Slopes(), [x.detach() for x in inputs(20)]
    length = {2: torch.export.Dim("length", min=2, max=99)}
    program = torch.export.export(model, tuple(tensors), dynamic_shapes=dict.fromkeys("qkv", length), strict=strict)
    for n in (20, 57):
        tensors = [x.detach() for x in inputs(n)]
        for got, want in zip(program.module()(*tensors), model(*tensors), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mod", [
    lambda s, b, h, i, j: torch.lgamma(s), lambda s, b, h, i, j: s.cumsum(0),
], ids=["lgamma", "cumsum"])  # fmt: skip
def test_a_mod_that_is_refused_is_named_without_fullgraph(mod):
    """Dynamo then calls the operator with the mod itself."""
    torch._dynamo.reset()
    q = torch.randn(1, 1, 9, 8)
    with pytest.raises(NotImplementedError, match="a mod cannot use (lgamma|cumsum).*test_flex_compile.py, line"):
        torch.compile(lambda: flex_attention(q, q, q, mod), backend="eager")()


def test_dynamo_does_not_read_the_programs_behind_a_refused_mod(monkeypatch):
    """Garbage collection drops programs at any time, and Dynamo fails if a dictionary changes that it reads."""
    read, build = [], VariableBuilder.__call__
    monkeypatch.setattr(VariableBuilder, "__call__", lambda self, value: read.append(value) or build(self, value))
    torch._dynamo.reset()
    q = torch.randn(1, 1, 9, 8)
    compiled = torch.compile(lambda: flex_attention(q, q, q, lambda s, b, h, i, j: torch.lgamma(s)), backend="eager")
    with pytest.raises(NotImplementedError, match="a mod cannot use lgamma"):
        compiled()
    assert any(x is q for x in read)
    assert not any(x is graph._programs or x is graph._programs.data for x in read)


def test_a_mod_that_only_dynamo_refuses_runs_without_fullgraph():
    def counts(score, b, h, i, j):
        counts.calls += 1
        return score * 2

    counts.calls = 0
    torch._dynamo.reset()
    q = torch.randn(1, 1, 9, 8)
    compiled = torch.compile(lambda: flex_attention(q, q, q, counts), backend="eager")
    want = flex_attention(q, q, q, lambda score, b, h, i, j: score * 2)
    for _ in range(2):
        torch.testing.assert_close(compiled(), want)
    assert counts.calls == 2
