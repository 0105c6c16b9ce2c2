"""Tracing: the catalogue of mods against torch, and the cache of traces."""

import collections
import enum
import fractions
import functools
import math
import operator
import os
import random
import sys
import types
from pathlib import Path
from typing import NamedTuple

import fresh_python
import numpy as np
import pytest
import torch
from catalogue import CATALOGUE
from oracle_flex import evaluated, expected, vmapped

from flash_attn.flex import tracer
from flash_attn.flex_attention import flex_attention

SHAPE = (2, 2, 70, 140)


@pytest.mark.parametrize("make", CATALOGUE, ids=lambda make: make.__name__)
def test_a_mask_is_torchs(make):
    rng = random.Random(make.__name__)
    mod = make(rng, SHAPE)
    got = evaluated(mod, SHAPE)
    assert got.dtype == torch.bool
    assert torch.equal(got, vmapped(mod, SHAPE))


FIRST_CALLS = """
import random, sys
sys.path[:0] = sys.argv[1:]
import torch
from catalogue import CATALOGUE
from score_catalogue import SCORES
from flash_attn.flex_attention import create_block_mask, flex_attention

b, h, len_q, len_kv = shape = 2, 2, 70, 140
q, k, v = (torch.randn(b, h, n, 16, requires_grad=True) for n in (len_q, len_kv, len_kv))
rng = random.Random(0)
for make in CATALOGUE:
    create_block_mask(make(rng, shape), b, h, len_q, len_kv, device="cpu")
for make in SCORES:
    mod, leaves = make(rng, shape)
    out = flex_attention(q, k, v, score_mod=mod)
    torch.autograd.grad(out.sum(), [q, *leaves], allow_unused=True)
print(*(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""


def test_first_calls_import_no_compiler():
    """The import of torch.compile, which some functions of torch begin with, takes 3 to 5 seconds."""
    folder = Path(__file__).parent
    done = fresh_python.python(FIRST_CALLS, folder, folder.parent)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def scored(make):
    """A score mod: its program, and torch over whole grids of scores."""
    scores = torch.randn(SHAPE)
    got = evaluated(make, SHAPE, scores)
    want = expected(functools.partial(make, scores), SHAPE)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=2e-6, atol=2e-6)


def test_score_mods():
    slopes, bias = torch.rand(2), torch.randn(2, 140, dtype=torch.float64).float()
    distances, table = torch.randint(0, 9, (2, 70, 140)), torch.randn(2, 9)
    scored(lambda s, b, h, q, k: s + torch.exp2(-(h + 1) * 8 / 2) * (k - q))
    scored(lambda s, b, h, q, k: 20 * torch.tanh(s / 20))
    scored(lambda s, b, h, q, k: s * slopes[h] + bias[h, k])
    scored(lambda s, b, h, q, k: s + table[h, distances[b, q, k]])
    scored(lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")))
    scored(lambda s, b, h, q, k: s * s + torch.sin(b) + torch.log(torch.nn.functional.softplus(s) + 1))


def test_vectors_of_captures():
    rows, keys = torch.randn(2, 2, 70, 16), torch.randn(2, 140, 16)
    scores = torch.randn(SHAPE)
    got = evaluated(lambda s, b, h, q, k: s + rows[b, h, q].dot(keys[b, k]), SHAPE, scores)
    want = scores + torch.einsum("bhqd,bkd->bhqk", rows, keys)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got = evaluated(lambda s, b, h, q, k: s + (rows[b, h, q, 4:8] * keys[b][k][:4]).sum(-1), SHAPE, scores)
    want = scores + torch.einsum("bhqd,bkd->bhqk", rows[..., 4:8], keys[..., :4])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_indices_and_integers_mix():
    table = torch.randint(0, 99, (3, 2, 2, 140, 4))
    for mod in (
        lambda b, h, q, k: table[1, b, h, k, 2],
        lambda b, h, q, k: table[1][b][:, k][h, -1],
        lambda b, h, q, k: table[-1, b, ..., 3][h, k],
        lambda b, h, q, k: table.select(0, 2)[b, h, k][1:3][1],
        lambda b, h, q, k: table[0, b, h, k].amax(),
        lambda b, h, q, k: table.sum(-1)[0, b, h, k] // table[0, 0, 0, 0].max(),
    ):
        plain = [torch.arange(n).view([-1 if j == i else 1 for j in range(4)]) for i, n in enumerate(SHAPE)]
        b, h, _, k = (x.expand(SHAPE).flatten() for x in plain)
        got = evaluated(mod, SHAPE).flatten()
        every = torch.randint(0, got.numel(), (50,), generator=torch.Generator().manual_seed(0)).tolist()
        for i in every:
            assert got[i] == mod(b[i].item(), h[i].item(), 0, k[i].item())


@pytest.mark.parametrize("result", [True, False, 1, 0.5])
def test_a_python_number_is_a_result(result):
    got = evaluated(lambda b, h, q, k: result, (1, 1, 2, 3))
    assert got.tolist() == torch.full((1, 1, 2, 3), result).tolist()


# ---- the cache ----------------------------------------------------------------------------------------------------


def traces(calls):
    before = tracer.num_traces
    calls()
    return tracer.num_traces - before


def test_closures_of_one_kind_are_traced_once():
    def window(reach, table):
        return lambda b, h, q, k: ((q - k).abs() <= reach) & table[k]

    def run():
        for reach in range(1000):
            mod = window(reach, torch.ones(reach + 1, dtype=torch.bool))
            _, tensors, numbers = tracer.program_of(mod)
            assert numbers == (reach,) and tensors[0].shape == (reach + 1,)

    assert traces(run) == 1


def test_new_codes_do_not_pile_up(monkeypatch):
    """A mod whose source is compiled for each call has a new code each time."""
    monkeypatch.setattr(tracer, "_MOST_CODES", 20)
    for known in ("_programs_at", "_programs", "_places"):
        monkeypatch.setattr(tracer, known, {})
    for number in range(50):
        mod = eval(f"lambda b, h, q, k: q - k < {number} + 3")
        assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(mod, (1, 1, 9, 9)))
        assert len(tracer._programs_at) <= 20 and len(tracer._programs) <= 20 and len(tracer._places) <= 20


def test_another_kind_is_another_program():
    def compare(x):
        return lambda b, h, q, k: q >= k + x

    def run():
        for x in (1, 2.0, 3, 4.0, True, torch.tensor(1), torch.tensor(2), torch.tensor(2, dtype=torch.int32)):
            got = evaluated(compare(x), (1, 1, 9, 9))
            assert torch.equal(got, vmapped(compare(x), (1, 1, 9, 9)))

    assert traces(run) == 5


def test_control_flow_by_a_number_is_guarded():
    def window(reach, steps):
        def mod(b, h, q, k):
            kept = q >= k
            if reach > 0:
                kept = kept & (q - k < reach)
            for step in range(steps):
                kept = kept | (k == step)
            return kept

        return mod

    def run():
        for reach, steps in ((5, 2), (9, 2), (0, 2), (-1, 2), (7, 3), (8, 3)):
            assert torch.equal(evaluated(window(reach, steps), SHAPE), vmapped(window(reach, steps), SHAPE))

    assert traces(run) == 3


REACH = 4


def test_a_variable_without_a_value_may_get_one_later():
    """PyTorch's function does not mind such a variable, either, as long as the mod does not ask for it."""

    def make():
        has_value = False

        def mod(score, b, h, i, j):
            return score + slope * (i - j) if has_value else score

        def fill():
            nonlocal slope, has_value
            slope, has_value = 0.5, True

        return mod, fill
        slope = 0.0

    (mod, fill), x = make(), torch.randn(1, 1, 8, 8)
    for _ in range(2):
        assert torch.allclose(flex_attention(x, x, x, mod), flex_attention(x, x, x), atol=1e-5)
    fill()
    wants = flex_attention(x, x, x, lambda score, b, h, i, j: score + 0.5 * (i - j))
    assert torch.allclose(flex_attention(x, x, x, mod), wants, atol=1e-5)


