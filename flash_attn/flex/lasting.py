"""Which values never change, so that what a mod finds in them is found again in each call."""

import builtins
import collections
import dataclasses
import enum
import functools
import sys
import types

import torch

from .steps import NUMBERS, SIMPLE, exact

_KNOWN = {*sys.stdlib_module_names, "torch", "numpy", __name__.split(".")[0]}  # packages whose names never change
_CONSTANT = {"torch", "numpy", __name__.split(".")[0], "abc", "argparse", "builtins", "cmath", "collections"}
_CONSTANT |= {"contextlib", "copy", "dataclasses", "enum", "fractions", "functools", "itertools", "math", "numbers"}
_CONSTANT |= {"operator", "statistics", "string", "types", "typing", "warnings"}  # and whose functions give the same
ANYWHERE = {"__builtins__", "__getattribute__", "__globals__"}  # attributes that lead to anything
_UNSEEN = {"globals", "locals", "eval", "exec", "dir", "open", "input", "attrgetter", "methodcaller"}
_SETTINGS = {  # modules of torch and NumPy
    "accelerator", "amp", "autograd", "backends", "compiler", "cpu", "cuda", "distributed", "mps", "random", "utils",
    "xpu",
}  # fmt: skip
_NAMED = (*NUMBERS, *SIMPLE, type(NotImplemented), torch.layout, torch.memory_format)


def is_known(value):
    """Does a module or a class belong to a package that no mod changes?"""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (name or "").split(".")[0] in _KNOWN and (name or "").split(".")[0] != "__main__"


def is_constant(value):
    """Does a library's module, class or function give the same each time?"""
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        return callable(value) or isinstance(value, _NAMED)
    if not isinstance(value, types.ModuleType) and value.__name__ in _UNSEEN:
        return False
    owner = value.__self__ if isinstance(value, types.BuiltinFunctionType) else None
    if owner is not None and not isinstance(owner, types.ModuleType):
        return isinstance(owner, (type, *NUMBERS, *SIMPLE))  # a method may belong to an object that changes
    name = _module_of(value)
    if name is None:
        return True
    root, *path = name.split(".")
    if root == "torch" and not isinstance(value, (type, types.ModuleType)) and _is_setting(value):
        return False
    return root.removeprefix("_") in _CONSTANT and not (path and path[0] in _SETTINGS)


