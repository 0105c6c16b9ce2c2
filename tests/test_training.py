"""A small GPT learns real text with our attention as well as with PyTorch's own arithmetic."""

import functools

import pytest
import torch
import train_gpt
from cases import BOTH

SMALL = {"length": 130, "batch": 2, "layers": 2, "heads": 1, "head_dim": 64}
STEPS = 40
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@functools.cache
def losses(attention, device, dtype=torch.float32, bf16=False):
    return train_gpt.train(getattr(train_gpt, attention), device, STEPS, dtype=dtype, bf16=bf16, **SMALL)


@pytest.mark.parametrize("bf16", BOTH)
@pytest.mark.parametrize(
    "device, attention",
    [
        ("cpu", "our_attention"),
        pytest.param("cuda", "our_attention", marks=GPU),
        pytest.param("cuda", "our_attention_in_order", marks=GPU),
    ],
)
def test_loss_stays_as_close_to_fp64_as_plain_arithmetic(device, attention, bf16):
    """The rule of compare.py for a whole curve, without its allowance: E(ours) <= 2 E(plain).

    On a GPU rounding alone moves the loss by up to 5e-7 in fp32 and 6e-4 in bf16 until step 80. Later differences feed
    on themselves, to 3e-3 and 3e-2 by step 300 (benchmarks/results/train_gpt_cuda.csv, "math").
    """
    exact = losses("math_attention", device, dtype=torch.float64)
    plain, ours = (losses(name, device, bf16=bf16) for name in ("math_attention", attention))
    assert exact[0] - exact[-1] > 1, "it learns"
    of_ours, of_plain = (train_gpt.largest_difference(x, exact) for x in (ours, plain))
    assert 0 < of_ours <= 2 * of_plain
