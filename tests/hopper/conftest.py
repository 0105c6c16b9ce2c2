"""Builds the extension of hopper/ in place, if it is older than its sources, and puts hopper/ on the path."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HOPPER = ROOT / "hopper"
MODULE = HOPPER / "flash_attn_3" / "_C.abi3.so"


def is_old():
    texts = [path for suffix in ("c", "h", "def", "py") for path in (ROOT / "csrc").rglob(f"*.{suffix}")]
    texts = [path for path in texts if path.parent.name != "__pycache__" and path.parent.name != "cuda"]
    newest = max(path.stat().st_mtime for path in [*texts, HOPPER / "setup.py", ROOT / "csrc/cuda/tiles.def"])
    return not MODULE.exists() or MODULE.stat().st_mtime < newest


def build():
    """Tests run in parallel processes. The first process builds, the others wait."""
    (HOPPER / "build").mkdir(exist_ok=True)
    with open(HOPPER / "build" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_old():
            subprocess.run(
                [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"], cwd=HOPPER, check=True
            )


build()
sys.path.insert(0, str(HOPPER))


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.fixture(params=["reference", None], ids=["reference", "best"])
def engine(request):
    from flash_attn_3 import _C

    _C.set_cpu_isa(request.param)
    yield request.param
    _C.set_cpu_isa(None)
