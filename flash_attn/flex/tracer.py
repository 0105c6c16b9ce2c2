"""Turns a mod into a program.

The tracer calls a copy of the mod. In this copy, numbers and tensors of closures, defaults and globals are replaced by
:class:`Number` and :class:`Capture`. The copy is called with :class:`Value` objects, which record what is done with
them. What the mod does with captures alone is no part of the program. It is done again for each mod of the same code
(:mod:`flash_attn.flex.steps`). Operations are in :mod:`flash_attn.flex.operations`.
"""

import builtins
import collections
import contextlib
import dis
import enum
import functools
import operator
import sys
import types

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .program import TYPES, Builder
from .steps import SIMPLE, Steps, kind

INDICES = ("b", "h", "q_idx", "kv_idx")
RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "normal"}
RANDOM |= {"multinomial", "poisson", "dropout", "seed", "manual_seed", "uniform_", "normal_", "bernoulli_", "random_"}
MOST_UNROLLED = 1024  # elements of a vector
FUNCTIONS = torch.autograd.function.__file__  # no place in a mod

_numbers = (bool, int, float)


class Program:
    """A traced mod. ``text`` runs with the tensors and numbers that ``bind`` finds.

    ``score`` is the dtype of the score, or None. For derivative.py the program keeps the trace's instructions.
    ``result`` is the number of the result. ``captures`` and ``params`` are the numbers that instructions have for the
    tensors and numbers of ``bind``. ``kinds`` has dtype and rank of each capture, ``types`` the type of each param.
    """

    def __init__(self, trace, result, dtype):
        values, self.builder, self.result = trace.steps.values, trace.builder, result
        every_kind = [(values[i].dtype, values[i].dim()) for i in trace.captures]
        every_type = [_type_of_number(values[i]) for i in trace.params]
        self.text, self.captures, self.params = self.builder.text(result, every_kind, every_type)
        self.kinds, self.types = [every_kind[i] for i in self.captures], [every_type[i] for i in self.params]
        self.dtype, self.score, self.holds_once = dtype, trace.score, trace.holds_once
        self.derivatives = {}  # of derivative_of
        self.pattern = None  # of attention.plain_of: numbers, and what was found for them
        _places[self.text] = trace.where()
        self._steps = trace.steps
        self.places = [trace.captures[i] for i in self.captures], [trace.params[i] for i in self.params]

    def reads(self, op):
        """Does the result depend on an index: ``"b"``, ``"h"``, ``"q_idx"`` or ``"kv_idx"``?"""
        return any(self.builder.nodes[node][0] == op for node in self.builder.ancestors(self.result))

    def bind(self, mod):
        """Returns the tensors and numbers of a mod of the same kind, or None if this program is not the mod's."""
        self.bind = self._steps.function()  # the next calls need no search
        return self.bind(mod)


_places = {}  # text of a program: name, file and line of the mod that it was traced from last


def place_of_text(text):
    """Returns "name, file, line 7" of the mod that a program was traced from."""
    return _places.get(text, "a mod that was not traced here")


_programs = {}  # key: programs
_programs_at = {}  # (address of a code or type, score): (the code or type, which so keeps its address, its programs)
_MOST_PROGRAMS = 64  # of one key
_MOST_CODES = 1024  # a process that compiles a mod's source for each call has new codes without end
num_traces = 0  # for tests


def _programs_of(code, score):
    """The programs of mods with this code or of this type. Equal codes share them, and the hash of a code is slow."""
    found = _programs_at.get((id(code), score))
    if found is None:
        if len(_programs_at) >= _MOST_CODES:
            for known in (_programs_at, _programs, _places):
                known.clear()
        found = _programs_at[id(code), score] = code, _programs.setdefault((code, score), [])
    return found[1]


def known_program_of(mod, score=None):
    """``program_of`` of a mod whose kind was traced before, or None."""
    code = getattr(mod, "__code__", None) or type(mod)
    found = _programs_at.get((id(code), score))
    known = _programs_of(code, score) if found is None else found[1]
    for program in known:
        bound = program.bind(mod)
        if bound is not None:
            if program is not known[0]:  # the next mod is of the same kind most of the time
                known[:] = [program, *(other for other in known if other is not program)]
            return (program, *bound)
    return None


