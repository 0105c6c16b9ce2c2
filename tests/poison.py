"""Results in memory that was full of NaN: every element is written, and every time the same."""

import math

import torch

REPEATS = 1000  # a race at the hand-over of tiles left memory unwritten in every tenth call


def check_repeats(call, results, repeats, in_any_order=()):
    """Calls again and again what writes `results`, {name: tensor}, which hold NaN before each call.

    All are finite after each, and the bits of the first, but for names `in_any_order`. On a GPU nothing waits between.
    """
    first, wrong = {}, {name: torch.zeros((), dtype=torch.int64, device=x.device) for name, x in results.items()}
    for i in range(repeats):
        for x in results.values():
            x.fill_(math.nan)
        call()
        for name, x in results.items():
            if i == 0:
                first[name] = x.clone()
            wrong[name] += (x - x if name in in_any_order or i == 0 else x - first[name]).count_nonzero() > 0
    wrong = {name: f"{int(n)} of {repeats} times" for name, n in wrong.items() if int(n)}
    assert not wrong, f"not written, not finite or other bits: {wrong}"
