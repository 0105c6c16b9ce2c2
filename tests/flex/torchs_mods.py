"""The mods that PyTorch's own tests of FlexAttention use, in our words. Each entry makes a mod and its learned tensors.

The tensors fit calls of B batches, H heads and S queries and keys. ``for_torch`` as in score_catalogue.
"""

import functools

import torch
from torch.nn import functional

B, H, S = 2, 4, 131
INF = float("inf")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def integers(high, *shape, dtype=torch.int32):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high)).to(dtype)


def learned(*shape, dtype=torch.float32, seed=0):
    return random(*shape, dtype=dtype, seed=seed).requires_grad_()


# ---- scores without captures ----------------------------------------------------------------------------------------


def is_before(b, h, i, j):
    return j <= i


def is_behind(b, h, i, j):
    return j >= i


def hidden(mask_mod):
    """The score_mod that hides what a mask_mod hides."""
    return lambda s, b, h, i, j: torch.where(mask_mod(b, h, i, j), s, -INF)


def composed(outer, inner):
    return lambda s, b, h, i, j: outer(inner(s, b, h, i, j), b, h, i, j)


def alibi(s, b, h, i, j):
    return s + torch.exp2(-(h + 1) * 8.0 / 8) * (j - i)


def distance(s, b, h, i, j):
    return s + (i - j)


def natten(s, b, h, i, j):
    """With a true division, as theirs."""
    is_near = ((i / 11 - j / 11).abs() <= 3) | ((i % 11 - j % 11).abs() <= 3)
    return torch.where(is_near, s, -INF)


def sines(s, b, h, i, j):
    return s.cos() * s.sin() + torch.tan(b)


BUILTIN = {
    "identity": lambda s, b, h, i, j: s,
    "times two": lambda s, b, h, i, j: 2 * s,
    "squared": lambda s, b, h, i, j: s * s,
    "causal": hidden(is_before),
    "inverse causal": hidden(is_behind),
    "distance": distance,
    "distance, causal": composed(hidden(is_before), distance),
    "alibi": alibi,
}
PLAIN = {
    **BUILTIN,
    "distance, inverse causal": composed(hidden(is_behind), distance),
    "window with an offset": hidden(lambda b, h, i, j: i + 50 >= j),
    "even keys": hidden(lambda b, h, i, j: j % 2 == 0),
    "natten": natten,
    "quotient of indices": lambda s, b, h, i, j: s - i // (j + 1),
    "sine of cosine": lambda s, b, h, i, j: s.cos().sin() + torch.tan(b),
    "sines": sines,
    "silu": lambda s, b, h, i, j: functional.silu(s),
}


# ---- captured tensors -----------------------------------------------------------------------------------------------


def documents():
    """Of 40 rows, and of a batch of its own."""
    numbers = torch.arange(S) // 40
    return hidden(lambda b, h, i, j: (numbers[i] == numbers[j]) & (i >= j))


def nested(inner):
    """A mod of a packed sequence's own indices."""
    starts = torch.tensor([0, 64, 96, S], dtype=torch.int32)
    numbers = torch.bucketize(torch.arange(S), starts[1:], right=True, out_int32=True)
    return lambda s, b, h, i, j: inner(s, b, h, i - starts[numbers[i]], j - starts[numbers[j]])


def rows_of_a_batch():
    bias = random(B, S)
    return lambda s, b, h, i, j: s + bias[b][i]


def a_constant_and_rows():
    bias = random(4, B, H, S)
    return lambda s, b, h, i, j: s + bias[0][b, h][i]


def a_captured_index():
    bias, which = random(B, H, 4, S), torch.tensor(2)
    return lambda s, b, h, i, j: s + bias[b][h][which, i]


def each_dimension():
    heads, batches, rows, keys = random(H), random(B), random(S), random(S, seed=1)
    return lambda s, b, h, i, j: s + keys[j] + rows[i] + batches[b] + heads[h]


def halves():
    is_second = torch.arange(S) >= S // 2
    return hidden(lambda b, h, i, j: is_second[i] == is_second[j])


def table(dtype, index, *shape):
    bias = random(*shape, dtype=dtype)
    return lambda s, b, h, i, j: s + bias[index(b, h, i, j)]


