"""Objects of C files that several tests compile: each file is compiled once (cached_cc.sh)."""

import functools
import shlex
import shutil
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "cached_cc.sh"
FOLDER = ROOT / "build" / "objects-of-tests"
DAYS = 14

# The flags of setup.py and those that setuptools puts before them. An object with these flags is the installed one.
SETUP_FLAGS = ["-std=c11", "-O2", "-g0", "-fexceptions", "-fvisibility=hidden", "-Wall", "-Wextra"]
INSTALLED_FLAGS = [*shlex.split(sysconfig.get_config_var("CFLAGS") or ""), "-fPIC", *SETUP_FLAGS]


@functools.cache
def _works():
    """Can the script run? Removes what was not used for a long time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.iterdir():
        try:
            if path.stat().st_mtime < time.time() - DAYS * 24 * 3600:
                path.unlink()
        except FileNotFoundError:  # another process was faster
            pass
    return all(map(shutil.which, ("sh", "flock", "sha256sum")))


def cached(compiler):
    """The command line of a compiler that uses the cache."""
    return [str(SCRIPT), str(compiler)] if _works() else [str(compiler)]


def cached_build():
    """The environment variables of a build of an extension that uses the cache."""
    return {"CC": shlex.join(cached(sysconfig.get_config_var("CC") or "cc"))}
