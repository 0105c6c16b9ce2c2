"""What the tests of flex_attention share: tensors and block masks on a GPU, and random expressions."""

import torch
from oracle_attention import moved
from torch.nn.attention.flex_attention import BlockMask

from flash_attn.flex_attention import create_block_mask, create_mask

DEVICE = "cuda"
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
DIMS = [(64, 64), (72, 72), (96, 96), (128, 128), (64, 128), (64, 256), (192, 128), (192, 192), (256, 256), (24, 8)]


def make(b, h, h_kv, len_q, len_kv, d, d_v=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, h, len_q, d), (b, h_kv, len_kv, d), (b, h_kv, len_kv, d_v or d)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def causal(b, h, q, k):
    return q >= k


# torch rounds no function exactly, not even sqrt: it may call a vector library.
FUNCTIONS = "sqrt exp exp2 log log2 log10 log1p expm1 tanh sin cos tan erf sigmoid rsqrt reciprocal".split()
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def expression(rng, depth, leaves, wants):
    """Returns a function of the leaves. `wants` is "int", "bool" or "real"."""

    def sub(kind):
        return expression(rng, depth - 1, leaves, kind)

    if depth == 0:
        name = rng.choice(leaves[wants])
        return lambda env: env[name]
    if wants == "bool":
        op = rng.choice(["lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "logical", "where", "any"])
        if op in ("and", "or", "xor", "where"):
            a, b, c = sub("bool"), sub("bool"), sub("bool")
            return {
                "and": lambda env: a(env) & b(env),
                "or": lambda env: a(env) | b(env),
                "xor": lambda env: a(env) ^ b(env),
                "where": lambda env: torch.where(c(env), a(env), b(env)),
            }[op]
        if op == "not":
            a = sub("bool")
            return lambda env: ~a(env)
        if op == "logical":
            a, b = sub("int"), sub(rng.choice(["int", "real"]))
            name = rng.choice(["logical_and", "logical_or", "logical_xor"])
            return lambda env: getattr(torch, name)(a(env), b(env))
        if op == "any":
            a, name = sub("real"), rng.choice(["isnan", "isinf", "isneginf", "isposinf", "isfinite"])
            return lambda env: getattr(torch, name)(a(env))
        kind = rng.choice(["int", "real"])
        a, b = sub(kind), sub(kind)
        return lambda env: getattr(torch, op)(a(env), b(env))
    a, b, c = sub(wants), sub(wants), sub("bool")
    low, high = sorted(rng.sample(range(-20, 20), 2))
    shift, bits = rng.choice([-1, 0, 1, 5, 31, 63, 64, 100]), rng.choice([1, 7, -8, 255])

    def divisor(env):
        """torch itself stops at a division by 0, and of the least int64 by -1."""
        x = b(env)
        return torch.where((x == 0) | (x == -1), 3, x)

    both = {
        "add": lambda env: a(env) + b(env),
        "sub": lambda env: a(env) - b(env),
        "mul": lambda env: a(env) * b(env),
        "minimum": lambda env: torch.minimum(a(env), b(env)),
        "maximum": lambda env: torch.maximum(a(env), b(env)),
        "where": lambda env: torch.where(c(env), a(env), b(env)),
        "clamp": lambda env: a(env).clamp(low, high),
        "neg": lambda env: -a(env),
        "abs": lambda env: a(env).abs(),
        "sign": lambda env: a(env).sign(),
        "square": lambda env: a(env).square(),
        "masked_fill": lambda env: a(env).masked_fill(c(env), 1),
    }
    ints = {
        "floor_divide": lambda env: a(env) // divisor(env),
        "remainder": lambda env: a(env) % divisor(env),
        "trunc": lambda env: torch.div(a(env), divisor(env), rounding_mode="trunc"),
        "fmod": lambda env: torch.fmod(a(env), divisor(env)),
        "and": lambda env: a(env) & bits,
        "or": lambda env: a(env) | b(env),
        "xor": lambda env: a(env) ^ b(env),
        "not": lambda env: ~a(env),
        "left": lambda env: a(env) << shift,
        "right": lambda env: a(env) >> shift,
        "shift": lambda env: a(env) >> b(env),
        "pow": lambda env: a(env) ** 3,
        "to": lambda env: a(env).to(torch.int64),
        "int": lambda env: c(env).int(),
    }
    reals = {
        "div": lambda env: a(env) / b(env),
        "floor_divide": lambda env: a(env) // b(env),
        "remainder": lambda env: a(env) % b(env),
        "fmod": lambda env: torch.fmod(a(env), b(env)),
        "floor": lambda env: a(env).floor(),
        "ceil": lambda env: a(env).ceil(),
        "round": lambda env: a(env).round(),
        "trunc": lambda env: a(env).trunc(),
        "relu": lambda env: torch.relu(a(env)),
        "bool": lambda env: c(env).float(),
    }
    choices = both | (ints if wants == "int" else reals)
    return choices[rng.choice(sorted(choices))]


NUMBERS = [0, 1, -1, 3, -7, 0.5, -0.25, 1e9, 255, -129, 2**31, True, float("inf"), float("nan"), -3.7]


def mixed_expression(rng, depth, leaves):
    """A function of leaves of any dtype and of Python's numbers, whose dtypes mix as PyTorch says."""
    if depth == 0 or rng.random() < 0.1:
        name = rng.choice(leaves)
        return lambda env: env[name]
    a, number = mixed_expression(rng, depth - 1, leaves), rng.choice(NUMBERS)
    b = (lambda env: number) if rng.random() < 0.4 else mixed_expression(rng, depth - 1, leaves)

    def divisor(env):
        """Neither 0 nor -1, by which torch itself stops."""
        x = b(env)
        if not isinstance(x, torch.Tensor):
            return 3 if x in (0, -1) else x
        return torch.ones_like(x) if x.dtype == torch.bool else torch.where((x == 0) | (x == -1), 1, x)

    def small(env):
        """What every integer has."""
        x = a(env)
        return torch.where((x >= 0) & (x < 100), x, 0) if x.dtype.is_floating_point else x

    low, high = sorted(rng.sample(range(-20, 20), 2))
    dtype, power = rng.choice([*INTEGERS, torch.bool, torch.float32, torch.float64]), rng.choice([1, 2, 3, 2.0])
    choices = [
        lambda env: a(env) + b(env), lambda env: a(env) - b(env), lambda env: a(env) * b(env),
        lambda env: a(env) / b(env), lambda env: a(env) // divisor(env), lambda env: a(env) % divisor(env),
        lambda env: b(env) - a(env), lambda env: torch.add(a(env), b(env), alpha=2), lambda env: a(env) < b(env),
        lambda env: a(env) >= b(env), lambda env: a(env) == b(env), lambda env: a(env) & b(env),
        lambda env: torch.fmod(a(env), divisor(env)), lambda env: torch.where(env["torch.bool"], a(env), b(env)),
        lambda env: -a(env), lambda env: a(env).abs(), lambda env: a(env).sign(), lambda env: a(env).square(),
        lambda env: torch.pow(a(env), power), lambda env: a(env).clamp(low, high),
        lambda env: a(env).clamp(low + 0.5, high + 0.5), lambda env: small(env).to(dtype),
        lambda env: a(env).floor(), lambda env: torch.logical_not(a(env)), lambda env: torch.isnan(a(env)),
        lambda env: env["table"][small(env).long() % 37], lambda env: a(env).masked_fill(env["torch.bool"], low),
        {1: lambda env: a(env) ** 1, 2: lambda env: a(env) ** 2, 3: lambda env: a(env) ** 3}[rng.choice([1, 2, 3])],
    ]  # fmt: skip
    return rng.choice(choices)


def tables(seed):
    """A table of extreme and small values for each integer dtype, bool, fp32 and fp64."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        table = torch.randint(max(-9, limits.min), 9, (64,), generator=generator).to(dtype)
        table[:4] = torch.tensor([limits.min, limits.max, limits.max - 1, 0], dtype=dtype)
        made[dtype] = table
    made[torch.bool] = torch.rand(64, generator=generator) < 0.5
    for dtype in (torch.float32, torch.float64):
        made[dtype] = torch.randn(64, generator=generator, dtype=dtype) * 8
        made[dtype][:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    return made


def block_mask_on_gpu(block_mask, mask_mod):
    lists = {name: getattr(block_mask, name).to(DEVICE) for name in LISTS}
    lists.update(q_num_blocks=None, q_indices=None, full_q_num_blocks=None, full_q_indices=None)
    sizes = {"seq_lengths": block_mask.seq_lengths, "BLOCK_SIZE": block_mask.BLOCK_SIZE}
    return BlockMask(mask_mod=mask_mod, **sizes, **lists)


on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def prepared(tensors, score_mod, mask_mod=None, block=None, mask=None, seen=None, **kwargs):
    """The mask of the specification, and the arguments of flex_attention. block: the size of blocks; None: a bare
    mask_mod. ``seen`` as in moved()."""
    shape, seen = (*tensors[0].shape[:3], tensors[1].shape[2]), {} if seen is None else seen
    if mask_mod is not None:
        mask = create_mask(mask_mod, *shape, device="cpu")
        kwargs["mask_mod"] = moved(mask_mod, "cuda", seen)
    if block is not None:
        made = create_block_mask(mask_mod, *shape, device="cpu", BLOCK_SIZE=block)
        kwargs = {"block_mask": block_mask_on_gpu(made, kwargs["mask_mod"])}
    mod = None if score_mod is None else moved(score_mod, "cuda", seen)
    return mask, {"score_mod": mod, "enable_gqa": True, "return_lse": True, **kwargs}


def random_blocks(rng, generator, mod, masks, lengths, block):
    """A block mask with lists in any order, garbage behind the counts and rows without blocks, and its dense mask."""
    made = create_block_mask(mod, *masks, *lengths, device="cpu", BLOCK_SIZE=block)
    block_mask, columns = block_mask_on_gpu(made, mod), -(-lengths[1] // block[1])
    kinds = torch.randint(0, 4, (*masks, -(-lengths[0] // block[0]), columns), generator=generator) % 3
    kinds[:, -1, 2] = 0
    for kind, prefix in ((1, ""), (2, "full_")):
        is_listed = kinds == kind
        order = torch.argsort(is_listed + 0.1 * torch.rand(kinds.shape, generator=generator), -1, descending=True)
        num = is_listed.sum(-1, dtype=torch.int32)
        order[torch.arange(columns) >= num[..., None]] = rng.choice([-(2**31), 2**31 - 1, 3])
        getattr(block_mask, prefix + "kv_num_blocks").copy_(num)
        getattr(block_mask, prefix + "kv_indices").copy_(order)
    blocks = kinds.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, : lengths[0], : lengths[1]]
    mask = (blocks == 2) | ((blocks == 1) & create_mask(mod, *masks, *lengths, device="cpu"))
    return block_mask, mask


def shape_of(rng):
    lengths = (rng.choice([1, 64, 127, 128, 129, rng.randint(1, 700)]) for _ in range(2))
    return rng.randint(1, 2), rng.randint(1, 4), *lengths


def tensors_of(rng, shape, dims=None, dtype=None):
    b, h, len_q, len_kv = shape
    h_kv, (d, d_v) = h // 2 if h % 2 == 0 else h, dims or rng.choice(DIMS)
    dtype = dtype or rng.choice([torch.bfloat16, torch.float16])
    generator = torch.Generator().manual_seed(rng.randint(0, 1000))
    sizes = [(b, h, len_q, d), (b, h_kv, len_kv, d), (b, h_kv, len_kv, d_v)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]