def program_of(mod, score=None):
    """Returns ``(program, tensors, numbers)`` of a mod. Only the first mod of a kind is traced.

    Args:
        score: the dtype of a score_mod's score, fp32 or fp64; None for a mask_mod.
    """
    global num_traces
    found = known_program_of(mod, score)
    if found is not None:
        return found
    num_traces += 1
    program, tensors, numbers = Trace(mod, score).run()
    if not program.holds_once:
        known = _programs_of(getattr(mod, "__code__", None) or type(mod), score)
        known.insert(0, program)
        del known[_MOST_PROGRAMS:]
    return program, tensors, numbers


class Trace:
    def __init__(self, mod, score):
        self.mod, self.score = mod, score
        self.steps, self.builder = Steps(mod), Builder()
        self.captures, self.params = [], []  # numbers of steps
        self.created = {}  # tensors that torch made while the mod ran, by id
        self.holds_once = False  # a tensor came by a way that cannot be found again
        self._codes, self._shared = set(), {}  # by id of a value: its number, and what the copy of the mod sees
        self._classes = []  # (number of a class or of an instance, function of it that gives the class)
        self._instances = []  # numbers of objects whose class the mod may ask for
        self.grad_mode = torch.is_grad_enabled()

    def run(self):
        function = self.callee()
        indices = [Value(self, self.builder.emit(name, TYPES[torch.int64]), torch.int64) for name in INDICES]
        if self.score is not None:
            indices.insert(0, Value(self, self.builder.emit("score", TYPES[self.score]), self.score))
        with _Mode(self):
            result = function(*indices)
        return self._finish(result)

    def callee(self):
        """What is called in place of the mod."""
        return self.wrap(0)

    def _finish(self, result):
        from . import operations

        if isinstance(result, (tuple, list, dict)) or result is None:
            raise TypeError(f"a mod must return a tensor or a number, not {type(result).__name__}: {self.where()}")
        value = operations.value_of(self, result)
        if value.shape != ():
            raise TypeError(f"a mod must return one element, not a tensor of shape {value.shape}: {self.where()}")
        (node,), dtype = value.instructions(), value.dtype
        if self.score is not None:  # the new score has the type of the old one
            node, dtype = self.builder.cast(node, self.score), self.score
        self._guard_classes()
        program = Program(self, node, dtype)
        bound = [tuple(self.steps.values[i] for i in places) for places in program.places]
        self.steps.finish(*program.places)
        return (program, *bound)

    # ---- places in the mod's source --------------------------------------------------------------------------------

    def where(self):
        """Says in which mod and line the trace is."""
        frame = sys._getframe(1)
        while frame is not None and (frame.f_code not in self._codes or frame.f_code.co_filename == FUNCTIONS):
            frame = frame.f_back
        target = self.mod
        while isinstance(target, functools.partial):
            target = target.func
        code = getattr(target, "__code__", None) or getattr(type(target).__call__, "__code__", None)
        name = getattr(target, "__qualname__", type(target).__name__)
        if frame is not None:
            return f"{name}, {frame.f_code.co_filename}, line {frame.f_lineno}"
        return f"{name}, {code.co_filename}, line {code.co_firstlineno}" if code else name

    def fail(self, text, error=NotImplementedError):
        raise error(f"{text}: {self.where()}")

    def refuse_grad_mode(self):
        self.fail(
            "a mod must not switch gradients off or on, as torch.autograd.Function does; use detach(), or torch's "
            "functions"
        )

    def guard_default_dtype(self):
        """The trace holds as long as floats of no other dtype have this one."""
        self.steps.guard(0, _default_dtype)

    def check_grad_mode(self):
        if torch.is_grad_enabled() != self.grad_mode:
            self.refuse_grad_mode()

    # ---- copies of the mod and of what it reaches ------------------------------------------------------------------

    def child(self, number, template, constant=None):
        return self.wrap(self.steps.read(number, template, constant))

    def wrap(self, number):
        """Returns what the copy of the mod shall see instead of a value."""
        value = self.steps.values[number]
        self.steps.guard(number, kind)
        if isinstance(value, torch.Tensor):
            return Capture(self, number)
        if isinstance(value, (bool, enum.Enum)):  # Python asks whether they are True, or a member
            self._classes.append((number, type))
            return self.steps.guard(number, _itself)
        if isinstance(value, _numbers):
            return Number(self, number)
        if isinstance(value, types.FunctionType):
            return self._copy(number, value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.child(number, "{0}.__func__"), self.child(number, "{0}.__self__"))
        if isinstance(value, functools.partial):
            args = [self.child(number, "{0}.args[{1}]", i) for i in range(len(value.args))]
            words = {name: self.child(number, "{0}.keywords[{1}]", name) for name in value.keywords}
            return functools.partial(self.child(number, "{0}.func"), *args, **words)
        if isinstance(value, (tuple, list)):
            if type(value) not in (tuple, list):
                self._classes.append((number, type))  # its methods are no copies
            items = [self.child(number, "{0}[{1}]", i) for i in range(len(value))]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {name: self.child(number, "{0}[{1}]", name) for name in value}
        if isinstance(value, (type, types.ModuleType)) and not _is_known(value):
            return self._object(number, value) if isinstance(value, types.ModuleType) else self._class(number, value)
        if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)) and not _is_constant(value):
            self.holds_once = True
        if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType, enum.Enum, *SIMPLE)):
            return value
        if isinstance(value, (torch.nn.Module, types.SimpleNamespace)) or type(value).__flags__ & (1 << 9):
            return self._object(number, value)  # an instance of a class of Python
        self.holds_once = True  # whether another mod has the same value is not known
        return value

    def _again(self, number, value):
        """What the copy sees of a value that it has reached before. Other mods must reach one value twice, too."""
        if id(value) not in self._shared:
            return None
        first, seen = self._shared[id(value)]
        self.steps.guard(self.steps.add(lambda values: values[number] is values[first]), _itself)
        return seen

    def _object(self, number, value):
        seen = self._again(number, value)
        if seen is None:
            seen = _Object(self, number)
            self._shared[id(value)] = number, seen
            self._instances.append(number)
        return seen

    def _class(self, number, value):
        """A class is seen as it is."""
        self._classes.append((number, _itself))
        return value

    def _guard_classes(self):
        """Other mods must find the same in the classes that the mod saw as they are."""
        names = {x for code in self._codes for x in (*code.co_names, *code.co_consts) if isinstance(x, str)}
        self.holds_once |= bool(names & _UNSEEN)
        asked = self._instances if names & {"__class__", "type"} else []
        for number, class_of in (*self._classes, *((number, type) for number in asked)):
            found = _found_in(class_of(self.steps.values[number]), names)
            if found is None:
                self.holds_once = True
            elif found:
                self.steps.guard(number, lambda value, class_of=class_of: _found_in(class_of(value), names))

    def _copy(self, number, function):
        code = function.__code__
        if function.__module__ and function.__module__.split(".")[0] == "torch" and not function.__closure__:
            return function
        copy = self._again(number, function)
        if copy is not None:
            return copy
        self._codes.update(_codes(code))
        for each in _codes(code):
            self._check_instructions(each)
        scope, cells = dict(function.__globals__), [types.CellType() for _ in function.__closure__ or ()]
        copy = types.FunctionType(code, scope, function.__name__, None, tuple(cells))
        self._shared[id(function)] = number, copy
        for i, cell in enumerate(cells):
            cell.cell_contents = self.child(number, "{0}.__closure__[{1}].cell_contents", i)
        names = {name for each in _codes(code) for name in each.co_names}
        for name in sorted(names & set(function.__globals__)):
            if name != "__builtins__":
                scope[name] = self.child(number, "{0}.__globals__[{1}]", name)
        for name in sorted(names & set(vars(builtins)) - set(function.__globals__)):  # a global would hide a builtin
            self.steps.guard(self.steps.read(number, "{1} in {0}.__globals__", name), _itself)
            if name in STAND_INS:
                scope[name] = STAND_INS[name]
        for name in sorted(names - set(function.__globals__) - set(vars(builtins))) if "NameError" in names else ():
            self.steps.guard(self.steps.read(number, "{1} in {0}.__globals__", name), _itself)
        if names & _ASKS or vars(function):
            self.steps.guard(number, _attributes)
            copy.__dict__.update({name: self.child(number, "{0}.__dict__[{1}]", name) for name in vars(function)})
        if function.__defaults__:
            copy.__defaults__ = self.child(number, "{0}.__defaults__")
        if function.__kwdefaults__:
            copy.__kwdefaults__ = self.child(number, "{0}.__kwdefaults__")
        return copy

    def _check_instructions(self, code):
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname == "MATCH_CLASS":
                raise NotImplementedError(
                    "a mod must not match classes, because objects of the tracer stand for its values; use isinstance: "
                    f"{code.co_name}, {code.co_filename}, line {code.co_firstlineno}"
                )
            if instruction.opname == "IMPORT_NAME" and name.split(".")[0] not in _CONSTANT:
                self.holds_once = True

    # ---- captures and parameters -----------------------------------------------------------------------------------

    def repeat(self, function, args, kwargs):
        """Calls a function of captures and numbers now, and again for each mod of the same kind."""
        self.check_grad_mode()
        planned, words = _plan(args), _plan(kwargs)

        def compute(values):
            return function(*_fill(planned, values), **_fill(words, values))

        number = self.steps.add(compute)
        value = self.steps.values[number]
        if isinstance(value, (tuple, list)) or isinstance(value, (torch.Tensor, *_numbers)):
            return self.wrap(number)
        return self.steps.guard(number, _itself)

    def constant_tensor(self, tensor):
        """A tensor that is no capture of the mod: made while it ran, or found by a way that is not known."""
        if id(tensor) not in self.created:
            self.holds_once = True
        return Capture(self, self.steps.add(lambda values: tensor))

    def capture(self, number):
        if number not in self.captures:
            self.captures.append(number)
        return self.captures.index(number)

    def param(self, number):
        if number not in self.params:
            self.params.append(number)
        return self.params.index(number)


