"""Builds the extension of hopper/ in place, if it is older than its sources."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from object_cache import cached_build

ROOT = Path(__file__).resolve().parents[1]
HOPPER = ROOT / "hopper"
MODULE = HOPPER / "flash_attn_3" / "_C.abi3.so"


def is_old():
    sources = [path for suffix in ("c", "h", "def") for path in (ROOT / "csrc").rglob(f"*.{suffix}")]
    newest = max(path.stat().st_mtime for path in [*sources, HOPPER / "setup.py", ROOT / "csrc" / "extension.py"])
    return not MODULE.exists() or MODULE.stat().st_mtime < newest


def build_hopper():
    """Returns the path of the extension. Tests run in parallel processes: the first one builds, the others wait."""
    (HOPPER / "build").mkdir(exist_ok=True)
    with open(HOPPER / "build" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_old():
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
            subprocess.run(command, cwd=HOPPER, check=True, env={**os.environ, **cached_build()})
    return MODULE
