"""The operations that a program may hold, by their names in torch.

Shapes and dtypes of results are those of torch: every operation also runs on tensors of ones, or of the device "meta".
"""

import contextlib
import itertools
import math
import operator

import torch

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
        if is_float and OPERATIONS[self.name] is not _convert and not any(x.is_floating_point for x in dtypes):
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


# ---- element by element -------------------------------------------------------------------------------------------


def _arithmetic(op):
    """The operands are converted to the result's dtype."""

    def compute(call):
        meta, operands = call.meta(), call.args[:2]
        if op.startswith(("bit_", "shift_")) and meta.dtype.is_floating_point:
            call.trace.fail(f"a mod cannot use {call.name} with {meta.dtype}", TypeError)
        nodes = [call.operand(x, meta.dtype, meta.shape) for x in operands]
        scale = call.kwargs.get("alpha", 1)
        if not (isinstance(scale, int) and scale == 1):
            scaled = call.operand(scale, meta.dtype, meta.shape)
            nodes[1] = [_emit(call.builder, "mul", meta.dtype, *pair) for pair in zip(scaled, nodes[1])]
        return call.result((_emit(call.builder, op, meta.dtype, *each) for each in zip(*nodes)), meta.dtype, meta.shape)

    return compute


def _emit(builder, op, dtype, *operands):
    """One instruction in the arithmetic of a dtype."""
    type = TYPES[dtype]
    if type == BOOL:
        op = {"add": "bit_or", "mul": "bit_and", "maximum": "bit_or", "minimum": "bit_and"}.get(op, op)
        if op in ("bit_or", "bit_and"):
            return builder.logic(op, *operands)
        return builder.emit(op, BOOL, *operands)
    return builder.narrow(builder.emit(op, type, *operands), dtype)


def _reflected_subtraction(call):
    scale = call.kwargs.pop("alpha", 1)
    less = call.args[0] if isinstance(scale, int) and scale == 1 else call.args[0] * scale
    call.args, call.function = (call.args[1], less), operator.sub
    return _arithmetic("sub")(call)


def _division(call):
    mode = call.kwargs.get("rounding_mode")
    if mode is None:
        return _arithmetic("divide")(call)
    if mode == "floor":
        return _arithmetic("floor_divide")(call)
    if TYPES[call.meta().dtype] == I64:
        return _arithmetic("trunc_divide")(call)
    quotient = _arithmetic("divide")(call)
    return _unary_of(call, quotient, "trunc")


def _unary_of(call, value, op):
    nodes = (_emit(call.builder, op, value.dtype, n) for n in value.instructions())
    return call.result(nodes, value.dtype, value.shape)


def _power(call):
    base, exponent = call.args[0], call.argument(1, "exponent")
    if isinstance(exponent, int) and exponent in (1, 2, 3) and isinstance(base, Value):
        meta = call.meta()  # a power of a bool is an integer
        base = call.result(call.operand(base, meta.dtype, meta.shape), meta.dtype, meta.shape)
        return base if exponent == 1 else base * base if exponent == 2 else base * base * base
    return _arithmetic("pow")(call)


def _comparison(op, swaps=False):
    def compute(call):
        meta, (a, b) = call.meta(), (call.args[0], call.argument(1, "other"))
        dtype = call.common(a, b)
        nodes = [call.operand(x, dtype, meta.shape) for x in ((b, a) if swaps else (a, b))]
        compare = (call.builder.emit(op, TYPES[dtype], *pair) for pair in zip(*nodes))
        return call.result(compare, torch.bool, meta.shape)

    return compute


def _logical(op):
    def compute(call):
        meta = call.meta()
        a, b = (call.operand(x, torch.bool, meta.shape) for x in (call.args[0], call.argument(1, "other")))
        nodes = (_emit(call.builder, op, torch.bool, *pair) for pair in zip(a, b))
        return call.result(nodes, torch.bool, meta.shape)

    return compute


def _logical_not(call):
    meta = call.meta()
    nodes = (call.builder.emit("bit_not", BOOL, n) for n in call.operand(call.args[0], torch.bool, meta.shape))
    return call.result(nodes, torch.bool, meta.shape)


def _unary(op):
    def compute(call):
        meta = call.meta()
        if TYPES[meta.dtype] in (BOOL, I64) and op in ("floor", "ceil", "round", "trunc"):
            return value_of(call.trace, call.args[0])
        if op in ("abs", "sign") and TYPES[meta.dtype] == BOOL:
            return value_of(call.trace, call.args[0])
        nodes = call.operand(call.args[0], meta.dtype, meta.shape)
        return call.result((_emit(call.builder, op, meta.dtype, n) for n in nodes), meta.dtype, meta.shape)

    return compute


