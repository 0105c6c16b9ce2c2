"""A small GPT learns real text the same way with our attention and with PyTorch's own arithmetic."""

import importlib.util
from pathlib import Path

import pytest
import torch

spec = importlib.util.spec_from_file_location(
    "train_gpt", Path(__file__).resolve().parents[1] / "benchmarks/train_gpt.py"
)
train_gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train_gpt)

SMALL = {"length": 65, "batch": 4, "layers": 2, "heads": 2, "head_dim": 32}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_fp32_follows_the_same_curve(device):
    ours = train_gpt.train(train_gpt.our_attention, device, 40, **SMALL)
    math = train_gpt.train(train_gpt.math_attention, device, 40, **SMALL)
    assert math[0] > 4 and math[-1] < 3.2, "it learns"
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(math), atol=2e-3, rtol=0)
