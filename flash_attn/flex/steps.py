"""How the values of a trace are found again in another mod of the same code.

A step computes one value from earlier values. Step 0 is the mod itself. Later steps read cells, defaults, globals and
attributes, or repeat what the mod did with its captures alone. A guard says what a value must be like, so that the
trace holds.
"""

import enum
import functools
import types

import torch

NUMBERS = (bool, int, float)
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
        names, of_names = tuple(value), tuple(map(type, value))
        is_told = float not in of_names and tuple not in of_names  # 1.0 == 1, and 0.0 == -0.0
        return (type(value), names, of_names) if is_told else (type(value), exact(names))
    if isinstance(value, functools.partial):
        return functools.partial, len(value.args), tuple(value.keywords)
    if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType, enum.Enum, *SIMPLE)):
        return value
    return type(value)


def exact(value):
    """A number, a string and the like, or a tuple of them, with all types. It tells 0.0 from -0.0."""
    if type(value) is tuple:
        return tuple(map(exact, value))
    return type(value), value if value or not isinstance(value, float) else repr(value)


@functools.cache
def _reader(template):
    """The function of a value and a constant that a template stands for."""
    return eval(f"lambda v, c: {template.format('v', 'c')}")


class Steps:
    """The steps and guards of a trace. ``function`` makes a function of source that does them for another mod.

    Row i of a mod's replay computes ``v<number>``, or returns None if a guard does not hold. Constants are c0, c1, ..
    """

    def __init__(self, mod):
        self.values = [mod]  # of the mod that is traced; None when the trace is done
        self._rows = []  # (the source of a value or None, the source of a condition)
        self._constants = {"Tensor": torch.Tensor, "FunctionType": types.FunctionType, "same": _same, "kind": kind}
        self._guarded = set()
        self._results = None
        self.computes = False  # a step or a guard is being computed
        self.has_failed = False  # a step raised an error. The mod may have caught it, and no guard tells of it.

    def _name(self, constant):
        name = f"c{len(self._constants)}"
        self._constants[name] = constant
        return name

    def _append(self, source, value):
        self._rows.append((f"v{len(self.values)} = {source}", None))
        self.values.append(value)
        return len(self.values) - 1

    def _computed(self, function, *args, guarded=()):
        self.computes = True
        try:
            with torch._C.DisableTorchFunction():
                return function(*args)
        except guarded:
            raise
        except BaseException:
            self.has_failed = True
            raise
        finally:
            self.computes = False

    def add(self, compute):
        """``compute`` takes the list of values. Returns the number of the new value."""
        value = self._computed(compute, self.values)
        return self._append(f"{self._name(compute)}(values)", value)

    def read(self, number, template, constant=None, guarded=()):
        """Reads an attribute or an item of a value: ``{0}`` of the template is the value, ``{1}`` the constant.

        The caller has a guard for errors of the class ``guarded``.
        """
        value = self._computed(_reader(template), self.values[number], constant, guarded=guarded)
        constant = constant if type(constant) is int else self._name(constant)
        return self._append(template.format(f"v{number}", constant), value)

    def write(self, number, name, new):
        """Sets an attribute of a value to another value. No guard must follow."""
        setattr(self.values[number], name, self.values[new])
        self._append(f"setattr(v{number}, {self._name(name)}, v{new})", None)

    def guard(self, number, check):
        """The trace holds for mods whose value has the same ``check(value)``. Returns this result."""
        holds = self._computed(check, self.values[number])
        if (number, check) not in self._guarded:
            self._guarded.add((number, check))
            self._rows.append((None, self._condition(f"v{number}", check, holds)))
        return holds

    def _condition(self, v, check, holds):
        """The source of ``_same(check(v), holds)``. The most usual values of ``kind`` need no call."""
        if check is kind and isinstance(holds, types.CodeType):
            code = self._name(holds)
            return f"{v}.__class__ is FunctionType and ({v}.__code__ is {code} or {v}.__code__ == {code})"
        if check is kind and type(holds) is tuple and holds[0] is torch.Tensor:
            _, dtype, dim, device = holds
            of_device = f"{v}.is_cpu" if device == "cpu" else f"{v}.device.type == {device!r}"
            is_tensor = f"({v}.__class__ is Tensor or isinstance({v}, Tensor))"
            return f"{is_tensor} and {v}.dtype is {self._name(dtype)} and {v}.ndim == {dim} and {of_device}"
        if check is kind and type(holds) is tuple and holds[0] is dict and len(holds) == 3:
            names, of_names = self._name(holds[1]), self._name(holds[2])
            return f"{v}.__class__ is dict and tuple({v}) == {names} and tuple(map(type, {v})) == {of_names}"
        if check is kind and (holds is bool or holds is int or holds is float):
            return f"{v}.__class__ is {holds.__name__}"
        if check is kind:
            wanted = self._name(holds)
            return f"{v} is {wanted} or same(kind({v}), {wanted})"  # a module, a type or a string is its own kind
        return f"same({self._name(check)}({v}), {self._name(holds)})"

    def finish(self, *results):
        """Ends the trace. ``results``: lists of numbers of values, which the function returns."""
        self.values, self._results = None, results

    def _source(self):
        """An error says that the mod is of another kind, or fails. The trace of this mod tells."""
        asks_values = any("(values)" in (row or "") for row, _ in self._rows)
        lines, number = ["def replay(v0):", " try:"] + ["  values = [v0]"] * asks_values, 0
        for row, condition in self._rows:
            if row is None:
                lines.append(f"  if not ({condition}): return None")
                continue
            number += 1
            lines += [f"  {row}"] + [f"  values.append(v{number})"] * asks_values
        results = ["(" + "".join(f"v{i}, " for i in each) + ")" for each in self._results]
        return "\n".join([*lines, f"  return {', '.join(results)}", " except Exception:", "  return None"])

    def function(self):
        """A function of another mod: the values that ``finish`` named, or None if a guard does not hold."""
        exec(compile(self._source(), "<replay>", "exec"), self._constants)
        return self._constants["replay"]


def _same(a, b):
    if a is b or isinstance(a, enum.Enum):  # whose class may say that all members are equal
        return a is b
    return type(a) is type(b) and a == b and (a != 0 or type(a) is not float or repr(a) == repr(b))
