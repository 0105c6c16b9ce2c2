"""Objects of C files that several tests compile: each file is compiled once (cached_cc.sh)."""

import functools
import re
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
    compiler, *options = shlex.split(sysconfig.get_config_var("CC") or "cc")
    return {"CC": shlex.join([*cached(compiler), *options])}


def saved_seconds(log):
    """The processor seconds that the cache has saved, less those that it took, from the file CACHED_CC_LOG."""
    text = log.read_text() if log.exists() else ""
    saved, numbers = 0.0, [60 * float(m) + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", text)]
    for i in range(0, len(numbers), 12):  # user and system, of the shell and of its children
        taken, (before, after) = numbers[i : i + 4], (numbers[j + 2 : j + 4] for j in (i + 4, i + 8))
        saved += sum(after) - sum(before) - sum(taken)
    return saved


if __name__ == "__main__":  # for .ci/run
    print(cached_build()["CC"])
