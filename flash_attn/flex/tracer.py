"""Turns a mod into a program.

The tracer calls a copy of the mod. In this copy, numbers and tensors of closures, defaults and globals are replaced by
:class:`Number` and :class:`Capture`. The copy is called with :class:`Value` objects, which record what is done with
them (:mod:`flash_attn.flex.values`). What the mod does with captures alone is no part of the program. It is done again
for each mod of the same code (:mod:`flash_attn.flex.steps`). Operations are in :mod:`flash_attn.flex.operations`.
"""

import builtins
import collections
import dataclasses
import dis
import enum
import functools
import inspect
import math
import operator
import sys
import types
from traceback import walk_stack, walk_tb

import torch
from torch.overrides import TorchFunctionMode

from . import operations
from .known import STAND_INS, Module
from .lasting import (
    ANYWHERE,
    found_in,
    has_functions,
    is_as_it_is,
    is_builtin,
    is_constant,
    is_fixed,
    is_key,
    is_known,
    is_of_library,
    is_simple,
)
from .program import TYPES, Builder
from .steps import NUMBERS, SIMPLE, Steps, kind
from .values import (
    MOST_UNROLLED,
    RANDOM,
    Bound,
    Capture,
    DataObject,
    Function,
    Number,
    Object,
    Traced,
    Value,
    dispatch,
    has,
    is_object,
    itself,
    parts_of,
)

INDICES = ("b", "h", "q_idx", "kv_idx")
FUNCTIONS = torch.autograd.function.__file__  # no place in a mod
CONTAINERS = (tuple, list, dict, collections.OrderedDict)  # of which the copy sees a tuple, a list or a dict
ASKS_IDENTITY = (id, operator.is_, operator.is_not)


class IdentityAsked(BaseException):
    """The mod asks whether two values are one object. No ``except Exception`` of a mod must catch this."""


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
        self.ops = {self.builder.nodes[node][0] for node in self.builder.ancestors(result)}
        self.pattern = None  # of attention.plain_of: numbers, and what was found for them
        _places[self.text] = trace.where()
        self._steps = trace.steps
        self.places = [trace.captures[i] for i in self.captures], [trace.params[i] for i in self.params]

    def reads(self, op):
        """Does the result depend on an operation, such as an index: ``"b"``, ``"h"``, ``"q_idx"`` or ``"kv_idx"``?"""
        return op in self.ops

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
    try:
        program, tensors, numbers = Trace(mod, score).run()
    except IdentityAsked:
        program, tensors, numbers = Trace(mod, score, asks_identity=True).run()
    if not program.holds_once:
        known = _programs_of(getattr(mod, "__code__", None) or type(mod), score)
        known.insert(0, program)
        del known[_MOST_PROGRAMS:]
    return program, tensors, numbers


PARAMETERS = "a mask_mod takes (b, h, q_idx, kv_idx), a score_mod (score, b, h, q_idx, kv_idx)"


def _target(mod):
    while isinstance(mod, functools.partial):
        mod = mod.func
    return mod


def name_of(mod):
    return getattr(_target(mod), "__qualname__", type(_target(mod)).__name__)


def place_of(mod):
    """The name of a mod, its file and its first line."""
    target = _target(mod)
    code = getattr(target, "__code__", None) or getattr(type(target).__call__, "__code__", None)
    return f"{name_of(mod)}, {code.co_filename}, line {code.co_firstlineno}" if code else name_of(mod)


def takes(mod, num):
    """Can the mod be called with so many arguments? True if its signature is not known."""
    try:
        inspect.signature(mod).bind(*range(num))
    except TypeError:
        return False
    except ValueError:
        return True
    return True


