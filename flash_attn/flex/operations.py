"""The operations that a program may hold, by their names in torch. This file has calls, views, reductions and indexing.

Shapes and dtypes of results are those of torch: every operation also runs on tensors of ones, or of the device "meta".
"""

import contextlib
import itertools
import math
import operator

import torch

from . import elementwise
from .elementwise import arithmetic, convert, emit
from .program import BOOL, F32, F64, I64, LIMITS, TYPES
from .steps import NUMBERS
from .values import MOST_UNROLLED, Capture, Number, Row, Value, in_memory, parts_of, without_modes


def operate(trace, name, function, args, kwargs):
    """Does an operation of which at least one argument depends on an index."""
    name = ALIASES.get(name, name)
    if name not in OPERATIONS:
        trace.fail(f"a mod cannot use {name}")
    return OPERATIONS[name](Call(trace, name, function, *_in_places(name, args, kwargs)))


def _in_places(name, args, kwargs):
    """Operands that have come by their names are put where they stand by position."""
    kwargs = dict(kwargs)
    names = (("condition",), ("input", "self"), ("other",)) if name == "where" else OPERANDS
    for at in names[len(args) :]:
        given = next((x for x in at if x in kwargs), None)
        if given is None:
            break
        args = (*args, kwargs.pop(given))
    return args, kwargs


OPERANDS = ("input", "self"), ("other", "exponent")


class Call:
    def __init__(self, trace, name, function, args, kwargs):
        self.trace, self.name, self.function, self.args, self.kwargs = trace, name, function, args, kwargs
        self.builder = trace.builder

    def argument(self, place, name, default=None):
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def value(self, x):
        """A Value with the elements of anything that an operation takes."""
        return value_of(self.trace, x)

    def meta(self):
        """A tensor of the result's shape and dtype. Errors of torch get the place in the mod.

        The first operation on "meta" imports all of torch.compile, which takes seconds. So only large operations run
        there, and those that the CPU refuses.
        """
        dtypes = [x.dtype for x in parts_of((self.args, self.kwargs)) if isinstance(x, (Value, Capture, torch.Tensor))]
        for dtype in dtypes:
            if dtype not in TYPES:
                self.trace.fail(f"a mod cannot use a tensor of dtype {dtype}")
        found = self._meta()
        is_float = isinstance(found, torch.Tensor) and found.dtype.is_floating_point
        if is_float and OPERATIONS[self.name] is not convert and not any(x.is_floating_point for x in dtypes):
            self.trace.guard_default_dtype()
        return found

    @staticmethod
    def _out_of_sight():
        """Dispatch modes must not see how the type of a value is found. A selective checkpoint would keep the results,
        and when it repeats the call, whose mod is known by then, other operations would get them."""
        return contextlib.nullcontext() if torch.compiler.is_compiling() else without_modes()

    def _meta(self):
        is_small = sum(map(_elements, (*self.args, *self.kwargs.values()))) <= MOST_UNROLLED
        with torch._C.DisableTorchFunction(), self._out_of_sight():
            try:
                if is_small and self.name not in OF_ANY_SHAPE:
                    args = _ones(self.args)
                    if self.name in DIVISIONS:  # the CPU refuses some numbers, and all ints give the same dtype
                        args = tuple(1 if type(x) is int else x for x in args)
                    with contextlib.suppress(RuntimeError):
                        return self.function(*args, **_ones(self.kwargs))
                return self.function(*_meta(self.args), **_meta(self.kwargs))
            except ERRORS as error:
                self.trace.holds_once = True  # if the mod catches the error
                raise type(error)(f"{error}: {self.trace.where()}") from None

    def common(self, *operands):
        """The dtype in which operands are compared."""
        with torch._C.DisableTorchFunction():
            common = _meta(operands[0])
            for x in operands[1:]:
                common = torch.empty((), dtype=torch.result_type(common, _meta(x)), device="meta")
        tensors = [x for x in operands if isinstance(x, (Value, Capture, torch.Tensor))]
        if common.dtype.is_floating_point and not any(x.dtype.is_floating_point for x in tensors):
            self.trace.guard_default_dtype()
        return common.dtype

    def operand(self, x, dtype, shape):
        """The instructions of an operand in a dtype and shape."""
        value = value_of(self.trace, x)
        if dtype not in TYPES:
            self.trace.fail(f"a mod cannot compute in {dtype}")
        return [self.builder.cast(n, dtype) for n in value.instructions(shape)]

    def result(self, nodes, dtype, shape):
        return Value(self.trace, in_memory(list(nodes), shape), dtype)


def _elements(x):
    if isinstance(x, (tuple, list)):
        return sum(map(_elements, x))
    return math.prod(map(operator.index, x.shape)) if isinstance(x, (Value, Capture, torch.Tensor)) else 0


