"""Clients that look for the installed package flash_attn_3, unchanged, over this package: transformers'
"flash_attention_3", Diffusers' "_flash_3" and "_flash_varlen_3", PyTorch's implementation "FA3", and SimpleTuner.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_hopper import HOPPER
from harness import need
from harness_clients import need_simpletuner
from torch.nn import attention

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """A folder with what an installation writes about the package. importlib.metadata finds it on the path."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", str(folder)]
    subprocess.run(command, cwd=HOPPER, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": ""})
    return folder


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("program", ["transformers", "diffusers", "torch", "simpletuner"])
def test_clients(program, device, metadata):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if program == "simpletuner":
        need_simpletuner()
    elif program != "torch":
        need(program)
    elif "FA3" not in getattr(attention, "list_flash_attention_impls", list)():
        pytest.skip(f"torch {torch.__version__} has no implementation FA3")
    paths = [str(HOPPER), str(metadata), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, HERE / "clients3.py", program, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.endswith("equal\n"), done.stdout + done.stderr[-4000:]