def test_globals_and_attributes_are_bound_again(monkeypatch):
    config = types.SimpleNamespace(reach=3)

    def mod(b, h, q, k):
        return (q - k).abs() <= REACH + config.reach

    def run():
        for reach in (1, 20):
            monkeypatch.setitem(globals(), "REACH", reach)
            config.reach = reach + 1
            want = expected(lambda b, h, q, k: (q - k).abs() <= 2 * reach + 1, (1, 1, 40, 40))  # noqa: B023
            assert torch.equal(evaluated(mod, (1, 1, 40, 40)), want)

    assert traces(run) == 1


def test_a_global_that_hides_a_builtin_is_seen(monkeypatch):
    def mod(b, h, q, k):
        return abs(q - k) <= 2

    assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(mod, (1, 1, 9, 9)))
    monkeypatch.setitem(globals(), "abs", lambda x: x)
    assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(lambda b, h, q, k: q - k <= 2, (1, 1, 9, 9)))


@pytest.mark.parametrize("kind", ["tensor", "list", "float", "object", "function", "function of operator"])
def test_a_mod_may_ask_whether_two_values_are_one(kind):
    """Dynamo guards such a question. Mods with one value and with two values are two programs, in any order."""
    same = operator.is_

    def mod_of(q_doc, k_doc):
        if kind == "function of operator":
            return lambda b, h, q, k: q >= k if same(q_doc, k_doc) else k > q
        return lambda b, h, q, k: q >= k if q_doc is k_doc else k > q

    makes = {
        "tensor": lambda: torch.zeros(9),
        "list": lambda: [torch.zeros(9)],
        "float": lambda: float("2.5"),
        "object": types.SimpleNamespace,
        "function": lambda: eval("lambda: None"),
        "function of operator": lambda: torch.zeros(9),
    }
    x, y = (makes[kind]() for _ in range(2))

    def run():
        for pair in ((x, y), (x, x), (y, y), (y, x)):
            assert torch.equal(evaluated(mod_of(*pair), (1, 1, 9, 9)), expected(mod_of(*pair), (1, 1, 9, 9)))

    assert traces(run) == 2


