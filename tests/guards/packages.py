"""How the guards build packages as users and packagers build them, and install them in a fresh environment."""

import functools
import os
import sys

from object_cache import cached_build
from toolbox import git_files, run

# No build may touch a C++ compiler, nvcc, or an editable install of this tree.
CLEAN = {"CXX": "/bin/false", "CUDA_HOME": "/nonexistent", "PYTHONPATH": ""}


def pip(*arguments, **options):
    environment = {**os.environ, **CLEAN, **cached_build(), **options}
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, env=environment)


@functools.cache
def tracked_files():
    return set(git_files()) - {".gitignore"}
