"""Derivatives of score_mods against torch.autograd: of the score and of captured tensors."""

import random
import struct

import flash_attn_2_cuda
import oracle_derivative
import pytest
import torch
from oracle_flex import grids
from score_catalogue import SCORES
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from flash_attn.flex import program, tracer
from flash_attn.flex.derivative import derivative_of

SHAPE = (2, 3, 7, 9)


def of_torch(mod, leaves, score, grad):
    """The gradients of the score and of the leaves, by torch in fp64."""
    score = score.double().requires_grad_()
    with TransformGetItemToIndex():
        out = _vmap_for_bhqkv(getattr(mod, "for_torch", mod), prefix=(0,))(
            score, *(torch.arange(n) for n in score.shape)
        )
    if not out.requires_grad:
        return [torch.zeros_like(score), *map(torch.zeros_like, leaves)]
    found = torch.autograd.grad(out, [score, *leaves], grad.to(out.dtype).expand(out.shape), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, [score, *leaves])]


def of_program(mod, leaves, score, grad):
    """The same by the derivative's instructions."""
    traced, tensors, numbers = tracer.program_of(mod, score.dtype)
    wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    text, order = derivative_of(traced, wanted)
    kind = flash_attn_2_cuda.flex_check(text)
    assert kind == str(score.dtype)[6:]
    taken = [tensors[i] for i in order]
    got, sums = oracle_derivative.run(text, taken, numbers, grids(*score.shape), score, grad)
    assert {order[i] for i in sums} <= set(wanted)
    if not leaves:
        return [got]
    parts = [(taken[i], total.to(taken[i].dtype)) for i, total in sums.items()]
    if not parts:
        return [got, *map(torch.zeros_like, leaves)]
    found = torch.autograd.grad([x for x, _ in parts], leaves, [g for _, g in parts], allow_unused=True)
    return [got, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves))]


def compare(mod, leaves, score, grad, tolerance=1e-6):
    want, got = of_torch(mod, leaves, score, grad), of_program(mod, leaves, score, grad)
    for has, wants in zip(got, want, strict=True):
        eps = tolerance if wants.dtype != torch.bfloat16 else 1e-2
        torch.testing.assert_close(has.to(wants.dtype), wants, rtol=eps, atol=eps, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", SCORES, ids=lambda make: make.__name__)
def test_a_score_mod_has_torchs_gradients(make, dtype):
    rng = random.Random(SCORES.index(make))
    for _ in range(3):
        mod, leaves = make(rng, SHAPE)
        generator = torch.Generator().manual_seed(rng.randint(0, 99))
        score, grad = (torch.randn(SHAPE, generator=generator, dtype=dtype) * 2 for _ in range(2))
        compare(mod, leaves, score, grad, 1e-5)


@pytest.mark.parametrize("make", SCORES, ids=lambda make: make.__name__)
def test_a_pair_without_a_gradient_adds_nothing(make):
    mod, leaves = make(random.Random(1), SHAPE)
    score = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1e30, -1e30, 3.0]).view(7, 1).expand(SHAPE)
    for has in of_program(mod, leaves, score.contiguous(), torch.zeros(SHAPE)):
        assert has.eq(0).all()


def _leaf(*values):
    return torch.tensor(values, requires_grad=True)


