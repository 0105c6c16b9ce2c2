"""What the tracer refuses, and the words of its errors."""

import fractions
import types

import fresh_python
import pytest
import torch
from oracle_flex import evaluated

from flash_attn import flash_attn_func
from flash_attn.flex import tracer
from flash_attn.flex_attention import create_block_mask, create_mask, flex_attention


def refused(mod, error, message):
    with pytest.raises(error, match=message) as caught:
        tracer.program_of(mod)
    text = str(caught.value)
    assert "refused_mod" in text and "test_tracer_errors.py, line " in text
    assert int(text.rpartition("line ")[2]) > mod.__code__.co_firstlineno


def test_a_branch_on_an_index_is_refused():
    def refused_mod(b, h, q, k):
        return q if q > k else k

    refused(refused_mod, RuntimeError, "use &, |, ~ or torch.where".replace("|", r"\|"))

    def refused_mod(b, h, q, k):
        return q >= k and k >= 0

    refused(refused_mod, RuntimeError, "must not branch")


@pytest.mark.parametrize(
    "use",
    [
        lambda q, k: q.item(),
        lambda q, k: int(q),
        lambda q, k: [1, 2, 3][q],
        lambda q, k: {0: 1}[q],
        lambda q, k: q in {1, 2},
        lambda q, k: torch.arange(9)[q:][0],
        lambda q, k: torch.arange(9)[:, None][1 : q + 1, 0].sum(),
        lambda q, k: torch.arange(9)[::q].sum(),
    ],
)
def test_the_value_of_an_index_is_not_known(use):
    def refused_mod(b, h, q, k):
        return use(q, k) > k

    with pytest.raises(RuntimeError, match="is not known while a mod is traced.*refused_mod"):
        tracer.program_of(refused_mod)


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda x: torch.rand(()) < x, "rand"),
        (lambda x: torch.rand_like(x.float()) < 0.5, "rand_like"),
        (lambda x: torch.sort(x), "sort"),
        (lambda x: x.cumsum(0), "cumsum"),
        (lambda x: x.add_(1), "add_"),
        (lambda x: x[None].float().view(torch.int32)[0] > 3, "view with a dtype"),
        (lambda x: torch.lgamma(x), "lgamma"),
        (lambda x: torch.zeros(9, dtype=torch.float8_e5m2)[x] > 3, "float8_e5m2"),
    ],
)
def test_an_operation_that_is_not_supported_is_named(use, name):
    def refused_mod(b, h, q, k):
        return use(q)

    with pytest.raises(NotImplementedError, match=f"{name}.*refused_mod, .*test_tracer_errors.py, line"):
        tracer.program_of(refused_mod)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.expand(2000).amax(),
        lambda x: x.expand(2, 600).sum(1)[0],
        lambda x: (x.expand(2000) + 1)[7],
        lambda x: (x + torch.zeros(4, 500))[1, 1],
        lambda x: x.new_zeros(2000).sum() + x,
    ],
)
def test_long_vectors_are_refused(use):
    """Each element would have instructions of its own."""

    def refused_mod(b, h, q, k):
        return use(q) > k

    with pytest.raises(NotImplementedError, match="at most 1024 elements, not a tensor of shape .*refused_mod, .*line"):
        tracer.program_of(refused_mod)
    tracer.program_of(lambda b, h, q, k: q.expand(1024).amax() > k)


def test_errors_of_torch_name_the_mod():
    def refused_mod(b, h, q, k):
        return (q > k) - (k > q)

    refused(refused_mod, RuntimeError, "Subtraction")
    table = torch.arange(9)

    def refused_mod(b, h, q, k):
        return table[q, k] > 0

    refused(refused_mod, IndexError, "too many indices")

    def refused_mod(b, h, q, k):
        return q.greater_than(k)

    refused(refused_mod, AttributeError, "a tensor has no attribute 'greater_than'")

    def refused_mod(b, h, q, k):
        return table.greater_than(k)

    refused(refused_mod, AttributeError, "a tensor has no attribute 'greater_than'")

    def refused_mod(b, h, q, k):
        table[0] = 1
        return q >= k

    refused(refused_mod, NotImplementedError, "must not write")


def _distance(q, k):
    return q - k


class Near:
    def sees(self, b, h, q, k):
        return q >= k


BARE, AREA, ROWS, SIDE = types.SimpleNamespace(), Near(), torch.ones(3, 2), 3
MISTAKES = {
    "an attribute of an object": (lambda q: BARE.reach, "'types.SimpleNamespace' object has no attribute 'reach'"),
    "an attribute of a function": (lambda q: _distance.reach, "'function' object has no attribute 'reach'"),
    "an attribute of a number": (lambda q: SIDE.reach, "'int' object has no attribute 'reach'"),
    "a call of a function": (lambda q: _distance(q), r"_distance\(\) missing 1 required positional argument: 'k'"),
    "a call of a method": (lambda q: AREA.sees(q), r"Near.sees\(\) missing 3 required"),
    "getattr": (lambda q: getattr(BARE), "getattr expected at least 2 arguments, got 1"),
    "getattr by a word": (lambda q: getattr(BARE, "x", default=1), r"getattr\(\) takes no keyword"),
    "isinstance": (lambda q: isinstance(BARE), r"isinstance\(\) missing 1"),
    "a quotient": (lambda q: fractions.Fraction(SIDE, 2), "fractions sees an object of the tracer .*float.x"),
    "vmap": (lambda q: torch.vmap(torch.sum)(ROWS)[0], "vmap sees an object of the tracer .*outside of the mod"),
    "a value": (lambda q: range("far"), "'str' object cannot be interpreted as an integer"),
}


