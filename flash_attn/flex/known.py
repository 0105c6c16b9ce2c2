"""What a mod sees of Python, PyTorch and NumPy. Most of their functions stand for themselves.

Some ask what an argument is. They must answer for the value, not for the object of the trace in its place.
"""

import types

import torch

from .values import Bound, Value, is_object


class Module(types.ModuleType):
    """A module. The trace learns what the mod finds in it."""

    def __init__(self, trace, module):
        super().__init__(module.__name__)
        object.__setattr__(self, "_trace", trace)
        object.__setattr__(self, "_module", module)

    def __getattribute__(self, name):
        get = object.__getattribute__
        return get(self, "_trace").known(getattr(get(self, "_module"), name))

    def __setattr__(self, name, value):
        object.__getattribute__(self, "_trace").fail(f"a mod must not set the attribute {name}")


def _isinstance(x, classes):
    """Is what an object of the trace stands for an instance of classes?"""
    if isinstance(x, Bound):
        return x._trace.steps.guard(x._number, lambda value: isinstance(value, classes))
    if is_object(x):  # an abstract class asks for methods, which the stand-in has
        return object.__getattribute__(x, "_asked")(lambda value: isinstance(value, classes))
    return issubclass(torch.Tensor, classes) if isinstance(x, Value) else isinstance(x, classes)


class _OfType(type):
    def __call__(cls, *args, **kwargs):
        if cls is not Type:
            return super().__call__(*args, **kwargs)
        return _type_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, x):
        return isinstance(x, type) if cls is Type else super().__instancecheck__(x)

    def __subclasscheck__(cls, x):
        return issubclass(x, type) if cls is Type else super().__subclasscheck__(x)


class Type(type, metaclass=_OfType):
    """``type``, for a mod. It gives the type of what an object of the trace stands for."""


def _type_of(x):
    found = type(x)
    if isinstance(x, Bound):
        found = x._trace.steps.guard(x._number, type)
    elif isinstance(x, Value):
        found = torch.Tensor
    elif is_object(x):
        found = x.__class__
    return Type if found is type else found


def _callable(x):
    """Can what an object of the trace stands for be called?"""
    return object.__getattribute__(x, "_asked")(callable) if is_object(x) else callable(x)


def is_tensor(x):
    """Does an object of the trace stand for a tensor? PyTorch's function of this name asks for the class."""
    return _isinstance(x, torch.Tensor)


STAND_INS = {isinstance: _isinstance, type: Type, callable: _callable, torch.is_tensor: is_tensor}
for _asks, _seen in STAND_INS.items():
    _seen.__name__ = _seen.__qualname__ = _asks.__name__  # for errors
Type.__module__ = "builtins"
