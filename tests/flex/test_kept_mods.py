"""Mods whose program is kept: whatever changes between two calls is seen, and what a mod asks is answered as by Python.

A mod that could answer from memory alone is traced for each call.
"""

import builtins
import collections.abc
import copy
import dataclasses
import decimal
import enum
import functools
import types

import pytest
import torch
from harness_kept import SHAPE, Width, check
from oracle_flex import evaluated

WIDTH = 2


# ---- errors that a mod catches --------------------------------------------------------------------------------------


def _or_zero(error, compute):
    def mod(b, h, q, k):
        try:
            width = compute()
        except error:
            width = 0
        return q - k <= width

    return mod


class Late:
    """A width, a length and a number that it has later."""

    is_ready = False

    def _width(self):
        if not self.is_ready:
            raise ValueError
        return 3

    width = property(_width)
    __len__ = _width


def quotient():
    x = Width(0)
    return _or_zero(ZeroDivisionError, lambda: 6 // x.width), lambda: setattr(x, "width", 2)


def quotient_that_fails_later():
    x = Width(2)
    return _or_zero(ZeroDivisionError, lambda: 6 // x.width), lambda: setattr(x, "width", 0)


def place_of_a_tensor():
    x = Width(torch.ones(3))
    return _or_zero(IndexError, lambda: x.width[5]), lambda: setattr(x, "width", torch.ones(6) * 4)


def view_of_a_tensor():
    x = Width(torch.full((3, 2), 4).T)
    return _or_zero(RuntimeError, lambda: x.width.view(3, 2)[0, 0]), lambda: setattr(x, "width", x.width.contiguous())


def number_of_a_tensor():
    x, errors = Width(torch.full((3,), 4)), (RuntimeError, TypeError, ValueError)
    return _or_zero(errors, lambda: int(x.width)), lambda: setattr(x, "width", x.width[:1])


def property_of_an_object():
    x = Late()
    return _or_zero(ValueError, lambda: x.width), lambda: setattr(x, "is_ready", True)


def length_of_an_object():
    x = Late()
    return _or_zero(ValueError, lambda: len(x)), lambda: setattr(x, "is_ready", True)


def large_number():
    x = Width(2**64)

    def mod(b, h, q, k):
        try:
            return k + x.width >= q
        except (OverflowError, RuntimeError):
            return q >= k

    return mod, lambda: setattr(x, "width", 3)


def attribute_of_a_function():
    def helper():
        return 1

    return _or_zero(AttributeError, lambda: helper.width), lambda: setattr(helper, "width", 3)


# ---- values that change where they are ------------------------------------------------------------------------------


def memory_of_a_tensor():
    x = torch.tensor([2])
    return lambda b, h, q, k: q - k <= int(x.numpy()[0]), lambda: x.fill_(5)


class Equal(enum.Enum):
    """An enum that says that all its members are equal."""

    NEAR, FAR = 2, 5

    def __eq__(self, other):
        return True

    __hash__ = None


def member_among_equals():
    x = Width(Equal.NEAR)
    return lambda b, h, q, k: q - k <= x.width.value, lambda: setattr(x, "width", Equal.FAR)


def member_of_a_class_among_equals():
    class Config:
        member = Equal.NEAR

    return lambda b, h, q, k: q - k <= Config.member.value, lambda: setattr(Config, "member", Equal.FAR)


def computed_name_of_a_class():
    class Config:
        far_width = 2

    far = ["far"]
    return lambda b, h, q, k: q - k <= getattr(Config, far[0] + "_width"), lambda: setattr(Config, "far_width", 5)


def sign_of_zero_of_a_class():
    class Config:
        zero = 0.0

    return lambda b, h, q, k: (q - k - 9) / Config.zero < 0, lambda: setattr(Config, "zero", -0.0)


def value_of_an_enum():
    class Widths(enum.Enum):
        FAR = [2]

    return lambda b, h, q, k: q - k <= Widths.FAR.value[0], lambda: Widths.FAR.value.__setitem__(0, 5)


def value_of_a_computed_member():
    class Widths(enum.Enum):
        FAR = [2]

    name = ["FAR"]
    return lambda b, h, q, k: q - k <= Widths[name[0]].value[0], lambda: Widths.FAR.value.__setitem__(0, 5)


def attribute_of_an_enum():
    class Widths(enum.Enum):
        FAR = 1

    member = Widths.FAR
    member.width = 2
    return lambda b, h, q, k: q - k <= member.width, lambda: setattr(member, "width", 5)


def _attribute_of(base, *of):
    x = type("Derived", (base,), {})(*of)
    x.width = 2
    return lambda b, h, q, k: q - k <= x.width, lambda: setattr(x, "width", 5)


def attribute_of_an_int():
    return _attribute_of(int, 3)


def attribute_of_a_string():
    return _attribute_of(str, "far")


# ---- methods of a class, which run as they are ----------------------------------------------------------------------


def constructor():
    wide = Width()

    class Near:
        def __init__(self, k):
            self.end = k + wide.width

    return lambda b, h, q, k: q <= Near(k).end, lambda: setattr(wide, "width", 5)


def operator_of_a_class():
    wide = Width()

    class Near(collections.namedtuple("_Near", "place")):
        def __sub__(self, other):
            return self.place - other.place - wide.width

    return lambda b, h, q, k: Near(q) - Near(k) <= 0, lambda: setattr(wide, "width", 5)


def item_of_a_class():
    widths = {"far": 2}

    class Near:
        def __class_getitem__(cls, name):
            return widths[name]

    return lambda b, h, q, k: q - k <= Near["far"], lambda: widths.update(far=5)


def attribute_of_a_function_of_a_class():
    class Config:
        def near(self):
            return 0

        near.width = 2

    return lambda b, h, q, k: q - k <= Config.near.width, lambda: setattr(Config.near, "width", 5)


def defaults_of_a_function_of_a_class():
    class Config:
        def near(self, width=2):
            return width

    near = Config.near
    return lambda b, h, q, k: q - k <= Config.near.__defaults__[0], lambda: setattr(near, "__defaults__", (5,))


def forward_of_a_module():
    class Near(torch.nn.Module):
        def forward(self, q):
            return q - WIDTH

    return lambda b, h, q, k: Near()(q) <= k, lambda: globals().update(WIDTH=5)


def missing_member_of_an_enum():
    class Widths(enum.Enum):
        NEAR, FAR = 2, 5

        @classmethod
        def _missing_(cls, name):
            return cls(WIDTH)

    return lambda b, h, q, k: q - k <= Widths("any").value, lambda: globals().update(WIDTH=5)


def string_of_an_enum():
    class Widths(enum.Enum):
        FAR = 1

        def __str__(self):
            return f"{WIDTH}"

    return lambda b, h, q, k: q - k <= int(f"{Widths.FAR}"), lambda: globals().update(WIDTH=5)


def format_of_a_class():
    class Config:
        width = 2

    form = "{0.width}"
    return lambda b, h, q, k: q - k <= int(form.format(Config)), lambda: setattr(Config, "width", 5)


class Near:
    def __init__(self):
        self.width = WIDTH


def class_of_an_object():
    near = Near()
    return lambda b, h, q, k: q - k <= near.__class__().width, lambda: globals().update(WIDTH=5)


def class_of_a_class():
    class Config:
        inner = Near

    return lambda b, h, q, k: q - k <= Config.inner().width, lambda: globals().update(WIDTH=5)


def computed_class_of_an_object():
    near, name = Near(), ["class"]
    return lambda b, h, q, k: q - k <= getattr(near, f"__{name[0]}__")().width, lambda: globals().update(WIDTH=5)


def factory_of_a_dataclass():
    wide = Width()

    @dataclasses.dataclass
    class Near:
        width: int = dataclasses.field(default_factory=lambda: wide.width)

    return lambda b, h, q, k: q - k <= Near().width, lambda: setattr(wide, "width", 5)


# ---- keys of dicts --------------------------------------------------------------------------------------------------


def object_as_a_key():
    key = Width()
    widths = {key: 1}
    return lambda b, h, q, k: q - k <= sum(x.width * y for x, y in widths.items()), lambda: setattr(key, "width", 5)


def function_as_a_key():
    x = Width()
    widths = {lambda: x.width: 1}
    return lambda b, h, q, k: q - k <= sum(f() * y for f, y in widths.items()), lambda: setattr(x, "width", 5)


def type_of_a_key():
    x = Width({1: 2})

    def mod(b, h, q, k):
        (key,) = x.width
        return q - k <= (2 if isinstance(key, int) else 5)

    return mod, lambda: setattr(x, "width", {1.0: 2})


def hash_of_an_object():
    key = dataclasses.make_dataclass("Key", ["number"], frozen=True)
    widths, x = {key(7): 5}, Width(key(1))
    return lambda b, h, q, k: q - k <= widths.get(x.width, 2), lambda: setattr(x, "width", key(7))


def equality_of_functions():
    def make(width):
        return lambda x: x + width

    x, y = make(1), make(1)
    pair = [x, y]
    return lambda b, h, q, k: q >= k if pair[0] == pair[1] else q <= k, lambda: pair.__setitem__(1, x)


def equality_with_a_number():
    class Key:
        number = 1

        def __eq__(self, other):
            return self.number == other

    key, x = Key(), Width(2)

    def change():
        key.number = x.width = 5

    return lambda b, h, q, k: q >= k if key == x.width else q <= k, change


# ---- names and settings ---------------------------------------------------------------------------------------------


def global_name():
    def mod(b, h, q, k):
        try:
            width = WIDTH_OF_A_LATER_TIME  # noqa: F821
        except Exception:
            width = 2
        return q - k <= width

    return mod, lambda: globals().update(WIDTH_OF_A_LATER_TIME=5)


@functools.wraps(torch.nn.functional.silu)
def _mine(q):
    return q - WIDTH


def wrapped_function_of_torch():
    return lambda b, h, q, k: _mine(q) <= k, lambda: globals().update(WIDTH=5)


def name_of_builtins():
    builtins.BUILTIN_WIDTH = 2
    return lambda b, h, q, k: q - k <= BUILTIN_WIDTH, lambda: setattr(builtins, "BUILTIN_WIDTH", 5)  # noqa: F821


def precision_of_products():
    def mod(b, h, q, k):
        return q >= k if torch.get_float32_matmul_precision() == "high" else q <= k

    return mod, lambda: torch.set_float32_matmul_precision("high")


def precision_by_another_name():
    ask = torch.get_float32_matmul_precision
    return lambda b, h, q, k: q >= k if ask() == "high" else q <= k, lambda: torch.set_float32_matmul_precision("high")


def setting_by_a_captured_module():
    x = types.SimpleNamespace(lib=torch)

    def mod(b, h, q, k):
        from torch import is_grad_enabled

        return q >= k if x.lib.get_float32_matmul_precision() == "high" or not is_grad_enabled() else q <= k

    return mod, lambda: torch.set_float32_matmul_precision("high")


def global_name_by_builtins():
    return lambda b, h, q, k: q - k <= builtins.eval("WIDTH", globals()), lambda: globals().update(WIDTH=5)


def computed_name_by_builtins():
    class Config:
        far_width = 2

    far = ["far"]
    return lambda b, h, q, k: q - k <= builtins.getattr(Config, far[0] + "_width"), lambda: setattr(
        Config, "far_width", 5
    )


def fields_of_a_dataclass():
    @dataclasses.dataclass
    class Config:
        width: int = dataclasses.field(default=2, metadata={"more": [0]})

    config = Config()

    def mod(b, h, q, k):
        return q - k <= sum(
            getattr(config, field.name) + field.metadata["more"][0] for field in dataclasses.fields(config)
        )

    return mod, lambda: dataclasses.fields(config)[0].metadata["more"].__setitem__(0, 3)


def copy_of_an_object():
    class Config:
        def width(self):
            return WIDTH

    config = Config()
    return lambda b, h, q, k: q - k <= copy.copy(config).width(), lambda: globals().update(WIDTH=5)


def changed_dataclass():
    @dataclasses.dataclass
    class Config:
        width: int = 2

        def __post_init__(self):
            self.width += WIDTH

    config = Config(0)
    return lambda b, h, q, k: q - k <= dataclasses.replace(config).width, lambda: globals().update(WIDTH=5)


def generator():
    return lambda b, h, q, k: q - k <= torch.default_generator.initial_seed() % 5, lambda: torch.manual_seed(8)


def flag_of_a_backend():
    def mod(b, h, q, k):
        return q >= k if torch.backends.mkldnn.enabled else q <= k

    return mod, lambda: setattr(torch.backends.mkldnn, "enabled", False)


def seed():
    return lambda b, h, q, k: q - k <= torch.initial_seed() % 5, lambda: torch.manual_seed(8)


def precision_of_decimals():
    def mod(b, h, q, k):
        return q >= k if decimal.Decimal(1) / 3 == decimal.Decimal("0.33") else q <= k

    return mod, lambda: setattr(decimal.getcontext(), "prec", 2)


def precision_of_a_captured_class():
    make = decimal.Decimal

    def mod(b, h, q, k):
        return q >= k if make(1) / 3 == make("0.33") else q <= k

    return mod, lambda: setattr(decimal.getcontext(), "prec", 2)


def limits_of_the_default_dtype():
    def mod(b, h, q, k):
        return q >= k if torch.finfo().bits == 32 else q <= k

    return mod, lambda: torch.set_default_dtype(torch.float64)


def default_dtype():
    large = torch.tensor([16777217] * 9)
    return lambda b, h, q, k: large[q] <= 16777216.0, lambda: torch.set_default_dtype(torch.float64)


CHANGES = [
    quotient, quotient_that_fails_later, place_of_a_tensor, view_of_a_tensor, number_of_a_tensor,
    property_of_an_object, length_of_an_object, large_number, attribute_of_a_function, memory_of_a_tensor,
    member_among_equals, member_of_a_class_among_equals, computed_name_of_a_class, sign_of_zero_of_a_class,
    value_of_an_enum, value_of_a_computed_member, attribute_of_an_enum, attribute_of_an_int, attribute_of_a_string,
    constructor, operator_of_a_class, item_of_a_class, attribute_of_a_function_of_a_class,
    defaults_of_a_function_of_a_class, forward_of_a_module, missing_member_of_an_enum, string_of_an_enum,
    format_of_a_class, class_of_an_object, class_of_a_class, computed_class_of_an_object, factory_of_a_dataclass,
    object_as_a_key, function_as_a_key, type_of_a_key, hash_of_an_object, equality_of_functions,
    equality_with_a_number, global_name, wrapped_function_of_torch, name_of_builtins, precision_of_products,
    precision_by_another_name, setting_by_a_captured_module, global_name_by_builtins, computed_name_by_builtins,
    generator, fields_of_a_dataclass, copy_of_an_object, changed_dataclass, flag_of_a_backend, seed,
    precision_of_decimals, precision_of_a_captured_class, limits_of_the_default_dtype, default_dtype,
]  # fmt: skip


@pytest.fixture
def settings():
    """All that a change may set for the whole process."""
    precision, is_enabled = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    torch.manual_seed(6)
    with decimal.localcontext():
        yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.mkldnn.enabled = is_enabled
    torch.set_default_dtype(torch.float32)
    globals()["WIDTH"] = 2
    globals().pop("WIDTH_OF_A_LATER_TIME", None)
    vars(builtins).pop("BUILTIN_WIDTH", None)


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__)
def test_a_change_between_two_calls_is_seen(make, settings):
    mod, change = make()
    check(mod)
    before = evaluated(mod, SHAPE)
    change()
    check(mod)
    assert not torch.equal(evaluated(mod, SHAPE), before)
