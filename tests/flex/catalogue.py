"""Mask mods of every kind that clients write. Each entry makes a mod from random parameters."""

import functools

import torch


def documents(rng, length):
    """Numbers of documents, ascending, and where each begins."""
    cuts = sorted(rng.sample(range(1, length), min(5, length - 1)))
    starts = torch.tensor([0, *cuts], dtype=torch.int32)
    numbers = torch.zeros(length, dtype=torch.int32)
    numbers[starts[1:].long()] = 1
    return numbers.cumsum(0).to(torch.int32), starts


def causal(rng, shape):
    return lambda b, h, q, k: q >= k


def sliding_window(rng, shape):
    left, right = rng.randint(0, shape[3]), rng.randint(0, 9)
    return lambda b, h, q, k: (q - k <= left) & (k - q <= right)


def prefix(rng, shape):
    length = rng.randint(0, shape[3])
    return lambda b, h, q, k: (k < length) | (q >= k)


def dilated_window(rng, shape):
    reach, step = rng.randint(1, shape[3]), rng.randint(1, 5)
    return lambda b, h, q, k: ((q - k).abs() <= reach) & ((q - k) % step == 0)


def global_window(rng, shape):
    is_global = torch.tensor([rng.random() < 0.05 for _ in range(max(shape[2:]))])
    reach = rng.randint(0, 20)
    return lambda b, h, q, k: ((q - k).abs() <= reach) | is_global[q] | is_global[k]


def document(rng, shape):
    numbers, starts = documents(rng, max(shape[2:]) + 2)
    inner = sliding_window(rng, shape)

    def mod(b, h, q, k):
        own, other = numbers[q], numbers[k]
        return (own == other) & inner(b, h, q - starts[own], k - starts[other])

    return mod


def document_ends(rng, shape):
    numbers, starts = documents(rng, max(shape[2:]) + 2)
    ends = torch.cat([starts[1:], torch.tensor([len(numbers)], dtype=torch.int32)])[numbers.long()]
    return lambda b, h, q, k: (q >= k) & (ends[k] > q)


