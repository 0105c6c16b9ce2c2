"""CUDA C texts of programs, compiled for the CPU, against flex_evaluate and the oracle of derivatives."""

import ctypes
import math
import random
import shutil
import subprocess
from pathlib import Path

import flash_attn_2_cuda
import oracle_derivative
import pytest
import torch
from catalogue import CATALOGUE
from harness_flex import FUNCTIONS, INTEGERS, expression, tables
from oracle_flex import evaluated, grids
from score_catalogue import SCORES

from flash_attn.flex import tracer
from flash_attn.flex.derivative import derivative_of

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (2, 3, 7, 70)
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")

ENTRY = """
extern "C" void run(const flex_values *x, const long long *shape, const float *score, const float *grad, void *out) {
    long long i = 0;
    for (int b = 0; b < shape[0]; b++)
        for (int h = 0; h < shape[1]; h++) {
            BEGIN
            for (int q = 0; q < shape[2]; q++)
                for (int k = 0; k < shape[3]; k++, i++) ((RESULT *)out)[i] = VALUE;
            END
        }
}
"""


def part(mod, score=None):
    program, tensors, numbers = tracer.program_of(mod, score)
    return program.text, tensors, numbers


def compiled(texts, folder, begin, result, value, end):
    """A function for each text. One compiler takes all texts, each in a namespace of its own."""
    entry = ENTRY.replace("BEGIN", begin).replace("RESULT", result).replace("VALUE", value).replace("END", end)
    number = len(list(folder.iterdir()))
    source, library = folder / f"text{number}.cpp", folder / f"text{number}.so"
    parts = [f"namespace of_{i} {{\n{text}{entry.replace('run(', f'run_{i}(')}}}\n" for i, text in enumerate(texts)]
    source.write_text("".join(['#include "flex_device.h"\n#include "flex_values.cuh"\n', *parts]))
    folders = [f"-I{ROOT / 'tests/c'}", f"-I{ROOT / 'csrc/cuda'}"]
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-DFLEX_DEVICE_ALONE", *folders]
    subprocess.run([*command, "-o", library, source], check=True)
    return [getattr(ctypes.CDLL(library), f"run_{i}") for i in range(len(texts))]


def run(made, folder, out, score=None, grad=None, begin="", value="", end=""):
    """Compiles a text and runs it for every index of `out`."""
    return run_all([made], folder, [out], [score], grad, begin, value, end)[0]


