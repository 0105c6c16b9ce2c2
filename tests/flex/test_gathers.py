"""What mods read from captured tensors on the CPU, and where their gradients are added: elements one behind the other,
lines that are turned, and any others (csrc/flex/operate.h). Indices beyond a tensor are clamped, and negative ones
count from its end."""

import pytest
import torch

from flash_attn.flex_attention import flex_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.int8, torch.bool]
LENGTHS = [(1, 1), (3, 17), (64, 64), (130, 33), (70, 300), (200, 129)]


def table_of(dtype, *sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randint(-3, 4, sizes, generator=generator).to(dtype)


def reads(dtype, len_q, len_kv):
    """(name, what a mod reads at b, h, i, j, and the same with indices that fit)."""
    pairs, heads = table_of(dtype, len_q, len_kv), table_of(dtype, 2, len_q, len_kv)
    of_keys, of_rows = table_of(dtype, len_kv), table_of(dtype, len_q, 1)
    line, wide = table_of(dtype, len_q + 2 * len_kv), table_of(dtype, len_q, 3, len_kv)
    small, turned = table_of(dtype, 5, 20), table_of(dtype, len_kv, len_q)
    where = torch.randint(0, len_kv, (len_kv,), generator=torch.Generator().manual_seed(1))
    halves = table_of(dtype, len_q, 2 * len_kv)[:, ::2]
    same = {
        "pairs": lambda b, h, i, j: pairs[i, j],
        "heads": lambda b, h, i, j: heads[h, i, j],
        "keys": lambda b, h, i, j: of_keys[j],
        "rows": lambda b, h, i, j: of_rows[i, 0],
        "rising": lambda b, h, i, j: line[i + j],
        "differences": lambda b, h, i, j: line[i - j + len_kv],
        "other differences": lambda b, h, i, j: line[j - i + len_q],
        "from the end": lambda b, h, i, j: line[j - i],
        "turned": lambda b, h, i, j: turned[j, i],
        "apart": lambda b, h, i, j: wide[i, 1, j],
        "halves": lambda b, h, i, j: halves[i, j],
        "two steps": lambda b, h, i, j: line[2 * j],
        "expanded": lambda b, h, i, j: of_keys.expand(len_q, -1)[i, j],
        "any": lambda b, h, i, j: pairs[i, where[j]],
    }
    yield from ((name, read, read) for name, read in same.items())
    for down, left in ((0, 0), (3, 7), (-2, -9)):
        yield (
            f"clamped {down} {left}",
            lambda b, h, i, j: small[i - down, j - left],  # noqa: B023
            lambda b, h, i, j: small[place(i - down, 5), place(j - left, 20)],  # noqa: B023
        )


def place(index, size):
    """An index as gathers of a mod clamp it."""
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_to_read(dtype, lengths):
    generator = torch.Generator().manual_seed(0)
    len_q, len_kv = lengths
    query, key, value = (torch.randn(2, 2, n, 8, generator=generator) for n in (len_q, len_kv, len_kv))
    scores = query.double() @ key.double().mT * 8**-0.5
    indices = (torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None], torch.arange(len_q)[:, None])
    indices += (torch.arange(len_kv),)
    for name, read, want in reads(dtype, len_q, len_kv):
        dense = want(*indices)
        if dtype == torch.bool:
            out = flex_attention(query, key, value, mask_mod=lambda b, h, i, j: read(b, h, i, j) | (j == 0))  # noqa: B023
            expected = scores.masked_fill(~(dense | (indices[3] == 0)), -float("inf"))
        else:
            out = flex_attention(query, key, value, lambda s, b, h, i, j: s + read(b, h, i, j))  # noqa: B023
            expected = scores + dense
        assert (out - expected.softmax(-1) @ value.double()).abs().max() < 1e-5, name


def test_an_index_may_follow_the_score():
    table = table_of(torch.float32, 8, 48).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 48, 8, generator=generator) for _ in range(3))
    ways = {
        "keys": lambda s, i, j: table[(s * 3 + 4).clamp(0, 7).long(), j],
        "rows": lambda s, i, j: table[(s * 3 + 4).clamp(0, 7).long(), i],
        "a choice": lambda s, i, j: table[torch.where(s > 0, 1, 0), j],
        "turned": lambda s, i, j: table.T[j, (s * 3 + 4).clamp(0, 7).long()],
    }
    scores = query.double() @ key.double().mT * 8**-0.5
    i, j = torch.arange(48)[:, None], torch.arange(48)
    for name, read in ways.items():
        out = flex_attention(query, key, value, lambda s, b, h, q, kv: s + read(s, q, kv))  # noqa: B023
        want = (scores + read(scores, i, j)).softmax(-1) @ value.double()
        assert (out - want).abs().max() < 1e-5, name
        has, wants = (torch.autograd.grad(x, table, torch.ones_like(x) * value)[0] for x in (out, want.float()))
        assert (has - wants).abs().max() < 1e-4, name


