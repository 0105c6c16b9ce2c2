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


@pytest.fixture
def set_isa():
    """A function that limits the kernels of the CPU to an instruction set; None: the best that this machine has."""
    from flash_attn_3 import _C

    yield _C.set_cpu_isa
    _C.set_cpu_isa(None)


@pytest.fixture(params=["reference", None], ids=["reference", "best"])
def engine(request, set_isa):
    """The kernels of the CPU: the specification, and the best that this machine has."""
    set_isa(request.param)
    return request.param