def _itself(value):
    return value


def _default_dtype(value):
    return torch.get_default_dtype()


_KNOWN = {*sys.stdlib_module_names, "torch", "numpy", __name__.split(".")[0]}  # packages whose names never change
_CONSTANT = {"torch", "numpy", __name__.split(".")[0], "abc", "builtins", "cmath", "collections", "copy", "dataclasses"}
_CONSTANT |= {"decimal", "enum", "fractions", "functools", "itertools", "math", "numbers", "operator", "statistics"}
_CONSTANT |= {"string", "types", "typing", "warnings"}  # and whose functions give the same each time
_UNSEEN = {"globals", "locals", "eval", "exec", "__globals__", "__import__", "random"}  # names that lead to anything
_UNSEEN |= {
    "get_default_dtype",
    "get_default_device",
    "get_num_threads",
    "is_grad_enabled",
    "is_inference_mode_enabled",
}
_UNSEEN |= {"is_autocast_enabled", "get_autocast_dtype", "are_deterministic_algorithms_enabled"}  # torch's settings
_ASKS = {"hasattr", "getattr", "vars", "__dict__"}


def _is_known(value):
    """Does a module or a class belong to a package that no mod changes?"""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (name or "").split(".")[0] in _KNOWN and (name or "").split(".")[0] != "__main__"


