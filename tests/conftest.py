"""Every test that takes the fixture `isa` runs once with the kernels of each instruction set of this machine."""

import flash_attn_2_cuda  # after torch, whose library it looks up
import pytest
import torch


def pytest_configure(config):
    torch.set_num_threads(2)


@pytest.fixture(params=flash_attn_2_cuda.cpu_isas())
def isa(request):
    flash_attn_2_cuda.set_cpu_isa(request.param)
    yield request.param
    flash_attn_2_cuda.set_cpu_isa(None)


@pytest.fixture
def reference_isa():
    flash_attn_2_cuda.set_cpu_isa("reference")
    yield
    flash_attn_2_cuda.set_cpu_isa(None)
