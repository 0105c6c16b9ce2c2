"""What a mod sees while it is traced: in place of its indices, and of numbers, tensors and objects that it captures."""

import contextlib
import copy
import copyreg
import functools
import operator
import types

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from .lasting import is_of_torch, is_simple
from .steps import NUMBERS, SIMPLE

MOST_UNROLLED = 1024  # elements of a vector
RANDOM = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "normal"}
RANDOM |= {"multinomial", "poisson", "dropout", "seed", "manual_seed", "uniform_", "normal_", "bernoulli_", "random_"}


def itself(value):
    return value


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


class Traced(_Operators):
    """Reaches the trace through functions of torch, too."""

    def __init__(self, trace):
        self._trace = trace

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})

    def _apply(self, function, *operands):
        return dispatch(function, operands, {})

    __hash__ = None

    def __copy__(self, memo=None):
        return self  # nothing changes it

    __deepcopy__ = __copy__

    def __setitem__(self, index, value):
        self._trace.fail("a mod must not write to a tensor; use torch.where")


class Bound(Traced):
    """A value that does not depend on indices. It is computed again for each mod of the same kind."""

    def __init__(self, trace, number):
        super().__init__(trace)
        self._number, self._known = number, trace.steps.values[number]

    @property
    def _value(self):
        return self._known


def is_left_over(x):
    """Is this an object of a trace that has ended? A cache of a class may keep one. It stands for its value then."""
    return isinstance(x, Bound) and x._trace.steps.values is None


class Number(Bound):
    """A bool, int or float that is a parameter of the program. Python's control flow records a guard."""

    def _apply(self, function, *operands):
        if all(isinstance(x, (Number, *NUMBERS)) and not is_left_over(x) for x in operands):
            return self._trace.repeat(function, operands, {})
        return dispatch(function, operands, {})

    def __bool__(self):
        return bool(self._known) if is_left_over(self) else self._trace.steps.guard(self._number, bool)

    def _is_users(self):
        """Is it of a class that is derived from int or float?"""
        return isinstance(self._known, NUMBERS) and not is_simple(self._known)

    def _concrete(self):
        if is_left_over(self):
            return self._known
        self._trace.holds_once |= self._is_users()  # its class may have an `__index__` of its own
        return self._trace.steps.guard(self._number, itself)

    def __int__(self):
        return int(self._concrete())

    def __float__(self):
        return float(self._concrete())

    def __index__(self):
        return operator.index(self._concrete())

    def __hash__(self):
        return hash(self._concrete())

    def __round__(self, *digits):
        return self._apply(round, self, *digits)

    def __repr__(self):
        return repr(self._concrete())

    __str__ = __repr__

    def __format__(self, form):
        return format(self._concrete(), form)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self._is_users():
            return self._trace.attribute(self._number, name)
        return getattr(self._concrete(), name)


class _Tensor(Traced):
    """The methods of torch.Tensor."""

    __array_ufunc__ = None  # a number of NumPy leaves its operators to ours

    def __getattr__(self, name):
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            self._refuse_attribute(name)
        found = getattr(torch.Tensor, name)
        if not callable(found):
            return dispatch(found.__get__, (self,), {}, name)
        return lambda *args, **kwargs: dispatch(found, (self, *args), kwargs)

    def _refuse_attribute(self, name):
        place = "" if name.startswith("_") else ": " + self._trace.where()  # Python asks for some of its own
        raise AttributeError(f"a tensor has no attribute {name!r}{place}")

    def __iter__(self):
        return (self[i] for i in range(len(self)))


class Capture(_Tensor, Bound):
    """A captured tensor, or a tensor computed from captures alone."""

    def __init__(self, trace, number):
        super().__init__(trace, number)
        with torch._C.DisableTorchFunction():
            self.dtype, self.device, self.ndim = self._value.dtype, self._value.device, self._value.dim()

    def __getattr__(self, name):
        if name.startswith("__") or hasattr(torch.Tensor, name):
            return super().__getattr__(name)
        if self._trace.steps.guard(self._number, has(name)):  # an attribute that the tensor was given
            return self._trace.child(self._number, "getattr({0}, {1})", name)
        self._refuse_attribute(name)

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

    def __repr__(self):
        return object.__repr__(self) if is_left_over(self) else self._trace.repeat(repr, (self,), {})

    def __format__(self, form):
        return repr(self) if is_left_over(self) else self._trace.repeat(format, (self, form), {})


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
        shape = self.shape if shape is None else shape
        self._trace.check_size(shape)
        with without_modes():
            return self.nodes.expand(shape).flatten().tolist()

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

    __int__ = __float__ = __index__ = __complex__ = __hash__ = tolist = item


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
def has(name):
    return lambda value: hasattr(value, name)


