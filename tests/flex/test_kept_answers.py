"""What a mod asks of its captures and of Python is answered as by Python."""

import builtins
import copy
import copyreg
import dataclasses
import functools
import types

import pytest
import torch
from harness_kept import Width, check

WIDTH = 2


class Named:
    def __str__(self):
        return "far"

    def __format__(self, form):
        return form or "far"

    def __repr__(self):
        return "<far>"


def _double(x):
    return x * 2


def _imported(x):
    from torch import is_tensor

    return is_tensor(x)


@dataclasses.dataclass
class Part:
    width: int = 2
    place: tuple = (1, 2)


@dataclasses.dataclass
class Whole:
    part: Part = dataclasses.field(default_factory=Part)
    widths: list = dataclasses.field(default_factory=lambda: [1, 3])
    table: torch.Tensor = None


def _distance(self, q, k):
    return q - k - self.width


def _as_method(q, k):
    class Made:
        width, distance, half = 2, _distance, PARTIAL

    return (
        Made().distance(q, k) + Made().half() - type("Made", (), {"width": 2, "distance": _distance})().distance(k, q)
    )


def _made_by_a_metaclass():
    class Meta(type):
        pass

    class Made(metaclass=Meta):
        pass

    return Made if type(Made) is Meta and isinstance(Made, type) and not isinstance(Named, Meta) else Named


def _sum_of_fields(x):
    return sum(getattr(x, field.name) for field in dataclasses.fields(x) if field.name == "width")


LIBRARIES = types.SimpleNamespace(lib=torch, builtins=builtins)
FAR, BARE, TABLE, LENGTH, PARTIAL = Named(), Width(), torch.tensor(2), 3, functools.partial(_double, 1)
WHOLE, ITEMS = Whole(table=torch.arange(4)), [1, [2, torch.tensor(3)]]
WIDTHS, FUNCTIONS = {_double: 5, "far": 4, "<far>": 3, "3": 2}, frozenset([_double])
ANSWERS = {
    "str of an object": lambda: WIDTHS.get(str(FAR), 0),
    "a string with an object": lambda: WIDTHS.get(f"{FAR}", 0),
    "a string with a formatted object": lambda: WIDTHS.get(f"{FAR:far}", 0),
    "repr of an object": lambda: WIDTHS.get(repr(FAR), 0),
    "a formatted number": lambda: WIDTHS.get(f"{LENGTH:d}", 0),
    "a string with a tensor": lambda: len(f"{TABLE}"),
    "callable of an object": lambda: 5 if callable(BARE) else 2,
    "callable of a function": lambda: 5 if callable(_double) else 2,
    "torch.is_tensor": lambda: 5 if torch.is_tensor(TABLE) else 2,
    "torch.is_tensor of a number": lambda: 5 if torch.is_tensor(LENGTH) else 2,
    "torch.is_tensor of an import": lambda: 5 if _imported(TABLE) and not _imported(LENGTH) else 2,
    "torch.is_tensor of a captured module": lambda: 5 if LIBRARIES.lib.is_tensor(TABLE) else 2,
    "isinstance of a captured module": lambda: 5 if LIBRARIES.builtins.isinstance(TABLE, torch.Tensor) else 2,
    "a function as a key": lambda: WIDTHS.get(_double, 0),
    "a function in a dict": lambda: 5 if _double in WIDTHS else 2,
    "a function in a set": lambda: 5 if _double in FUNCTIONS else 2,
    "a function in a list": lambda: 5 if _double in [len, _double] else 2,
    "another function": lambda: 5 if _double != check else 2,
    "a partial": lambda: 5 if PARTIAL == PARTIAL and PARTIAL.func == _double else 2,
    "the type of a function": lambda: 5 if type(_double) is types.FunctionType else 2,
    "type": lambda: 5 if isinstance(Named, type) and type(Named) is type and issubclass(type(Named), type) else 2,
    "a class of type": lambda: type("Made", (Named,), {"width": 3}).width + (type(type("Made", (), {})) is type),
    "a metaclass": lambda: len(_made_by_a_metaclass().__name__),
    "an instance of a function": lambda: 5 if isinstance(_double, types.FunctionType) else 2,
    "the name of a function": lambda: len(_double.__name__) - 3,
    "fields of a dataclass": lambda: _sum_of_fields(WHOLE.part),
    "a dataclass as a dict": lambda: (
        dataclasses.asdict(WHOLE)["part"]["width"] + dataclasses.asdict(WHOLE)["widths"][1]
    ),
    "a dataclass as a tuple": lambda: dataclasses.astuple(WHOLE)[0][0] + dataclasses.astuple(WHOLE)[2].sum(),
    "a changed dataclass": lambda: dataclasses.replace(WHOLE.part, width=LENGTH).width + 1,
    "is_dataclass": lambda: 5 if dataclasses.is_dataclass(WHOLE) and not dataclasses.is_dataclass(BARE) else 2,
    "a copy of a list": lambda: copy.deepcopy(ITEMS)[1][1] + copy.copy(ITEMS)[0],
    "a copy of a function": lambda: copy.copy(_double)(1) + copy.deepcopy(_double)(1),
    "a copy of an object": lambda: copy.copy(BARE).width + copy.deepcopy(WHOLE).part.width,
}


@pytest.mark.parametrize("ask", ANSWERS.values(), ids=ANSWERS)
def test_answers_are_those_of_python(ask):
    check(lambda b, h, q, k: q - k <= ask())


def test_a_captured_function_is_a_method_of_a_class_of_the_mod():
    check(lambda b, h, q, k: _as_method(q, k) <= 3)


def test_an_index_is_a_tensor():
    is_tensor = torch.is_tensor
    check(lambda b, h, q, k: q >= k if torch.is_tensor(q) else q <= k)
    check(lambda b, h, q, k: q >= k if is_tensor(q) and not is_tensor(b"") else q <= k)


@dataclasses.dataclass
class Tripled:
    width: int = 1

    def __copy__(self):
        return Tripled(self.width * 3)


class Pickled:
    def __init__(self, width=1):
        self.width = width


def test_a_class_says_how_it_is_copied(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, Pickled, lambda x: (Pickled, (x.width * 3,)))
    for made, kind in (
        (Tripled(), copy.copy),
        (Pickled(), copy.copy),
        (Pickled(), copy.deepcopy),
        (Width(), copy.copy),
    ):
        check(lambda b, h, q, k: q - k <= kind(made).width)  # noqa: B023
    made, copied = Pickled(), copy.copy
    check(lambda b, h, q, k: q - k <= copied(made).width)
    monkeypatch.delitem(copyreg.dispatch_table, Pickled)
    check(lambda b, h, q, k: q - k <= copied(made).width)
