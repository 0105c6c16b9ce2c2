"""What stays known of classes and functions of a program, so that a mod is kept, and attributes that a mod sets."""

import collections.abc
import dataclasses
import enum
import functools
import sys
import types

import pytest
import torch
from harness_kept import SHAPE, Width, check, traces
from oracle_flex import evaluated, expected

from flash_attn.flex_attention import create_mask

WIDTH = 2


# ---- what stays known -----------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    NEAR = 1
    FAR = "far"


@dataclasses.dataclass(frozen=True, order=True)
class Settings:
    width: int = 2
    kind: Kind = Kind.NEAR


class Plain:
    width, kind = 2, Kind.FAR


class Mode(enum.Enum):
    NEAR, FAR = "near", "far"

    def __str__(self):
        return f"{self.value} {WIDTH}"


class Built:
    """A class with functions that the mods do not call."""

    width = 2

    def __init__(self, wide=3):
        self.wide = wide + WIDTH

    def __eq__(self, other):
        return self.wide == other.wide

    @classmethod
    def most(cls):
        return cls.width

    @property
    def double(self):
        return self.wide * 2


class Bounds(collections.namedtuple("Bounds", "low high", defaults=(0, 9))):
    pass


def helper(q, k):
    return q - k


KEPT = {
    "a dict": lambda x: lambda q, k: q - k <= x["width"] + x[0],
    "a dataclass": lambda x: lambda q, k: q - k <= x.width if x.kind is Kind.NEAR else q <= k,
    "a new dataclass": lambda x: lambda q, k: q - k <= Settings(x).width,
    "fields of a dataclass": lambda x: lambda q, k: q - k <= sum(getattr(x, f.name) for f in dataclasses.fields(x)[:1]),
    "a changed dataclass": lambda x: lambda q, k: q - k <= dataclasses.replace(x, width=3).width,
    "a namedtuple": lambda x: lambda q, k: (q - k <= x.high) & (q - k >= Bounds().low),
    "a class": lambda x: lambda q, k: q - k <= getattr(Plain, x) if Plain.kind is Kind.FAR else q <= k,
    "a class with a constructor": lambda x: (
        lambda q, k: q - k <= x.wide + Built.width if isinstance(x, Built) else q <= k
    ),
    "a classmethod": lambda x: lambda q, k: (q - k <= x.most()) & (q - k <= x.double),
    "a member with a string of its own": lambda x: lambda q, k: q - k <= 2 if x is Mode.NEAR else q <= k,
    "a helper": lambda x: lambda q, k: helper(q, k) <= x if q is not None else q <= k,
    "a partial": lambda x: lambda q, k: x(q) <= k,
    "an attribute that is missing": lambda x: lambda q, k: q - k <= getattr(x, "wide", 3),
    "an attribute of a function": lambda x: lambda q, k: q - k <= getattr(x, "width", 3),
    "an iterable": lambda x: lambda q, k: q - k <= sum([*x]),
    "names of functions and settings": lambda x: (
        lambda q, k: (q - k <= x.distributed) | (q - k <= x.dir["eval"] + x.id)
    ),
    "NotImplemented": lambda x: lambda q, k: q - k <= (3 if x is NotImplemented else x),
    "the dtype of a tensor": lambda x: lambda q, k: (q <= k + x) if x.dtype == torch.int64 else q <= k,
}


class Iterable:
    def __init__(self, *items):
        self.items = list(items)

    def __iter__(self):
        return iter(self.items)