def test_a_question_of_identity_amid_a_mod():
    """It is found when the mod runs, and no `except` of the mod catches it."""

    class Sides:
        def __init__(self, q_doc, k_doc):
            self.q_doc, self.k_doc = q_doc, k_doc

        def are_one(self):
            return self.q_doc is self.k_doc

    def mod_of(sides):
        def mod(b, h, q, k):
            try:
                is_causal = sides.are_one()
            except Exception:
                is_causal = None
            return q >= k if is_causal else k > q

        return mod

    x, y = torch.zeros(9), torch.ones(9)
    for pair in ((x, x), (x, y), (y, y)):
        mod = mod_of(Sides(*pair))
        assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(mod, (1, 1, 9, 9)))


class Near:
    def __init__(self, reach):
        self.reach = reach

    def sees(self, b, h, q, k):
        return q - k <= self.reach

    @classmethod
    def widest(cls):
        return cls.most

    most = 1


class Around:
    """Holds a method of another object, or shadows what a method of its class reads."""

    reach, most = 7, 7

    def __init__(self, inner):
        self.inner, self.sees = inner, inner.sees

    def __call__(self, b, h, q, k):
        return self.sees(b, h, q, k)


class Shadowed(Near):
    def __init__(self):
        self.most = 7

    def sees(self, b, h, q, k):
        return q - k <= self.widest()


def test_a_method_keeps_its_object():
    around = Around(Near(2))
    mods = [around, around.__call__, around.sees, lambda b, h, q, k: around.sees(b, h, q, k), Shadowed().sees]
    for mod in mods:
        assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(mod, (1, 1, 9, 9)))

    def run():
        for reach in range(5):
            mod = Around(Near(reach))
            assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(mod, (1, 1, 9, 9)))

    assert traces(run) <= 1


def test_the_gradient_of_a_module_in_another_module():
    class Slope(torch.nn.Module):
        def __init__(self, slope, score=None):
            super().__init__()
            self.slope, self.other = torch.nn.Parameter(torch.tensor(slope)), score

        def score(self, score, b, h, q, k):
            return score + self.slope * k

        def forward(self, *x):
            return self.other(*x)

    inner = Slope(0.5)
    outer = Slope(9.0, inner.score)
    x = torch.randn(3, 1, 1, 9, 8, generator=torch.Generator().manual_seed(0))
    flex_attention(*x, outer).sum().backward()
    wanted = Slope(0.5)
    flex_attention(*x, wanted.score).sum().backward()
    assert outer.slope.grad is None and inner.slope.grad.item() == wanted.slope.grad.item() != 0