@functools.cache
def _formatted(form):
    return lambda value: format(value, form)


@functools.cache
def _size(dim):
    return lambda tensor: tensor.size(dim)


class Object:
    """An instance of a class of Python. Its attributes are captures and parameters."""

    def __init__(self, trace, number):
        object.__setattr__(self, "_trace", trace)
        object.__setattr__(self, "_number", number)

    def __getattribute__(self, name):
        get = object.__getattribute__
        trace, number = get(self, "_trace"), get(self, "_number")
        if name == "__class__":
            return type(trace.steps.values[number])
        if name == "__reduce_ex__":  # which copy.deepcopy asks of the object itself
            return get(self, name)
        return trace.attribute(number, name)

    def __setattr__(self, name, value):
        object.__getattribute__(self, "_trace").fail(f"a mod must not set the attribute {name}")

    def _asked(self, question):
        """The answer to a question about the object itself, which must be the same in other mods."""
        get = object.__getattribute__
        return get(self, "_trace").steps.guard(get(self, "_number"), question)

    def _repeated(self, function, *operands):
        """The answer to a question about the object and another value."""
        trace = object.__getattribute__(self, "_trace")
        if not all(isinstance(x, (Traced, *NUMBERS, *SIMPLE)) or is_object(x) for x in parts_of(operands)):
            trace.holds_once = True  # the other value may change
        return bool(trace.repeat(function, operands, {}))

    def __eq__(self, other):
        return object.__getattribute__(self, "_repeated")(operator.eq, self, other)

    def __ne__(self, other):
        return object.__getattribute__(self, "_repeated")(operator.ne, self, other)

    def __hash__(self):
        return object.__getattribute__(self, "_asked")(hash)

    def __repr__(self):
        has_ended = object.__getattribute__(self, "_trace").steps.values is None
        return object.__repr__(self) if has_ended else object.__getattribute__(self, "_asked")(repr)

    def __str__(self):
        return object.__getattribute__(self, "_asked")(str)

    def __format__(self, form):
        return object.__getattribute__(self, "_asked")(_formatted(form))

    def __bool__(self):
        return object.__getattribute__(self, "_asked")(bool)

    def __len__(self):
        asked = object.__getattribute__(self, "_asked")
        if not asked(has("__len__")):  # as list() asks before it iterates
            raise TypeError(f"object of type {self.__class__.__name__!r} has no len()")
        return asked(len)

    def __int__(self):
        return object.__getattribute__(self, "_asked")(int)

    def __float__(self):
        return object.__getattribute__(self, "_asked")(float)

    def __index__(self):
        return object.__getattribute__(self, "_asked")(operator.index)

    def __contains__(self, item):
        return object.__getattribute__(self, "_repeated")(operator.contains, self, item)

    def __call__(self, *args, **kwargs):
        return type(self).__getattribute__(self, "__call__")(*args, **kwargs)

    def __iter__(self):
        if object.__getattribute__(self, "_asked")(has("__iter__")):
            return iter(type(self).__getattribute__(self, "__iter__")())
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index):
        return type(self).__getattribute__(self, "__getitem__")(index)

    def __copy__(self):
        if object.__getattribute__(self, "_asked")(has("__copy__")):
            return type(self).__getattribute__(self, "__copy__")()
        return copy.copy(_Reduced(self))

    def __reduce_ex__(self, protocol):
        """``copy.copy`` and ``copy.deepcopy`` ask the type. The copy is an object of the real class."""
        get = object.__getattribute__
        reduce = get(self, "_asked")(_reduce_by_copyreg)
        if reduce:
            return reduce(self)
        return get(self, "_trace").attribute(get(self, "_number"), "__reduce_ex__")(protocol)