def _is_constant(value):
    """Do a module's functions, or does a builtin function, give the same each time?"""
    owner = value if isinstance(value, types.ModuleType) else value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        name = value.__module__ if owner is None else owner.__name__
        return name is None or name.split(".")[0].removeprefix("_") in _CONSTANT
    return isinstance(owner, (type, *_numbers, *SIMPLE))  # a method may belong to an object that changes


def _attributes(value):
    """The names of the attributes that a function was given."""
    return tuple(vars(value))


_PURE = (types.MemberDescriptorType, types.GetSetDescriptorType, type(collections.namedtuple("_Pair", "a").a))


def _found_in(value, names):
    """What attributes of these names a class has, ``((name, what), ..)``; None: it may be another thing next time."""
    if _is_known(value):
        return ()
    if "__dict__" in names or "vars" in names or not _is_known(type(value)):
        return None
    found = []
    for base in value.__mro__:
        for name in () if _is_known(base) else sorted(names & set(vars(base))):
            what = vars(base)[name]
            what = () if isinstance(what, _PURE) else _lasting(what, names)
            if what is None:
                return None
            found.append((name, what))
    return tuple(found)


def _lasting(value, names):
    """A value that cannot change, with its types. None: it can."""
    if isinstance(value, (*_numbers, *SIMPLE, enum.Enum)):
        return type(value), value
    if type(value) is tuple:
        items = tuple(_lasting(item, names) for item in value)
        return None if None in items else items
    if isinstance(value, type):
        found = _found_in(value, names)
        return None if found is None else (value, found)
    return None