def test_a_tensor_made_in_the_mod_is_made_for_each_call():
    def mod_of(reach):
        return lambda b, h, q, k: (q - k).abs() <= torch.tensor(reach) + torch.tensor(1)

    def run():
        for reach in (2, 5):
            assert torch.equal(evaluated(mod_of(reach), (1, 1, 9, 9)), vmapped(mod_of(reach), (1, 1, 9, 9)))

    assert traces(run) == 1


class Plain:
    reach, of_kind = 2, "near"


class Setting:
    """What mods read of a class that has no numbers, and of objects around it."""

    reaches, of_kind, table = [2], "near", torch.arange(9)
    nested = types.SimpleNamespace(reach=2)

    class Inner:
        reach = 2

    @staticmethod
    def sees(q, k):
        return q - k < REACH

    def from_super(self, q, k):
        return q - k < REACH


class Further(Setting):
    def from_super(self, q, k):
        return super().from_super(q, k)

    def of_class(self, q, k):
        return (q - k < self.__class__.reaches[0]) & (q - k < type(self).reaches[0])

    def __iter__(self):
        return iter(self.reaches)


class Pair(NamedTuple):
    reach: int

    def sum(self):
        return self.reach + REACH


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def _imports(b, h, q, k):
    import setting_of_a_mod

    return q - k < setting_of_a_mod.reach


READERS = {
    "a list of a class": lambda b, h, q, k: q - k < Setting.reaches[0],
    "a string of a class": lambda b, h, q, k: q >= k if Setting.of_kind == "near" else q <= k,
    "a number of a class": lambda b, h, q, k: q - k < Plain.reach,
    "a tensor of a class": lambda b, h, q, k: Setting.table[q] >= k,
    "a class of a class": lambda b, h, q, k: q - k < Setting.Inner.reach,
    "an object of a class": lambda b, h, q, k: q - k < Setting.nested.reach,
    "a function of a class": lambda b, h, q, k: Setting.sees(q, k),
    "super()": lambda b, h, q, k: FURTHER.from_super(q, k),
    "type(self)": lambda b, h, q, k: FURTHER.of_class(q, k),
    "an iterable object": lambda b, h, q, k: q - k < sum(FURTHER),
    "a method of a tuple": lambda b, h, q, k: q - k < PAIR.sum(),
    "an import": _imports,
    "globals()": lambda b, h, q, k: q - k < globals()["REACH"],
    "sys.modules": lambda b, h, q, k: q - k < sys.modules["setting_of_a_mod"].reach,
    "os.environ": lambda b, h, q, k: q - k < int(os.environ["REACH_OF_A_MOD"]),
    "a cached function": lambda b, h, q, k: q - k < _cached(REACH) + _cached(NUMBER) * TABLES.of(REACH),
    "a cache of a class": lambda b, h, q, k: q - k < Memory.of(REACH) + Memory.last(REACH)[-1],
    "a dict of a class": lambda b, h, q, k: q - k < NAMED["reach"] - NAMED.get("reach") + COUNTS["none"],
    "a list with items of its own": lambda b, h, q, k: q - k < LONGER[0] + LONGER.further - sum(LONGER),
    "a tuple of a class": lambda b, h, q, k: q - k < WIDER[1] - 3,
    "a number of NumPy": lambda b, h, q, k: q - k < (COUNT * k) // ARRAY[0] + ARRAY[1] - np.prod((COUNT, 1)),
    "a bound builtin": lambda b, h, q, k: q - k < GET("reach"),
    "an attribute that was missing": lambda b, h, q, k: q - k < getattr(LATER, "reach", 1),
    "an attribute of a tensor": lambda b, h, q, k: q - k < getattr(TENSOR, "reach", 1),
    "an attribute of a function": lambda b, h, q, k: q - k < getattr(_imports, "reach", 1),
    "is True": lambda b, h, q, k: q >= k if FLAG is True else q <= k,
    "isinstance": lambda b, h, q, k: q >= k if isinstance(NUMBER, int) else q <= k,
    "isinstance of a tensor": lambda b, h, q, k: q >= k if isinstance(TENSOR, torch.nn.Parameter) else q <= k,
    "type()": lambda b, h, q, k: q >= k if type(NUMBER) is int else q <= k,
    "a member of an IntEnum": lambda b, h, q, k: q >= k if LEVEL is Level.LOW else q <= k,
    "an object that is a number": lambda b, h, q, k: q - k < float(SHARE) + int(SHARE) + [1, 2, 3][Places()],
    "the sign of 0": lambda b, h, q, k: q >= k if math.copysign(1, ZERO) > 0 else q <= k,
}