TIES = {
    "relu": (lambda x, y: torch.relu(x), _leaf(1.0)),
    "maximum": (lambda x, y: torch.maximum(x, y), _leaf(0.0, 1.0, -1.0)),
    "minimum": (lambda x, y: torch.minimum(x, y), _leaf(0.0, 1.0, -1.0)),
    "amax": (lambda x, y: torch.stack([x, y + 0 * x, x * y, x]).amax(0), _leaf(0.0, 1.0, -1.0)),
    "min": (lambda x, y: torch.min(torch.stack([y + 0 * x, x * 0, x, x * y]).amin(0), y), _leaf(0.0, 1.0, -1.0)),
    "clamp": (lambda x, y: x.clamp(-1, 1), _leaf(1.0)),
    "clamp by tensors": (lambda x, y: torch.clamp(x, min=y, max=y + 1), _leaf(0.0, 1.0, -1.0)),
    "clamp by equal tensors": (lambda x, y: torch.clamp(x, min=y, max=y * 1), _leaf(0.0, 1.0, -1.0)),
    "clamp by the score": (lambda x, y: torch.clamp(y * 2, min=x, max=x), _leaf(0.0, 1.0, -1.0)),
    "clamp by bounds that cross": (lambda x, y: torch.clamp(x, min=y, max=-y), _leaf(0.0, 1.0, -1.0)),
    "abs": (lambda x, y: x.abs() * y, _leaf(2.0)),
    "sign and rounding": (lambda x, y: x.sign() * y + x.floor() + x.round() + x.trunc() + x.ceil(), _leaf(2.0)),
    "comparisons": (lambda x, y: (x > 0) * y + (x >= y) * x, _leaf(2.0, 1.0)),
    "conversions": (lambda x, y: x.int() * y + x.double() + x.to(torch.int64).to(x.dtype), _leaf(2.0)),
    "remainder": (lambda x, y: x % y + torch.remainder(y, x + 0.25), _leaf(2.0, -1.5, 0.7)),
    "fmod": (lambda x, y: torch.fmod(x, y) + torch.fmod(y, x + 0.25), _leaf(2.0, -1.5, 0.7)),
    "rounded division": (lambda x, y: torch.div(x, y, rounding_mode="floor") * x, _leaf(2.0, -1.5)),
    "truncated division": (lambda x, y: torch.div(x, y, rounding_mode="trunc") * x, _leaf(2.0, -1.5)),
    "pow": (lambda x, y: torch.pow(x.abs(), y), _leaf(0.0, 2.0, 1.5)),
    "pow of a negative base": (lambda x, y: x**2.0 + x**3 + x**-2, _leaf(2.0)),
    "pow of a number": (lambda x, y: 2.0**x * y, _leaf(2.0)),
    "sqrt": (lambda x, y: x.abs().sqrt() + torch.rsqrt(x + 100), _leaf(2.0)),
    "logs": (lambda x, y: sum(f(x.abs() + y) for f in (torch.log, torch.log2, torch.log10, torch.log1p)), _leaf(2.0)),
    "exps": (lambda x, y: torch.exp(x * y) + torch.exp2(x * y) + torch.expm1(x * y), _leaf(0.1, -0.2)),
    "erf, tan": (lambda x, y: torch.erf(x * y) + torch.tan(x / 8) + torch.cos(y) - x.reciprocal(), _leaf(0.5, -1.0)),
    "squares": (lambda x, y: x.square() * y - (x - y) / (y * x), _leaf(2.0)),
    "steep": (lambda x, y: torch.sigmoid(x * 50) + functional.silu(x * y) + functional.softplus(x * 20), _leaf(9.0)),
    "where": (lambda x, y: torch.where(x > y, x * y, y - x).masked_fill(x == 1, 3.0), _leaf(0.0, 1.0)),
    "int": (lambda x, y: torch.zeros_like(x, dtype=torch.int64), _leaf(0.0)),
}


@pytest.mark.parametrize("name", TIES)
def test_ties_and_edges_are_torchs(name):
    function, leaf = TIES[name]
    scores = [-60.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 60.0]
    if name in ("exps", "pow of a number"):
        scores = [max(-3.0, min(x, 3.0)) for x in scores]
    score = torch.tensor(scores).expand(1, 3, 2, 9).contiguous()
    grad = torch.rand(score.shape, generator=torch.Generator().manual_seed(0)) + 0.5

    def mod(score, b, h, q, k):
        return function(score, leaf[h % len(leaf)])

    compare(mod, [leaf], score, grad, 1e-5)


def expression(rng, depth, leaves):
    """Returns a smooth function of the leaves."""
    if depth == 0:
        name = rng.choice(leaves)
        return lambda env: env[name]
    a, b = expression(rng, depth - 1, leaves), expression(rng, depth - 1, leaves)
    number = rng.choice([-1.5, 0.25, 2, 3])
    return rng.choice(
        [
            lambda env: a(env) + b(env),
            lambda env: a(env) - b(env),
            lambda env: a(env) * b(env),
            lambda env: a(env) / (b(env).abs() + 1),
            lambda env: torch.where(a(env) > b(env), a(env), b(env) * number),
            lambda env: torch.maximum(a(env), b(env)),
            lambda env: torch.minimum(a(env), b(env) + number),
            lambda env: a(env).clamp(-2, 2),
            lambda env: torch.remainder(a(env), b(env).abs() + 0.5),
            lambda env: torch.fmod(a(env), number),
            lambda env: torch.tanh(a(env)),
            lambda env: torch.sin(a(env)) + b(env).cos(),
            lambda env: torch.exp(-a(env).abs()),
            lambda env: torch.log1p(a(env).abs()),
            lambda env: (a(env).square() + 1).sqrt(),
            lambda env: torch.sigmoid(a(env)) - b(env),
            lambda env: functional.gelu(a(env)),
            lambda env: functional.softplus(a(env)),
            lambda env: functional.silu(b(env)),
            lambda env: (a(env).abs() + 0.5) ** torch.tanh(b(env)),
            lambda env: a(env).abs() - torch.relu(b(env)),
            lambda env: torch.erf(a(env)) * number,
            lambda env: a(env).floor() + b(env),
            lambda env: a(env).double() * b(env),
        ]
    )