def _reduce_by_copyreg(value):
    return copyreg.dispatch_table.get(type(value))


class _Reduced:
    """What ``copy.copy`` takes for an object without a way of its own to be copied."""

    def __init__(self, of):
        self.of = of

    def __reduce_ex__(self, protocol):
        return type(self.of).__reduce_ex__(self.of, protocol)


class DataObject(Object):
    """An instance of a dataclass. Functions of ``dataclasses`` ask its type whether it has fields."""

    __dataclass_fields__ = {}

    def __getattribute__(self, name):
        if name == "__dataclass_fields__":
            get = object.__getattribute__
            return get(self, "_trace").fields(get(self, "_number"))
        return super().__getattribute__(name)


def is_object(x):
    return issubclass(type(x), Object)  # its __class__ is that of what it stands for


class Function(Object):
    """A function or a partial. ``_copy`` is what runs in its place. Two are equal if they stand for one function."""

    def __init__(self, trace, number, copy):
        super().__init__(trace, number)
        object.__setattr__(self, "_copy", copy)

    def __getattribute__(self, name):
        if name in _OF_COPIES:
            return getattr(object.__getattribute__(self, "_copy"), name)
        if name == "__deepcopy__":  # which copy.deepcopy asks of a function itself
            return object.__getattribute__(self, name)
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        get = object.__getattribute__
        get(self, "_trace").write(get(self, "_number"), name, value)

    def __hash__(self):
        object.__getattribute__(self, "_trace").holds_once = True  # the next mod may have made the function again
        return super().__hash__()

    def __bool__(self):
        return True

    def __call__(self, *args, **kwargs):
        return object.__getattribute__(self, "_copy")(*args, **kwargs)

    def __copy__(self, memo=None):
        return self  # as Python's functions

    __deepcopy__ = __copy__

    def __get__(self, instance, owner=None):
        """A class that the mod makes has the function as a method."""
        is_method = instance is not None and hasattr(object.__getattribute__(self, "_copy"), "__get__")
        return types.MethodType(self, instance) if is_method else self


_OF_COPIES = {"__call__", "__closure__", "__code__", "__get__", "__globals__"}


# ---- functions of torch -------------------------------------------------------------------------------------------


def parts_of(x):
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from parts_of(item)
    elif isinstance(x, slice):
        yield from (x.start, x.stop, x.step)
    elif isinstance(x, dict):
        yield from parts_of(tuple(x.values()))
    else:
        yield x


def _check_is_torchs(trace, function):
    """An operation is known by its name. One of another library may have such a name, too."""
    packet = getattr(function, "overloadpacket", function)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        if not packet._qualified_op_name.startswith("aten::"):
            trace.fail(f"a mod cannot use {packet._qualified_op_name}, which is no operator of PyTorch")
    elif isinstance(function, types.FunctionType) and not is_of_torch(function):
        trace.fail(f"a mod cannot use {function.__qualname__}, which is no function of PyTorch")


def _without_left_overs(x):
    """The same arguments with the values of what other traces have left."""
    if isinstance(x, slice):
        return slice(*map(_without_left_overs, (x.start, x.stop, x.step)))
    if isinstance(x, (tuple, list)):
        return type(x)(map(_without_left_overs, x))
    if isinstance(x, dict):
        return {name: _without_left_overs(item) for name, item in x.items()}
    return x._value if is_left_over(x) else x


def dispatch(function, args, kwargs, name=None):
    """Does what a function of torch or an operator of Python does, for the objects of a trace."""
    from . import operations

    is_torchs, name = name is not None, name or getattr(function, "__name__", str(function))
    parts = [*parts_of(args), *parts_of(kwargs)]
    if any(map(is_left_over, parts)):
        args, kwargs = _without_left_overs(args), _without_left_overs(kwargs)
        parts = [*parts_of(args), *parts_of(kwargs)]
        for x in parts:
            if isinstance(x, Traced):
                x._trace.holds_once = True
        if not any(isinstance(x, Traced) for x in parts):
            return function(*args, **kwargs)
    trace = next(x._trace for x in parts if isinstance(x, Traced))
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
