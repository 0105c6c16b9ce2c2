"""Every test with the fixture `isa` runs once with the kernels of each instruction set of this machine.

Tests run in parallel processes of one thread each. Two OpenMP teams on two cores would spin against each other and take
a hundred times as long. test_memory.py tests several threads.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import flash_attn_2_cuda
import pytest
import torch
from harness_plan import plan  # noqa: F401  (a fixture)

torch.set_num_threads(1)


LONG = "test_check_kernels.py", "test_arm.py", "test_inner_loops.py"


def pytest_collection_modifyitems(items):
    """Tests that take minutes come first, because at the end a process would wait for another one that has one left."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """isa varies fastest. So the expected result of a case is computed once and kept for all instruction sets."""
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", flash_attn_2_cuda.cpu_isas(), indirect=True)


@pytest.fixture
def isa(request):
    flash_attn_2_cuda.set_cpu_isa(request.param)
    yield request.param
    flash_attn_2_cuda.set_cpu_isa(None)


@pytest.fixture
def reference_isa():
    flash_attn_2_cuda.set_cpu_isa("reference")
    yield
    flash_attn_2_cuda.set_cpu_isa(None)
