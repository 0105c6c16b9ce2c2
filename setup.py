"""Builds flash_attn: Python files and one C extension, for every Python >= 3.9 and every torch >= 2.10 at once.

The extension is plain C on CPython's limited API and finds libtorch's C functions when it is imported. So building
needs a C compiler and setuptools, and nothing else: no torch, no C++, no CUDA. csrc/gpu/ship_cubins.py adds compiled
GPU kernels where that is asked for. docs/install.md lists the environment variables.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)  # setuptools wants sources relative to the project
sys.path.insert(0, str(ROOT / "csrc" / "gpu"))

from ship_cubins import ship, wanted_archs  # noqa: E402

LIMITED_API = "0x03090000"
GNU_FLAGS = ["-std=c11", "-O2", "-g0", "-fexceptions", "-fvisibility=hidden", "-Wall", "-Wextra"]
MSVC_FLAGS = ["/std:c11", "/O2", "/W3", "/EHsc"]


def version():
    scope = {}
    exec((ROOT / "flash_attn" / "_version.py").read_text(encoding="utf-8"), scope)
    return scope["__version__"]


def max_jobs():
    """Compilers that run at once: MAX_JOBS, or one per processor."""
    return max(1, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))


class BuildExt(build_ext):
    """Chooses the compiler's dialect and compiles MAX_JOBS files at a time."""

    def build_extensions(self):
        flags = MSVC_FLAGS if self.compiler.compiler_type == "msvc" else GNU_FLAGS
        for extension in self.extensions:
            extension.extra_compile_args = flags
        compile_files = self.compiler.compile
        with ThreadPoolExecutor(max_jobs()) as pool:

            def compile_in_parallel(sources, *args, **kwargs):
                jobs = [pool.submit(compile_files, [source], *args, **kwargs) for source in sources]
                return [obj for job in jobs for obj in job.result()]

            self.compiler.compile = compile_in_parallel
            super().build_extensions()
        ship(self.get_ext_fullpath("flash_attn_2_cuda"), wanted_archs(os.environ), max_jobs())


c_files = sorted(glob("csrc/*.c") + glob("csrc/*/*.c"))

extension = Extension(
    "flash_attn_2_cuda",
    sources=c_files,
    depends=sorted(glob("csrc/*.h") + glob("csrc/*/*.h") + glob("csrc/*/*.def")),
    include_dirs=["csrc"],
    define_macros=[("Py_LIMITED_API", LIMITED_API)],
    libraries=[] if sys.platform == "win32" else ["m", "dl"],
    py_limited_api=True,
)

# GPU kernels are installed as text, beside the Python files: they are compiled when they are first used.
gpu_kernels = ["flash_attn.cuda"] if glob("csrc/cuda/*.cu") else []

setup(
    name="flash_attn",
    version=version(),
    description="Exact attention for PyTorch, fast and with memory linear in the length, on CPUs and GPUs",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.9",
    # Without bounds, as upstream: pip then never replaces the torch that is installed. `import flash_attn` itself
    # says what is missing when that torch is older than 2.10.
    install_requires=["torch", "einops"],
    packages=find_packages(include=["flash_attn", "flash_attn.*"]) + gpu_kernels,
    package_dir={"flash_attn.cuda": "csrc/cuda"},
    package_data={"flash_attn.cuda": ["*.cu", "*.cuh", "*.h", "*.def"]},
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp39"}},
    zip_safe=False,
)
