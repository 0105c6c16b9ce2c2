"""Results in memory that was full of NaN. Every element must be written, and every time with the same bits."""

import math

import torch

REPEATS = 1000  # a race at the hand-over of tiles left memory unwritten in every tenth call


def check_repeats(call, results, repeats, in_any_order=()):
    """Calls `call` again and again. `results`, {name: tensor}, hold NaN before each call.

    After each call all results are finite and have the bits of the first call. Names `in_any_order` may differ in bits.
    On a GPU the host does not wait between the calls.
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
