"""Mods that the plain kernels know: a window around the diagonal, causal masks included, and a softcap.

A call with such mods and nothing else runs on the kernels of ``flash_attn_func``, which need no code of the mod.
"""

import ctypes
import struct

import torch

from .program import BOOL, F32, F64, I64

MOST = 1 << 40  # no sum of such numbers and indices leaves int64
MOST_VISITED = 128  # instructions: a window has fewer, and what many others share would be visited again and again
CONVERSIONS = {BOOL: bool, I64: int, F32: lambda x: ctypes.c_float(x).value, F64: float}


class _Tree:
    """The instructions of a program with the numbers of one call."""

    def __init__(self, program, numbers):
        self.nodes, self.types = program.builder.nodes, program.builder.types
        self.result = program.result
        self._numbers, self._left = dict(zip(program.params, numbers)), MOST_VISITED

    def visit(self, node):
        """An instruction. Its op is None if too many have been visited."""
        self._left -= 1
        return self.nodes[node] if self._left >= 0 else (None, None, (), ())

    def number(self, node):
        """The value of a constant or a parameter, or None."""
        types = []
        while self.nodes[node][0] == "convert":
            types.append(self.nodes[node][1])
            node = self.nodes[node][3][0]
        op, type, words, _ = self.nodes[node]
        if op not in ("constant", "param"):
            return None
        bits = None if op == "param" else struct.pack("=2I", *words)
        number = self._numbers[words[0]] if bits is None else struct.unpack("=d" if type == F64 else "=q", bits)[0]
        for type in reversed(types):
            if type == I64 and not abs(number) <= MOST:
                return None  # NaN and infinity are no integers
            number = CONVERSIONS[type](number)
        return number

    def line(self, node):
        """``(a, b, c)`` of an integer a q_idx + b kv_idx + c, or None."""
        op, type, _, operands = self.visit(node)
        if type != I64:
            return None
        if op in ("q_idx", "kv_idx"):
            return (1, 0, 0) if op == "q_idx" else (0, 1, 0)
        number = self.number(node)
        if number is not None:
            return 0, 0, int(number)
        if op not in ("add", "sub", "neg"):
            return None
        lines = [self.line(x) for x in operands]
        if None in lines or any(abs(x) > MOST for line in lines for x in line):
            return None  # a sum might not fit int64
        signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[op]
        return tuple(sum(sign * line[i] for sign, line in zip(signs, lines)) for i in range(3))


def _bounds(tree, node):
    """``(left, right)`` of a mask q_idx - left <= kv_idx <= q_idx + right, with None for no bound; or None."""
    op, _, _, operands = tree.visit(node)
    if op == "bit_and":
        both = [_bounds(tree, x) for x in operands]
        if None in both:
            return None
        return tuple(min((x for x in side if x is not None), default=None) for side in zip(*both))
    if op == "constant":
        return (None, None) if tree.number(node) else None
    if op not in ("le", "lt") or tree.types[operands[0]] != I64:
        return None
    less, more = operands
    if tree.nodes[less][0] == "abs":
        inner, reach = tree.line(tree.nodes[less][3][0]), tree.line(more)
        if inner is None or reach is None or reach[:2] != (0, 0) or inner not in ((1, -1, 0), (-1, 1, 0)):
            return None
        reach = reach[2] - (op == "lt")
        return reach, reach
    lines = tree.line(less), tree.line(more)
    if None in lines:
        return None
    if any(abs(x) > MOST for line in lines for x in line):
        return None
    a, b, c = (y - x for x, y in zip(*lines))
    c -= op == "lt"
    return {(1, -1): (None, c), (-1, 1): (c, None)}.get((a, b))


def bounds_of(program, numbers):
    """``(left, right)`` of a mask_mod that is a window, with None for no bound; or None."""
    tree = _Tree(program, numbers)
    return _bounds(tree, tree.result)


def _keys_within(tree, node, len_q, len_kv):
    op, _, _, operands = tree.visit(node)
    everything, nothing = (0, len_kv), (len_kv, 0)
    if op in ("bit_and", "bit_or"):
        (first, end), (other_first, other_end) = (_keys_within(tree, x, len_q, len_kv) for x in operands)
        if op == "bit_and":
            return max(first, other_first), min(end, other_end)
        return min(first, other_first), max(end, other_end)
    if op == "constant":
        return everything if tree.number(node) else nothing
    if op not in ("le", "lt") or tree.types[operands[0]] != I64:
        return everything
    less, more = operands
    is_distance = tree.nodes[less][0] == "abs"
    line, reach = tree.line(tree.nodes[less][3][0] if is_distance else less), tree.line(more)
    if line is None or reach is None:
        return everything
    first, end = everything
    for sign in (1, -1) if is_distance else (1,):  # a q_idx + b kv_idx + c >= 0
        a, b, c = (y - sign * x for x, y in zip(line, reach))
        most = max(0, a * (len_q - 1)) + c - (op == "lt")  # of a q_idx + c
        if b == 1:
            first = max(first, -most)
        elif b == -1:
            end = min(end, most + 1)
        elif b == 0 and most < 0:
            return nothing
    return first, end


def keys_within(program, numbers, len_q, len_kv):
    """``(first, end)``: rows 0 to len_q - 1 of a mask_mod see no key outside, whatever tensors it reads.

    Comparisons of q_idx, kv_idx and numbers are understood. Other conditions may let any key through.
    """
    tree = _Tree(program, numbers)
    return _keys_within(tree, tree.result, len_q, len_kv)


def window_of(bounds, shift):
    """The window of these bounds as the plain kernels take it, ``(left, right)`` with -1 for no bound, or None.

    The plain kernels put the last query beside the last key. There query q_idx lies beside key ``q_idx + shift``.
    """
    left, right = (None if x is None else x + s for x, s in zip(bounds, (shift, -shift)))
    if (left is not None and left < 0) or (right is not None and right < 0):
        return None  # the window lies beside the diagonal
    return tuple(-1 if x is None or x > 1 << 30 else x for x in (left, right))


def softcap_of(program, numbers):
    """The cap of a score_mod ``cap * tanh(score / cap)``, or None."""
    tree = _Tree(program, numbers)
    op, _, _, operands = tree.nodes[tree.result]
    if op != "mul" or program.score != torch.float32:
        return None
    for outer, inner in (operands, operands[::-1]):
        cap = tree.number(outer)
        if cap is None or tree.nodes[inner][0] != "tanh":
            continue
        op, _, _, quotient = tree.nodes[tree.nodes[inner][3][0]]
        if op == "divide" and tree.nodes[quotient[0]][0] == "score" and tree.number(quotient[1]) == cap:
            return float(cap) if 1e-6 <= cap <= 1e6 else None
    return None
