"""The derivative of a score_mod's program, which is a program, too. ``csrc/flex/program.h`` says what it computes.

Reverse mode over instructions. The derivative of each operation is that of torch, at ties and edges, too.
"""

import math

from .program import F32, F64, SOURCES, TYPES, Builder


def derivative_of(program, wanted=()):
    """Returns the text of a program's derivative, and which of the program's captures the derivative has.

    The derivative takes all numbers of the program, and the listed ones of the program's tensors, in this order. If the
    result does not depend on the score, the gradient is 0.

    Args:
        program: of a score_mod (:func:`flash_attn.flex.tracer.program_of`).
        wanted: numbers of the captures whose gradients are wanted.
    """
    key = tuple(sorted(set(wanted)))
    if key not in program.derivatives:
        program.derivatives[key] = _Reverse(program, key).run()
    return program.derivatives[key]


class _Reverse:
    def __init__(self, program, wanted):
        self.program, self.builder = program, Builder()
        old, place = program.builder, {}
        numbers = {"capture": program.captures, "param": program.params}
        for node in old.ancestors(program.result):
            op, type, words, operands = old.nodes[node]
            if op in SOURCES:
                words = (numbers[SOURCES[op]].index(words[0]),)
            place[node] = self.builder.emit(op, type, *(place[x] for x in operands), words=words)
        self.rules = {
            new: (old.rules[node][0], tuple(place[x] for x in old.rules[node][1:]))
            for node, new in place.items()
            if node in old.rules
        }
        self.result, self.depends = place[program.result], set()
        for node, (op, type, words, operands) in enumerate(self.builder.nodes):
            is_variable = op == "score" or (op == "gather" and words[0] in wanted)
            passes = op in RULES and any(x in self.depends for x in operands)
            if type in (F32, F64) and self.builder.types[node] == type and (is_variable or passes):
                self.depends.add(node)

    def run(self):
        builder, type, sums = self.builder, TYPES[self.program.score], {}
        on, variables = _Arithmetic(builder, type), sorted(self.depends, reverse=True)
        grad = builder.emit("grad", type)
        total, scatters = on.number(0.0), []
        if self.result in self.depends:
            sums[self.result] = builder.convert(grad, builder.types[self.result])
        for node in variables:  # an instruction comes before all that need it
            if node not in sums:
                continue
            op, type, words, operands = builder.nodes[node]
            if op == "score":
                total = self.unless_0(grad, sums[node])
            elif op == "gather":
                addend = self.unless_0(grad, sums[node])
                scatters.append(builder.emit("scatter", type, *operands, addend, words=words))
            else:
                for operand, part in self.parts(node, sums[node]):
                    has = sums.get(operand)
                    sums[operand] = part if has is None else builder.emit("add", builder.types[operand], has, part)
        if scatters and total < scatters[-1]:  # the result is the last instruction
            total = on.where(on.compare("ne", grad, on.number(0.0)), total, on.number(0.0))
        kinds, types = self.program.kinds, self.program.types
        text, captures, _ = builder.text(total, kinds, types, scatters, has_all_params=True)
        return text, captures

    def unless_0(self, grad, x):
        """A value that is 0 where ``grad`` is 0."""
        type = self.builder.types[x]
        on = _Arithmetic(self.builder, self.builder.types[grad])
        is_used, zero = on.compare("ne", grad, on.number(0.0)), _Arithmetic(self.builder, type).number(0.0)
        return x if x == grad else self.builder.emit("where", type, is_used, x, zero)

    def parts(self, node, grad):
        """Yields each operand that depends on a variable, with the gradient that the instruction gives it."""
        op, type, _, operands = self.builder.nodes[node]
        on = _Arithmetic(self.builder, type)
        if node in self.rules:
            name, operands = self.rules[node]
            if name == "detach":
                return
            if name == "extreme":
                yield from _shares(on, grad, node, operands, self.depends)
                return
            yield operands[0], FORMULAS[name](on, grad, *operands)
            return
        for operand, rule in zip(operands, RULES[op]):
            if operand in self.depends:
                yield operand, rule(on, grad, node, *operands)


class _Arithmetic:
    """``on.mul(a, b)`` emits an instruction in fp32 or fp64."""

    def __init__(self, builder, type):
        self.builder, self.type = builder, type

    def number(self, x):
        return self.builder.convert(self.builder.constant(float(x)), self.type)

    def where(self, condition, a, b):
        return self.builder.emit("where", self.type, condition, a, b)

    def compare(self, op, a, b):
        return self.builder.emit(op, self.type, a, b)

    def times(self, x, number):
        return self.mul(x, self.number(number))

    def to_number(self, x):
        return self.builder.convert(x, self.type)

    def to(self, x, node):
        """Converts to the type of another instruction."""
        return self.builder.convert(x, self.builder.types[node])

    def __getattr__(self, op):
        return lambda *operands: self.builder.emit(op, self.type, *operands)


# ---- rules --------------------------------------------------------------------------------------------------------


def _same(on, g, y, *operands):
    return g


