"""SimpleTuner with this package, unchanged, on the CPU, and its calls of packed functions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness_clients import close, need_simpletuner

from flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)

PROGRAM = Path(__file__).with_name("program_simpletuner.py")


def test_simpletuner():
    need_simpletuner()
    environment = {**os.environ, "FLASH_ATTN_LOG": "plan", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.endswith("equal\n"), done.stdout + done.stderr[-4000:]
    for name in ("WanTransformer3DModel", "FluxTransformer2DModel"):
        (log,) = re.findall(f"{name} calls sdpa\n(.*?)end of the calls", done.stderr, re.DOTALL)
        assert "attn_fwd_" in log and "attn_bwd_" in log, log


def test_calls_of_simpletuner():
    """It calls packed functions by these names, and again with fewer arguments after a TypeError."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 3, 2, 16)
    expected = flash_attn_func(*qkv.unbind(2), softmax_scale=0.3)
    close(flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=0.3, causal=False), expected)
    close(flash_attn_qkvpacked_func(qkv, causal=False), flash_attn_func(*qkv.unbind(2)))
    cu_seqlens, packed = torch.tensor([0, 9, 18], dtype=torch.int32), qkv.flatten(0, 1)
    out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, 9, 0.0, softmax_scale=0.3, causal=False)
    close(out, expected.flatten(0, 1))
    out = flash_attn_varlen_qkvpacked_func(
        qkv=packed, cu_seqlens=cu_seqlens, max_seqlen=9, dropout_p=0.0, softmax_scale=0.3, causal=False
    )
    close(out, expected.flatten(0, 1))
    parts = [x.contiguous() for x in packed.unbind(1)]
    out = flash_attn_varlen_func(*parts, cu_seqlens, cu_seqlens, 9, 9, dropout_p=0.0, softmax_scale=0.3, causal=False)
    close(out, expected.flatten(0, 1))


@pytest.mark.parametrize(
    "change", [lambda x: x.long(), lambda x: x[..., 0], lambda x: x[:, :, :2], lambda x: x.to(torch.complex64)]
)
def test_a_wrong_tensor_is_no_type_error(change):
    """A TypeError would make SimpleTuner try again without dropout and scale."""
    with pytest.raises((RuntimeError, ValueError)):
        flash_attn_qkvpacked_func(change(torch.randn(2, 9, 3, 2, 16)), dropout_p=0.1, softmax_scale=0.3, causal=False)