def adds(dtype, len_q, len_kv):
    """(name, a table, what a mod reads of it, and the same with indices that fit). There are 3 batches and 2 heads."""
    sizes = {
        "pairs": ((len_q, len_kv), lambda t, b, h, i, j: t[i, j]),
        "heads": ((2, len_q, len_kv), lambda t, b, h, i, j: t[h, i, j]),
        "batches": ((3, 1, len_q, len_kv), lambda t, b, h, i, j: t[b, 0, i, j]),
        "all": ((3, 2, len_q + 3, len_kv + 20), lambda t, b, h, i, j: t[b, h, i, j]),
        "turned": ((2, len_kv, len_q), lambda t, b, h, i, j: t[h, j, i]),
        "apart": ((len_q, len_kv, 3), lambda t, b, h, i, j: t[i, j, 1]),
        "keys": ((2, len_kv), lambda t, b, h, i, j: t[h, j]),
        "rows": ((3, len_q), lambda t, b, h, i, j: t[b, i]),
        "one": ((2,), lambda t, b, h, i, j: t[h]),
        "differences": ((2, len_q + len_kv), lambda t, b, h, i, j: t[h, i - j + len_kv]),
        "other differences": ((len_q + len_kv,), lambda t, b, h, i, j: t[j - i + len_q]),
        "from the end": ((len_q + len_kv,), lambda t, b, h, i, j: t[j - i]),
        "backwards": ((len_q, len_kv), lambda t, b, h, i, j: t[len_q - 1 - i, len_kv - 1 - j]),
        "twice": ((2, len_q, len_kv), lambda t, b, h, i, j: t[h, i, j] + 2 * t[1 - h, i, j]),
        "scaled": ((2, len_q, len_kv), lambda t, b, h, i, j: 3 * t[h, i, j]),
        "unequal": ((2, 2), lambda t, b, h, i, j: t[h, torch.where(i != j, 1, 0)]),
        "buckets": ((2, 8), lambda t, b, h, i, j: t[h, (j - i).abs().clamp(max=7)]),
        "every second": ((len_q, 2 * len_kv), lambda t, b, h, i, j: t[i, 2 * j]),
    }
    for name, (shape, read) in sizes.items():
        yield name, table_of(dtype, *shape), read, read
    for down, left in ((0, 0), (3, 7), (-2, -9)):
        yield (
            f"clamped {down} {left}",
            table_of(dtype, 2, 5, 20),
            lambda t, b, h, i, j: t[h, i - down, j - left],  # noqa: B023
            lambda t, b, h, i, j: t[h, place(i - down, 5), place(j - left, 20)],  # noqa: B023
        )


@pytest.mark.parametrize("lengths", [(1, 1), (3, 17), (64, 64), (49, 49), (130, 33), (70, 300), (300, 129)], ids=str)
def test_every_way_to_add(isa, lengths):
    """Gradients of tables, with the same bits for any number of threads. Some keys are masked."""
    generator, (len_q, len_kv) = torch.Generator().manual_seed(0), lengths
    query, key, value = (torch.randn(3, 2, n, 16, generator=generator) for n in (len_q, len_kv, len_kv))
    weights = torch.randn(3, 2, len_q, 16, generator=generator)
    scores = query.double() @ key.double().mT * 16**-0.5
    indices = [torch.arange(3)[:, None, None, None], torch.arange(2)[:, None, None], torch.arange(len_q)[:, None]]
    indices.append(torch.arange(len_kv))
    seen = (indices[3] != 2) | (indices[2] % 5 == 0)
    dtypes = [torch.float32] if isa == "reference" else [torch.float32, torch.bfloat16, torch.float64]
    for dtype in dtypes:
        for name, table, read, fits in adds(dtype, len_q, len_kv):
            own = table.requires_grad_()
            dense = (scores + fits(own.double(), *indices)).masked_fill(~seen, -float("inf"))
            (wanted,) = torch.autograd.grad((dense.softmax(-1) @ value.double() * weights.double()).sum(), own)
            found = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                out = flex_attention(
                    query, key, value, lambda s, b, h, i, j: s + read(own, b, h, i, j),  # noqa: B023
                    mask_mod=lambda b, h, i, j: (j != 2) | (i % 5 == 0),
                )  # fmt: skip
                found += torch.autograd.grad((out * weights).sum(), own)
            torch.set_num_threads(1)
            assert torch.equal(*found), name
            error, most = (found[0].double() - wanted.double()).abs(), 1e-2 if dtype == torch.bfloat16 else 2e-5
            assert (error <= most * (1 + wanted.double().abs())).all(), (name, dtype, error.max())


def test_lines_of_another_head_do_not_lengthen_those_inside(isa):
    """The strides overlap, and the tensor has fewer keys than there are. So the lines of one head lie behind those of
    the other, but its last key serves all further keys."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(64, 64, generator=generator).unfold(1, 20, 16)[:, :2]  # [64, 2, 20], strides (64, 16, 1)
    query, key, value = (torch.randn(1, 2, 64, 16, generator=generator) for _ in range(3))

    def results(bias):
        return flex_attention(
            query,
            key,
            value,
            lambda s, b, h, i, j: s + bias[i, 1 - h, j],
            mask_mod=lambda b, h, i, j: (j < 16) == (h == 0),
        )

    assert (results(bias) - results(bias.contiguous())).abs().max() < 1e-5