def batchify(rng, shape):
    length = rng.randint(1, 60)
    inner = causal(rng, shape)
    return lambda b, h, q, k: (q // length == k // length) & inner(b, h, q % length, k % length)


def block_diffusion(rng, shape):
    half, block = rng.randint(1, max(shape[2:])), rng.randint(1, 40)

    def mod(b, h, q, k):
        noisy_q, noisy_k = q < half, k < half
        block_q, block_k = (q % half) // block, (k % half) // block
        within = (block_q == block_k) & (noisy_q == noisy_k)
        to_clean = (block_q > block_k) & noisy_q & ~noisy_k
        clean = (block_q >= block_k) & ~noisy_q & ~noisy_k
        return within | to_clean | clean

    return mod


def shared_prefix(rng, shape):
    length = max(shape[2:]) + 2
    numbers, starts = documents(rng, length)
    bounds = torch.cat([starts, torch.tensor([length], dtype=torch.int32)])
    common = rng.randint(0, 40)

    def mod(b, h, q, k):
        own = numbers[q]
        inside = (k >= bounds[own]) & (k < bounds[own + 1]) & (q >= k)
        return inside | ((k < common) & (q >= common))

    return mod


def spans(rng, shape):
    table = torch.randint(0, shape[3], (shape[2], 2), generator=torch.Generator().manual_seed(rng.randint(0, 99)))

    def mod(b, h, q, k):
        span = table[q]
        return (k >= span[0]) & (k < span[1] + 10)

    return mod


def tree(rng, shape):
    size = rng.randint(2, 30)
    generator = torch.Generator().manual_seed(rng.randint(0, 99))
    ancestors = torch.rand(size, size, generator=generator) < 0.5
    past = rng.randint(0, shape[3])

    def mod(b, h, q, k):
        node = (k - past).clamp(min=0, max=size - 1)
        in_tree = (k >= past) & (k - past < size) & (q < size)
        return (k < past) | (in_tree & ancestors[q.clamp(max=size - 1), node])

    return mod


def shifted_blocks(rng, shape):
    """Negative operands for // and %."""
    shift, block = rng.randint(1, shape[3]), rng.randint(1, 30)
    return lambda b, h, q, k: ((q - shift) // block >= (k - shift) // block) & ((k - shift) % block < block // 2 + 1)


def neighbourhood(rng, shape):
    width, reach = rng.randint(2, 20), rng.randint(0, 6)
    height = -(-shape[3] // width)

    def mod(b, h, q, k):
        row = (q // width).clamp(reach, max(reach, height - 1 - reach))
        column = (q % width).clamp(reach, max(reach, width - 1 - reach))
        return ((row - k // width).abs() <= reach) & ((column - k % width).abs() <= reach)

    return mod


def morton(rng, shape):
    reach = rng.randint(0, 5)

    def even_bits(x):
        x = x & 0x5555
        x = (x | (x >> 1)) & 0x3333
        x = (x | (x >> 2)) & 0x0F0F
        return (x | (x >> 4)) & 0x00FF

    def mod(b, h, q, k):
        rows = (even_bits(q >> 1) - even_bits(k >> 1)).abs() <= reach
        return rows & ((even_bits(q) - even_bits(k)).abs() <= reach)

    return mod


def sliding_tiles(rng, shape):
    tile, reach, text = rng.choice([16, 32, 64]), rng.randint(0, 2), rng.randint(0, shape[3])

    def mod(b, h, q, k):
        centre = (q // tile).clamp(reach, max(reach, shape[3] // tile - reach))
        return ((centre - k // tile).abs() <= reach) | (k >= text)

    return mod


def temporal(rng, shape):
    frame, reach, first = rng.randint(1, 20), rng.randint(1, 5), rng.randint(0, 10)
    return lambda b, h, q, k: ((q % frame - k % frame).abs() < reach) | (k < first) | (q < first)


def block_map(rng, shape):
    size = rng.choice([16, 64])
    blocks = [-(-n // size) for n in shape[2:]]
    generator = torch.Generator().manual_seed(rng.randint(0, 99))
    listed = torch.rand(*shape[:2], *blocks, generator=generator) < 0.4
    lengths = torch.randint(0, size + 1, (blocks[1],), generator=generator, dtype=torch.int32)
    return lambda b, h, q, k: listed[b, h, q // size, k // size] & (k % size < lengths[k // size])


def top_blocks(rng, shape):
    size, most = 64, 3
    blocks = [-(-n // size) for n in shape[2:]]
    generator = torch.Generator().manual_seed(rng.randint(0, 99))
    listed = torch.randint(0, blocks[1], (*shape[:2], blocks[0], most), generator=generator, dtype=torch.int32)
    return lambda b, h, q, k: (listed[b, h, q // size] == (k // size).unsqueeze(-1)).any(-1)


def frames(rng, shape):
    times = torch.arange(max(shape[2:])).float().div(rng.randint(1, 50)).floor()
    return lambda b, h, q, k: (times[q] >= times[k]) | (times[q] == -1.0)


def padding(rng, shape):
    lengths = torch.tensor([rng.randint(0, shape[3]) for _ in range(shape[0])])
    offset = torch.tensor(rng.randint(-20, 20))
    return lambda b, h, q, k: (k < lengths[b]) & (q + offset >= k)


def dense_table(rng, shape):
    generator = torch.Generator().manual_seed(rng.randint(0, 99))
    table = torch.rand(1, 1, shape[2], shape[3], generator=generator) < 0.5
    return lambda b, h, q, k: table.expand(shape)[b][0][q][k]


def by_head(rng, shape):
    return functools.partial(lambda b, h, q, k, reach: (q - k).abs() <= reach * (h + 1) + b, reach=rng.randint(0, 30))


class Windows:
    def __init__(self, reach):
        self.reach = reach

    def __call__(self, b, h, q, k):
        return (q - k).abs() <= self.reach


def an_object(rng, shape):
    return Windows(rng.randint(0, 50))


def everything(rng, shape):
    return lambda b, h, q, k: q == q


def nothing(rng, shape):
    return lambda b, h, q, k: q < 0


CATALOGUE = [causal, sliding_window, prefix, dilated_window, global_window, document, document_ends, batchify]
CATALOGUE += [block_diffusion, shared_prefix, spans, tree, shifted_blocks, neighbourhood, morton, sliding_tiles]
CATALOGUE += [temporal, block_map, top_blocks, frames, padding, dense_table, by_head, an_object, everything, nothing]