def _stand_in(make, device):
    """A function that puts ``make(shape, dtype=, device=)`` in place of every tensor."""

    def of(x):
        if isinstance(x, (Value, Capture, torch.Tensor)):
            return make(tuple(map(operator.index, x.shape)), dtype=x.dtype, device=device)
        if isinstance(x, Number):
            return x._value
        if isinstance(x, slice):
            return slice(*map(of, (x.start, x.stop, x.step)))
        if isinstance(x, (tuple, list)):
            return type(x)(map(of, x))
        if isinstance(x, dict):
            return {name: of(item) for name, item in x.items()}
        return torch.device(device) if isinstance(x, torch.device) else x

    return of


_meta = _stand_in(torch.empty, "meta")
_ones = _stand_in(torch.ones, "cpu")
ERRORS = TypeError, RuntimeError, IndexError, ValueError, OverflowError


def value_of(trace, x):
    """Returns a Value with the elements of anything that an operation takes."""
    if isinstance(x, Value):
        return x
    if type(x).__module__ == "numpy" and getattr(x, "shape", None) == ():
        x = x.item()  # NumPy's number, such as numpy.int64(3); NumPy need not be there
    if isinstance(x, torch.Tensor):
        x = trace.constant_tensor(x)
    if isinstance(x, Capture):
        if x.dtype not in TYPES:
            trace.fail(f"a mod cannot use a tensor of dtype {x.dtype}")
        row = Row(trace, x, (None,) * x.ndim)
        return Value(trace, row.nodes, x.dtype)
    if isinstance(x, Number):
        number = _in_64_bits(trace, x._value)
        type_of = BOOL if isinstance(number, bool) else I64 if isinstance(number, int) else F64
        node = trace.builder.emit("param", type_of, words=(trace.param(x._number),))
    elif isinstance(x, NUMBERS):
        number = _in_64_bits(trace, x)
        node = trace.builder.constant(number)
    else:
        trace.fail(f"a mod cannot use a {type(x).__name__} as an operand", TypeError)
    dtype = torch.bool if isinstance(number, bool) else torch.int64 if isinstance(number, int) else torch.float64
    return Value(trace, node, dtype)


def _in_64_bits(trace, number):
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        trace.fail(f"a mod cannot use an integer of {number.bit_length() + 1} bits; write a float", OverflowError)
    return number


# ---- several elements ---------------------------------------------------------------------------------------------


def _view(call):
    """The operation acts on the instructions as it would act on the elements."""

    def nodes(x):
        if isinstance(x, (tuple, list)):
            return type(x)(map(nodes, x))
        if isinstance(x, (Value, Capture, torch.Tensor)):
            return call.value(x).nodes
        return operator.index(x) if isinstance(x, Number) else x

    def cast(x, dtype):
        if isinstance(x, (tuple, list)):
            return type(x)(cast(item, dtype) for item in x)
        if isinstance(x, (Capture, torch.Tensor)) or (isinstance(x, Value) and x.dtype != dtype):
            value = call.value(x)
            return call.result(call.operand(value, dtype, value.shape), dtype, value.shape)
        return x

    if any(isinstance(x, torch.dtype) for x in parts_of((call.args, call.kwargs))):
        call.trace.fail(f"a mod cannot use {call.name} with a dtype; bits have no instruction")
    meta = call.meta()
    several = isinstance(meta, (tuple, list))
    dtype = (meta[0] if several else meta).dtype
    args = tuple(cast(x, dtype) for x in call.args)
    kwargs = {name: nodes(x) for name, x in call.kwargs.items()}
    args = tuple(map(nodes, args))
    with torch._C.DisableTorchFunction(), without_modes():
        moved = call.function(*args, **kwargs)
    return type(meta)(Value(call.trace, x, dtype) for x in moved) if several else Value(call.trace, moved, dtype)


def _reduction(op):
    """Sums and the like are written out, in the order of the elements."""

    def compute(call):
        meta, value = call.meta(), call.value(call.args[0])
        if not isinstance(meta, torch.Tensor):
            call.trace.fail(f"a mod cannot use {call.name} with a dimension; use amax or amin")
        dim = call.argument(1, "dim")
        shape, nodes = value.shape, value.nodes
        call.trace.check_size(shape)
        dims = range(len(shape)) if dim is None or dim == () else dim if isinstance(dim, (tuple, list)) else (dim,)
        dims = [operator.index(d) % max(len(shape), 1) for d in dims] if shape else []
        rest = [d for d in range(len(shape)) if d not in dims]
        num_rows, num = (math.prod(shape[d] for d in which) for which in (rest, dims))
        with without_modes():
            rows = nodes.permute((*rest, *dims)).reshape(num_rows, num).tolist()
        reduced = [_fold(call, op, [call.builder.cast(n, meta.dtype) for n in row], meta.dtype) for row in rows]
        return call.result(reduced, meta.dtype, meta.shape)

    return compute