def _type_of_number(number):
    if isinstance(number, (bool, torch.SymBool)):
        return TYPES[torch.bool]
    return TYPES[torch.int64 if isinstance(number, (int, torch.SymInt)) else torch.float64]


def _codes(code):
    found = {code}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _codes(constant)
    return found


class _Ref:
    def __init__(self, number):
        self.number = number


def _plan(x):
    """Replaces the trace's objects by their numbers."""
    if isinstance(x, _Bound):
        return _Ref(x._number)
    if isinstance(x, slice):
        return slice(*map(_plan, (x.start, x.stop, x.step)))
    if isinstance(x, (tuple, list)):
        return type(x)(map(_plan, x))
    return {name: _plan(item) for name, item in x.items()} if isinstance(x, dict) else x


def _fill(x, values):
    if isinstance(x, _Ref):
        return values[x.number]
    if isinstance(x, slice):
        return slice(*(_fill(each, values) for each in (x.start, x.stop, x.step)))
    if isinstance(x, (tuple, list)):
        return type(x)(_fill(item, values) for item in x)
    return {name: _fill(item, values) for name, item in x.items()} if isinstance(x, dict) else x


# ---- what a mod sees ----------------------------------------------------------------------------------------------


class _Operators:
    """Arithmetic that calls ``_apply(function, *operands)``."""

    def __getitem__(self, index):
        return self._apply(operator.getitem, self, index)


def _operator(function, is_reflected):
    def method(self, *others):
        return self._apply(function, *((*others, self) if is_reflected else (self, *others)))

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split():
    _function = getattr(operator, _name + "_" if _name in ("and", "or") else _name)
    setattr(_Operators, f"__{_name}__", _operator(_function, False))
    setattr(_Operators, f"__r{_name}__", _operator(_function, True))
for _name in "lt le gt ge eq ne neg pos abs invert".split():
    setattr(_Operators, f"__{_name}__", _operator(getattr(operator, _name), False))


class _Traced(_Operators):
    """Reaches the trace through functions of torch, too."""

    def __init__(self, trace):
        self._trace = trace

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def _apply(self, function, *operands):
        return dispatch(function, operands, {})

    __hash__ = None

    def __setitem__(self, index, value):
        self._trace.fail("a mod must not write to a tensor; use torch.where")


class _Bound(_Traced):
    """A value that does not depend on indices. It is computed again for each mod of the same kind."""

    def __init__(self, trace, number):
        super().__init__(trace)
        self._number = number

    @property
    def _value(self):
        return self._trace.steps.values[self._number]


class Number(_Bound):
    """A bool, int or float that is a parameter of the program. Python's control flow records a guard."""

    def _apply(self, function, *operands):
        if all(isinstance(x, (Number, *_numbers)) for x in operands):
            return self._trace.repeat(function, operands, {})
        return dispatch(function, operands, {})

    def __bool__(self):
        return self._trace.steps.guard(self._number, bool)

    def _concrete(self):
        return self._trace.steps.guard(self._number, _itself)

    def __int__(self):
        return int(self._concrete())

    def __float__(self):
        return float(self._concrete())

    def __index__(self):
        return operator.index(self._concrete())

    def __hash__(self):
        return hash(self._concrete())

    def __round__(self, *digits):
        return self._trace.repeat(round, (self, *digits), {})

    def __repr__(self):
        return repr(self._concrete())

    __str__ = __repr__

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._concrete(), name)
        return found


class _Tensor(_Traced):
    """The methods of torch.Tensor."""

    def __getattr__(self, name):
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        found = getattr(torch.Tensor, name)
        if not callable(found):
            return dispatch(found.__get__, (self,), {}, name)
        return lambda *args, **kwargs: dispatch(found, (self, *args), kwargs)

    def __iter__(self):
        return (self[i] for i in range(len(self)))