class Trace:
    """One trace of a mod. With ``asks_identity`` one object has one stand-in, so that ``is`` answers as in the mod, and
    other mods must have the same values in common. Few mods ask, and without it a mod whose values come from the same
    place today may have different ones tomorrow.
    """

    def __init__(self, mod, score, asks_identity=False):
        self.mod, self.score, self.asks_identity = mod, score, asks_identity
        self.steps, self.builder = Steps(mod), Builder()
        self.captures, self.params = [], []  # numbers of steps
        self.created = {}  # tensors that torch made while the mod ran, by id
        self.holds_once = False  # a tensor came by a way that cannot be found again
        self._codes, self._shared = set(), {}  # by id of a value: its number, and what the copy of the mod sees
        self._modules = {}  # of libraries
        self._stand_ins = {ask: functools.partial(self._ask, ask) for ask in (getattr, hasattr)} | STAND_INS
        self._stand_ins[__import__] = self._import
        self._builtins = vars(builtins) | {ask.__name__: seen for ask, seen in self._stand_ins.items()}  # of the copy
        self._classes = []  # (number of a class or of an instance, function of it that gives the class)
        self._watches = False  # is _notice called for each function that runs?
        self._instances = []  # numbers of objects whose class the mod may ask for
        self._asked = set()  # names of attributes that the mod has computed
        self._written = {}  # (number of a function, name of an attribute): what the mod has set the attribute to
        self._compared = []  # numbers of values whose stand-ins the mod may compare by `is`
        self.grad_mode = torch.is_grad_enabled()

    def run(self):
        try:
            result = self._result()
        finally:
            if self._watches:
                sys.setprofile(None)
        return self._finish(result)

    def _result(self):
        function = self.callee()
        indices = [Value(self, self.builder.emit(name, TYPES[torch.int64]), torch.int64) for name in INDICES]
        if self.score is not None:
            indices.insert(0, Value(self, self.builder.emit("score", TYPES[self.score]), self.score))
        with _Mode(self):
            try:
                return function(*indices)
            except (TypeError, AttributeError, ValueError) as error:
                self._explain(error, len(indices))
                raise

    def _explain(self, error, num):
        """Raises a clearer error in place of one of Python or of a library, which does not know what a mod may do."""
        text, place = str(error), self.where(error.__traceback__)
        if "does not support ufuncs" in text:
            raise TypeError(
                f"a mod cannot call functions of NumPy on its indices and tensors; use those of torch: {place}"
            ) from error
        if not takes(self.mod, num):
            raise TypeError(f"{PARAMETERS}: {place_of(self.mod)}: {error}") from error
        if f"{name_of(self.mod)}, " in text or type(error) not in (TypeError, AttributeError, ValueError):
            return
        *_, (frame, _) = walk_tb(error.__traceback__)
        name = frame.f_globals["__name__"]
        is_ours = frame.f_builtins is self._builtins or name.split(".")[0] == __package__.split(".")[0]
        if is_of_library(frame) and not (is_ours or isinstance(error, AttributeError)):
            text = (
                f"{text}; {name} sees an object of the tracer in place of a captured number or tensor. Give it int(x) "
                "or float(x), or call it outside of the mod"
            )
        raise type(error)(f"{text}: {place}") from error

    def callee(self):
        """What is called in place of the mod."""
        return self.wrap(0)

    def _finish(self, result):
        if isinstance(result, (tuple, list, dict)) or result is None:
            raise TypeError(f"a mod must return a tensor or a number, not {type(result).__name__}: {self.where()}")
        value = operations.value_of(self, result)
        if value.shape != ():
            raise TypeError(f"a mod must return one element, not a tensor of shape {value.shape}: {self.where()}")
        (node,), dtype = value.instructions(), value.dtype
        if self.score is not None:  # the new score has the type of the old one
            node, dtype = self.builder.cast(node, self.score), self.score
        self._guard_classes()
        self._guard_identity()
        self._write_attributes()
        self.holds_once |= self.steps.has_failed
        program = Program(self, node, dtype)
        bound = [tuple(self.steps.values[i] for i in places) for places in program.places]
        self.steps.finish(*program.places)
        return (program, *bound)

    # ---- places in the mod's source --------------------------------------------------------------------------------

    def where(self, traceback=None):
        """Says in which mod and line the trace is, or was when an exception with this traceback was raised."""
        frames = walk_stack(sys._getframe(1)) if traceback is None else [*walk_tb(traceback)][::-1]
        for frame, line in frames:
            is_of_mod = any(frame.f_code is code for code in self._codes)  # codes of Dynamo may have no hash
            if is_of_mod and frame.f_code.co_filename != FUNCTIONS:
                return f"{name_of(self.mod)}, {frame.f_code.co_filename}, line {line}"
        return place_of(self.mod)

    def fail(self, text, error=NotImplementedError):
        self.holds_once = True  # if the mod catches the error
        raise error(f"{text}: {self.where()}")

    def check_size(self, shape):
        """Each element has instructions of its own."""
        if math.prod(shape) > MOST_UNROLLED:
            self.fail(
                f"a mod can use a vector of at most {MOST_UNROLLED} elements, not a tensor of shape {tuple(shape)}"
            )

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

    def attribute(self, number, name):
        """An attribute of an object, of a function or of a number of a user's class."""
        if (number, name) in self._written:
            return self._written[number, name]
        if name == "__dict__" and any(number == written for written, _ in self._written):
            self.fail("a mod must not ask for __dict__ of a function after it has set an attribute")
        try:
            return self.wrap(self.steps.read(number, "getattr({0}, {1})", name, guarded=AttributeError))
        except AttributeError:  # a later one may have it
            self.steps.guard(number, has(name))
            raise

    def write(self, number, name, value):
        """Sets an attribute of a function when the trace ends, and again in each call."""
        function = self.steps.values[number]
        for x in parts_of(value):
            if not (isinstance(x, (Bound, torch.Tensor, *NUMBERS, *SIMPLE)) or is_object(x)):
                self.fail(f"a mod must not keep its indices, or an object that it makes, in the attribute {name}")
            self.holds_once |= isinstance(x, torch.Tensor)  # each function has a tensor of its own
        if hasattr(getattr(type(function), name, None), "__set__"):  # such as __defaults__
            self.fail(f"a mod must not set the attribute {name}")
        self._written[number, name] = value

    def _write_attributes(self):
        for (number, name), value in self._written.items():
            plan = _plan(value)
            new = self.steps.add(lambda values, plan=plan: _fill(plan, values))
            self.steps.write(number, name, new)

    def wrap(self, number):
        """Returns what the copy of the mod shall see instead of a value."""
        if not self.asks_identity:
            return self._stand_in(number)
        value = self.steps.values[number]
        self._compared.append(number)
        if id(value) not in self._shared:  # a function is there before its copy is complete
            seen = self._stand_in(number)
            self._shared.setdefault(id(value), (number, seen))
        return self._again(number, value)

    def _stand_in(self, number):
        """A new stand-in for a value. Modules, types and the like stand for themselves."""
        value = self.steps.values[number]
        self.steps.guard(number, kind)
        if isinstance(value, torch.Tensor):
            return Capture(self, number)
        if isinstance(value, (bool, enum.Enum)):  # Python asks whether they are True, or a member
            self._see_class(number, type)
            self.holds_once |= isinstance(value, enum.Enum) and not is_fixed(value)
            return self.steps.guard(number, itself)
        if isinstance(value, NUMBERS):
            return Number(self, number)
        if isinstance(value, types.FunctionType):
            if "_torchdynamo_orig_callable" in vars(value):  # of torch.compile and torch.compiler.disable
                return self.child(number, "{0}._torchdynamo_orig_callable")
            return self._copy(number, value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.child(number, "{0}.__func__"), self.child(number, "{0}.__self__"))
        if isinstance(value, functools.partial):
            return self._partial(number, value)
        if isinstance(value, functools._lru_cache_wrapper):  # it would keep objects of the trace
            return self.child(number, "{0}.__wrapped__")
        if isinstance(value, (tuple, list, dict)):
            return self._container(number, value)
        if isinstance(value, (type, types.ModuleType)) and not is_known(value):
            return self._object(number, value) if isinstance(value, types.ModuleType) else self._class(number, value)
        if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
            return self.known(value)
        if isinstance(value, SIMPLE):
            self.holds_once |= not is_simple(value)  # it may have attributes of its own
            return value
        if isinstance(value, (torch.nn.Module, types.SimpleNamespace)) or type(value).__flags__ & (1 << 9):
            return self._object(number, value)  # an instance of a class of Python
        self.holds_once = True  # whether another mod has the same value is not known
        return value

    def known(self, value):
        """What the copy sees of what a library has."""
        self.holds_once |= not is_constant(value)
        if isinstance(value, types.ModuleType):
            return self._modules.setdefault(value, Module(self, value)) if is_known(value) else value
        if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return value
        if value in ASKS_IDENTITY:
            self._need_identity()
        if value is torch.finfo:  # of the default dtype, if it gets none
            self.guard_default_dtype()
        if value is vars:
            self._asked.add("__dict__")
        return self._stand_ins.get(value, value)

    def _import(self, *args, **kwargs):
        """An import of the mod."""
        self.holds_once, before = True, self.holds_once
        module = __import__(*args, **kwargs)
        self.holds_once = before
        return self.known(module)

    def _container(self, number, value):
        """The same container of what the copy sees. A class may have another way to read its items."""
        is_plain, base = type(value) in CONTAINERS, next(x for x in (tuple, list, dict) if isinstance(value, x))
        names = value if base is dict else range(len(value))
        if base is dict:
            self.holds_once |= not all(map(is_key, names))
            classes = {type(name) for name in names if isinstance(name, enum.Enum)}
            for cls in classes:
                self._see_class(number, lambda _, cls=cls: cls)
        template = "{0}[{1}]" if is_plain else base.__name__ + ".__getitem__({0}, {1})"
        items = [self.child(number, template, name) for name in names]
        if is_plain:
            return dict(zip(names, items)) if base is dict else base(items)
        if base is not dict:
            self._see_class(number, type)  # its methods are no copies
            if hasattr(value, "_fields"):
                return type(value)(*items)
            if is_known(type(value)):
                return type(value)(items)
        self.holds_once = True  # its methods may read anything
        copy = base.__new__(type(value), *([items] if base is tuple else []))
        if base is dict:
            dict.update(copy, zip(names, items))
        elif base is list:
            list.extend(copy, items)
        if isinstance(value, collections.defaultdict):
            copy.default_factory = value.default_factory
        if hasattr(value, "__dict__"):
            copy.__dict__.update(vars(value))
        return copy

    def _again(self, number, value):
        """What the copy sees of a value that it has reached before. Other mods must reach one value twice, too."""
        if id(value) not in self._shared:
            return None
        first, seen = self._shared[id(value)]
        self.steps.guard(self.steps.add(lambda values: values[number] is values[first]), itself)
        return seen

    def _object(self, number, value):
        seen = self._again(number, value)
        if seen is None:
            seen = (DataObject if dataclasses.is_dataclass(value) else Object)(self, number)
            self._shared[id(value)] = number, seen
            self._instances.append(number)
        return seen

    def fields(self, number):
        """The fields of a dataclass are seen as they are. Functions of ``dataclasses`` ask, and may make an object."""
        self._see_class(number, type)
        fields = self.steps.values[number].__dataclass_fields__
        self.holds_once |= any(field.metadata for field in fields.values())
        return fields

    def _class(self, number, value):
        """A class is seen as it is."""
        self._see_class(number, itself)
        return value

    def _see_class(self, number, class_of):
        """The mod may call what the class of a value has. No copy is made of it, so it may read anything."""
        seen = class_of(self.steps.values[number])
        if not is_known(seen):
            self._classes.append((number, class_of))
        if has_functions(seen):
            self._watch()

    def _watch(self):
        """From here on Python tells of each function that runs."""
        if not (self._watches or self.holds_once):
            self._watches = sys.getprofile() is None
            self.holds_once |= not self._watches  # another profiler has the place
            if self._watches:
                sys.setprofile(self._notice)

    def _notice(self, frame, event, _):
        """A function runs. What it reads is not known, unless it is a copy, is of a library or runs in each call."""
        if event != "call" or self.steps.computes or is_of_library(frame):
            return
        if frame.f_builtins is not self._builtins:
            self.holds_once, self._watches = True, False
            sys.setprofile(None)

    def _names(self):
        """What may be names of attributes."""
        names = {x for code in self._codes for x in (*code.co_names, *code.co_consts) if isinstance(x, str)}
        return names | self._asked

    def _guard_classes(self):
        """Other mods must find the same in the classes that the mod saw as they are."""
        names = self._names()
        self.holds_once |= bool(names & ANYWHERE)
        asked = self._instances if names & {"__class__", "type"} else []
        for number, class_of in (*self._classes, *((number, type) for number in asked)):
            found = found_in(class_of(self.steps.values[number]), names, is_first=True)
            if found is None:
                self.holds_once = True
            elif found:
                self.steps.guard(number, lambda value, class_of=class_of: found_in(class_of(value), names))

    def _guard_identity(self):
        """Other mods must have one object in the same places, and different ones in the same places."""
        numbers = tuple(self._compared)

        def first_places(values):
            first = {}
            return tuple(first.setdefault(id(values[number]), number) for number in numbers)

        if self.asks_identity:
            self.steps.guard(self.steps.add(first_places), itself)

    def _copy(self, number, function):
        if is_as_it_is(function):
            return self.known(function)
        seen = self._again(number, function)
        if seen is not None:
            return seen
        code = function.__code__
        self._codes.update(_codes(code))
        if self._names() & {"__class__", "type"}:
            self._watch()
        names = {name for each in _codes(code) for name in self._check_instructions(each)}
        scope = {**function.__globals__, "__builtins__": self._builtins}
        cells = [types.CellType() for _ in function.__closure__ or ()]
        copy = types.FunctionType(code, scope, function.__name__, None, tuple(cells))
        seen = self._share(number, function, copy)
        for i, cell in enumerate(cells):
            if _is_empty(function.__closure__[i]):
                self.holds_once = True  # it may be filled later
            else:
                cell.cell_contents = self.child(number, "{0}.__closure__[{1}].cell_contents", i)
        for name in sorted(names - {"__builtins__"}):
            if name in function.__globals__:
                scope[name] = self.child(number, "{0}.__globals__[{1}]", name)
            elif name in vars(builtins) and is_builtin(name):  # a global would hide a builtin
                self.steps.guard(self.steps.read(number, "{1} in {0}.__globals__", name), itself)
                self.known(vars(builtins)[name])
            else:
                self.holds_once = True  # the name may be there later, or a program has put it into builtins
        if function.__defaults__:
            copy.__defaults__ = self.child(number, "{0}.__defaults__")
        if function.__kwdefaults__:
            copy.__kwdefaults__ = self.child(number, "{0}.__kwdefaults__")
        return seen

    def _partial(self, number, value):
        seen = self._again(number, value)
        if seen is None:
            args = [self.child(number, "{0}.args[{1}]", i) for i in range(len(value.args))]
            words = {name: self.child(number, "{0}.keywords[{1}]", name) for name in value.keywords}
            seen = self._share(number, value, functools.partial(self.child(number, "{0}.func"), *args, **words))
        return seen

    def _share(self, number, function, copy):
        """What the copy of the mod sees of a function, each time it reaches the function."""
        seen = Function(self, number, copy)
        self._shared[id(function)] = number, seen
        return seen

    def _ask(self, ask, *args, **kwargs):
        """``getattr`` or ``hasattr``. The names of attributes that the mod computes are not in its code."""
        self._asked.update(args[1:2])
        if "__class__" in self._asked:
            self._watch()
        return ask(*args, **kwargs)

    def _check_instructions(self, code):
        """Returns the names that a code looks for in its globals."""
        asks, before, names = False, "", set()
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if "GLOBAL" in instruction.opname or instruction.opname == "LOAD_NAME":
                names.add(name)
            asks |= instruction.opname == "IS_OP" and before != "LOAD_CONST"  # None and the like are seen as they are
            before = instruction.opname
            if instruction.opname == "MATCH_CLASS":
                raise NotImplementedError(
                    "a mod must not match classes, because objects of the tracer stand for its values; use isinstance: "
                    f"{code.co_name}, {code.co_filename}, line {code.co_firstlineno}"
                )
        if asks:
            self._need_identity()
        return names

    def _need_identity(self):
        if not self.asks_identity:
            raise IdentityAsked

    # ---- captures and parameters -----------------------------------------------------------------------------------

    def repeat(self, function, args, kwargs):
        """Calls a function of captures and numbers now, and again for each mod of the same kind."""
        self.check_grad_mode()
        planned, words = _plan(args), _plan(kwargs)

        def compute(values):
            return function(*_fill(planned, values), **_fill(words, values))

        number = self.steps.add(compute)
        value = self.steps.values[number]
        if isinstance(value, (tuple, list, torch.Tensor, *NUMBERS)):
            return self.wrap(number)
        self.holds_once |= not isinstance(value, (*SIMPLE, torch.layout, torch.memory_format))  # it may change
        return self.steps.guard(number, itself)

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