def _extreme(op):
    """``amax`` and ``amin``. ``torch.max`` of two tensors compares element by element."""

    def compute(call):
        is_of_two = len(call.args) > 1 and isinstance(call.args[1], (Value, Capture, torch.Tensor))
        return (arithmetic if is_of_two else _reduction)(op)(call)

    return compute


def _fold(call, op, nodes, dtype):
    if not nodes:
        if op in ("maximum", "minimum"):
            call.trace.fail(f"{call.name} needs at least one element", RuntimeError)
        return call.builder.cast(call.builder.constant({"mul": 1, "all": True}.get(op, 0)), dtype)
    instruction = {"any": "bit_or", "all": "bit_and"}.get(op, op)
    total = nodes[0]
    for node in nodes[1:]:
        total = emit(call.builder, instruction, dtype, total, node)
    if op in ("maximum", "minimum") and len(nodes) > 2 and TYPES[dtype] in (F32, F64):
        call.builder.rules[total] = ("extreme", *nodes)  # of two elements it is that of the instruction
    return total


def _mean(call):
    meta = call.meta()
    call.function = torch.sum
    total = _reduction("add")(call)
    count = call.value(call.args[0]).nodes.numel() // max(1, total.nodes.numel())
    return (total / count).to(meta.dtype)


def _dot(call):
    meta, (a, b) = call.meta(), (call.value(x) for x in call.args[:2])
    if meta.shape != () or len(a.shape) != 1:
        call.trace.fail("a mod cannot multiply matrices; only the product of two vectors is taken")
    pairs = zip(call.operand(a, meta.dtype, a.shape), call.operand(b, meta.dtype, b.shape))
    products = [emit(call.builder, "mul", meta.dtype, *pair) for pair in pairs]
    return call.result([_fold(call, "add", products, meta.dtype)], meta.dtype, ())


# ---- indexing -----------------------------------------------------------------------------------------------------


def load(row):
    """The instructions of a Row, in its shape."""
    trace, shape = row._trace, row.shape
    trace.check_size(shape)
    capture, dtype = row.capture, row.capture.dtype
    if len(row.indices) > LIMITS["rank"]:
        trace.fail(f"a mod can index tensors of at most {LIMITS['rank']} dimensions, not {len(row.indices)}")
    if dtype not in TYPES:
        trace.fail(f"a mod cannot use a tensor of dtype {dtype}")
    source, nodes = trace.capture(capture._number), []
    for place in itertools.product(*map(range, shape)):
        rest = iter(place)
        index = [trace.builder.constant(next(rest)) if i is None else i for i in row.indices]
        nodes.append(trace.builder.emit("gather", TYPES[dtype], *index, words=(source,)))
    return in_memory(nodes, shape)


def _getitem(call):
    trace, base, index = call.trace, call.args[0], call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    if isinstance(index, tuple) and any(isinstance(x, list) for x in index):
        trace.fail("a mod cannot use a list as an index")
    for x in parts_of(tuple(x for x in index if isinstance(x, slice))):
        if isinstance(x, Value):
            operator.index(x)  # which is not known
    if isinstance(base, torch.Tensor):
        base = trace.constant_tensor(base)
    if isinstance(base, Capture):
        base = Row(trace, base, (None,) * base.ndim)
    if not isinstance(base, Row):
        if any(isinstance(x, (Value, Capture, torch.Tensor)) for x in index):
            trace.fail("a mod can use indices only on captured tensors")
        return _view(call)
    return _gather(trace, base, index)


