"""What the tests of kept mods share."""

import torch
from oracle_flex import evaluated, expected

from flash_attn.flex import tracer

SHAPE = (1, 1, 9, 9)


def check(mod):
    """The mod is called as Python calls it, with tensors."""
    assert torch.equal(evaluated(mod, SHAPE), expected(mod, SHAPE))


def traces(calls):
    before = tracer.num_traces
    calls()
    return tracer.num_traces - before


class Width:
    """An object with a width."""

    def __init__(self, width=2):
        self.width = width