VALUES = {
    "a dict": lambda: {"width": 2, 0: 1},
    "a dataclass": Settings,
    "a new dataclass": lambda: 2,
    "fields of a dataclass": Settings,
    "a changed dataclass": Settings,
    "a namedtuple": lambda: Bounds(1, 4),
    "a class": lambda: "width",
    "a class with a constructor": Built,
    "a classmethod": Built,
    "a member with a string of its own": lambda: Mode.NEAR,
    "a helper": lambda: 3,
    "a partial": lambda: functools.partial(helper, k=2),
    "an attribute that is missing": lambda: types.SimpleNamespace(width=2),
    "an attribute of a function": lambda: lambda: 2,
    "an iterable": lambda: Iterable(1, 2),
    "names of functions and settings": lambda: types.SimpleNamespace(
        distributed=1, dir={"eval": 2, "backends": 1}, id=0
    ),
    "NotImplemented": lambda: 2,
    "the dtype of a tensor": lambda: torch.tensor(2),
}


@pytest.mark.parametrize("name", KEPT)
def test_plain_values_need_no_second_trace(name):
    def run():
        for _ in range(3):
            compare = KEPT[name](VALUES[name]())
            check(lambda b, h, q, k: compare(q, k))  # noqa: B023

    assert traces(run) == 1


def test_a_profiler_keeps_its_place():
    """The trace cannot watch what runs then, so the mod is traced for each call."""
    built, events = Built(), []

    def mod(b, h, q, k):
        return q - k <= built.wide if isinstance(built, Built) else q <= k

    def profiler(*event):
        events.append(event)

    def run():
        for _ in range(2):
            evaluated(mod, SHAPE)

    sys.setprofile(profiler)
    try:
        num = traces(run)
        is_kept = sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert num == 2 and is_kept and events
    assert traces(run) == 1 and sys.getprofile() is None
    check(mod)


def test_abstract_classes_ask_the_function_itself():
    """What stands for it has more methods."""
    halves = functools.partial(torch.div, rounding_mode="floor")

    def mod(b, h, q, k):
        return k <= (q if isinstance(halves, (collections.abc.Collection, collections.abc.Iterable)) else halves(q, 2))

    want = torch.arange(8) <= torch.arange(8)[:, None] // 2
    for _ in range(2):
        assert torch.equal(create_mask(mod, 1, 1, 8, 8, "cpu")[0, 0], want)


# ---- attributes that a mod sets --------------------------------------------------------------------------------------


def _double(x):
    return x * 2


def _counting(function):
    @functools.wraps(function)
    def wrapper(*args):
        wrapper.calls += 1
        wrapper.last = (function, wrapper.calls, "far")
        return function(*args)

    wrapper.calls = 0
    return wrapper


def _widths():
    if not hasattr(_widths, "known"):
        _widths.known = torch.arange(3)
    return _widths.known


def test_an_attribute_of_a_function_is_set_in_each_call():
    mod = _counting(lambda b, h, q, k: q - k <= 3)
    assert traces(lambda: [evaluated(mod, SHAPE) for _ in range(3)]) == 1
    assert mod.calls == 3 and mod.last == (mod.__wrapped__, 3, "far")

    def turns(b, h, q, k):
        turns.calls += 1
        return q >= k if turns.calls % 2 else q <= k

    turns.calls = 0
    odd, even = expected(lambda b, h, q, k: q >= k, SHAPE), expected(lambda b, h, q, k: q <= k, SHAPE)
    for want in (odd, even, odd, even):
        assert torch.equal(evaluated(turns, SHAPE), want)


def test_a_function_may_keep_what_it_has_computed():
    def run():
        for _ in range(4):
            check(lambda b, h, q, k: q - k <= _widths()[2])

    assert traces(run) == 2
    assert torch.equal(vars(_widths).pop("known"), torch.arange(3))


@pytest.mark.parametrize(
    "name, value", [("last", lambda q: q), ("last", lambda q: [Width()]), ("__defaults__", lambda q: ())]
)
def test_an_attribute_that_a_mod_must_not_set(name, value):
    def mod(b, h, q, k):
        setattr(_double, name, value(q))
        return q >= k

    with pytest.raises(NotImplementedError, match=f"a mod must not .* the attribute {name}: .*mod, .*line"):
        create_mask(mod, 1, 1, 8, 8, "cpu")
    assert _double.__defaults__ is None and not hasattr(_double, "last")
