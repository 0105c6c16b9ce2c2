"""Builds flash_attn: Python files and one C extension, for every Python >= 3.10 and every torch >= 2.4 at once.

The extension is plain C on CPython's limited API and finds libtorch's C functions when it is imported. So building
needs only a C compiler and setuptools. Torch, C++ and CUDA are not needed. csrc/gpu/ship_cubins.py adds compiled GPU
kernels on request. docs/install.md lists the environment variables. Everything that is no code stands in
pyproject.toml.
"""

import os
import sys
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)  # setuptools wants sources relative to the project
sys.path[:0] = [str(ROOT / "csrc"), str(ROOT / "csrc" / "gpu")]

import extension  # noqa: E402
from ship_cubins import ship, wanted_archs  # noqa: E402


class BuildExt(extension.BuildExt):
    """Compiles the extension, and then the GPU kernels that a wheel shall carry."""

    def build_extensions(self):
        super().build_extensions()
        ship(self.get_ext_fullpath("flash_attn_2_cuda"), wanted_archs(os.environ), extension.max_jobs())


# GPU kernels are installed as text beside the Python files. A kernel is compiled at its first use.
gpu_kernels = ["flash_attn.cuda"] if glob("csrc/cuda/*.cu") else []

setup(
    license="BSD-3-Clause",
    packages=find_packages(include=["flash_attn", "flash_attn.*"]) + gpu_kernels,
    package_dir={"flash_attn.cuda": "csrc/cuda"},
    ext_modules=[extension.extension("flash_attn_2_cuda", "csrc", 2)],
    cmdclass={"build_ext": BuildExt},
)