def _gather(trace, base, index):
    free = sum(i is None for i in base.indices)
    taken = sum(x is not None and x is not Ellipsis for x in index)
    if taken > free:
        trace.fail(f"too many indices for tensor of dimension {free}", IndexError)
    at = next((i for i, x in enumerate(index) if x is Ellipsis), len(index))
    index = (*index[:at], *[slice(None)] * (free - taken), *index[at + 1 :])
    # First everything that does not depend on an index is done to the capture itself.
    static, places, kept = [], [], []
    rest = iter(index)
    for have in base.indices:
        if have is not None:
            static.append(slice(None))
            kept.append(have)
            continue
        for x in rest:
            if x is not None:
                break
            static.append(None)
            kept.append(None)
        if isinstance(x, (Value, Capture, torch.Tensor)):
            static.append(slice(None))
            kept.append(x)
        else:
            static.append(x)
            if isinstance(x, slice):
                kept.append(None)
    for _ in rest:
        static.append(None)
        kept.append(None)
    capture = base.capture
    if not all(isinstance(x, slice) and x == slice(None) for x in static):
        capture = trace.repeat(operator.getitem, (capture, tuple(static)), {})
    vectors = []
    for i, x in enumerate(kept):
        if isinstance(x, (Value, Capture, torch.Tensor)):
            value = value_of(trace, x)
            if TYPES[value.dtype] != I64 or value.dtype == torch.uint8:
                trace.fail(f"tensors used as indices must be integers, not {value.dtype}", IndexError)
            kept[i] = value
            places.append(i)
            vectors.append(value.shape)
    try:
        # torch.broadcast_shapes would import sympy, which takes a second.
        shapes = ((), *vectors)
        shape = torch.broadcast_tensors(*(torch.empty((), device="cpu").expand(x) for x in shapes))[0].shape
    except RuntimeError as error:
        trace.fail(str(error), IndexError)
    if shape == ():
        for i in places:
            (kept[i],) = kept[i].instructions()
        return Row(trace, capture, tuple(kept))
    return _gather_vectors(trace, capture, kept, places, shape)


def _gather_vectors(trace, capture, kept, places, shape):
    """Several indices at once. Their dimensions come first, or where they stand if they stand side by side."""
    lists = [kept[i].instructions(shape) for i in places]
    rows = []
    for each in zip(*lists):
        for i, node in zip(places, each):
            kept[i] = node
        rows.append(Row(trace, capture, tuple(kept)).nodes)
    free_before = sum(x is None for x in kept[: places[0]])
    free_between = any(kept[i] is None for i in range(places[0], places[-1]))
    with without_modes():
        nodes = torch.empty(shape, dtype=torch.int64, device="cpu")
        if rows:
            nodes = torch.stack(rows).reshape(*shape, *rows[0].shape)
        if free_before and not free_between:
            dims = list(range(nodes.dim()))
            vector, free = dims[: len(shape)], dims[len(shape) :]
            nodes = nodes.permute(*free[:free_before], *vector, *free[free_before:])
    return Value(trace, nodes, capture.dtype)


def _select(call):
    base, dim, index = call.args[0], operator.index(call.argument(1, "dim")), call.argument(2, "index")
    place = dim % len(base.shape)
    call.args, call.function = (base, (*[slice(None)] * place, index)), operator.getitem
    return _getitem(call)


# ---- the table ----------------------------------------------------------------------------------------------------

ALIASES = {"truediv": "div", "true_divide": "div", "divide": "div", "subtract": "sub", "multiply": "mul"}
ALIASES |= {"floordiv": "floor_divide", "mod": "remainder", "and_": "bitwise_and", "or_": "bitwise_or"}
ALIASES |= {"xor": "bitwise_xor", "invert": "bitwise_not", "inv": "bitwise_not", "lshift": "bitwise_left_shift"}
ALIASES |= {"rshift": "bitwise_right_shift", "negative": "neg", "absolute": "abs", "equal_to": "eq", "clip": "clamp"}
ALIASES |= {"not_equal": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}
ALIASES |= {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__mod__": "remainder"}
ALIASES |= {"__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift", "__getitem__": "getitem"}
ALIASES |= {"__rand__": "bitwise_and", "__ror__": "bitwise_or", "__rxor__": "bitwise_xor", "fix": "trunc"}
ALIASES |= {"arctan": "atan", "sgn": "sign", "matmul": "dot", "inner": "dot", "special_erf": "erf", "pow_": "pow"}
ALIASES |= {"max": "amax", "min": "amin", "concat": "cat", "expit": "sigmoid", "type_as": "to", "__rsub__": "rsub"}

DIVISIONS = {"div", "floor_divide", "remainder", "fmod", "pow"}
OF_ANY_SHAPE = {"new_zeros", "new_ones", "new_full", "repeat"}  # a small tensor gives a large one

OPERATIONS = elementwise.OPERATIONS | {
    "sum": _reduction("add"),
    "prod": _reduction("mul"),
    "any": _reduction("any"),
    "all": _reduction("all"),
    "amax": _extreme("maximum"),
    "amin": _extreme("minimum"),
    "mean": _mean,
    "dot": _dot,
    "getitem": _getitem,
    "select": _select,
}
for _op in "pos clone contiguous view reshape squeeze unsqueeze expand expand_as permute transpose t flatten".split():
    OPERATIONS[_op] = _view
for _op in "stack cat unbind narrow movedim T mT positive view_as broadcast_to chunk split repeat flip".split():
    OPERATIONS[_op] = _view