def _round(call):
    """To the nearest integer, or to the nearest multiple of a power of ten."""
    decimals = operator.index(call.kwargs.get("decimals", 0))
    meta = call.meta()
    if decimals == 0 or TYPES[meta.dtype] not in (F32, F64):
        return _unary("round")(call)
    on = _Arithmetic(call.builder, meta.dtype)
    power, nodes = on.number(10.0 ** abs(decimals)), call.operand(call.args[0], meta.dtype, meta.shape)
    enlarge, reduce = (on.mul, on.divide) if decimals > 0 else (on.divide, on.mul)
    return call.result((reduce(on.round(enlarge(n, power)), power) for n in nodes), meta.dtype, meta.shape)


def _composed(formula):
    """``formula(arithmetic, x, call)`` over an operation's only operand, in the result's dtype."""

    def compute(call):
        meta = call.meta()
        on = _Arithmetic(call.builder, meta.dtype)
        nodes = call.operand(call.args[0], meta.dtype, meta.shape)
        return call.result((formula(on, n, call) for n in nodes), meta.dtype, meta.shape)

    return compute


class _Arithmetic:
    """``on.mul(a, b)`` emits an instruction. Numbers are constants."""

    def __init__(self, builder, dtype):
        self.builder, self.dtype = builder, dtype

    def number(self, x):
        return self.builder.cast(self.builder.constant(x), self.dtype)

    def where(self, condition, a, b):
        return self.builder.emit("where", TYPES[self.dtype], condition, a, b)

    def compare(self, op, a, b):
        return self.builder.emit(op, TYPES[self.dtype], a, b)

    def rule(self, name, node, *operands):
        """Says that a formula of derivative.py is better than the derivative of each instruction."""
        if TYPES[self.dtype] in (F32, F64):
            self.builder.rules[node] = (name, *operands)
        return node

    def __getattr__(self, op):
        return lambda *operands: _emit(self.builder, op, self.dtype, *operands)


def _sigmoid(on, x, call=None):
    one = on.number(1.0)
    return on.rule("sigmoid", on.divide(one, on.add(one, on.exp(on.neg(x)))), x)


def _silu(on, x, call):
    return on.rule("silu", on.divide(x, on.add(on.number(1.0), on.exp(on.neg(x)))), x)


def _relu(on, x, call):
    """A selection, so that the derivative at 0 is 0. A maximum would give each of its operands one half."""
    zero = on.number(0)
    return on.where(on.compare("le", x, zero), zero, x)


def _gelu(on, x, call):
    half, one = on.number(0.5), on.number(1.0)
    if call.argument(1, "approximate", "none") == "tanh":
        cube = on.mul(on.mul(x, x), x)
        inner = on.mul(on.number(math.sqrt(2 / math.pi)), on.add(x, on.mul(on.number(0.044715), cube)))
        return on.mul(on.mul(half, x), on.add(one, on.tanh(inner)))
    return on.mul(on.mul(half, x), on.add(one, on.erf(on.mul(x, on.number(math.sqrt(0.5))))))


def _softplus(on, x, call):
    beta, threshold = call.argument(1, "beta", 1.0), call.argument(2, "threshold", 20.0)
    beta, threshold = on.number(float(beta)), on.number(float(threshold))
    scaled = on.mul(x, beta)
    soft = on.where(on.compare("lt", threshold, scaled), x, on.divide(on.log1p(on.exp(scaled)), beta))
    return on.rule("softplus", soft, x, beta, threshold)


def _test(formula):
    """A question about a float; ``formula(arithmetic, x)``. No integer is infinite or NaN."""

    def compute(call):
        meta, value = call.meta(), value_of(call.trace, call.args[0])
        dtype = value.dtype if value.dtype.is_floating_point else torch.float32
        on, nodes = _Arithmetic(call.builder, dtype), call.operand(value, dtype, meta.shape)
        return call.result((formula(on, n) for n in nodes), torch.bool, meta.shape)

    return compute


def _clamp(call):
    meta = call.meta()
    nodes = call.operand(call.args[0], meta.dtype, meta.shape)
    low, high = call.argument(1, "min"), call.argument(2, "max")
    if meta.dtype.is_floating_point and all(isinstance(x, (Value, Capture, torch.Tensor)) for x in (low, high)):
        low = _unless_equal(call, low, high, meta)
    for bound, op in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            bounds = call.operand(bound, meta.dtype, meta.shape)
            if meta.dtype.is_floating_point:
                may_be_nan = not isinstance(bound, NUMBERS) or bound != bound
                nodes = [_limit(call.builder, op, meta.dtype, *pair, may_be_nan) for pair in zip(nodes, bounds)]
            else:
                nodes = [_emit(call.builder, op, meta.dtype, *pair) for pair in zip(nodes, bounds)]
    return call.result(nodes, meta.dtype, meta.shape)


