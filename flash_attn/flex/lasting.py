"""Which values never change, so that what a mod finds in them is found again in each call."""

import collections
import enum
import sys
import types

from .steps import NUMBERS, SIMPLE

_KNOWN = {*sys.stdlib_module_names, "torch", "numpy", __name__.split(".")[0]}  # packages whose names never change
CONSTANT = {"torch", "numpy", __name__.split(".")[0], "abc", "builtins", "cmath", "collections", "copy", "dataclasses"}
CONSTANT |= {"decimal", "enum", "fractions", "functools", "itertools", "math", "numbers", "operator", "statistics"}
CONSTANT |= {"string", "types", "typing", "warnings"}  # and whose functions give the same each time
UNSEEN = {"globals", "locals", "eval", "exec", "__globals__", "__import__", "random"}  # names that lead to anything
UNSEEN |= {"get_default_dtype", "get_default_device", "get_num_threads", "is_grad_enabled"}  # torch's settings
UNSEEN |= {"is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype"}
UNSEEN |= {"are_deterministic_algorithms_enabled"}
ASKS = {"hasattr", "getattr", "vars", "__dict__"}


def is_known(value):
    """Does a module or a class belong to a package that no mod changes?"""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (name or "").split(".")[0] in _KNOWN and (name or "").split(".")[0] != "__main__"


def is_constant(value):
    """Do a module's functions, or does a builtin function, give the same each time?"""
    owner = value if isinstance(value, types.ModuleType) else value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        name = value.__module__ if owner is None else owner.__name__
        return name is None or name.split(".")[0].removeprefix("_") in CONSTANT
    return isinstance(owner, (type, *NUMBERS, *SIMPLE))  # a method may belong to an object that changes


def attributes_of(value):
    """The names of the attributes that a function was given."""
    return tuple(vars(value))


_PURE = (types.MemberDescriptorType, types.GetSetDescriptorType, type(collections.namedtuple("_Pair", "a").a))


def found_in(value, names):
    """What attributes of these names a class has, ``((name, what), ..)``; None: it may be another thing next time."""
    if is_known(value):
        return ()
    if "__dict__" in names or "vars" in names or not is_known(type(value)):
        return None
    found = []
    for base in value.__mro__:
        for name in () if is_known(base) else sorted(names & set(vars(base))):
            what = vars(base)[name]
            what = () if isinstance(what, _PURE) else _lasting(what, names)
            if what is None:
                return None
            found.append((name, what))
    return tuple(found)


def _lasting(value, names):
    """A value that cannot change, with its types. None: it can."""
    if isinstance(value, (*NUMBERS, *SIMPLE, enum.Enum)):
        return type(value), value
    if type(value) is tuple:
        items = tuple(_lasting(item, names) for item in value)
        return None if None in items else items
    if isinstance(value, type):
        found = found_in(value, names)
        return None if found is None else (value, found)
    return None
