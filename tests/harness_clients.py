"""What the tests of flash_attn.integrations share: how results are compared, and which functions were called."""

import functools
import importlib.util
import sys

import pytest
import torch
from harness import need


def close(mine, theirs, limit=1e-6):
    torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)


def counted(function, found):
    @functools.wraps(function)
    def call(*args, **kwargs):
        found.append(function.__name__)
        return function(*args, **kwargs)

    return call


def need_simpletuner():
    """SimpleTuner 4.10 is for Python 3.12 to 3.14, and `make test` installs it there."""
    if (3, 12) <= sys.version_info < (3, 15):
        need("simpletuner")
    elif importlib.util.find_spec("simpletuner") is None:
        pytest.skip("SimpleTuner is for Python 3.12 to 3.14")