def _unless_equal(call, low, high, meta):
    """The lower bound. PyTorch gives it no gradient where both bounds are equal."""
    on = _Arithmetic(call.builder, meta.dtype)
    pairs = zip(*(call.operand(x, meta.dtype, meta.shape) for x in (low, high)))
    nodes = [on.where(on.compare("eq", a, b), _without_gradient(call.builder, a), a) for a, b in pairs]
    return call.result(nodes, meta.dtype, meta.shape)


def _limit(builder, op, dtype, x, bound, may_be_nan):
    """A minimum or maximum that selects, so that all of the derivative at a tie is that of x."""
    on = _Arithmetic(builder, dtype)
    outside = on.compare("lt", x, bound) if op == "maximum" else on.compare("lt", bound, x)
    if may_be_nan:
        outside = builder.logic("bit_or", outside, on.compare("ne", bound, bound))
    return on.where(outside, bound, x)


def _clamp_one_side(name):
    def compute(call):
        bound = call.argument(1, name)
        call.function, call.args, call.kwargs = torch.clamp, (call.args[0],), {name: bound}
        return _clamp(call)

    return compute


def _where(call):
    if len(call.args) + len(call.kwargs) != 3:
        call.trace.fail("a mod cannot use torch.where with one operand")
    condition, yes, no = call.args[0], call.argument(1, "input"), call.argument(2, "other")
    if isinstance(call.args[0], Value) and getattr(call.function, "__objclass__", None):  # x.where(condition, other)
        condition, yes = yes, condition
    meta = call.meta()
    test = call.operand(condition, torch.bool, meta.shape)
    pair = zip(call.operand(yes, meta.dtype, meta.shape), call.operand(no, meta.dtype, meta.shape))
    nodes = (call.builder.emit("where", TYPES[meta.dtype], c, *each) for c, each in zip(test, pair))
    return call.result(nodes, meta.dtype, meta.shape)


def _masked_fill(call):
    x, condition, value = call.args[0], call.argument(1, "mask"), call.argument(2, "value")
    call.function, call.args, call.kwargs = torch.where, (condition, value, x), {}
    result = _where(call)
    return call.result(call.operand(result, x.dtype, result.shape), x.dtype, result.shape)


def _convert(call):
    if call.name == "to":  # a device may be given by its name
        call.args = tuple(torch.device(x) if isinstance(x, str) else x for x in call.args)
        call.kwargs = {name: torch.device(x) if isinstance(x, str) else x for name, x in call.kwargs.items()}
    meta, value = call.meta(), call.args[0]
    if not isinstance(meta, torch.Tensor):
        call.trace.fail(f"a mod cannot use {call.name} without a dtype")
    if not isinstance(value, Value):
        value = value_of(call.trace, value)
    if meta.dtype not in TYPES:
        call.trace.fail(f"a mod cannot convert to {meta.dtype}")
    nodes = value.instructions()
    if value.dtype != meta.dtype:
        nodes = [call.builder.cast(n, meta.dtype) for n in nodes]
    return call.result(nodes, meta.dtype, value.shape)


def _filled(value):
    """new_zeros and the like; None: the value is an argument."""

    def compute(call):
        meta = call.meta()
        number = value if value is not None else call.argument(2 if call.name == "new_full" else 1, "fill_value")
        nodes = call.operand(number, meta.dtype, meta.shape)
        return call.result(nodes, meta.dtype, meta.shape)

    return compute


def _detach(call):
    value = value_of(call.trace, call.args[0])
    nodes = [_without_gradient(call.builder, n) for n in value.instructions()]
    return call.result(nodes, value.dtype, value.shape)


def _without_gradient(builder, node):
    """The same value in an instruction of its own, through which no gradient passes."""
    type = builder.types[node]
    if type in (F32, F64):
        node = builder.emit("where", type, builder.constant(True), node, node)
        builder.rules[node] = ("detach",)
    return node


# ---- several elements ---------------------------------------------------------------------------------------------


def _view(call):
    """The operation acts on the instructions as it would act on the elements."""

    def nodes(x):
        if isinstance(x, (tuple, list)):
            return type(x)(map(nodes, x))
        if isinstance(x, (Value, Capture, torch.Tensor)):
            return value_of(call.trace, x).nodes
        return operator.index(x) if isinstance(x, Number) else x

    def cast(x, dtype):
        if isinstance(x, (tuple, list)):
            return type(x)(cast(item, dtype) for item in x)
        if isinstance(x, (Capture, torch.Tensor)) or (isinstance(x, Value) and x.dtype != dtype):
            value = value_of(call.trace, x)
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
        meta, value = call.meta(), value_of(call.trace, call.args[0])
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
        return (_arithmetic if is_of_two else _reduction)(op)(call)

    return compute