def _default_dtype(value):
    return torch.get_default_dtype()


def _type_of_number(number):
    if isinstance(number, (bool, torch.SymBool)):
        return TYPES[torch.bool]
    return TYPES[torch.int64 if isinstance(number, (int, torch.SymInt)) else torch.float64]


def _is_empty(cell):
    """Is this the cell of a variable without a value?"""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


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
    if isinstance(x, Bound):
        return _Ref(x._number)
    if is_object(x):
        return _Ref(object.__getattribute__(x, "_number"))
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


class _Mode(TorchFunctionMode):
    """Sees the calls of torch in which no object of the trace takes part by itself."""

    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, Traced) for x in (*parts_of(args), *parts_of(kwargs))):
            return dispatch(function, args, kwargs)
        if getattr(function, "__name__", "") == "_set_grad_enabled":  # also to what it was: another call is recorded
            self.trace.refuse_grad_mode()
        if getattr(function, "__name__", "") in RANDOM:
            self.trace.fail(f"a mod must not draw random numbers ({function.__name__})")
        result = function(*args, **kwargs)
        inputs = [x for x in (*parts_of(args), *parts_of(kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.is_floating_point() for x in parts_of(result) if isinstance(x, torch.Tensor)):
            self.trace.guard_default_dtype()
        if all(id(x) in self.trace.created for x in inputs):
            self.trace.created.update({id(x): x for x in parts_of(result) if isinstance(x, torch.Tensor)})
        else:
            self.trace.holds_once = True
        return result
