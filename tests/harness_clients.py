"""What the tests of flash_attn.integrations share: how results are compared, and which functions were called."""

import functools

import torch


def close(mine, theirs, limit=1e-6):
    torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)


def counted(function, found):
    @functools.wraps(function)
    def call(*args, **kwargs):
        found.append(function.__name__)
        return function(*args, **kwargs)

    return call