def _fold(call, op, nodes, dtype):
    if not nodes:
        if op in ("maximum", "minimum"):
            call.trace.fail(f"{call.name} needs at least one element", RuntimeError)
        return call.builder.cast(call.builder.constant({"mul": 1, "all": True}.get(op, 0)), dtype)
    instruction = {"any": "bit_or", "all": "bit_and"}.get(op, op)
    total = nodes[0]
    for node in nodes[1:]:
        total = _emit(call.builder, instruction, dtype, total, node)
    if op in ("maximum", "minimum") and len(nodes) > 2 and TYPES[dtype] in (F32, F64):
        call.builder.rules[total] = ("extreme", *nodes)  # of two elements it is that of the instruction
    return total


def _mean(call):
    meta = call.meta()
    call.function = torch.sum
    total = _reduction("add")(call)
    count = value_of(call.trace, call.args[0]).nodes.numel() // max(1, total.nodes.numel())
    return (total / count).to(meta.dtype)


def _dot(call):
    meta, (a, b) = call.meta(), (value_of(call.trace, x) for x in call.args[:2])
    if meta.shape != () or len(a.shape) != 1:
        call.trace.fail("a mod cannot multiply matrices; only the product of two vectors is taken")
    pairs = zip(call.operand(a, meta.dtype, a.shape), call.operand(b, meta.dtype, b.shape))
    products = [_emit(call.builder, "mul", meta.dtype, *pair) for pair in pairs]
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

OPERATIONS = {
    "add": _arithmetic("add"),
    "sub": _arithmetic("sub"),
    "rsub": _reflected_subtraction,
    "mul": _arithmetic("mul"),
    "div": _division,
    "floor_divide": _arithmetic("floor_divide"),
    "remainder": _arithmetic("remainder"),
    "fmod": _arithmetic("fmod"),
    "minimum": _arithmetic("minimum"),
    "maximum": _arithmetic("maximum"),
    "pow": _power,
    "bitwise_and": _arithmetic("bit_and"),
    "bitwise_or": _arithmetic("bit_or"),
    "bitwise_xor": _arithmetic("bit_xor"),
    "bitwise_not": _unary("bit_not"),
    "bitwise_left_shift": _arithmetic("shift_left"),
    "bitwise_right_shift": _arithmetic("shift_right"),
    "eq": _comparison("eq"),
    "ne": _comparison("ne"),
    "lt": _comparison("lt"),
    "le": _comparison("le"),
    "gt": _comparison("lt", swaps=True),
    "ge": _comparison("le", swaps=True),
    "logical_and": _logical("bit_and"),
    "logical_or": _logical("bit_or"),
    "logical_xor": _logical("bit_xor"),
    "logical_not": _logical_not,
    "clamp": _clamp,
    "clamp_min": _clamp_one_side("min"),
    "clamp_max": _clamp_one_side("max"),
    "where": _where,
    "masked_fill": _masked_fill,
    "round": _round,
    "square": _composed(lambda on, x, call: on.mul(x, x)),
    "reciprocal": _composed(lambda on, x, call: on.divide(on.number(1.0), x)),
    "rsqrt": _composed(lambda on, x, call: on.divide(on.number(1.0), on.sqrt(x))),
    "sigmoid": _composed(_sigmoid),
    "silu": _composed(_silu),
    "relu": _composed(_relu),
    "gelu": _composed(_gelu),
    "softplus": _composed(_softplus),
    "isnan": _test(lambda on, x: on.compare("ne", x, x)),
    "isinf": _test(lambda on, x: on.compare("eq", on.abs(x), on.number(math.inf))),
    "isposinf": _test(lambda on, x: on.compare("eq", x, on.number(math.inf))),
    "isneginf": _test(lambda on, x: on.compare("eq", x, on.number(-math.inf))),
    "isfinite": _test(lambda on, x: on.compare("lt", on.abs(x), on.number(math.inf))),
    "sum": _reduction("add"),
    "prod": _reduction("mul"),
    "any": _reduction("any"),
    "all": _reduction("all"),
    "amax": _extreme("maximum"),
    "amin": _extreme("minimum"),
    "mean": _mean,
    "dot": _dot,
    "getitem": _getitem,
    "detach": _detach,
    "select": _select,
    "new_zeros": _filled(0),
    "new_ones": _filled(1),
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "new_full": _filled(None),
    "full_like": _filled(None),
}
for _op in "neg abs sign sqrt exp exp2 log log2 log10 log1p expm1 tanh sin cos tan erf floor ceil trunc".split():
    OPERATIONS[_op] = _unary(_op)
for _op in "to float double half bfloat16 int long short char byte bool type".split():
    OPERATIONS[_op] = _convert
for _op in "pos clone contiguous view reshape squeeze unsqueeze expand expand_as permute transpose t flatten".split():
    OPERATIONS[_op] = _view
for _op in "stack cat unbind narrow movedim T mT positive view_as broadcast_to chunk split repeat flip".split():
    OPERATIONS[_op] = _view
