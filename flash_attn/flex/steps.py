"""How the values of a trace are found again in another mod of the same code.

A step computes one value from earlier values. Step 0 is the mod itself. Later steps read cells, defaults, globals and
attributes, or repeat what the mod did with its captures alone. A guard says what a value must be like, so that the
trace holds.
"""

import enum
import functools
import types

import torch

SIMPLE = (str, bytes, type(None), torch.dtype, torch.device, type(Ellipsis))


def kind(value):
    """What must be equal for a trace to hold, whatever the value is."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.dim(), value.device.type
    if isinstance(value, (bool, int, float)):
        return type(value)
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, (tuple, list)):
        return type(value), len(value)
    if isinstance(value, dict):
        return dict, tuple(value)
    if isinstance(value, functools.partial):
        return functools.partial, len(value.args), tuple(value.keywords)
    if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType, enum.Enum, *SIMPLE)):
        return value
    return type(value)


class Steps:
    def __init__(self, mod):
        self.values = [mod]  # of the mod that is traced; None when the trace is done
        self._rows = []  # (compute, None, None) or (check, the number of a value, the result that holds)
        self._guarded = set()

    def add(self, compute):
        """``compute`` takes the list of values. Returns the number of the new value."""
        self._rows.append((compute, None, None))
        with torch._C.DisableTorchFunction():
            self.values.append(compute(self.values))
        return len(self.values) - 1

    def guard(self, number, check):
        """The trace holds for mods whose value has the same ``check(value)``. Returns this result."""
        with torch._C.DisableTorchFunction():
            holds = check(self.values[number])
        if (number, check) not in self._guarded:
            self._guarded.add((number, check))
            self._rows.append((check, number, holds))
        return holds

    def finish(self):
        self.values = None

    def replay(self, mod):
        """Returns the values of another mod, or None if a guard does not hold."""
        values = [mod]
        for function, number, holds in self._rows:
            if number is None:
                try:
                    values.append(function(values))
                except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError):
                    return None  # the mod is of another kind, or it fails. The trace of this mod tells
            elif not _same(function(values[number]), holds):
                return None
        return values


def _same(a, b):
    return a is b or (type(a) is type(b) and a == b)
