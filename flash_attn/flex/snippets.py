"""Mods written as one expression of C.

A snippet becomes a Python function that calls torch's functions, and the tracer takes it as any other mod. So
programs, kernels, gradients and ``torch.compile`` know nothing of C. The kinds of indices and captures are known, and
so the parser knows the kind of every part. It converts as C converts: a quotient of integers is cut off, and the sum of
two comparisons is an integer.
"""

import ast
import functools
import keyword
import linecache
import math
import re
from typing import NamedTuple, Union

import torch
from torch import Tensor

from .._types import MaskMod, ScoreMod
from .program import BOOL as OF_BOOL
from .program import I64, TYPES

INDICES = ("b", "h", "q_idx", "kv_idx")
BOOL, INT, FLOAT = "bool", "int", "float"
LEVELS = [("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-")]
LEVELS += [("*", "/", "%")]
COMPARISONS = {"==": ast.Eq, "!=": ast.NotEq, "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE}
ARITHMETIC = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult}
OF_BITS = {"&": ast.BitAnd, "|": ast.BitOr, "^": ast.BitXor, "<<": ast.LShift, ">>": ast.RShift}
CONSTANTS = {"INFINITY": math.inf, "NAN": math.nan, "M_PI": math.pi, "M_E": math.e, "true": 1, "false": 0}
CASTS = {"bool": BOOL, "_Bool": BOOL, "int": INT, "float": FLOAT, "double": "double"}

OF_REALS = {name: name for name in "sqrt exp exp2 log log2 log10 log1p expm1 tanh sin cos tan erf".split()}
OF_REALS |= {name: name for name in "floor ceil trunc rsqrt sigmoid relu".split()}
OF_REALS |= {"rint": "round", "nearbyint": "round", "fabs": "abs"}
OF_REALS |= {name: f"nn.functional.{name}" for name in ("silu", "gelu", "softplus")}
TESTS = {"isnan": "isnan", "isinf": "isinf", "isfinite": "isfinite"}
OF_TWO = {"min": "minimum", "max": "maximum", "fmin": "minimum", "fmax": "maximum", "fmod": "fmod", "pow": "pow"}
NUM_ARGUMENTS = {**dict.fromkeys((*OF_REALS, *TESTS, "abs"), 1), **dict.fromkeys(OF_TWO, 2), "clamp": 3}

INSTEAD = {"and": "&&", "or": "||", "not": "!", "True": "true", "False": "false", "inf": "INFINITY", "nan": "NAN"}
INSTEAD |= {"i": "q_idx", "j": "kv_idx", "q": "q_idx", "kv": "kv_idx", "k": "kv_idx", "head": "h", "batch": "b"}
INSTEAD |= {"where": "condition ? x : y", "if": "condition ? x : y", "else": "condition ? x : y", "round": "rint(x)"}
INSTEAD |= {"minimum": "min(x, y)", "maximum": "max(x, y)", "=": "==", "**": "pow(x, y)", "!": "!="}
INSTEAD |= {"++": "x + 1", "--": "x - 1"}
INSTEAD |= {f"{op}=": f"x {op} y" for op in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")}

_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*.*?\*/)"
    r"|(?P<float>(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?P<float_end>\w*)"
    r"|(?P<int>0[xX][0-9a-fA-F]+|\d+)(?P<int_end>\w*)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<op>\*\*|\+\+|--|->|<<=|>>=|[-+*/%&|^]=(?!=)|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:()\[\],;=])",
    re.DOTALL,
)


class _Token(NamedTuple):
    kind: str  # "float", "int", "name", "op" or "end"
    text: str
    at: int  # where it begins in the snippet


class _Part(NamedTuple):
    """A part of the snippet that has been read."""

    kind: str
    is_number: bool  # made of numbers alone, and no tensor
    code: ast.expr
    at: int
    op: str = ""  # its operator; "" of a part in parentheses


