"""Calls of two entries for ``torch.vmap``, where the numbers of one entry are wrong."""

from functools import partial

import harness
import torch

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

INT = torch.int32
randn = partial(harness.randn, dtype=torch.float64)


def packed_step(q, k, sums_q, sums_k):
    return flash_attn_varlen_func(q, k, k, sums_q, sums_k, 3, 3)


def with_sums(name, wrong, at):
    """Two sequences of queries and keys. Entry at has the wrong sums of lengths of q or k."""
    numbers = [[[0, 3, 5]] * 2, [[0, 2, 4]] * 2]
    numbers["qk".index(name)][at] = wrong
    return packed_step, [randn(2, 5, 2, 8), randn(2, 5, 1, 8), *(torch.tensor(x, dtype=INT) for x in numbers)]


def paged_step(q, pages, table):
    sums = torch.tensor([0, 1], dtype=INT, device=q.device)
    return flash_attn_varlen_func(q, pages, pages, sums, 3 * sums, 1, 3, block_table=table)


def with_pages(wrong, at):
    """A sequence of 3 keys in one of 3 pages."""
    table = torch.zeros(2, 1, 1, dtype=INT)
    table[at] = wrong
    return paged_step, [randn(2, 1, 2, 8), randn(2, 3, 4, 1, 8), table]


def cached_step(name, wrong, at, appends):
    """A step of decoding over 2 of 4 keys. name: the argument that holds the numbers."""
    numbers = torch.tensor([[1, 0]] * 2, dtype=INT)
    numbers[at, 1] = wrong
    numbers = numbers[..., None] if name == "block_table" else numbers

    def step(q, caches, new, numbers):
        new = (new, -new) if appends else (None, None)
        return flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=2, **{name: numbers})

    return step, [randn(2, 2, 1, 2, 8), randn(2, 2, 3, 4, 1, 8), randn(2, 2, 1, 1, 8), numbers]


SUMS = [-1, 2, 3], [1, 2, 3], [0, 3, 9], [0, 4, 5], [0, 3, 2]
ARGUMENTS = "block_table", "cache_batch_idx"

# Functions of at, the entry whose numbers are wrong. They return a step and its tensors. The second holds the keys.
WRONG = {
    **{f"{name} {sums}": partial(with_sums, name, sums) for name in "qk" for sums in SUMS},
    **{f"page {number}": partial(with_pages, number) for number in (-1, 3)},
    **{
        f"{name} {number} read": partial(cached_step, name, number, appends=False)
        for name in ARGUMENTS
        for number in (-1, 3)
    },
    **{
        f"{name} {number} append": partial(cached_step, name, number, appends=True)
        for name in ARGUMENTS
        for number in (-1, 3)
    },
}