def run_all(made, folder, outs, scores, grad=None, begin="", value="", end=""):
    """Compiles texts and runs each for every index of its element of `outs`."""
    names = {torch.bool: "bool", torch.float32: "float"}
    functions = compiled([text for text, _ in made], folder, begin, names[outs[0].dtype], value, end)
    for function, (_, values), out, score in zip(functions, made, outs, scores, strict=True):
        words = (ctypes.c_longlong * (len(values) // 8)).from_buffer_copy(values)
        pointers = [ctypes.c_void_p(x.data_ptr() if x is not None else None) for x in (score, grad, out)]
        function(words, (ctypes.c_longlong * 4)(*out.shape), *pointers)
    return outs


def masked_by_all(mods, folder, shape=SHAPE):
    bound = list(map(part, mods))
    made = [flash_attn_2_cuda.flex_source(None, each, None) for each in bound]
    outs = [torch.empty(shape, dtype=torch.bool) for _ in mods]
    return run_all(made, folder, outs, [None] * len(mods), value="flex_mask(*x, b, h, q, k)")


def scored(mod, folder, score):
    return scored_by_all([mod], folder, score)[0]


def scored_by_all(mods, folder, score):
    bound = [part(mod, torch.float32) for mod in mods]  # their tensors must live as long as the values
    made = [flash_attn_2_cuda.flex_source(each, None, None) for each in bound]
    scores, outs = [score] * len(mods), [torch.empty_like(score) for _ in mods]
    return run_all(made, folder, outs, scores, value="flex_score(*x, score[i], b, h, q, k)")


def close(got, want, name, **tolerances):
    torch.testing.assert_close(got, want, equal_nan=True, msg=lambda text: f"{name}: {text}", **tolerances)


def test_masks_have_their_programs_values(tmp_path):
    mods = [make(random.Random(3), SHAPE) for make in CATALOGUE]
    for make, mod, got in zip(CATALOGUE, mods, masked_by_all(mods, tmp_path), strict=True):
        assert torch.equal(got, evaluated(mod, SHAPE)), make.__name__


def test_scores_have_their_programs_values(tmp_path):
    mods = [make(random.Random(3), SHAPE)[0] for make in SCORES]
    score = torch.randn(SHAPE) * 4
    score[0, 0, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for make, mod, got in zip(SCORES, mods, scored_by_all(mods, tmp_path, score), strict=True):
        close(got, evaluated(mod, SHAPE, score).float(), make.__name__, rtol=1e-6, atol=1e-6)


def test_divisors_that_all_pairs_share(tmp_path):
    """Quotients and remainders by a captured number are products with a factor. They round down, also below 0."""
    divisors = [-(2**28) + 1, -1000003, -7, -2, -1, 0, 1, 2, 3, 7, 64, 4096, 46341, 1000003, 2**28 - 1]
    table = torch.tensor([7, -3, 0], dtype=torch.int32)
    large = torch.randint(-(2**31), 2**31, (SHAPE[3],), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    large[:4] = torch.tensor([-(2**31), 2**31 - 1, -(2**31) + 1, 0])

    def mod_of(n):
        return lambda s, b, h, q, k: s * 0 + ((q - k) * 3 - b) // n - (large[k] % n) % 65521

    def of_table(s, b, h, q, k):
        return s * 0 + ((q - 5) * 1001 - k) // table[h] + large[k] % table[b]

    mods = [*map(mod_of, divisors), of_table, lambda s, b, h, q, k: s * 0 + (large[k] // 3 + large[k] // -2) % 65521]
    score = torch.zeros(SHAPE)
    for mod, got in zip(mods, scored_by_all(mods, tmp_path, score), strict=True):
        assert torch.equal(got, evaluated(mod, SHAPE, score).float())
    text, _ = flash_attn_2_cuda.flex_source(part(mods[0], torch.float32), None, None)
    assert "flex_floor_divide_by" in text and "flex_remainder_by" in text


@pytest.mark.parametrize("large", ["number", "capture", "empty", None])
def test_a_text_of_64_bits_serves_what_is_large(large, tmp_path):
    """Large numbers, captures whose places need 64 bits, and captures without elements. Other calls have 32 bits."""
    table = torch.randn(3, 100)
    if large == "capture":
        table = torch.randn(100).as_strided((2**32, 100), (0, 1))
    n = 2**40 if large == "number" else 30
    nothing = torch.zeros(0 if large == "empty" else 3)
    mod = lambda s, b, h, q, k: s + table[h, (k - q + n) % 100] * (q - k + n) + nothing[h]  # noqa: E731
    score = torch.randn(SHAPE)
    torch.testing.assert_close(scored(mod, tmp_path, score), evaluated(mod, SHAPE, score), rtol=1e-6, atol=1e-6)
    text, _ = flash_attn_2_cuda.flex_source(part(mod, torch.float32), None, None)
    assert ("flex_load_if" in text) == (large is not None) and ("(int)x.words" in text) == (large is None)


def random_expression(seed):
    """(kind of the result, function of a score and its indices)"""
    rng, all_tables = random.Random(seed), tables(seed)
    leaves = {
        "int": ["q", "k", "h", *(str(dtype) for dtype in INTEGERS)],
        "bool": [str(torch.bool)],
        "real": [str(torch.float32), str(torch.float64)],
    }
    kind = rng.choice(sorted(leaves))
    root = expression(rng, rng.randint(1, 5), leaves, kind)

    def mod(score, b, h, q, k):
        at = (q * 7 + k * 3 + b) % 64
        env = {"q": q - 3, "k": k, "h": h} | {str(dtype): table[at] for dtype, table in all_tables.items()}
        return root(env)

    def mask(b, h, q, k):
        return mod(None, b, h, q, k)

    return kind, mask if kind == "bool" else mod


def test_expressions_have_their_programs_values(tmp_path):
    expressions = {seed: random_expression(seed) for seed in range(20)}
    masks = {seed: mod for seed, (kind, mod) in expressions.items() if kind == "bool"}
    scores = {seed: mod for seed, (kind, mod) in expressions.items() if kind != "bool"}
    for (seed, mod), got in zip(masks.items(), masked_by_all(list(masks.values()), tmp_path), strict=True):
        assert torch.equal(got, evaluated(mod, SHAPE)), seed
    score = torch.zeros(SHAPE)
    for (seed, mod), got in zip(scores.items(), scored_by_all(list(scores.values()), tmp_path, score), strict=True):
        close(got, evaluated(mod, SHAPE, score).float(), seed, rtol=0, atol=0)


def test_functions_have_their_programs_values(tmp_path):
    functions = [torch if "." not in name else torch.nn.functional for name in FUNCTIONS]
    functions = [getattr(home, name.split(".")[-1]) for home, name in zip(functions, FUNCTIONS)]
    score = torch.linspace(-12, 12, 140).repeat(7, 1)[None, None]
    score[..., :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])

    def mod_of(function):
        return lambda score, b, h, q, k: torch.where(q < 3, function(score), function(score.double()).float())

    mods = list(map(mod_of, functions))
    for mod, got in zip(mods, scored_by_all(mods, tmp_path, score), strict=True):
        want = evaluated(mod, score.shape, score)
        torch.testing.assert_close(got, want, rtol=5e-7, atol=5e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gather_reads_every_dtype_and_stride(dtype, tmp_path):
    table = (torch.randn(2, 3, 8, 300) * 50).to(dtype)
    if dtype == torch.float16:
        table[0, 0, 0, :6] = torch.tensor([6e-8, -3e-5, torch.inf, -torch.inf, torch.nan, -0.0], dtype=dtype)
    views = [table, table.transpose(0, 1)[::2], table[..., ::2], table[:1].expand(4, 3, 8, 300), table[:0, :, 2:3, 1:]]

    def mod_of(view):
        return lambda score, b, h, q, k: view[b, h, q, k - 2]

    mods, score = list(map(mod_of, views)), torch.zeros(2, 3, 8, 310)
    for mod, got in zip(mods, scored_by_all(mods, tmp_path, score), strict=True):
        want = evaluated(mod, score.shape, score)
        torch.testing.assert_close(got, want.float(), rtol=0, atol=0, equal_nan=True)


class Derivative:
    """The text of the derivative of a score, next to a mask, with its inputs, gradients and expected results."""

    def __init__(self, make):
        mod, _ = make(random.Random(3), SHAPE)
        program, tensors, numbers = tracer.program_of(mod, torch.float32)
        wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        text, order = derivative_of(program, wanted)
        taken = tuple(tensors[i].detach() for i in order)
        kinds = [torch.float64 if x.dtype == torch.float64 else torch.float32 for x in taken]
        self.gradients = tuple(
            torch.zeros(x.shape, dtype=kind) if i in wanted else None for i, x, kind in zip(order, taken, kinds)
        )
        self.score_part = program.text, tuple(x.detach() for x in tensors), numbers
        self.mask_part = part(CATALOGUE[5](random.Random(3), SHAPE))
        self.derivative = text, taken, numbers
        parts = self.score_part, self.mask_part, self.derivative
        self.made = flash_attn_2_cuda.flex_source(*parts, self.gradients)

    def check(self, got, score, grad, name):
        want, sums = oracle_derivative.run(*self.derivative, grids(*SHAPE), score, grad)
        close(got.double(), want.double(), name, rtol=3e-5, atol=3e-5)
        for i, gradient in enumerate(self.gradients):
            if gradient is not None:
                close(gradient.double(), sums[i], name, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keeps_sums", [False, True])
def test_derivatives_have_their_programs_values(keeps_sums, tmp_path):
    """Next to a score and a mask. The sums of a head may stay in registers until its end."""
    generator = torch.Generator().manual_seed(1)
    score, grad = (torch.randn(SHAPE, generator=generator) * 2 for _ in range(2))
    score[..., 7], grad[..., 7:9] = -torch.inf, 0.0
    arguments = "*x, sums, score[i], grad[i], b, h, q, k" if keeps_sums else "*x, score[i], grad[i], b, h, q, k"
    begin, end = ("flex_sums sums = {};", "flex_add_sums(*x, sums, b, h);") if keeps_sums else ("", "")
    derivatives = [Derivative(make) for make in SCORES]
    made, outs = [each.made for each in derivatives], [torch.empty(SHAPE) for _ in derivatives]
    run_all(made, tmp_path, outs, [score] * len(made), grad, begin, f"flex_derivative({arguments})", end)
    for make, each, got in zip(SCORES, derivatives, outs, strict=True):
        each.check(got, score, grad, make.__name__)


def test_a_score_may_choose_the_element_of_a_gradient(tmp_path):
    """Then pairs cannot be added up before: whoever knows the place has no score."""
    table = torch.randn(2, requires_grad=True)
    made = Derivative(lambda rng, shape: (lambda s, b, h, q, k: s * 0.5 + table[(s > 0).long()], None))
    assert "#define FLEX_PARTS      0\n" in made.made[0]
    score, grad = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(i)) for i in range(2))
    out = torch.empty(SHAPE)
    run(made.made, tmp_path, out, score, grad, value="flex_derivative(*x, score[i], grad[i], b, h, q, k)")
    made.check(out, score, grad, "a table")


SLOPES, TABLE, BY_QUERY = torch.tensor([0.5, -0.25, 3.0]), torch.randn(3, 80), torch.randn(7)
ADDERS = {  # score_mods that are the score plus something: the number of values of a head, and is the sum finite?
    "alibi": (lambda s, b, h, q, k: s - SLOPES[h] * (q - k), 1, True),
    "distances": (lambda s, b, h, q, k: s + -(SLOPES[h] * 0.5) * (q - k).abs() * 2, 1, True),
    "a negated distance": (lambda s, b, h, q, k: 0.1 * -(q - 2 * k + h).abs() + s, 1, True),
    "several terms": (lambda s, b, h, q, k: (s + SLOPES[h]) - (k - 3) * 0.25 - SLOPES[b] * q.clamp(max=5), 2, True),
    "a table": (lambda s, b, h, q, k: s + TABLE[h, q + k], 0, False),
    "a row's value": (lambda s, b, h, q, k: s + SLOPES[h] * BY_QUERY[q], 1, False),
    "a quotient": (lambda s, b, h, q, k: s - SLOPES[h] / (q + k + 1), 1, False),
    "many values": (lambda s, b, h, q, k: s + sum(SLOPES[(h + i) % 3] * q for i in range(5)), 0, True),
    "nothing": (lambda s, b, h, q, k: s + 0.0, 0, True),
    "a chosen infinity": (lambda s, b, h, q, k: s + torch.where(q < k, math.inf, 0.0), 0, False),
    "a chosen value of a head": (lambda s, b, h, q, k: s + torch.where(q < k, SLOPES[h], 0.0), 1, False),
}


def source_of_gradients(mod):
    program, tensors, numbers = tracer.program_of(mod, torch.float32)
    text, order = derivative_of(program)
    taken = tuple(tensors[i] for i in order)
    return flash_attn_2_cuda.flex_source((program.text, tensors, numbers), None, (text, taken, numbers), taken)


def test_sums_in_exponents(tmp_path):
    """What such a score_mod adds, at steps from another pair, against the score_mod's own text."""
    made = {name: source_of_gradients(mod) for name, (mod, _, _) in ADDERS.items()}
    for name, (text, _) in made.items():
        assert f"#define FLEX_HEAD_VALUES {ADDERS[name][1]}\n" in text, name
        assert f"#define FLEX_IS_FINITE   {int(ADDERS[name][2])}\n" in text, name
    begin = "float values[4]; flex_head_values(*x, values, b, h);"
    value = "flex_exponent(*x, values, 0.5f, b, h, q, k, q % 4, k % 16)"
    outs, wants = ([torch.empty(SHAPE) for _ in made] for _ in range(2))
    run_all(list(made.values()), tmp_path, outs, [None] * len(made), begin=begin, value=value)
    run_all(list(made.values()), tmp_path, wants, [None] * len(made), value="flex_score(*x, 0, b, h, q, k)")
    for name, out, want in zip(made, outs, wants, strict=True):
        close(out.double(), 0.5 + want.double() / math.log(2), name, rtol=1e-6, atol=1e-6)


BIAS, SHIFT = torch.randn(SHAPE[2], SHAPE[3]).bfloat16(), torch.linspace(-3, 1, SHAPE[2])
LOWEST = torch.full((SHAPE[1],), torch.finfo(torch.bfloat16).min)
MASKED = torch.where(torch.arange(SHAPE[2])[:, None] % 2 == 0, -1e9, torch.randn(SHAPE[2], SHAPE[3]))
LARGE = {  # score_mods with large terms, of which the sums are small, and what they add
    "terms that cancel each other": (
        lambda s, b, h, q, k: s + MASKED[q, k] - MASKED[q, 0],
        lambda b, h, q, k: MASKED[q, k].double() - MASKED[q, 0].double(),
    ),
    "a mask as a product": (
        lambda s, b, h, q, k: s + (1 - (q >= k).float()) * torch.finfo(torch.float32).min,
        lambda b, h, q, k: torch.where(q >= k, 0.0, -torch.inf),
    ),
    "a mask times finfo.min": (
        lambda s, b, h, q, k: s + (q < k) * LOWEST[h],
        lambda b, h, q, k: torch.where(q >= k, 0.0, -torch.inf),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("is_backward", [False, True])
def test_large_terms_in_exponents(is_backward, name, tmp_path):
    """No rounding of a large term is left where terms cancel each other, and 0 times a large factor is 0."""
    mod, added = LARGE[name]
    made = (
        source_of_gradients(mod) if is_backward else flash_attn_2_cuda.flex_source(part(mod, torch.float32), None, None)
    )
    begin = "float values[4]; flex_head_values(*x, values, b, h);"
    out = run(
        made, tmp_path, torch.empty(SHAPE), begin=begin, value="flex_exponent(*x, values, 0.5f, b, h, q, k, 0, 0)"
    )
    b, h, q, k = (torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(SHAPE))
    want = (0.5 + added(b, h, q, k).double() / math.log(2)).expand(SHAPE)
    is_low = want < -1e38
    assert is_low.any() == ("mask" in name) and (out[is_low] < -1e38).all()
    torch.testing.assert_close(out[~is_low].double(), want[~is_low], rtol=1e-6, atol=1e-6)


CLEARERS = {
    "of_captures": lambda s, b, h, q, k: s + torch.where(SHIFT[q] < -1, -s.detach(), 0.0) + (BIAS[q, k] - SHIFT[q]),
    "of_indices": lambda s, b, h, q, k: s + torch.where((q + h) % 3 == 0, -s, 0.0) + 0.1 * (k - q),
    "of_a_number": lambda s, b, h, q, k: s + torch.where(q * 0.5 > 1, -s, 0.0) + TABLE[h, q + k],
    "of_all_rows": lambda s, b, h, q, k: s + torch.where(SHIFT[0] + (q - q) < -1, -s, 0.0) + TABLE[h, k],
    "alone": lambda s, b, h, q, k: s + torch.where(q > 2, -s.detach(), 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEARERS)
def test_sums_that_clear_the_scores_of_rows(name, tmp_path):
    """The factor of the score and the exponent's sum, against the score_mod elementwise. A backward has neither."""
    mod, score = CLEARERS[name], torch.randn(SHAPE) * 4
    made = flash_attn_2_cuda.flex_source(part(mod, torch.float32), None, None)
    assert "#define FLEX_ADDS       1\n" in made[0] and "#define FLEX_IS_FINITE   0\n" in made[0]
    has_bits = name == "of_captures"
    row, bits = ("flex_row(*x, b, h, q)", ", flex_pair_bits(*x, b, h, q, k)") if has_bits else ("0", "")
    given = f"{bits}, {row}" if has_bits else ""
    value = (
        f"flex_exponent(*x, values, score[i] * LOG2E * flex_score_factor(*x, b, h, q, {row}), b, h, q, k, 0, 0{given})"
    )
    begin = "const float LOG2E = 1.44269504f; float values[4]; flex_head_values(*x, values, b, h);"
    out = run(made, tmp_path, torch.empty(SHAPE), score, begin=begin, value=value)
    close(out.double(), evaluated(mod, SHAPE, score).double() / math.log(2), name, rtol=1e-5, atol=1e-5)
    assert "#define FLEX_ADDS       0\n" in source_of_gradients(mod)[0]


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + torch.where(k > 2, -s, 0.0) + q,  # of keys
        lambda s, b, h, q, k: s + torch.where(s > 2, -s, 0.0) + q,
        lambda s, b, h, q, k: s + torch.where(q > 2, -s, 1.0) + q,
        lambda s, b, h, q, k: s + torch.where(q > 2, 0.0, -s) + q,
        lambda s, b, h, q, k: s + torch.where(q > 2, -2 * s, 0.0) + q,
        lambda s, b, h, q, k: (s + k) + torch.where(q > 2, -s, 0.0),  # k stays
        lambda s, b, h, q, k: s - torch.where(q > 2, -s, 0.0) + q,
        lambda s, b, h, q, k: 2 * s + torch.where(q > 2, -s, 0.0) + q,
    ],
)
def test_other_choices_clear_no_scores(mod):
    text, _ = flash_attn_2_cuda.flex_source(part(mod, torch.float32), None, None)
    assert "#define FLEX_ADDS       0\n" in text


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: 2 * s + q,
        lambda s, b, h, q, k: q - s,
        lambda s, b, h, q, k: torch.where(q > k, s, s + 1),
        lambda s, b, h, q, k: s + s.floor(),
        lambda s, b, h, q, k: torch.tanh(s),
        lambda s, b, h, q, k: s.double() + q,
    ],
)
def test_other_scores_are_no_sums(mod):
    text, _ = source_of_gradients(mod)
    assert "#define FLEX_ADDS       0\n" in text and "flex_exponent" not in text


def everything():
    """A text with most operations."""
    scores, masks = ([make(random.Random(3), SHAPE) for make in makers] for makers in (SCORES, CATALOGUE))
    scores = [mod for mod, _ in scores]

    def mod(score, b, h, q, k):
        return sum(each(score, b, h, q, k) for each in scores)

    def mask(b, h, q, k):
        result = q >= k
        for each in masks:
            result = result ^ each(b, h, q, k)
        return result

    score = tracer.program_of(mod, torch.float32)
    text, order = derivative_of(score[0], [i for i, x in enumerate(score[1]) if x.requires_grad])
    derivative = text, tuple(score[1][i] for i in order), score[2]
    return flash_attn_2_cuda.flex_source((score[0].text, *score[1:]), part(mask), derivative)


def test_the_same_programs_give_the_same_text():
    assert everything()[0] == everything()[0]


def test_no_program_gives_a_text(tmp_path):
    text, values = flash_attn_2_cuda.flex_source(None, None, None)
    assert values == bytes(8)
    assert run((text, values), tmp_path, torch.empty(1, 1, 1, 1), value="1").item() == 1


def test_flex_source_refuses_what_is_no_program():
    table = torch.zeros(3, requires_grad=True)
    traced, tensors, _ = tracer.program_of(lambda s, b, h, q, k: s * table[h], torch.float32)
    text, _ = derivative_of(traced, [0])
    for parts in ((3, None, None), (None, (text,), None), (None, None, (text, (), ())), (text, None, None)):
        with pytest.raises((TypeError, RuntimeError)):
            flash_attn_2_cuda.flex_source(*parts)
    for parts in ((None, (traced.text, tensors, ()), None), ((text, tensors, ()), None, None)):
        with pytest.raises(RuntimeError, match="program of the (mask|score) has the op (score|grad)"):
            flash_attn_2_cuda.flex_source(*parts)
    for gradients in (3, (), (torch.zeros(3, 1),), (torch.zeros(3).double(),)):
        with pytest.raises((TypeError, IndexError, RuntimeError)):
            flash_attn_2_cuda.flex_source(None, None, (text, tensors, ()), gradients)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")
def test_a_text_is_code_for_a_gpu(tmp_path):
    source = tmp_path / "text.cu"
    arguments = "const flex_values x, float score, float grad, int b, int h, int q, int k, float *out"
    value = "flex_mask(x, b, h, q, k) ? flex_score(x, score, b, h, q, k) : flex_derivative(x, score, grad, b, h, q, k)"
    source.write_text(f'{everything()[0]}\nextern "C" __global__ void kernel({arguments}) {{ *out = {value}; }}\n')
    options = ["-cubin", "-arch=sm_90a", "-std=c++17", "-use_fast_math", f"-I{ROOT / 'csrc/cuda'}"]
    subprocess.run(["nvcc", *options, "-Werror=all-warnings", "-o", tmp_path / "text.cubin", source], check=True)