def _extreme(swaps):
    """Of minimum and maximum: a tie gives each operand one half. A NaN gives all to both."""

    def rule(first):
        def part(on, g, y, a, b):
            own, other = (a, b) if first else (b, a)
            half = on.where(on.compare("eq", a, b), on.times(g, 0.5), g)
            loses = on.compare("lt", *((other, own) if swaps else (own, other)))
            return on.where(loses, on.number(0.0), half)

        return part

    return rule(True), rule(False)


def _base(on, g, y, a, b):
    one_less = on.mul(b, on.pow(a, on.sub(b, on.number(1.0))))
    return on.where(on.compare("eq", b, on.number(0.0)), on.number(0.0), on.mul(g, one_less))


def _exponent(on, g, y, a, b):
    zero = on.number(0.0)
    is_flat = on.builder.logic("bit_and", on.compare("eq", a, zero), on.compare("le", zero, b))
    return on.where(is_flat, zero, on.mul(g, on.mul(y, on.log(a))))


# For each operation a rule for each operand: on, the gradient of the result, the result, the operands.
# An operation that is not listed has the derivative 0.
RULES = {
    "convert": (lambda on, g, y, a: on.to(g, a),),
    "where": (
        None,
        lambda on, g, y, c, a, b: on.where(c, g, on.number(0.0)),
        lambda on, g, y, c, a, b: on.where(c, on.number(0.0), g),
    ),
    "add": (_same, _same),
    "sub": (_same, lambda on, g, y, a, b: on.neg(g)),
    "mul": (lambda on, g, y, a, b: on.mul(g, b), lambda on, g, y, a, b: on.mul(g, a)),
    "divide": (
        lambda on, g, y, a, b: on.divide(g, b),
        lambda on, g, y, a, b: on.neg(on.mul(g, on.divide(y, b))),
    ),
    "remainder": (_same, lambda on, g, y, a, b: on.neg(on.mul(g, on.floor_divide(a, b)))),
    "fmod": (_same, lambda on, g, y, a, b: on.neg(on.mul(g, on.trunc(on.divide(a, b))))),
    "minimum": _extreme(swaps=True),
    "maximum": _extreme(swaps=False),
    "pow": (_base, _exponent),
    "neg": (lambda on, g, y, a: on.neg(g),),
    "abs": (lambda on, g, y, a: on.mul(g, on.sign(a)),),
    "sqrt": (lambda on, g, y, a: on.divide(g, on.times(y, 2.0)),),
    "exp": (lambda on, g, y, a: on.mul(g, y),),
    "exp2": (lambda on, g, y, a: on.times(on.mul(g, y), math.log(2)),),
    "log": (lambda on, g, y, a: on.divide(g, a),),
    "log2": (lambda on, g, y, a: on.divide(g, on.times(a, math.log(2))),),
    "log10": (lambda on, g, y, a: on.divide(g, on.times(a, math.log(10))),),
    "log1p": (lambda on, g, y, a: on.divide(g, on.add(a, on.number(1.0))),),
    "expm1": (lambda on, g, y, a: on.mul(g, on.add(y, on.number(1.0))),),
    "tanh": (lambda on, g, y, a: on.mul(g, on.sub(on.number(1.0), on.mul(y, y))),),
    "sin": (lambda on, g, y, a: on.mul(g, on.cos(a)),),
    "cos": (lambda on, g, y, a: on.neg(on.mul(g, on.sin(a))),),
    "tan": (lambda on, g, y, a: on.mul(g, on.add(on.number(1.0), on.mul(y, y))),),
    "erf": (lambda on, g, y, a: on.times(on.mul(g, on.exp(on.neg(on.mul(a, a)))), 2 / math.sqrt(math.pi)),),
}


# Formulas for several instructions. Rules for each of the instructions would give inf * 0.


def _of_logistic(on, x):
    one = on.number(1.0)
    return on.divide(one, on.add(one, on.exp(on.neg(x))))


def _sigmoid(on, g, x):
    y = _of_logistic(on, x)
    return on.mul(g, on.mul(on.sub(on.number(1.0), y), y))


def _silu(on, g, x):
    y, one = _of_logistic(on, x), on.number(1.0)
    return on.mul(g, on.mul(y, on.add(one, on.mul(x, on.sub(one, y)))))


def _softplus(on, g, x, beta, threshold):
    scaled = on.mul(x, beta)
    power = on.exp(scaled)
    slope = on.divide(power, on.add(power, on.number(1.0)))
    return on.where(on.compare("lt", threshold, scaled), g, on.mul(g, slope))


def _shares(on, g, y, elements, depends):
    """Of the largest or least of several elements: those that have this value share the gradient."""
    wins = [on.compare("eq", x, y) for x in elements]
    count = on.to_number(wins[0])
    for win in wins[1:]:
        count = on.add(count, on.to_number(win))
    share = on.divide(g, count)
    for x, win in zip(elements, wins):
        if x in depends:
            yield x, on.where(win, share, on.number(0.0))


FORMULAS = {"sigmoid": _sigmoid, "silu": _silu, "softplus": _softplus}
