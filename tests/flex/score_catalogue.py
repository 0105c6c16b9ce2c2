"""Score mods of every kind that clients write. Each entry makes a mod, and lists the tensors that require gradients.

torch has no gradient of a captured tensor's row. ``for_torch`` of a mod is the same mod without rows.
"""

import torch
from torch.nn import functional


def _leaf(rng, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rng.randint(0, 999))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def nothing(rng, shape):
    return lambda score, b, h, q, k: score, []


def alibi(rng, shape):
    heads = shape[1]
    return lambda score, b, h, q, k: score + torch.exp2(-((h + 1) * 8.0 / heads)) * (k - q), []


def learned_alibi(rng, shape):
    slopes = _leaf(rng, shape[1])
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs(), [slopes]


def softcap(rng, shape):
    cap = rng.choice([1, 20, 0.5])
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap), []


def learned_softcap(rng, shape):
    cap = torch.tensor(3.0, requires_grad=True)
    return lambda score, b, h, q, k: torch.tanh(score / cap) * cap, [cap]


def _activation(function):
    def make(rng, shape):
        return lambda score, b, h, q, k: function(score), []

    make.__name__ = getattr(function, "__name__", "activation")
    return make


def gelu_tanh(x):
    return functional.gelu(x, approximate="tanh")


def log_of_softplus(x):
    return torch.log(functional.softplus(x) + 1e-3)


def wide_softplus(x):
    return functional.softplus(x, beta=2.0, threshold=3.0)


def trigonometry_of_indices(rng, shape):
    return lambda score, b, h, q, k: score * torch.cos(q) + torch.sin(k) * torch.tan(b) - score.sin(), []


def squared(rng, shape):
    return lambda score, b, h, q, k: score * score, []


def a_cube(rng, shape):
    return lambda score, b, h, q, k: score**3 - score**2.0 / 2, []


def scale_of_heads(rng, shape):
    scale = _leaf(rng, shape[1])
    return lambda score, b, h, q, k: score * scale[h], [scale]


def scale_of_batches_in_half(rng, shape):
    scale = _leaf(rng, shape[0], shape[1], dtype=torch.bfloat16)

    def mod(score, b, h, q, k):
        return score * scale[b, h] + scale[b][0]

    mod.for_torch = lambda score, b, h, q, k: score * scale[b, h] + scale[b, h * 0]
    return mod, [scale]


def bias_of_keys(rng, shape):
    bias = _leaf(rng, shape[3])
    return lambda score, b, h, q, k: score + bias[k], [bias]


def bias_of_queries_twice(rng, shape):
    bias = _leaf(rng, max(shape[2:]))
    return lambda score, b, h, q, k: score * bias[q] + bias[k] * bias[q], [bias]


def bias_of_heads(rng, shape):
    bias = _leaf(rng, *shape[1:])
    return lambda score, b, h, q, k: score + bias[h, q, k], [bias]


def chained(rng, shape):
    bias = _leaf(rng, 1, *shape[1:], dtype=torch.float64)

    def mod(score, b, h, q, k):
        return score + bias.expand(shape)[b][0][q][k]

    mod.for_torch = lambda score, b, h, q, k: score + bias.expand(shape)[b, h * 0, q, k]
    return mod, [bias]


def t5_buckets(rng, shape):
    reach = rng.randint(1, 30)
    table = _leaf(rng, shape[1], 2 * reach + 1)
    return lambda score, b, h, q, k: score + table[h, torch.clamp(q - k, -reach, reach) + reach], [table]


def graphormer(rng, shape):
    distances = torch.randint(0, 9, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(rng.randint(0, 9)))
    table = _leaf(rng, shape[1], 9)
    return lambda score, b, h, q, k: score + table[h, distances[b, q, k]], [table]


def graphormer_edges(rng, shape):
    generator = torch.Generator().manual_seed(rng.randint(0, 9))
    edges = torch.randint(0, 6, (*shape[2:], 3), generator=generator)
    table = _leaf(rng, shape[1], 6, 3)

    def mod(score, b, h, q, k):
        total, count = 0.0, 0
        for step in range(3):
            edge = edges[q, k, step]
            total = total + torch.where(edge > 0, table[h, edge, step], 0.0)
            count = count + (edge > 0)
        return score + total / count.clamp(min=1)

    return mod, [table]


def sandwich(rng, shape):
    a, b_table = _leaf(rng, 64), _leaf(rng, shape[1])
    return lambda score, b, h, q, k: score + a[(q - k) % 64] * b_table[h], [a, b_table]


def rope_products(rng, shape):
    left, right = _leaf(rng, shape[2], 4), _leaf(rng, shape[3], 4)

    def mod(score, b, h, q, k):
        return score + 0.5 * torch.dot(left[q], right[k])

    mod.for_torch = lambda score, b, h, q, k: (
        score + 0.5 * sum(left[q, h * 0 + i] * right[k, h * 0 + i] for i in range(4))
    )
    return mod, [left, right]


def a_captured_number(rng, shape):
    number = torch.tensor(0.75, requires_grad=True)
    return lambda score, b, h, q, k: score * number.exp(), [number]


def masked(rng, shape):
    allowed = torch.rand(shape[0], max(shape[2:]), generator=torch.Generator().manual_seed(rng.randint(0, 9))) < 0.7
    return lambda score, b, h, q, k: torch.where(allowed[b, q] & allowed[b, k], score, -float("inf")), []


def no_score(rng, shape):
    bias = _leaf(rng, shape[3])
    return lambda score, b, h, q, k: bias[k] * 2, [bias]


def limits(rng, shape):
    low = _leaf(rng, shape[1])
    return lambda score, b, h, q, k: torch.maximum(score.clamp(-1, 1.5), low[h]) + score.clamp(min=0.1).abs(), [low]


def distances_in_logs(rng, shape):
    scale = _leaf(rng, shape[1])
    return lambda score, b, h, q, k: score - scale[h] * torch.log1p((q - k).abs().float()) + score.sigmoid(), [scale]


def extremes_of_rows(rng, shape):
    """Each element of a row has an equal one, and all share the gradient."""
    table = _leaf(rng, shape[1], 4)
    with torch.no_grad():
        table[:, 2:] = table[:, :2]

    def mod(score, b, h, q, k):
        return score * table[h].amax() + (table[h] * (q - k)).amin() / 8

    def row(h):
        return torch.stack([table[h, h * 0 + i] for i in range(4)])

    mod.for_torch = lambda score, b, h, q, k: score * row(h).amax(0) + (row(h) * (q - k)).amin(0) / 8
    return mod, [table]


SCORES = [nothing, alibi, learned_alibi, softcap, learned_softcap, trigonometry_of_indices, squared, a_cube]
SCORES += [scale_of_heads, scale_of_batches_in_half, bias_of_keys, bias_of_queries_twice, bias_of_heads, chained]
SCORES += [t5_buckets, graphormer, graphormer_edges, sandwich, rope_products, a_captured_number, masked, no_score]
SCORES += [limits, distances_in_logs, _activation(gelu_tanh), _activation(log_of_softplus), _activation(wide_softplus)]
SCORES += map(_activation, (functional.gelu, functional.silu, functional.relu, torch.sigmoid, functional.softplus))
SCORES += [extremes_of_rows]
