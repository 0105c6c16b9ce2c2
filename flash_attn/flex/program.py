"""Builds the text of a program, which ``csrc/flex/program.h`` describes.

Equal instructions are one instruction. Instructions that the result does not need are left out.
"""

import struct

import flash_attn_2_cuda
import torch

OPS, DTYPES, LIMITS = flash_attn_2_cuda.flex_tables()
BOOL, I64, F32, F64 = range(4)
TYPES = {torch.bool: BOOL, torch.float64: F64, torch.float32: F32, torch.float16: F32, torch.bfloat16: F32}
TYPES.update(dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), I64))
NARROW = {torch.uint8: "wrap_u8", torch.int8: "wrap_i8", torch.int16: "wrap_i16", torch.int32: "wrap_i32"}
COMPARISONS = {"eq", "ne", "lt", "le"}


class Builder:
    def __init__(self):
        self.nodes = []  # (op, type, words before the operands, operands)
        self.types = []  # of the results
        self.rules = {}  # node: (name, operand, ...); its derivative has a formula of its own (derivative.py)
        self._known = {}

    def emit(self, op, type, *operands, words=()):
        """Returns the number of an instruction."""
        node = (op, type, tuple(words), operands)
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
            self.types.append(BOOL if op in COMPARISONS else type)
        return self._known[node]

    def constant(self, number):
        """Returns an instruction with the value of a Python number, of type bool, int64 or fp64."""
        if isinstance(number, bool):
            return self.emit("constant", BOOL, words=struct.unpack("=2I", struct.pack("=q", number)))
        if isinstance(number, int):
            return self.emit("constant", I64, words=struct.unpack("=2I", struct.pack("=q", number)))
        return self.emit("constant", F64, words=struct.unpack("=2I", struct.pack("=d", number)))

    def convert(self, node, type):
        return node if self.types[node] == type else self.emit("convert", type, node)

    def cast(self, node, dtype):
        """Converts a value as ``Tensor.to`` does. fp16 and bf16 keep the digits of fp32."""
        if TYPES[dtype] == self.types[node] == I64 or dtype not in NARROW:
            return self.narrow(self.convert(node, TYPES[dtype]), dtype)
        return self.narrow(self.convert(node, I64), dtype)

    def narrow(self, node, dtype):
        return self.emit(NARROW[dtype], I64, node) if dtype in NARROW else node

    def logic(self, op, a, b):
        """``bit_and`` or ``bit_or`` of two bools. An operand that is a constant needs no instruction."""
        no, yes = self.constant(False), self.constant(True)
        keeps, wins = (yes, no) if op == "bit_and" else (no, yes)
        for x, y in ((a, b), (b, a)):
            if x == keeps:
                return y
            if x == wins:
                return x
        return a if a == b else self.emit(op, BOOL, a, b)

    def ancestors(self, *nodes):
        """Returns the numbers of all instructions that some instructions need, and of these themselves."""
        needed = set(nodes)
        for node in range(max(nodes), -1, -1):
            if node in needed:
                needed.update(self.nodes[node][3])
        return sorted(needed)

    def text(self, result, captures, params, scatters=(), has_all_params=False):
        """Returns the text, and the numbers of the captures and parameters that it uses.

        Args:
            result: the instruction with the result; no scatter comes after it.
            captures: ``(dtype, rank)`` of each capture.
            params: the type of each parameter.
            scatters: instructions that are needed, although the result does not need them.
            has_all_params: the text names all parameters, also those that it does not use.
        """
        order = self.ancestors(result, *scatters)
        used = {name: set() for name in ("capture", "param")}
        for op, _, own, _ in map(self.nodes.__getitem__, order):
            if op in SOURCES:
                used[SOURCES[op]].add(own[0])
        if has_all_params:
            used["param"] = range(len(params))
        used = {name: sorted(numbers) for name, numbers in used.items()}
        place = {node: idx for idx, node in enumerate(order)}
        words = [LIMITS["magic"], len(used["capture"]), len(used["param"]), len(order)]
        for dtype, rank in (captures[i] for i in used["capture"]):
            words += [DTYPES[str(dtype).removeprefix("torch.")], rank]
        words += [params[i] for i in used["param"]]
        for op, type, own, operands in map(self.nodes.__getitem__, order):
            words.append(OPS[op] | type << 8)
            words += [used[SOURCES[op]].index(w) for w in own] if op in SOURCES else own
            words += [place[node] for node in operands]
        return struct.pack(f"={len(words)}I", *words), used["capture"], used["param"]


SOURCES = {"gather": "capture", "scatter": "capture", "param": "param"}