def columns_of_a_view():
    """Positions of one axis, of a view that a product made."""
    made = torch.einsum("bhqd,kd->bhqk", random(B, H, S, 8), random(17, 8)) / 8
    view = made.reshape(B * H, S, 17, 1).view(B, H, S, 17, 1).squeeze(-1)
    return lambda s, b, h, i, j: s + view[b, h, i, j // 8]


def bidirectional():
    lengths = integers(S, B)
    return hidden(lambda b, h, i, j: ((i <= lengths[b]) & (j <= lengths[b])) | (i >= j))


def below_a_length():
    """A mask that depends on the score."""
    lengths = torch.arange(B, dtype=torch.int32) + 1
    causal = hidden(is_before)
    return lambda s, b, h, i, j: torch.where(s <= lengths[b], causal(s, b, h, i, j), -INF)


def an_integer():
    number = torch.ones((), dtype=torch.int32)
    return lambda s, b, h, i, j: s + number


def sum_of_a_row():
    scale = random(B, 8)
    return lambda s, b, h, i, j: s + scale[b].sum(dim=-1)


def euclid(columns=3):
    """torch refuses long rows here."""
    places, lengths = random(S, columns), torch.logspace(0.001, 0.1, H)

    def mod(s, b, h, i, j):
        away = (places[i] - places[j]).pow(2).sum(-1).sqrt()
        return torch.exp(-away / lengths[h]) * s

    return mod


def logarithm_of_half():
    mass = torch.full((1,), 1.5, dtype=torch.float16)
    return lambda s, b, h, i, j: s + torch.log(mass[0])


def a_bool_is_added():
    allowed = torch.ones(B, 1, S, S, dtype=torch.bool).tril()
    return lambda s, b, h, i, j: s + allowed[b, h.new_zeros(h.shape), i, j]


def reshaped_bias():
    bias = (2 * random(B, S, S, H, dtype=torch.bfloat16)).view(B, H, S, S).contiguous()
    return lambda s, b, h, i, j: s + bias[b, h, i, j]


CAPTURES = {
    "documents": documents,
    "nested": lambda: nested(hidden(is_before)),
    "rows of a batch": rows_of_a_batch,
    "a constant and rows": a_constant_and_rows,
    "a captured index": a_captured_index,
    "each dimension": each_dimension,
    "halves": halves,
    "pairs": lambda: table(torch.float16, lambda b, h, i, j: (i, j), S, S),
    "pairs of a batch": lambda: table(torch.bfloat16, lambda b, h, i, j: (b, i, j), B, S, S),
    "pairs of a head": lambda: table(torch.float32, lambda b, h, i, j: (b, h, i, j), B, H, S, S),
    "distances": lambda: table(torch.float16, lambda b, h, i, j: (i - j) + S, 2 * S),
    "columns of a view": columns_of_a_view,
    "bidirectional": bidirectional,
    "below a length": below_a_length,
    "an integer": an_integer,
    "sum of a row": sum_of_a_row,
    "euclid": euclid,
    "euclid, 30 columns": functools.partial(euclid, 30),
    "logarithm of half": logarithm_of_half,
    "a bool is added": a_bool_is_added,
    "reshaped bias": reshaped_bias,
    "products of rows": lambda: table(torch.bfloat16, lambda b, h, i, j: i, S),
}


# ---- learned tensors ------------------------------------------------------------------------------------------------


def learned_table(index, *shape, dtype=torch.float32):
    bias = learned(*shape, dtype=dtype)

    def mod(s, b, h, i, j):
        return s + bias[index(b, h, i, j)]

    return mod, [bias]


def a_factor_of_heads():
    factor = learned(H)
    return lambda s, b, h, i, j: s * factor[h], [factor]


def a_factor_of_rows():
    factor = learned(S)
    return lambda s, b, h, i, j: s * factor[i], [factor]


def a_learned_captured_index():
    bias, which = learned(B, H, 4, S), torch.tensor(0)
    return lambda s, b, h, i, j: s + bias[b, h, which, i], [bias]


def indirect():
    bias, places = learned(S), integers(S, S, dtype=torch.int64)
    return lambda s, b, h, i, j: s + bias[places[i]], [bias]


def symmetric():
    bias = learned(S)
    return lambda s, b, h, i, j: s + bias[i] + bias[j], [bias]


def two_tables():
    rows, keys = learned(S), learned(S, seed=1)
    return lambda s, b, h, i, j: s + rows[i] + keys[j], [rows, keys]


def gate():
    of_heads = learned(H, dtype=torch.bfloat16)
    return lambda s, b, h, i, j: s * torch.sigmoid(of_heads[h].to(torch.float32)), [of_heads]


def one_by_one():
    bias = learned(S, S)

    def mod(s, b, h, i, j):
        return s + bias[i][j]

    mod.for_torch = lambda s, b, h, i, j: s + bias[i, j]
    return mod, [bias]


LEARNED = {
    "of heads": lambda: learned_table(lambda b, h, i, j: h, H),
    "distances": lambda: learned_table(lambda b, h, i, j: torch.abs(i - j), 2 * S),
    "sums of indices": lambda: learned_table(lambda b, h, i, j: i + j, 2 * S),
    "pairs": lambda: learned_table(lambda b, h, i, j: (i, j), S, S),
    "pairs in bf16": lambda: learned_table(lambda b, h, i, j: (i, j), S, S, dtype=torch.bfloat16),
    "pairs of a head": lambda: learned_table(lambda b, h, i, j: (h, i, j), H, S, S),
    "pairs of a batch": lambda: learned_table(lambda b, h, i, j: (b, h, i, j), B, H, S, S),
    "flipped": lambda: learned_table(lambda b, h, i, j: (j, i), S, S),
    "flipped, of a head": lambda: learned_table(lambda b, h, i, j: (h, j, i), H, S, S),
    "one by one": one_by_one,
    "window": lambda: learned_table(lambda b, h, i, j: torch.clamp(i - j + 8, 0, 16), 17),
    "of keys": lambda: learned_table(lambda b, h, i, j: j, S),
    "a factor of heads": a_factor_of_heads,
    "a factor of rows": a_factor_of_rows,
    "a captured index": a_learned_captured_index,
    "indirect": indirect,
    "symmetric": symmetric,
    "two tables": two_tables,
    "gate": gate,
}


# ---- tables that other operations make of learned tensors, which are the arguments ----------------------------------


PLACES = integers(25, S, S, dtype=torch.int64)


def of_a_network(places, mu, gamma):
    """With gates, and a bool that becomes a number."""
    first, index = torch.tensor(2, device=mu.device), PLACES.to(mu.device)
    (rows, keys), biases, gates = mu.unbind(2), torch.tanh(places), torch.sigmoid(gamma)

    def mod(s, b, h, i, j):
        is_biased = (i >= first) & (j >= first)
        return s + is_biased.to(s.dtype) * gates[h] * (rows[b, h, i] + keys[b, h, j]) * biases[index[i, j], h]

    return mod


def materialized(y):
    made = y[:, :, None] + y[:, None, :]
    return lambda s, b, h, i, j: s + made[b, i, j]


def slices(bias):
    """One table for each position, as PyTorch wants them of a tensor that is indexed several times."""
    tables = [bias[:, n] for n in range(3)]
    return lambda s, b, h, i, j: s + sum(x[h, (i + j) % 7] for x in tables)


DERIVED = {
    "of a network": (of_a_network, lambda: [learned(25, H), learned(B, H, 2, S), learned(H)]),
    "materialized": (materialized, lambda: [learned(B, S)]),
    "slices": (slices, lambda: [learned(H, 3, 7)]),
}


# ---- masks ----------------------------------------------------------------------------------------------------------


def some_heads():
    is_on = torch.arange(H) % H != 0
    return lambda b, h, i, j: is_on[h] & (i >= j)


def documents_of_a_batch():
    numbers = torch.stack([torch.arange(S) // (40 + 30 * n) for n in range(B)])
    return lambda b, h, i, j: numbers[b, i] == numbers[b, j]


def clamped_documents():
    numbers = torch.bucketize(torch.arange(S), torch.tensor([9, 60, 61, 100]), right=True, out_int32=True)
    end = numbers.shape[0] - 1
    return lambda b, h, i, j: numbers[i.clamp(0, end)] == numbers[j.clamp(0, end)]


def padding():
    lengths = integers(S, B)

    def mod(b, h, i, j, lengths):
        return (i < lengths[b]) & (j < lengths[b])

    return functools.partial(mod, lengths=lengths)


def an_offset():
    offset = torch.tensor(S // 2 - 3, dtype=torch.int32)
    return lambda b, h, i, j: j >= i + offset


def a_bool_table():
    allowed = torch.ones(B, 1, S, S, dtype=torch.bool).tril()
    return lambda b, h, i, j: allowed[b, h.new_zeros(h.shape), i, j]


def rows_at_random():
    allowed = integers(2, B, S, dtype=torch.bool)
    return lambda b, h, i, j: ~allowed[b, i]


def a_float_width():
    def mod(b, h, i, j, width):
        return (i - j).abs() < width

    return functools.partial(mod, width=torch.tensor(20.5))


def a_limit_of_frames():
    length, frame = S, 32

    def mod(b, h, i, j):
        limit = (length // frame + 67 // frame) * frame
        return i < limit - 60

    return mod


MASKS = {
    "everything": lambda: lambda b, h, i, j: (i >= j) | (i < j),
    "causal": lambda: is_before,
    "inverse causal": lambda: is_behind,
    "causal window": lambda: lambda b, h, i, j: (i >= j) & (i - j <= 32),
    "far": lambda: lambda b, h, i, j: (i >= j) & (i - j > 32),
    "both ends": lambda: lambda b, h, i, j: (j < 16) | (j >= 100),
    "first rows": lambda: lambda b, h, i, j: i < S // 2,
    "even batches": lambda: lambda b, h, i, j: (i >= j) & (b % 2 == 0),
    "some heads": some_heads,
    "documents of a batch": documents_of_a_batch,
    "clamped documents": clamped_documents,
    "padding": padding,
    "an offset": an_offset,
    "a bool table": a_bool_table,
    "rows at random": rows_at_random,
    "a float width": a_float_width,
    "a limit of frames": a_limit_of_frames,
}
