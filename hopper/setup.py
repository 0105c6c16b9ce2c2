"""Builds flash_attn_3: Python files and one C extension, for every Python >= 3.10 and every torch >= 2.4 at once.

The C files are those of ../csrc. An sdist carries a copy of them, so that it builds on its own. README.md lists the
environment variables. Everything that is no code stands in pyproject.toml.
"""

import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
os.chdir(HERE)  # setuptools wants sources relative to the project
CSRC = "csrc" if Path("csrc").is_dir() else "../csrc"
LICENSE = "LICENSE" if Path("LICENSE").exists() else "../LICENSE"
sys.path[:0] = [CSRC, f"{CSRC}/gpu"]

import extension  # noqa: E402
from ship_cubins import VARIANTS, ship, wanted_archs  # noqa: E402

# A build folder of its own keeps object files inside this folder, wherever the C files lie.
BUILD = "build/csrc/objects"


class Sdist(sdist):
    """Adds the C files and the licence, which lie outside of this folder."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, [name for name in files if not name.startswith("..")])
        ignored = shutil.ignore_patterns("*.o", "*.so", "__pycache__", "measurements")
        shutil.copytree(CSRC, Path(base_dir, "csrc"), ignore=ignored, dirs_exist_ok=True)
        shutil.copy(LICENSE, Path(base_dir, "LICENSE"))
        shutil.copy(VARIANTS, Path(base_dir, "csrc", "gpu", "_variants.py"))


class BuildExt(extension.BuildExt):
    """Compiles the extension, and then the GPU kernels that a wheel shall carry."""

    def build_extensions(self):
        super().build_extensions()
        ship(self.get_ext_fullpath("flash_attn_3._C"), wanted_archs(os.environ), extension.max_jobs())


# GPU kernels are installed as text beside the Python files. A kernel is compiled at its first use.
setup(
    license="BSD-3-Clause",
    packages=["flash_attn_3"] + (["flash_attn_3.cuda"] if glob(f"{CSRC}/cuda/*.cu") else []),
    package_dir={"flash_attn_3.cuda": f"{CSRC}/cuda"},
    ext_modules=[extension.extension("flash_attn_3._C", CSRC, 3)],
    cmdclass={"build_ext": BuildExt, "sdist": Sdist},
    options={"build_ext": {"build_temp": BUILD}},
)