@pytest.mark.parametrize("seed", range(60))
def test_an_expression_has_torchs_gradients(seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    of_heads, table = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (9, 7)))
    leaves = [of_heads.requires_grad_(), table.requires_grad_()]
    root = expression(rng, rng.randint(1, 4), ["score", "score", "heads", "table", "twice", "index"])

    def mod(score, b, h, q, k):
        env = {"score": score, "heads": of_heads[h], "table": table[k, q], "twice": table[(k + q) % 9, 0]}
        return root(env | {"index": (q - k).double() / 4})

    score, grad = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    want = of_torch(mod, leaves, score, grad)
    traced, tensors, _ = tracer.program_of(mod, torch.float64)
    if not tensors:
        leaves, want = [], want[:1]
    used = [x for x in leaves if any(x is tensor for tensor in tensors)]
    got = of_program(mod, used, score, grad)
    want = [want[0], *(w for w, x in zip(want[1:], leaves) if any(x is y for y in used))]
    for has, wants in zip(got, want, strict=True):
        torch.testing.assert_close(has, wants, rtol=1e-8, atol=1e-8)


# ---- texts ---------------------------------------------------------------------------------------------------------


def a_derivative():
    table, number = torch.rand(4, 9, requires_grad=True), 3
    traced, tensors, numbers = tracer.program_of(lambda s, b, h, q, k: s * table[h, k // number], torch.float32)
    return derivative_of(traced, [0])[0], tensors, numbers


def test_a_derivative_is_kept_with_its_program():
    table = torch.rand(9, requires_grad=True)
    traced, _, _ = tracer.program_of(lambda s, b, h, q, k: s * table[k] + table[q], torch.float32)
    assert derivative_of(traced, [0]) is derivative_of(traced, [0])
    with_table, without = derivative_of(traced, [0]), derivative_of(traced)
    assert with_table[1] == without[1] == [0]
    ops = [[op for op, *_ in oracle_derivative.instructions(text)] for text, _ in (with_table, without)]
    assert [names.count("scatter") for names in ops] == [2, 0]
    assert ops[0][-1] != "scatter"


def test_a_type_of_score_has_its_own_program():
    def mod(score, b, h, q, k):
        return score * 1.5

    texts = [tracer.program_of(mod, dtype)[0].text for dtype in (torch.float32, torch.float64)]
    assert [flash_attn_2_cuda.flex_check(text) for text in texts] == ["float32", "float64"]


def test_a_derivative_is_no_mask_and_is_not_evaluated():
    text, tensors, numbers = a_derivative()
    out = torch.empty(1, 1, 2, 3)
    with pytest.raises(RuntimeError, match="flex_evaluate.*derivative"):
        flash_attn_2_cuda.flex_evaluate(text, tensors, numbers, out, out)
    with pytest.raises(RuntimeError, match="flex_classify.*derivative"):
        flash_attn_2_cuda.flex_classify(text, tensors, numbers, (out,) * 8, 1, 1, 2, 3, 1, 1)


def test_bad_words_of_a_derivative_are_refused():
    text, _, _ = a_derivative()
    words, rng, refused = list(struct.unpack(f"={len(text) // 4}I", text)), random.Random(0), 0
    for size in range(len(text)):
        with pytest.raises(RuntimeError, match="program"):
            flash_attn_2_cuda.flex_check(text[:size])
    for place in range(len(words)):
        for value in (0, 1, 2, 3, 5, 7, 255, 256, 1 << 16, (1 << 32) - 1, rng.randrange(1 << 32), words[place] ^ 1):
            changed = struct.pack(f"={len(words)}I", *words[:place], value, *words[place + 1 :])
            try:
                flash_attn_2_cuda.flex_check(changed)
            except RuntimeError:
                refused += 1
    assert refused > len(words)


@pytest.mark.parametrize(
    "capture, instructions, message",
    [
        ((8, 1), [10 | 2 << 8, 11 | 2 << 8, 0, 0, 0], "operand 0 of scatter has type 2"),
        ((8, 1), [1 | 1 << 8, 11 | 2 << 8, 0, 0, 0], "operand 1 of scatter has type 1"),
        ((8, 0), [10 | 2 << 8, 11 | 3 << 8, 0, 0], "capture 0 of the program has another type"),
        ((5, 0), [1 | 1 << 8, 11 | 1 << 8, 0, 0], "scatter does not exist for type 1"),
        ((8, 0), [10 | 1 << 8, 11 | 2 << 8, 0, 0], "grad does not exist for type 1"),
        ((8, 0), [10 | 2 << 8, 11 | 2 << 8, 1, 0], "capture, which must be less than 1"),
        ((8, 0), [10 | 2 << 8, 11 | 2 << 8, 0, 1], "operand, which must be less than 1"),
        ((8, 5), [10 | 2 << 8, 11 | 2 << 8, 0, 0], "operand"),
    ],
)
def test_a_malformed_scatter_says_why(capture, instructions, message):
    words = [program.LIMITS["magic"], 1, 0, 2, *capture, *instructions]
    with pytest.raises(RuntimeError, match=message):
        flash_attn_2_cuda.flex_check(struct.pack(f"={len(words)}I", *words))