def _module_of(value):
    """The name of the module that has a class or function. ``functools.wraps`` changes ``__module__``."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__"))
    owner = getattr(value, "__self__", None)
    return owner.__name__ if isinstance(owner, types.ModuleType) else value.__module__


def _is_setting(function):
    """Does a function of torch tell what the process is set to?"""
    name = function.__name__
    asks = name.lstrip("_").startswith(("get_", "are_")) or name.endswith(("_enabled", "_available", "_seed"))
    is_method = hasattr(torch.Tensor, name) or not (hasattr(torch, name) or hasattr(torch._C, name))
    return asks and not is_method


def is_of_torch(function):
    """Is this a function of torch itself?"""
    return _module_of(function).split(".")[0] == "torch"


def is_as_it_is(function):
    """Does a function of a library need no copy?"""
    return _module_of(function).split(".")[0] in ("copy", "dataclasses", "torch") and not function.__closure__


def is_builtin(name):
    """Does Python itself have this builtin? Other names are put into the module by a program."""
    value = vars(builtins)[name]
    if isinstance(value, type):
        return value.__module__ == "builtins"
    is_function = isinstance(value, types.BuiltinFunctionType) and value.__name__ == name
    return (is_function and value.__module__ in ("builtins", "io", "_io")) or value in (Ellipsis, NotImplemented)


def is_simple(value):
    """Is this a number, a string and the like without attributes of its own?"""
    return isinstance(value, (*NUMBERS, *SIMPLE)) and is_known(type(value))


_OF_ENUM = {"_name_", "_value_", "__objclass__", "_sort_order_", "_inverted_"}  # what Python gives a member


def is_fixed(member):
    """Has a member of an enum nothing but its name and a value that cannot change?"""
    value = member._value_
    return vars(member).keys() <= _OF_ENUM and all(map(is_simple, value if type(value) is tuple else (value,)))


def is_key(value):
    """May it be a key of a dict whose keys the mod sees as they are?"""
    if type(value) is tuple:
        return all(is_key(item) and not isinstance(item, enum.Enum) for item in value)
    if isinstance(value, type):
        return is_known(value)
    if isinstance(value, enum.Enum):
        return is_fixed(value) and not isinstance(type(value).__eq__, types.FunctionType)
    return is_simple(value)


_PURE = (types.MemberDescriptorType, types.GetSetDescriptorType, type(collections.namedtuple("_Pair", "a").a))
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_ANY_NAME = {"__dict__", "format", "format_map"}  # attributes that read others; "{0.width}".format(x) reads x.width
_OF_FUNCTIONS = {"__closure__", "__code__", "__defaults__", "__kwdefaults__"}  # attributes that may change


def has_functions(cls):
    """Has a class anything that may run, other than what a library has?"""
    bases = [vars(base) for base in cls.__mro__ if not is_known(base)]
    return any(callable(what) or isinstance(what, _METHODS) for base in bases for what in base.values())


def is_of_library(frame):
    """Is this a function of a library, or one that ``dataclass`` or ``namedtuple`` made?"""
    code = frame.f_code
    if _is_library(str(frame.f_globals.get("__name__"))):
        return True
    made_by = getattr(code, "co_qualname", "__create_fn__").split(".")[0]  # from Python 3.11
    return code.co_filename == "<string>" and code.co_name.startswith("__") and made_by == "__create_fn__"


@functools.lru_cache(1024)
def _is_library(name):
    return name.split(".")[0] in _KNOWN or name.startswith("namedtuple_")


def _has_fixed_defaults(cls):
    """Do the functions that ``dataclass`` or ``namedtuple`` made have only values that cannot change?"""
    defaults = [field.default for field in vars(cls).get("__dataclass_fields__", {}).values()]
    if "_fields" in vars(cls):
        defaults += getattr(vars(cls).get("__new__"), "__defaults__", None) or ()
    return all(x is dataclasses.MISSING or is_key(x) for x in defaults)


def found_in(value, names, is_first=False):
    """What attributes of these names a class has, ``((name, what), ..)``; None: it may be another thing next time.

    Only the trace, which is the first to ask, looks at what cannot change later.
    """
    found, bases = [], [base for base in value.__mro__ if not is_known(base)]
    if is_first and bases and not (names.isdisjoint(_ANY_NAME) and is_known(type(value))):
        return None
    if is_first and issubclass(value, enum.Enum) and not all(map(is_fixed, value.__members__.values())):
        return None  # the mod may find a member by its name or its value
    for base in bases:
        if is_first and not _has_fixed_defaults(base):
            return None
        for name in sorted(names & set(vars(base))):
            what = vars(base)[name]
            what = () if isinstance(what, _PURE) else _lasting(what, names, is_first)
            if what is None:
                return None
            found.append((name, what))
    return tuple(found)


_EXACT = {*NUMBERS, *SIMPLE} - {float}


def _lasting(value, names, is_first):
    """A value that cannot change, with its types. None: it can."""
    if type(value) in _EXACT or (type(value) is float and value != 0):
        return type(value), value
    if isinstance(value, enum.Enum):
        is_as_made = is_fixed(value) if is_first else vars(value).keys() <= _OF_ENUM
        return (type(value), id(value)) if is_as_made else None  # the class may say that all members are equal
    if is_simple(value):
        return exact(value)
    if type(value) is tuple:
        items = tuple(_lasting(item, names, is_first) for item in value)
        return None if None in items else items
    if isinstance(value, type):
        found = found_in(value, names, is_first)
        return None if found is None else (value, found)
    if type(value) in _METHODS:  # which the mod has not called, for the trace would know
        has_fixed_attributes = names.isdisjoint(_OF_FUNCTIONS) and names.isdisjoint(getattr(value, "__dict__", ()))
        return (type(value), value) if has_fixed_attributes else None
    return None