@functools.cache
def _cached(n):
    return n * 2 + 1


class Places:
    def __index__(self):
        return REACH // 3


class Tables:
    @functools.lru_cache(4)  # noqa: B019
    def of(self, n):
        return torch.arange(int(n))[-1]


class Memory:
    known = {}

    @classmethod
    def of(cls, n):
        if n not in cls.known:
            cls.known[n] = n + 1
        return cls.known[n]

    @staticmethod
    @functools.cache
    def last(n):
        return torch.arange(int(n)) + n


class Named(dict):
    def __getitem__(self, name):
        return super().__getitem__(name) * 2 + REACH


class Longer(list):
    def __init__(self, *items):
        super().__init__(items)
        self.further = 3

    def __getitem__(self, place):
        return super().__getitem__(place) * 2


class Wider(tuple):
    def __getitem__(self, place):
        return super().__getitem__(place) + REACH


NAMED, COUNTS, LONGER, WIDER = Named(reach=1), collections.Counter(some=3), Longer(1, 2), Wider((1, 2))
COUNT, ARRAY = np.int64(2), np.array([3, 5])
TABLES = Tables()
FURTHER, PAIR, FLAG, NUMBER, LEVEL, ZERO = Further(), Pair(2), True, 3, Level.LOW, 0.0
LATER, TENSOR, SOURCE = types.SimpleNamespace(), torch.zeros(3), {"reach": 2}
GET, SHARE = SOURCE.get, fractions.Fraction(5, 2)


@pytest.mark.parametrize("mod", READERS.values(), ids=READERS)
def test_whatever_a_mod_reads_is_read_again(mod, monkeypatch):
    """The mod is called as Python calls it, with tensors. Then all that it may read changes, and changes back."""
    module, names = types.ModuleType("setting_of_a_mod"), globals()
    module.reach = 2
    monkeypatch.setitem(sys.modules, "setting_of_a_mod", module)
    monkeypatch.setenv("REACH_OF_A_MOD", "2")

    def check():
        assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(mod, (1, 1, 9, 9)))

    for _ in range(2):
        check()
        with monkeypatch.context() as changed:
            for owner in (Plain, Setting.Inner, Setting.nested, module):
                changed.setattr(owner, "reach", 5)
            for name, x in {"of_kind": "far", "table": torch.arange(9) + 2}.items():
                changed.setattr(Setting, name, x)
            for name, x in {"REACH": 6, "FLAG": False, "NUMBER": 3.0, "LEVEL": Level.HIGH, "ZERO": -0.0}.items():
                changed.setitem(names, name, x)
            changed.setitem(names, "TENSOR", torch.nn.Parameter(torch.zeros(3)))
            changed.setattr(names["TENSOR"], "reach", 4, raising=False)
            changed.setitem(names, "PAIR", Pair(3))
            changed.setitem(names, "SHARE", fractions.Fraction(7, 2))
            changed.setitem(SOURCE, "reach", 5)
            changed.setitem(names, "COUNT", np.int64(1))
            changed.setitem(names, "ARRAY", np.array([3, 7]))
            changed.setenv("REACH_OF_A_MOD", "5")
            for owner in (LATER, _imports):
                changed.setattr(owner, "reach", 4, raising=False)
            changed.setattr(Setting, "reaches", [3, 2])
            check()
            Setting.reaches[0] = 5
            check()


def _or_not(b, h, q, k):
    try:
        return q - k < LATER_NAME
    except NameError:
        return q >= k


def test_torchs_settings_and_missing_names_are_read_again():
    def check(mod):
        assert torch.equal(evaluated(mod, (1, 1, 9, 9)), expected(mod, (1, 1, 9, 9)))

    def of_grad_mode(b, h, q, k):
        return q >= k if torch.is_grad_enabled() else q <= k

    def of_dtype(b, h, q, k):
        return q >= k if torch.get_default_dtype() == torch.float32 else q <= k

    def of_quotients(b, h, q, k):
        return q / 10 + k / 10 == 0.3

    def of_a_tensor(b, h, q, k):
        return q.double() / 10 + torch.tensor(0.1) == k.double() / 10

    for _ in range(2):
        check(of_grad_mode), check(of_dtype), check(of_quotients), check(of_a_tensor), check(_or_not)
        with torch.no_grad():
            check(of_grad_mode)
        torch.set_default_dtype(torch.float64)
        try:
            check(of_dtype), check(of_quotients), check(of_a_tensor)
        finally:
            torch.set_default_dtype(torch.float32)
        globals()["LATER_NAME"] = 3
        check(_or_not)
        del globals()["LATER_NAME"]


