"""The evaluator against torch: fuzzed expressions, single functions, gathers, and texts that are no programs."""

import random
import struct

import flash_attn_2_cuda
import pytest
import torch
from harness_flex import FUNCTIONS, INTEGERS, expression, mixed_expression, tables
from oracle_flex import evaluated, expected

from flash_attn.flex import program, tracer

SHAPE = (2, 3, 5, 131)


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


@pytest.mark.parametrize("seed", range(120))
def test_an_expression_of_mixed_dtypes_has_torchs_values(seed):
    """What torch refuses for its dtypes tells nothing, and one in three is refused."""
    rng, all_tables = random.Random(seed), {str(dtype): x for dtype, x in tables(seed).items()}
    table = torch.randint(-50, 50, (37,), generator=torch.Generator().manual_seed(seed))
    root = mixed_expression(rng, rng.randint(1, 5), ["q", "k", "h", *all_tables])

    def mod(b, h, q, k):
        at = (q * 7 + k * 3 + b) % 64
        return root({"q": q - 3, "k": k, "h": h, "table": table} | {name: x[at] for name, x in all_tables.items()})

    try:
        want = expected(mod, SHAPE)
    except (RuntimeError, NotImplementedError):
        return
    got = evaluated(mod, SHAPE)
    assert got.dtype == want.dtype
    rtol = 1e-6 if want.dtype.is_floating_point else 0  # torch multiplies with a reciprocal instead of dividing
    torch.testing.assert_close(got, want, rtol=rtol, atol=0, equal_nan=True)


POWERS = [lambda x: x**0, lambda x: x**1, lambda x: x**2, lambda x: x**3, lambda x: x**5, lambda x: x**2.0]
POWERS += [lambda x: torch.pow(x, 2)]


@pytest.mark.parametrize("power", POWERS)
def test_a_power_has_torchs_dtype(power):
    """That of a bool is an integer: the sum of two is 2."""

    def is_below(q, k):
        return q >= k

    for base in (is_below, lambda q, k: (q - k).to(torch.int8), lambda q, k: (q - k).double()):

        def mod(b, h, q, k, base=base):
            x = power(base(q, k))
            return x + x

        want, got = expected(mod, (1, 1, 5, 9)), evaluated(mod, (1, 1, 5, 9))
        assert got.dtype == want.dtype and torch.equal(got, want)


WITH_ARGUMENTS = {
    "max of two": lambda x, y: torch.max(x, y),
    "min of two": lambda x, y: torch.min(x, other=y) + x.min(y),
    "amax": lambda x, y: torch.stack([x + 0 * y, y + 0 * x]).amax(dim=0),
    "decimals": lambda x, y: torch.round(x * 0.3, decimals=1) + (y * 0.37).round(decimals=2),
    "decimals before the point": lambda x, y: torch.round(x * 7.5, decimals=-1),
    "names": lambda x, y: torch.sub(input=x, other=y, alpha=3) + torch.div(x, other=y + 9, rounding_mode="floor"),
    "exponent": lambda x, y: torch.pow(x, exponent=4) + torch.pow(input=x, exponent=2) + torch.pow(x, exponent=0.5),
    "condition": lambda x, y: torch.where(condition=x > y, input=x, other=y),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2) + torch.rsub(x, 7, alpha=3) + torch.rsub(x, other=y),
}


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_every_argument_counts(name):
    def mod(b, h, q, k):
        return WITH_ARGUMENTS[name](q, k - 3)

    want, got = expected(mod, (1, 1, 9, 12)), evaluated(mod, (1, 1, 9, 12))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


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
    for wrong in ((), (table.int(),), (table.repeat(2, 1),), (3,)):
        with pytest.raises((RuntimeError, TypeError)):
            run(traced.text, wrong, numbers, out)
    for wrong in (traced.text.hex(), None, 3):
        with pytest.raises(TypeError, match="a program is bytes"):
            run(wrong, tensors, numbers, out)
    for wrong in (out.float(), out[0], out.transpose(2, 3), out.expand(2, 1, 2, 3)):
        with pytest.raises(RuntimeError):
            run(traced.text, tensors, numbers, wrong)
