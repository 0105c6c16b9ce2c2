"""The evaluator against torch: fuzzed expressions, single functions, gathers, and texts that are no programs."""

import random
import struct

import flash_attn_2_cuda
import pytest
import torch
from oracle_flex import evaluated, expected

from flash_attn.flex import program, tracer

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SHAPE = (2, 3, 5, 131)


def tables(seed):
    """A table of extreme and small values for each integer dtype, bool, fp32 and fp64."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        table = torch.randint(max(-9, limits.min), 9, (64,), generator=generator).to(dtype)
        table[:4] = torch.tensor([limits.min, limits.max, limits.max - 1, 0], dtype=dtype)
        made[dtype] = table
    made[torch.bool] = torch.rand(64, generator=generator) < 0.5
    for dtype in (torch.float32, torch.float64):
        made[dtype] = torch.randn(64, generator=generator, dtype=dtype) * 8
        made[dtype][:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    return made


def expression(rng, depth, leaves, wants):
    """Returns a function of the leaves. `wants` is "int", "bool" or "real"."""

    def sub(kind):
        return expression(rng, depth - 1, leaves, kind)

    if depth == 0:
        name = rng.choice(leaves[wants])
        return lambda env: env[name]
    if wants == "bool":
        op = rng.choice(["lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "logical", "where", "any"])
        if op in ("and", "or", "xor", "where"):
            a, b, c = sub("bool"), sub("bool"), sub("bool")
            return {
                "and": lambda env: a(env) & b(env),
                "or": lambda env: a(env) | b(env),
                "xor": lambda env: a(env) ^ b(env),
                "where": lambda env: torch.where(c(env), a(env), b(env)),
            }[op]
        if op == "not":
            a = sub("bool")
            return lambda env: ~a(env)
        if op == "logical":
            a, b = sub("int"), sub(rng.choice(["int", "real"]))
            name = rng.choice(["logical_and", "logical_or", "logical_xor"])
            return lambda env: getattr(torch, name)(a(env), b(env))
        if op == "any":
            a, name = sub("real"), rng.choice(["isnan", "isinf", "isneginf", "isposinf", "isfinite"])
            return lambda env: getattr(torch, name)(a(env))
        kind = rng.choice(["int", "real"])
        a, b = sub(kind), sub(kind)
        return lambda env: getattr(torch, op)(a(env), b(env))
    a, b, c = sub(wants), sub(wants), sub("bool")
    low, high = sorted(rng.sample(range(-20, 20), 2))
    shift, bits = rng.choice([-1, 0, 1, 5, 31, 63, 64, 100]), rng.choice([1, 7, -8, 255])

    def divisor(env):
        """torch itself stops at a division by 0, and of the least int64 by -1."""
        x = b(env)
        return torch.where((x == 0) | (x == -1), 3, x)

    both = {
        "add": lambda env: a(env) + b(env),
        "sub": lambda env: a(env) - b(env),
        "mul": lambda env: a(env) * b(env),
        "minimum": lambda env: torch.minimum(a(env), b(env)),
        "maximum": lambda env: torch.maximum(a(env), b(env)),
        "where": lambda env: torch.where(c(env), a(env), b(env)),
        "clamp": lambda env: a(env).clamp(low, high),
        "neg": lambda env: -a(env),
        "abs": lambda env: a(env).abs(),
        "sign": lambda env: a(env).sign(),
        "square": lambda env: a(env).square(),
        "masked_fill": lambda env: a(env).masked_fill(c(env), 1),
    }
    ints = {
        "floor_divide": lambda env: a(env) // divisor(env),
        "remainder": lambda env: a(env) % divisor(env),
        "trunc": lambda env: torch.div(a(env), divisor(env), rounding_mode="trunc"),
        "fmod": lambda env: torch.fmod(a(env), divisor(env)),
        "and": lambda env: a(env) & bits,
        "or": lambda env: a(env) | b(env),
        "xor": lambda env: a(env) ^ b(env),
        "not": lambda env: ~a(env),
        "left": lambda env: a(env) << shift,
        "right": lambda env: a(env) >> shift,
        "shift": lambda env: a(env) >> b(env),
        "pow": lambda env: a(env) ** 3,
        "to": lambda env: a(env).to(torch.int64),
        "int": lambda env: c(env).int(),
    }
    reals = {
        "div": lambda env: a(env) / b(env),
        "floor_divide": lambda env: a(env) // b(env),
        "remainder": lambda env: a(env) % b(env),
        "fmod": lambda env: torch.fmod(a(env), b(env)),
        "floor": lambda env: a(env).floor(),
        "ceil": lambda env: a(env).ceil(),
        "round": lambda env: a(env).round(),
        "trunc": lambda env: a(env).trunc(),
        "relu": lambda env: torch.relu(a(env)),
        "bool": lambda env: c(env).float(),
    }
    choices = both | (ints if wants == "int" else reals)
    return choices[rng.choice(sorted(choices))]


@pytest.mark.parametrize("seed", range(60))
def test_an_expression_has_torchs_values(seed):
    rng, all_tables = random.Random(seed), tables(seed)
    leaves = {
        "int": ["q", "k", "h", *(str(dtype) for dtype in INTEGERS)],
        "bool": [str(torch.bool)],
        "real": [str(torch.float32), str(torch.float64)],
    }
    root = expression(rng, rng.randint(1, 5), leaves, rng.choice(sorted(leaves)))

    def mod(b, h, q, k):
        at = (q * 7 + k * 3 + b) % 64
        env = {"q": q - 3, "k": k, "h": h} | {str(dtype): table[at] for dtype, table in all_tables.items()}
        return root(env)

    want, got = expected(mod, SHAPE), evaluated(mod, SHAPE)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# torch rounds no function exactly, not even sqrt: it may call a vector library.
FUNCTIONS = "sqrt exp exp2 log log2 log10 log1p expm1 tanh sin cos tan erf sigmoid rsqrt reciprocal".split()
FUNCTIONS += ["nn.functional." + name for name in "gelu silu softplus relu".split()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_torchs_values(name, dtype):
    function = torch
    for part in name.split("."):
        function = getattr(function, part)
    x = torch.linspace(-12, 12, 128, dtype=dtype)
    x[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], dtype=dtype)
    # torch's gelu of fp32 is NaN for infinity, and less precise than the formula.
    want = function(x.double()).to(dtype) if "gelu" in name else function(x)
    got = evaluated(lambda b, h, q, k: function(x[k]), (1, 1, 1, 128))[0, 0, 0]
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=8 * eps, atol=8 * eps, equal_nan=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_takes_its_option(approximate):
    def mod(score, b, h, q, k):
        return torch.nn.functional.gelu(score, approximate=approximate)

    scores = torch.randn(1, 2, 5, 140)
    want = mod(scores.double(), *[None] * 4).float()
    torch.testing.assert_close(evaluated(mod, scores.shape, scores), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gather_reads_every_dtype_and_stride(dtype):
    table = (torch.randn(2, 3, 8, 300) * 50).to(dtype)
    views = [table, table.transpose(0, 1)[::2], table[..., ::2], table[:1].expand(4, 3, 8, 300), table[:, :, 2:3, 1:]]
    for view in views:
        got = evaluated(lambda b, h, q, k, view=view: view[b, h, q, k], view.shape)
        assert torch.equal(got, view)


def test_an_index_wraps_once_and_is_clamped():
    table = torch.arange(10, 20)
    got = evaluated(lambda b, h, q, k: table[k], (1, 1, 1, 40), first_kv=-20)[0, 0, 0]
    places = [max(0, k + 10) if k < 0 else min(k, 9) for k in range(-20, 20)]
    assert got.tolist() == table[places].tolist()
    got = evaluated(lambda b, h, q, k: table[:0][k], (1, 1, 1, 4))
    assert got.eq(0).all()


def test_a_division_by_zero_does_not_stop_the_program():
    zero = torch.tensor(0)
    assert evaluated(lambda b, h, q, k: (k // zero) + (k % zero), (1, 1, 2, 200)).eq(0).all()
    least = torch.tensor(torch.iinfo(torch.int64).min)
    assert evaluated(lambda b, h, q, k: (least // (k - 1)) * (k == 0), (1, 1, 1, 1)).item() == least.item()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_give_the_same_bits(threads):
    before = torch.get_num_threads()
    slopes = torch.rand(3)

    def mod(score, b, h, q, k):
        return torch.tanh(score / 20) * 20 - slopes[h] * (q - k).abs()

    scores = torch.randn(2, 3, 300, 257)
    torch.set_num_threads(threads)
    try:
        got = evaluated(mod, scores.shape, scores)
    finally:
        torch.set_num_threads(before)
    one = torch.cat(
        [
            evaluated(
                lambda s, b, h, q, k, i=i: mod(s, b, h + i, q, k), (2, 1, 300, 257), scores[:, i : i + 1].contiguous()
            )
            for i in range(3)
        ],
        1,
    )
    assert torch.equal(got, one)


# ---- texts that are no programs -----------------------------------------------------------------------------------


def a_program():
    table = torch.rand(4, 9) < 0.5
    number = 3
    text = tracer.program_of(lambda b, h, q, k: table[h, k // number] & (q + 1.5 >= k))[0].text
    return text


def test_every_beginning_of_a_program_is_refused():
    text = a_program()
    assert flash_attn_2_cuda.flex_check(text) == "bool"
    for size in range(len(text)):
        with pytest.raises(RuntimeError, match="program"):
            flash_attn_2_cuda.flex_check(text[:size])
    with pytest.raises(RuntimeError, match="after its last instruction"):
        flash_attn_2_cuda.flex_check(text + b"\0\0\0\0")


def test_a_changed_word_is_refused_or_runs():
    text, table = a_program(), torch.rand(4, 9) < 0.5
    words, rng, refused = list(struct.unpack(f"={len(text) // 4}I", text)), random.Random(0), 0
    dtypes = ["bool", "int64", "float32", "float64"]
    for place in range(len(words)):
        for value in (0, 1, 2, 3, 7, 255, 256, 1 << 16, (1 << 32) - 1, rng.randrange(1 << 32), words[place] ^ 1):
            changed = struct.pack(f"={len(words)}I", *words[:place], value, *words[place + 1 :])
            try:
                out = torch.empty(1, 2, 3, 140, dtype=getattr(torch, flash_attn_2_cuda.flex_check(changed)))
                assert str(out.dtype)[6:] in dtypes
                flash_attn_2_cuda.flex_evaluate(changed, (table,), (3,), out, torch.zeros(1, 2, 3, 140))
            except (RuntimeError, TypeError):
                refused += 1
    assert refused > len(words)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"abc", "not a multiple of 4"),
        (struct.pack("=4I", 1, 0, 0, 1), "not a program"),
        (struct.pack("=4I", program.LIMITS["magic"], 0, 0, 0), "no instructions"),
        (struct.pack("=4I", program.LIMITS["magic"], 1000, 0, 1), "number of captures"),
        (struct.pack("=5I", program.LIMITS["magic"], 0, 0, 1, 127 | 256), "unknown op"),
        (struct.pack("=5I", program.LIMITS["magic"], 0, 0, 1, program.OPS["sqrt"] | 256), "does not exist for type"),
        (struct.pack("=6I", program.LIMITS["magic"], 0, 0, 1, program.OPS["neg"] | 256, 0), "operand"),
    ],
)
def test_a_malformed_program_says_why(text, message):
    with pytest.raises(RuntimeError, match=message):
        flash_attn_2_cuda.flex_check(text)


def test_wrong_tensors_are_refused():
    table = torch.arange(9)
    traced, tensors, numbers = tracer.program_of(lambda b, h, q, k: table[k])
    out = torch.empty(1, 1, 2, 3, dtype=torch.int64)
    run = flash_attn_2_cuda.flex_evaluate
    for wrong in ((), (table.int(),), (table[None],), (3,)):
        with pytest.raises((RuntimeError, TypeError)):
            run(traced.text, wrong, numbers, out)
    for wrong in (traced.text.hex(), None, 3):
        with pytest.raises(TypeError, match="a program is bytes"):
            run(wrong, tensors, numbers, out)
    for wrong in (out.float(), out[0], out.transpose(2, 3), out.expand(2, 1, 2, 3)):
        with pytest.raises(RuntimeError):
            run(traced.text, tensors, numbers, wrong)
