"""Small tensors that the tests of flash_attn_3 make, and the devices that they use."""

from itertools import accumulate

import pytest
import torch

E4M3 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def make(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def i32(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def sums(*lengths):
    """cu_seqlens of sequences of these lengths."""
    return i32(0, *accumulate(lengths))
