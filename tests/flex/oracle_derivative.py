"""What a derivative is measured with: its words, run by torch in fp64."""

import struct

import torch

from flash_attn.flex import program

NAMES = {code: name for name, code in program.OPS.items()}
DTYPES = (torch.bool, torch.int64, torch.float32, torch.float64)


def _floor_divide(a, b):
    return torch.div(torch.where(b == 0, 0, a), torch.where(b == 0, 1, b), rounding_mode="floor")


FUNCTIONS = {"divide": torch.div, "bit_and": torch.bitwise_and, "bit_or": torch.bitwise_or}
FUNCTIONS |= {"bit_xor": torch.bitwise_xor, "bit_not": torch.bitwise_not, "pow": torch.pow}
FUNCTIONS |= {"shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift}
FUNCTIONS |= {"wrap_u8": lambda x: x.to(torch.uint8).long(), "wrap_i8": lambda x: x.to(torch.int8).long()}
FUNCTIONS |= {"wrap_i16": lambda x: x.to(torch.int16).long(), "wrap_i32": lambda x: x.to(torch.int32).long()}
UNARY = set(
    "neg abs sign bit_not sqrt exp exp2 log log2 log10 log1p expm1 tanh sin cos tan erf floor ceil round".split()
)
UNARY |= {"trunc", "wrap_u8", "wrap_i8", "wrap_i16", "wrap_i32"}


def instructions(text):
    """Yields ``(op, type, words, operands)``."""
    words = iter(struct.unpack(f"={len(text) // 4}I", text))
    _, num_captures, num_params, num = (next(words) for _ in range(4))
    ranks = [(next(words), next(words))[1] for _ in range(num_captures)]
    for _ in range(num_params):
        next(words)
    for _ in range(num):
        word = next(words)
        op, own = NAMES[word & 255], []
        count = {"where": 3, "convert": 1}.get(op, 1 if op in UNARY else 2)
        if op in ("b", "h", "q_idx", "kv_idx", "score", "grad", "param", "constant", "gather", "scatter"):
            own = [next(words) for _ in range({"param": 1, "constant": 2, "gather": 1, "scatter": 1}.get(op, 0))]
            count = ranks[own[0]] + (op == "scatter") if op in ("gather", "scatter") else 0
        yield op, word >> 8, own, [next(words) for _ in range(count)]


def run(text, tensors, numbers, indices, score, grad):
    """Returns the result and the sums of all scatters by their capture. Real numbers are fp64 throughout."""
    leaves = dict(zip(("b", "h", "q_idx", "kv_idx", "score", "grad"), (*indices, score.double(), grad.double())))
    values, sums, shape = [], {}, score.shape
    for op, type, own, operands in instructions(text):
        x = [values[i] for i in operands]
        dtype = DTYPES[max(type, 3) if type > 1 else type]
        if op in leaves:
            value = leaves[op]
        elif op == "param":
            value = torch.tensor(numbers[own[0]], dtype=dtype)
        elif op == "constant":
            bits = struct.pack("=2I", *own)
            number = struct.unpack("=d" if type == 3 else "=q", bits)[0]
            value = torch.tensor(number, dtype=dtype)
        elif op in ("gather", "scatter"):
            table = tensors[own[0]]
            places = tuple(
                torch.where(i < 0, i + size, i).clamp(0, size - 1).expand(shape) for i, size in zip(x, table.shape)
            )
            if op == "scatter":
                value = x[-1].expand(shape)
                into = sums.setdefault(own[0], torch.zeros(table.shape, dtype=torch.float64))
                sums[own[0]] = into.index_put(places, value, accumulate=True) if places else into + value.sum()
            else:
                value = table.detach().to(dtype)[places] if places else table.detach().to(dtype)
        elif op == "convert":
            value = x[0].to(dtype)
        elif op == "floor_divide" and type == 1:
            value = _floor_divide(*x)
        else:
            value = (FUNCTIONS.get(op) or getattr(torch, op))(*x)
        values.append(value)
    return values[-1].expand(shape), sums