@pytest.mark.parametrize("outer, inner", [
    (torch.no_grad, torch.no_grad), (torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad),
    (torch.enable_grad, torch.enable_grad), (torch.enable_grad, torch.inference_mode),
])  # fmt: skip
def test_the_grad_mode_is_no_choice_of_a_mod(outer, inner):
    """Neither beside captures alone, nor where the mode is the same already: other calls have another mode."""
    slopes = torch.rand(3, requires_grad=True)

    def of_captures(score, b, h, q, k):
        with inner():
            slope = slopes.exp()
        return score + slope[h]

    def of_scores(score, b, h, q, k):
        with inner():
            return score * 2

    for mod in (of_captures, of_scores):
        with outer(), pytest.raises(NotImplementedError, match=f"must not switch gradients.*{mod.__name__}"):
            tracer.program_of(mod, torch.float32)


def test_a_class_of_constants_needs_no_second_trace():
    def mod_of(settings):
        return lambda b, h, q, k: q - k < settings.reach + (settings.of_kind == "near")

    def run():
        for _ in range(3):
            want = expected(lambda b, h, q, k: q - k < 3, (1, 1, 9, 9))
            assert torch.equal(evaluated(mod_of(Plain), (1, 1, 9, 9)), want)

    assert traces(run) == 1


def relu(x):
    """A function of a library that asks its arguments, as torch's own do."""
    return torch.overrides.handle_torch_function(relu, (x,), x) if torch.overrides.has_torch_function((x,)) else x - 1


OF_ANOTHER_LIBRARY = {
    "packet": lambda x: torch.ops.fa_test.tanh(x),
    "overload": lambda x: torch.ops.fa_test.tanh.default(x),
    "function": relu,
}


@pytest.mark.parametrize("name", OF_ANOTHER_LIBRARY)
def test_an_operation_of_another_library_is_refused(name):
    """It may have the name of one of PyTorch. Of captures alone it is taken."""
    table, call = torch.ones(3), OF_ANOTHER_LIBRARY[name]
    with torch.library._scoped_library("fa_test", "FRAGMENT") as library:
        library.define("tanh(Tensor x) -> Tensor")
        library.impl("tanh", lambda x: x - 1, "CompositeExplicitAutograd")
        with pytest.raises(NotImplementedError, match="no (operator|function) of PyTorch.*test_tracer.py, line"):
            tracer.program_of(lambda b, h, q, k: call(q.float()) > k)
        _, (found,), _ = tracer.program_of(lambda b, h, q, k: call(table)[q] > k)
        assert found.eq(0).all()


@pytest.mark.parametrize("wrap", [torch.compile, torch.compiler.disable, functools.cache], ids=lambda x: x.__name__)
def test_a_wrapped_function_is_the_function_inside(wrap):
    for reach in (2, 5):
        wrapped = wrap(lambda b, h, q, k: q - k < reach)  # noqa: B023
        for mod in (wrapped, lambda b, h, q, k: wrapped(b, h, q, k)):  # noqa: B023
            got = evaluated(mod, (1, 1, 9, 9))
            assert torch.equal(got, expected(lambda b, h, q, k: q - k < reach, (1, 1, 9, 9)))  # noqa: B023


def test_a_match_of_classes_is_refused():
    scope = {"WIDTH": 3}
    text = "def refused_mod(b, h, q, k):\n match WIDTH:\n  case int(): return q >= k\n return q <= k\n"
    exec(text, scope)
    with pytest.raises(NotImplementedError, match="must not match classes.*refused_mod"):
        tracer.program_of(scope["refused_mod"])


def test_a_captured_view_has_its_strides():
    table = torch.rand(140, 70) < 0.5
    for view in (table.T, table.T.flip(0), table[:1, :].T.expand(70, 140)):
        assert torch.equal(evaluated(lambda b, h, q, k: view[q, k], (1, 1, 70, 140))[0, 0], view)  # noqa: B023
