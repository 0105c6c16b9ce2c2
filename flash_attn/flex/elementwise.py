"""Operations that compute each element of a result from the same elements of their operands.

Each function takes a call (:class:`flash_attn.flex.operations.Call`).
"""

import math
import operator

import torch

from .program import BOOL, F32, F64, I64, TYPES
from .steps import NUMBERS
from .values import Capture, Value


def arithmetic(op):
    """The operands are converted to the result's dtype."""

    def compute(call):
        meta, operands = call.meta(), call.args[:2]
        if op.startswith(("bit_", "shift_")) and meta.dtype.is_floating_point:
            call.trace.fail(f"a mod cannot use {call.name} with {meta.dtype}", TypeError)
        nodes = [call.operand(x, meta.dtype, meta.shape) for x in operands]
        scale = call.kwargs.get("alpha", 1)
        if not (isinstance(scale, int) and scale == 1):
            scaled = call.operand(scale, meta.dtype, meta.shape)
            nodes[1] = [emit(call.builder, "mul", meta.dtype, *pair) for pair in zip(scaled, nodes[1])]
        return call.result((emit(call.builder, op, meta.dtype, *each) for each in zip(*nodes)), meta.dtype, meta.shape)

    return compute


def emit(builder, op, dtype, *operands):
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
    return arithmetic("sub")(call)


def _division(call):
    mode = call.kwargs.get("rounding_mode")
    if mode is None:
        return arithmetic("divide")(call)
    if mode == "floor":
        return arithmetic("floor_divide")(call)
    if TYPES[call.meta().dtype] == I64:
        return arithmetic("trunc_divide")(call)
    quotient = arithmetic("divide")(call)
    return _unary_of(call, quotient, "trunc")


def _unary_of(call, value, op):
    nodes = (emit(call.builder, op, value.dtype, n) for n in value.instructions())
    return call.result(nodes, value.dtype, value.shape)


def _power(call):
    base, exponent = call.args[0], call.argument(1, "exponent")
    if isinstance(exponent, int) and exponent in (1, 2, 3) and isinstance(base, Value):
        meta = call.meta()  # a power of a bool is an integer
        base = call.result(call.operand(base, meta.dtype, meta.shape), meta.dtype, meta.shape)
        return base if exponent == 1 else base * base if exponent == 2 else base * base * base
    return arithmetic("pow")(call)


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
        nodes = (emit(call.builder, op, torch.bool, *pair) for pair in zip(a, b))
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
            return call.value(call.args[0])
        if op in ("abs", "sign") and TYPES[meta.dtype] == BOOL:
            return call.value(call.args[0])
        nodes = call.operand(call.args[0], meta.dtype, meta.shape)
        return call.result((emit(call.builder, op, meta.dtype, n) for n in nodes), meta.dtype, meta.shape)

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
        return lambda *operands: emit(self.builder, op, self.dtype, *operands)


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
        meta, value = call.meta(), call.value(call.args[0])
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
                nodes = [emit(call.builder, op, meta.dtype, *pair) for pair in zip(nodes, bounds)]
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


def convert(call):
    if call.name == "to":  # a device may be given by its name
        call.args = tuple(torch.device(x) if isinstance(x, str) else x for x in call.args)
        call.kwargs = {name: torch.device(x) if isinstance(x, str) else x for name, x in call.kwargs.items()}
    meta, value = call.meta(), call.args[0]
    if not isinstance(meta, torch.Tensor):
        call.trace.fail(f"a mod cannot use {call.name} without a dtype")
    if not isinstance(value, Value):
        value = call.value(value)
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
    value = call.value(call.args[0])
    nodes = [_without_gradient(call.builder, n) for n in value.instructions()]
    return call.result(nodes, value.dtype, value.shape)


def _without_gradient(builder, node):
    """The same value in an instruction of its own, through which no gradient passes."""
    type = builder.types[node]
    if type in (F32, F64):
        node = builder.emit("where", type, builder.constant(True), node, node)
        builder.rules[node] = ("detach",)
    return node


OPERATIONS = {
    "add": arithmetic("add"),
    "sub": arithmetic("sub"),
    "rsub": _reflected_subtraction,
    "mul": arithmetic("mul"),
    "div": _division,
    "floor_divide": arithmetic("floor_divide"),
    "remainder": arithmetic("remainder"),
    "fmod": arithmetic("fmod"),
    "minimum": arithmetic("minimum"),
    "maximum": arithmetic("maximum"),
    "pow": _power,
    "bitwise_and": arithmetic("bit_and"),
    "bitwise_or": arithmetic("bit_or"),
    "bitwise_xor": arithmetic("bit_xor"),
    "bitwise_not": _unary("bit_not"),
    "bitwise_left_shift": arithmetic("shift_left"),
    "bitwise_right_shift": arithmetic("shift_right"),
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
    "detach": _detach,
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
    OPERATIONS[_op] = convert