def quotient(a, b):
    """An integer divided as C divides, without what lies behind the point. By 0 it is 0, as in a kernel."""
    if b == 0:
        return 0
    return -(-a // b) if (a < 0) != (b < 0) else a // b


def ratio(a, b):
    """A float divided as C divides."""
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


SCOPE = {"__name__": __name__, "torch": torch, "c_quotient": quotient, "c_ratio": ratio}


class _Parser:
    def __init__(self, text, captures):
        self.text, self.captures, self.used = text, captures, set()
        self.tokens = list(self._scan())
        self.next = 0

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def fail(self, what, at):
        line = self.text.count("\n", 0, at)
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        place = f"line {line + 1}, column {column}" if "\n" in self.text.strip() else f"column {column}"
        raise ValueError(f"c_mod({self.text!r}), {place}: {what}")

    def _scan(self):
        at = 0
        while at < len(self.text):
            found = _TOKEN.match(self.text, at)
            if found is None:
                self.fail(f"{self.text[at]!r} is no part of an expression of C", at)
            kind = found.lastgroup.removesuffix("_end")
            if kind == "int":
                self._check_int(found, at)
            elif kind == "float" and found["float_end"] not in ("", "f", "F", "l", "L"):
                self.fail(f"{found[0]} is no number: write {found['float']}", at)
            if kind != "space":
                yield _Token(kind, found[0] if kind in ("name", "op") else found[kind], at)
            at = found.end()
        yield _Token("end", "the end", len(self.text.rstrip()))

    def _check_int(self, found, at):
        number, end = found["int"], found["int_end"]
        if end and end.lower() not in ("l", "ll"):
            instead = number + "." if end in ("f", "F") else number
            self.fail(f"{found[0]} is no number here, where integers have a sign: write {instead}", at)
        if number.startswith("0") and number.isdigit() and len(number) > 1:
            self.fail(f"{number} is an octal number in C: write {int(number)} or 0x..", at)
        if int(number, 0) >= 1 << 63:
            self.fail(f"{number} does not fit 64 bits", at)

    @property
    def token(self):
        return self.tokens[self.next]

    def take(self):
        self.next += 1
        return self.tokens[self.next - 1]

    def takes(self, text):
        is_there = self.token.kind in ("op", "name") and self.token.text == text
        self.next += is_there
        return is_there

    def expect(self, text, behind):
        if not self.takes(text):
            self.fail(f"{text} must follow {behind}, not {self._said(self.token)}", self.token.at)

    def _said(self, token):
        instead = INSTEAD.get(token.text)
        return f"{token.text}: write {instead}" if instead else token.text

    # ---- code ------------------------------------------------------------------------------------------------------

    def at_place(self, node, at):
        """Gives the code of a part its place in the snippet, which errors of the tracer name."""
        line = self.text.count("\n", 0, at)
        column = len(self.text[self.text.rfind("\n", 0, at) + 1 : at].encode())
        node.lineno = node.end_lineno = line + 1
        node.col_offset, node.end_col_offset = column, column + 1
        return node

    def function(self, name, at):
        node = self.at_place(ast.Name("torch", ast.Load()), at)
        for part in name.split("."):
            node = self.at_place(ast.Attribute(node, part, ast.Load()), at)
        return node

    def call(self, name, at, *args, **words):
        words = [ast.keyword(word, code) for word, code in words.items()]
        return self.at_place(ast.Call(self.function(name, at), list(args), words), at)

    def method(self, code, name, at, *args, **words):
        words = [ast.keyword(word, x) for word, x in words.items()]
        return self.at_place(ast.Call(ast.Attribute(code, name, ast.Load()), list(args), words), at)

    def binary(self, op, a, b, at):
        return self.at_place(ast.BinOp(a, op(), b), at)

    def compare(self, op, a, b, at):
        return self.at_place(ast.Compare(a, [op()], [b]), at)

    def number(self, value, at):
        return self.at_place(ast.Constant(value), at)

    # ---- conversions -----------------------------------------------------------------------------------------------

    def as_bool(self, x):
        if x.kind == BOOL:
            return x
        return x._replace(kind=BOOL, code=self.compare(ast.NotEq, x.code, self.number(0, x.at), x.at))

    def as_int(self, x):
        """Of a bool or an integer. The value of a cast is cut off behind the point."""
        if x.kind == INT:
            return x
        if x.is_number and x.kind == BOOL:
            code = self.at_place(ast.IfExp(x.code, self.number(1, x.at), self.number(0, x.at)), x.at)
        elif x.is_number:
            code = self.at_place(ast.Call(ast.Name("int", ast.Load()), [x.code], []), x.at)
        else:
            code = self.method(x.code, "to", x.at, self.function("int64", x.at))
        return x._replace(kind=INT, code=code)

    def as_float(self, x, dtype="float32"):
        if x.kind == FLOAT and (x.is_number or dtype == "float32"):
            return x
        if x.is_number:
            x = self.as_int(x)
            return x._replace(kind=FLOAT, code=self.binary(ast.Mult, x.code, self.number(1.0, x.at), x.at))
        return x._replace(kind=FLOAT, code=self.method(x.code, "to", x.at, self.function(dtype, x.at)))

    def as_tensor(self, x, dtype=None):
        """For functions of torch that take no numbers. A float has the dtype of the score."""
        if not x.is_number:
            return x
        if x.kind == FLOAT and "score" in self.names and dtype is None:
            like, words = "score", {}
        else:
            dtype = dtype or {BOOL: "bool", INT: "int64", FLOAT: "float32"}[x.kind]
            like, words = "b", {"dtype": self.function(dtype, x.at)}
        code = self.method(ast.Name(like, ast.Load()), "new_full", x.at, ast.Tuple([], ast.Load()), x.code, **words)
        return x._replace(is_number=False, code=code)

    def as_tensors(self, *parts):
        return parts if all(x.is_number for x in parts) else tuple(map(self.as_tensor, parts))

    def alike(self, a, b, least=INT):
        """Two operands as C converts them to one kind, which is `least` or comes later: bool, int, float."""
        order = (BOOL, INT, FLOAT)
        kind = order[max(map(order.index, (a.kind, b.kind, least)))]
        convert = {BOOL: lambda x: x, INT: self.as_int, FLOAT: lambda x: self.as_float(x) if x.kind == BOOL else x}
        return kind, convert[kind](a), convert[kind](b)

    # ---- the grammar -----------------------------------------------------------------------------------------------

    def parse(self):
        """Returns the part that is the whole snippet."""
        self.names = {token.text for token in self.tokens if token.kind == "name"}
        self.takes("return")
        result = self.conditional()
        ends = self.takes(";")
        if self.token.kind != "end":
            said = (
                f"{self.token.text}: a snippet is one expression, without statements"
                if ends
                else self._said(self.token)
            )
            self.fail(f"{'' if ends else 'an operator or '}the end must follow, not {said}", self.token.at)
        return result

    def conditional(self):
        condition = self.operation(0)
        at = self.token.at
        if not self.takes("?"):
            return condition
        yes = self.conditional()
        self.expect(":", "the second part of ?:")
        no = self.conditional()
        condition = self.as_bool(condition)
        kind, yes, no = self.alike(yes, no, BOOL)
        if condition.is_number:
            yes, no = self.as_tensors(yes, no)
            code = self.at_place(ast.IfExp(condition.code, yes.code, no.code), at)
            return _Part(kind, yes.is_number and no.is_number, code, at, "?")
        if kind == FLOAT:  # a pair of numbers, or of an integer and a number, has no dtype of the score
            yes, no = (self.as_tensor(x) if x.is_number else x for x in (yes, no))
        return _Part(kind, False, self.call("where", at, condition.code, yes.code, no.code), at, "?")

    def operation(self, level):
        if level == len(LEVELS):
            return self.unary()
        left = self.operation(level + 1)
        while self.token.kind == "op" and self.token.text in LEVELS[level]:
            op, at = self.take()[1:]
            left = self.apply(op, left, self.operation(level + 1), at)
        return left

    def apply(self, op, a, b, at):
        if op in ("&&", "||"):
            a, b = self.as_bool(a), self.as_bool(b)
            code = self.binary(ast.BitAnd if op == "&&" else ast.BitOr, a.code, b.code, at)
            kind = BOOL
        elif op in COMPARISONS:
            if a.op in COMPARISONS:
                self.fail(f"C compares the 0 or 1 of the comparison before with what follows {op}: write x {a.op} y && "
                          f"y {op} z", at)  # fmt: skip
            _, a, b = self.alike(a, b, BOOL if op in ("==", "!=") else INT)
            code, kind = self.compare(COMPARISONS[op], a.code, b.code, at), BOOL
        elif op in OF_BITS:
            kind, a, b = self.of_bits(op, a, b, at)
            if op in ("<<", ">>"):  # a number of Python cannot be shifted by less than 0
                a, b = self.as_tensor(a), self.as_tensor(b)
            code = self.binary(OF_BITS[op], a.code, b.code, at)
        else:
            kind, a, b = self.alike(a, b)
            code = self.arithmetic(op, kind, a, b, at)
        return _Part(kind, a.is_number and b.is_number and op not in ("%", "<<", ">>"), code, at, op)

    def of_bits(self, op, a, b, at):
        for x, other in ((a, b), (b, a)):
            if x.kind == FLOAT:
                self.fail(f"{op} takes integers, and an operand is a float: convert it by (int)x", at)
            if x.op in COMPARISONS and other.kind == INT:
                self.fail(f"in C {x.op} binds stronger than {op}: write parentheses", at)
        return self.alike(a, b, INT if op in ("<<", ">>") else BOOL)

    def arithmetic(self, op, kind, a, b, at):
        if op in ARITHMETIC:
            return self.binary(ARITHMETIC[op], a.code, b.code, at)
        if op == "%" and kind == FLOAT:
            self.fail("% takes integers, and an operand is a float: write fmod(x, y)", at)
        numbers = a.is_number and b.is_number
        if numbers and op == "/":
            name = "c_ratio" if kind == FLOAT else "c_quotient"
            return self.at_place(ast.Call(ast.Name(name, ast.Load()), [a.code, b.code], []), at)
        if kind == FLOAT:
            return self.binary(ast.Div, a.code, b.code, at)
        if op == "/":
            a, b = self.as_tensors(a, b)
            return self.call("div", at, a.code, b.code, rounding_mode=self.number("trunc", at))
        a, b = self.as_tensor(a), self.as_tensor(b)
        return self.call("fmod", at, a.code, b.code)

    def unary(self):
        token = self.token
        if token.kind == "op" and token.text in ("-", "+", "!", "~"):
            self.take()
            return self.signed(token.text, self.unary(), token.at)
        if token.text == "(" and self.tokens[self.next + 1].text in CASTS:
            self.take()
            kind = CASTS[self.take().text]
            self.expect(")", "the type of a cast")
            x = self.unary()
            if kind == "double":
                return self.as_float(self.as_tensor(x, "float64"), "float64")._replace(op="(", at=token.at)
            return {BOOL: self.as_bool, INT: self.as_int, FLOAT: self.as_float}[kind](x)._replace(op="(", at=token.at)
        return self.postfix()

    def signed(self, op, x, at):
        if op == "!":
            x = self.as_bool(x)
            if x.is_number:
                code = self.at_place(ast.UnaryOp(ast.Not(), x.code), at)
            else:
                code = self.call("logical_not", at, x.code)
            return x._replace(code=code, at=at, op=op)
        if op == "~" and x.kind != INT:
            instead = "write !" if x.kind == BOOL else "convert it by (int)x"
            self.fail(f"~ takes an integer, not a {'comparison' if x.kind == BOOL else 'float'}: {instead}", at)
        x = self.as_int(x) if x.kind == BOOL else x
        if op != "+":
            x = x._replace(code=self.at_place(ast.UnaryOp(ast.Invert() if op == "~" else ast.USub(), x.code), at))
        return x._replace(at=at, op=op)

    def postfix(self):
        token = self.take()
        if token.kind in ("int", "float"):
            value = float(token.text) if token.kind == "float" else int(token.text, 0)
            return _Part(token.kind, True, self.number(value, token.at), token.at)
        if token.text == "(":
            inner = self.conditional()
            if self.token.text == ",":
                self.fail("a snippet has no comma operator", self.token.at)
            self.expect(")", "what stands in parentheses")
            return inner._replace(op="")
        if token.kind != "name":
            self.fail(f"an operand must stand here, not {self._said(token)}", token.at)
        if self.takes("("):
            return self.function_of(token)
        return self.named(token)

    def named(self, token):
        name, at = token.text, token.at
        code = self.at_place(ast.Name(name, ast.Load()), at)
        if name == "score" or name in INDICES:
            found = _Part(FLOAT if name == "score" else INT, False, code, at)
        elif name in CONSTANTS:
            value = CONSTANTS[name]
            found = _Part(FLOAT if isinstance(value, float) else INT, True, self.number(value, at), at)
        elif name in self.captures:
            return self.captured(name, code, at)
        else:
            self.fail(self.unknown(token), at)
        if self.token.text == "[":
            self.fail(f"{name} is one number: only captured tensors take [..]", self.token.at)
        return found

    def unknown(self, token):
        if token.text in NUM_ARGUMENTS:
            return f"{token.text} is a function: write {token.text}(..)"
        if token.text in INSTEAD:
            return f"there is no {self._said(token)}"
        names = ", ".join(["score", *INDICES, *self.captures])
        return f"there is no {token.text}: write one of {names}, or pass {token.text}=.. to c_mod"

    def captured(self, name, code, at):
        self.used.add(name)
        kind, rank = self.captures[name]
        places = []
        while self.token.text == "[" and self.token.kind == "op":
            open_at = self.take().at
            place = self.conditional()
            if self.token.text == ",":
                self.fail(f"C has one index in each bracket: write {name}[..][..]", self.token.at)
            self.expect("]", "an index")
            if place.kind == FLOAT:
                self.fail(f"an index of {name} is a float: write (int)x", place.at)
            if rank is None or len(places) == rank:
                what = "a number" if rank is None else f"a tensor of {rank} dimensions"
                self.fail(f"{name} is {what}, and this is index {len(places) + 1} of it", open_at)
            places.append(self.as_tensor(self.as_int(place)).code)
        if rank is None:
            return _Part(kind, True, code, at)
        if len(places) < rank:
            self.fail(f"{name} has {rank} dimensions and {len(places)} indices: write {name}{'[..]' * rank}", at)
        if places:
            code = self.at_place(ast.Subscript(code, ast.Tuple(places, ast.Load()), ast.Load()), at)
        found = _Part(kind, False, code, at)
        return found if kind != INT else found._replace(code=self.method(code, "to", at, self.function("int64", at)))

    def function_of(self, token):
        name, at = token.text, token.at
        name = name[:-1] if name not in NUM_ARGUMENTS and name[:-1] in NUM_ARGUMENTS and name.endswith("f") else name
        if name not in NUM_ARGUMENTS:
            instead = f"write {INSTEAD[name]}" if name in INSTEAD else f"the functions are {', '.join(NUM_ARGUMENTS)}"
            self.fail(f"there is no function {name}: {instead}", at)
        x = [self.conditional()]
        while self.takes(","):
            x.append(self.conditional())
        self.expect(")", f"the arguments of {name}")
        if len(x) != NUM_ARGUMENTS[name]:
            self.fail(f"{name} takes {NUM_ARGUMENTS[name]} arguments, not {len(x)}", at)
        if name in TESTS or name in OF_REALS:
            x = self.as_tensor(self.as_float(x[0]))
            return _Part(
                BOOL if name in TESTS else FLOAT, False, self.call({**TESTS, **OF_REALS}[name], at, x.code), at
            )
        if name == "abs":
            x = self.as_tensor(self.as_int(x[0]) if x[0].kind == BOOL else x[0])
            return x._replace(code=self.call("abs", at, x.code), at=at, op="")
        if name == "clamp":
            kind = FLOAT if any(part.kind == FLOAT for part in x) else INT
            x = [self.as_tensor(part if part.kind == FLOAT else self.as_int(part)).code for part in x]
            return _Part(kind, False, self.call("clamp", at, x[0], min=x[1], max=x[2]), at)
        return self.of_two(name, *x, at)

    def of_two(self, name, a, b, at):
        is_real = name not in ("min", "max")
        kind, a, b = self.alike(a, b, FLOAT if is_real else INT)
        if is_real:
            a = self.as_float(a)
            b = b if name == "pow" else self.as_float(b)
        if name == "pow" and not a.is_number and b.is_number:
            pass  # torch knows small powers
        else:
            a, b = self.as_tensor(a), self.as_tensor(b)
        return _Part(kind, False, self.call(OF_TWO[name], at, a.code, b.code), at)


def _result_of(parser):
    """The code of the result, and whether the snippet is a score_mod."""
    result = parser.parse()
    if "score" in parser.names:
        if result.kind == BOOL:
            parser.fail(
                "a comparison is a mask_mod, which has no score: write condition ? score : -INFINITY", result.at
            )
        return result.code, True
    if result.kind == FLOAT:
        parser.fail("the result is a float without score: write score + .., or for a mask_mod a comparison", result.at)
    return parser.as_bool(result).code, False


@functools.lru_cache(maxsize=1024)
def _maker(text, captures):
    """The function of the captures that returns the mod. captures: (name, kind, dimensions or None) of each."""
    parser = _Parser(text, {name: (kind, rank) for name, kind, rank in captures})
    code, has_score = _result_of(parser)
    for name in parser.captures:
        if name not in parser.used:
            raise ValueError(f"c_mod({text!r}): {name} is passed, and the snippet does not use it")
    names = ["score", *INDICES] if has_score else INDICES

    def arguments(names):
        return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])

    mod = ast.FunctionDef("c_mod", arguments(names), [ast.Return(code)], [])
    make = ast.FunctionDef("make", arguments(parser.captures), [mod, ast.Return(ast.Name("c_mod", ast.Load()))], [])
    for node in (mod, make):
        node.type_params = []
    file = f"<c_mod {' '.join(text.split())}>"
    linecache.cache[file] = len(text), None, [line + "\n" for line in text.split("\n")], file
    scope = dict(SCOPE)
    exec(compile(ast.fix_missing_locations(ast.Module([make], [])), file, "exec"), scope)
    return scope["make"]


