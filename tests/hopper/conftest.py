"""The extension of hopper/ is built if it is older than its sources, and hopper/ is put on the path."""

import sys

import pytest
import torch
from build_hopper import HOPPER, build_hopper

build_hopper()
sys.path.insert(0, str(HOPPER))


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.fixture(params=["reference", None], ids=["reference", "best"])
def engine(request):
    """The kernels of the CPU: the specification, and the best that this machine has."""
    from flash_attn_3 import _C

    _C.set_cpu_isa(request.param)
    yield request.param
    _C.set_cpu_isa(None)