class Capture(_Tensor, _Bound):
    """A captured tensor, or a tensor computed from captures alone."""

    def __init__(self, trace, number):
        super().__init__(trace, number)
        with torch._C.DisableTorchFunction():
            self.dtype, self.device, self.ndim = self._value.dtype, self._value.device, self._value.dim()

    def __getattr__(self, name):
        if name.startswith("__") or hasattr(torch.Tensor, name):
            return super().__getattr__(name)
        if self._trace.steps.guard(self._number, _has(name)):  # an attribute that the tensor was given
            return self._trace.child(self._number, "getattr({0}, {1})", name)
        raise AttributeError(f"a tensor has no attribute {name!r}")

    def __len__(self):
        return self.shape[0].__index__()

    def __bool__(self):
        return bool(self.item())

    def __int__(self):
        return int(self.item())

    def __float__(self):
        return float(self.item())

    def __index__(self):
        return operator.index(self.item())


def without_modes():
    """A context for tensors of instructions, which are real although Dynamo and its backends trace with fake ones."""
    is_traced = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if is_traced else contextlib.nullcontext()


def in_memory(instructions, shape):
    with without_modes():
        return torch.tensor(instructions, dtype=torch.int64, device="cpu").reshape(shape)


class Value(_Tensor):
    """One or several elements that depend on indices. ``nodes`` holds their instructions, in the shape of the value."""

    def __init__(self, trace, nodes, dtype):
        super().__init__(trace)
        self._nodes = nodes if isinstance(nodes, torch.Tensor) else in_memory(nodes, ())
        self.dtype, self.device = dtype, torch.device("cpu")

    @property
    def nodes(self):
        return self._nodes

    def instructions(self, shape=None):
        """A list of them, of the value in this shape."""
        with without_modes():
            return self.nodes.expand(self.shape if shape is None else shape).flatten().tolist()

    @property
    def shape(self):
        return tuple(self._nodes.shape)

    @property
    def ndim(self):
        return len(self.shape)

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self):
        return len(self.shape)

    def numel(self):
        return self.nodes.numel()

    def __len__(self):
        return self.shape[0]

    def __bool__(self):
        self._refuse("a mod must not branch on its indices or use and, or, not; use &, |, ~ or torch.where")

    def _refuse(self, text="the value of an index or score is not known while a mod is traced; use tensor operations"):
        self._trace.fail(text, RuntimeError)

    def item(self):
        self._refuse()

    __int__ = __float__ = __index__ = __complex__ = tolist = item


class Row(Value):
    """Part of a capture: some dimensions have an index, others are whole. Its elements are loaded when needed."""

    def __init__(self, trace, capture, indices):
        super().__init__(trace, 0, capture.dtype)
        self.capture, self.indices = capture, indices  # an instruction for each dimension, or None

    @property
    def shape(self):
        guard, number = self._trace.steps.guard, self.capture._number
        return tuple(guard(number, _size(dim)) for dim, index in enumerate(self.indices) if index is None)

    @property
    def nodes(self):
        from . import operations

        return operations.load(self)


@functools.cache
def _has(name):
    return lambda value: hasattr(value, name)


@functools.cache
def _size(dim):
    return lambda tensor: tensor.size(dim)


class _Object:
    """An instance of a class of Python. Its attributes are captures and parameters."""

    def __init__(self, trace, number):
        object.__setattr__(self, "_trace", trace)
        object.__setattr__(self, "_number", number)

    def __getattribute__(self, name):
        get = object.__getattribute__
        trace, number = get(self, "_trace"), get(self, "_number")
        if name == "__class__":
            return type(trace.steps.values[number])
        try:
            found = trace.child(number, "getattr({0}, {1})", name)
        except AttributeError:  # a later one may have it
            trace.steps.guard(number, _has(name))
            raise
        if isinstance(found, types.MethodType):
            return types.MethodType(found.__func__, self)
        return found

    def __setattr__(self, name, value):
        object.__getattribute__(self, "_trace").fail(f"a mod must not set the attribute {name}")

    def _asked(self, question):
        """The answer to a question about the object itself, which must be the same in other mods."""
        get = object.__getattribute__
        return get(self, "_trace").steps.guard(get(self, "_number"), question)

    def __eq__(self, other):
        get = object.__getattribute__
        trace, number = get(self, "_trace"), get(self, "_number")
        if isinstance(other, _Object):
            second = get(other, "_number")
            return trace.steps.guard(trace.steps.add(lambda values: values[number] == values[second]), bool)
        return trace.steps.guard(trace.steps.add(lambda values: values[number] == other), bool)

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(object.__getattribute__(self, "_trace").steps.values[object.__getattribute__(self, "_number")])

    def __bool__(self):
        return object.__getattribute__(self, "_asked")(bool)

    def __len__(self):
        return object.__getattribute__(self, "_asked")(len)

    def __contains__(self, item):
        get = object.__getattribute__
        trace, number = get(self, "_trace"), get(self, "_number")
        return trace.steps.guard(trace.steps.add(lambda values: item in values[number]), bool)

    def __call__(self, *args, **kwargs):
        return type(self).__getattribute__(self, "__call__")(*args, **kwargs)

    def __iter__(self):
        if object.__getattribute__(self, "_asked")(_has("__iter__")):
            return iter(type(self).__getattribute__(self, "__iter__")())
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index):
        return type(self).__getattribute__(self, "__getitem__")(index)