TAKEN = {"score", *INDICES, *CONSTANTS, *CASTS, *NUM_ARGUMENTS, *SCOPE, "return", "c_mod", "make"}


def _described(name, x):
    if name in TAKEN or keyword.iskeyword(name) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(f"c_mod: {name} is no name for a capture, because it means something else: take another name")
    if isinstance(x, Tensor):
        if x.dtype not in TYPES:
            raise TypeError(f"c_mod: {name} must be bool, an integer, fp16, bf16, fp32 or fp64; it is {x.dtype}")
        return name, {OF_BOOL: BOOL, I64: INT}.get(TYPES[x.dtype], FLOAT), x.dim()
    if isinstance(x, (bool, int, float)):
        return name, FLOAT if isinstance(x, float) else INT, None
    raise TypeError(f"c_mod: {name} must be a tensor, an int, a float or a bool; it is a {type(x).__name__}")


def c_mod(text: str, /, **captures: Union[Tensor, float, bool]) -> Union[ScoreMod, MaskMod]:
    """Returns the score_mod or the mask_mod that an expression of C describes.

        causal = c_mod("q_idx >= kv_idx")
        alibi = c_mod("score + slope[h] * (kv_idx - q_idx)", slope=slopes)
        out = flex_attention(query, key, value, alibi, mask_mod=causal)

    A snippet that reads ``score`` is a score_mod. Any other is a mask_mod; its result is a comparison or an integer.
    Operators, their precedence and conversions are those of C: ``7 / 2`` is 3, and ``%`` has the sign of its left side.
    Integers have 64 bits, floats have 32. Indices, division by 0 and NaN in ``min`` and ``max`` are as in other mods.

    Args:
        text: one expression of ``score``, ``b``, ``h``, ``q_idx``, ``kv_idx`` and the captures. It may have ``?:``,
            casts to bool, int, float and double, functions of ``math.h`` such as ``tanh`` and ``fmod``, and ``min``,
            ``max``, ``clamp``, ``sigmoid``.
        captures: tensors, which are indexed as ``table[h][q_idx]``, and numbers.
    Returns:
        A function for flex_attention, create_block_mask and create_mask. Make it outside of ``torch.compile``.
    Raises:
        ValueError: the snippet is wrong; the message has the column and what to write instead.
        TypeError: a capture is neither a tensor nor a number.

    >>> mask = c_mod("kv_idx <= q_idx && q_idx - kv_idx < width", width=2)
    >>> create_mask(mask, 1, 1, 3, 3, "cpu")[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    if not isinstance(text, str):
        raise TypeError(f"c_mod: the snippet must be a string; it is a {type(text).__name__}")
    make = _maker(text, tuple(_described(name, x) for name, x in captures.items()))
    return make(*(int(x) if isinstance(x, bool) else x for x in captures.values()))