@pytest.mark.parametrize("use, message", MISTAKES.values(), ids=MISTAKES)
def test_errors_of_python_name_the_mod(use, message):
    def refused_mod(b, h, q, k):
        return q >= use(q)

    with pytest.raises(
        (TypeError, AttributeError, ValueError), match=f"{message}.*: .*refused_mod, .*py, line [0-9]+$"
    ):
        tracer.program_of(refused_mod)
    assert tracer.program_of(lambda b, h, q, k: q >= fractions.Fraction(int(SIDE), 2).numerator)


def test_reductions_of_one_element_and_of_none():
    """A value may have no dimension, or a dimension of size 0."""
    table = torch.randn(9, 3)

    def one(score, b, h, i, j):
        x = table[i, 2]
        return score + x.sum() + x.amax(-1) + x.mean() + x.prod() + torch.where(x.any() & x.all(), x.amin(), 0.0)

    def none(score, b, h, i, j):
        rows = torch.stack([table[i][:0], table[j][:0]])
        return score + rows.sum() + rows.prod() + rows.any() + rows.all() + rows.sum(1)[1] + rows.sum(0).sum()

    def mean_of_none(score, b, h, i, j):
        return score + table[i][:0].mean()

    scores = torch.randn(1, 1, 9, 5)
    x = table[:, 2:]
    assert torch.allclose(evaluated(one, scores.shape, scores), scores + torch.where(x != 0, 5, 4) * x, atol=1e-5)
    assert torch.allclose(evaluated(none, scores.shape, scores), scores + 2, atol=1e-5)
    assert evaluated(mean_of_none, scores.shape, scores).isnan().all()


def test_numbers_that_no_mod_can_use():
    far = 2**63

    def refused_mod(b, h, q, k):
        return q < far

    refused(refused_mod, OverflowError, "an integer of 65 bits; write a float")

    def refused_mod(b, h, q, k):
        return q + 2**70 > k

    refused(refused_mod, OverflowError, "too big")

    def refused_mod(b, h, q, k):
        return 1j + q > k

    refused(refused_mod, TypeError, "a mod cannot use a complex")

    def refused_mod(b, h, q, k):
        return q.float() & 1 > k

    refused(refused_mod, TypeError, "bitwise_and with torch.float32")

    def make(bound):
        return lambda b, h, q, k: q < bound

    assert create_mask(make(2**63 - 1), 1, 1, 3, 3, "cpu").all()
    with pytest.raises(OverflowError, match="a mod cannot use an integer of more than 64 bits; write a float"):
        create_mask(make(2**63), 1, 1, 3, 3, "cpu")


FALLBACKS = """
import sys, torch
from flash_attn.flex_attention import create_mask

table = torch.randn(9, 3)
create_mask(lambda b, h, i, j: (i % 0 == j // 0) | (torch.fmod(i, 0) > (j + 1) ** -1), 1, 1, 4, 4, "cpu")
create_mask(lambda b, h, i, j: i.to("cuda") > j.to(device="cuda:1", dtype=torch.int32), 1, 1, 4, 4, "cpu")
for wrong in (lambda i: (table[i] + 1)[3], lambda i: table[i].sum(1), lambda i: table[i].to(torch.uint16)[0]):
    try:
        create_mask(lambda b, h, i, j: wrong(i) > 0, 1, 1, 4, 4, "cpu")
        print("not refused")
    except (IndexError, RuntimeError) as error:
        assert "<string>, line" in str(error), error
print(*(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""


def test_what_the_cpu_refuses_needs_no_compiler():
    """Divisions by a number 0, devices by name, and wrong indices."""
    done = fresh_python.python(FALLBACKS)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_default_device_is_not_that_of_the_tracer():
    """A mod is traced with tensors on the CPU, whatever device PyTorch's factories have by default."""
    table, pairs = torch.randn(2, 40), torch.randn(40, 3)
    q, k, v = torch.randn(3, 1, 2, 40, 16)

    def score_mod(score, b, h, i, j):
        return score + table[h, (i - j).abs()] + pairs[torch.stack([i, j])].sum()

    def mask_mod(b, h, i, j):
        return (i >= j) | (pairs[j, 1] > 0)

    with torch.device("meta"):
        block_mask = create_block_mask(mask_mod, None, None, 40, 40, "cpu")
        mask = create_mask(mask_mod, None, None, 40, 40, "cpu")
        scores = create_mask(score_mod, 1, 2, 40, 40, "cpu")
        out = flex_attention(q, k, v, score_mod, block_mask)
        with_bias = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), attn_bias=table[:, None])
    assert mask[0, 0].equal((torch.arange(40) <= torch.arange(40)[:, None]) | (pairs[:, 1] > 0)) and scores.all()
    assert out.equal(flex_attention(q, k, v, score_mod, block_mask))
    assert with_bias.equal(flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), attn_bias=table[:, None]))