# ---- builtin functions ---------------------------------------------------------------------------------------------


def _isinstance(x, classes):
    """Is what an object of the trace stands for an instance of classes?"""
    if isinstance(x, _Bound):
        return x._trace.steps.guard(x._number, lambda value: isinstance(value, classes))
    return issubclass(torch.Tensor, classes) if isinstance(x, Value) else isinstance(x, classes)


def _type(x, *rest):
    """The type of what an object of the trace stands for."""
    if rest:
        return type(x, *rest)
    if isinstance(x, _Bound):
        return x._trace.steps.guard(x._number, type)
    return torch.Tensor if isinstance(x, Value) else x.__class__ if type(x) is _Object else type(x)


STAND_INS = {"isinstance": _isinstance, "type": _type}  # of builtin functions, in the copy of a mod


# ---- functions of torch -------------------------------------------------------------------------------------------


def _parts(x):
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from _parts(item)
    elif isinstance(x, slice):
        yield from (x.start, x.stop, x.step)
    elif isinstance(x, dict):
        yield from _parts(tuple(x.values()))
    else:
        yield x


def _check_is_torchs(trace, function):
    """An operation is known by its name. One of another library may have such a name, too."""
    packet = getattr(function, "overloadpacket", function)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        if not packet._qualified_op_name.startswith("aten::"):
            trace.fail(f"a mod cannot use {packet._qualified_op_name}, which is no operator of PyTorch")
    elif isinstance(function, types.FunctionType) and function.__module__.partition(".")[0] != "torch":
        trace.fail(f"a mod cannot use {function.__qualname__}, which is no function of PyTorch")


def dispatch(function, args, kwargs, name=None):
    """Does what a function of torch or an operator of Python does, for the objects of a trace."""
    from . import operations

    is_torchs, name = name is not None, name or getattr(function, "__name__", str(function))
    parts = [*_parts(args), *_parts(kwargs)]
    trace = next(x._trace for x in parts if isinstance(x, _Traced))
    if name in RANDOM:
        trace.fail(f"a mod must not draw random numbers ({name})")
    if (name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_")) or "out" in kwargs:
        trace.fail(f"a mod must not write to a tensor ({name})")
    if any(isinstance(x, Value) for x in parts):
        trace.check_grad_mode()
        if not is_torchs:
            _check_is_torchs(trace, function)
        with torch._C.DisableTorchFunction():  # the tracer's own tensors are no business of the mode
            return operations.operate(trace, name, function, args, kwargs)
    return trace.repeat(function, args, kwargs)


class _Mode(TorchFunctionMode):
    """Sees the calls of torch in which no object of the trace takes part by itself."""

    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, _Traced) for x in (*_parts(args), *_parts(kwargs))):
            return dispatch(function, args, kwargs)
        if getattr(function, "__name__", "") == "_set_grad_enabled":  # also to what it was: another call is recorded
            self.trace.refuse_grad_mode()
        if getattr(function, "__name__", "") in RANDOM:
            self.trace.fail(f"a mod must not draw random numbers ({function.__name__})")
        result = function(*args, **kwargs)
        inputs = [x for x in (*_parts(args), *_parts(kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.is_floating_point() for x in _parts(result) if isinstance(x, torch.Tensor)):
            self.trace.guard_default_dtype()
        if all(id(x) in self.trace.created for x in inputs):
            self.trace.created.update({id(x): x for x in _parts(result) if isinstance(x, torch.Tensor)})
        else:
            self.trace.holds_once = True
        return result
