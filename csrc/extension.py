"""How an extension is compiled, for setup.py and hopper/setup.py.

Both extensions consist of the same C files, but for the files that belong to one of them: its ops, its Python functions
and its module. Each extension is plain C on CPython's limited API and finds libtorch's C functions when it is imported.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension
from setuptools.command.build_ext import build_ext

LIMITED_API = "0x03090000"
GNU_FLAGS = ["-std=c11", "-O2", "-g0", "-fexceptions", "-fvisibility=hidden", "-Wall", "-Wextra"]
MSVC_FLAGS = ["/std:c11", "/O2", "/W3", "/EHsc"]

# The files that only flash_attn has, and those that only flash_attn_3 has.
OWN = {
    2: {
        "flex/classify.c",
        "flex/dense.c",
        "gpu/flex_classify.c",
        "torch/ops_2.c",
        "torch/direct_2.c",
        "torch/flex.c",
        "torch/flex_attend.c",
        "torch/flex_values.c",
        "torch/module_2.c",
        "torch/positional.c",
    },
    3: {
        "cpu/quantize.c",
        "gpu/quantize.c",
        "torch/quantize.c",
        "torch/ops_3.c",
        "torch/direct_3.c",
        "torch/module_3.c",
        "torch/scheduler_metadata.c",
    },
}


def max_jobs():
    """The number of compilers that run at once: MAX_JOBS, or one per processor."""
    return max(1, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))


def sources(csrc, generation):
    """The C files of an extension. ``csrc`` is a path relative to the folder of setup.py."""
    others = {f"{csrc}/{name}" for own, names in OWN.items() if own != generation for name in names}
    found = [path.replace(os.sep, "/") for path in glob(f"{csrc}/*.c") + glob(f"{csrc}/*/*.c")]
    return sorted(set(found) - others)


def extension(name, csrc, generation):
    headers = glob(f"{csrc}/*.h") + glob(f"{csrc}/*/*.h") + glob(f"{csrc}/*/*.def")
    return Extension(
        name,
        sources=sources(csrc, generation),
        depends=sorted(headers),
        include_dirs=[csrc],
        define_macros=[("Py_LIMITED_API", LIMITED_API)],
        libraries=[] if sys.platform == "win32" else ["m", "dl"],
        py_limited_api=True,
    )


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
