"""How an extension is compiled, for setup.py and hopper/setup.py.

Both extensions consist of the same C files, but for the files that belong to one of them: its ops, its Python functions
and its module. Each extension is plain C on CPython's limited API and finds libtorch's C functions when it is imported.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

LIMITED_API = "0x03090000"
GNU_FLAGS = ["-std=c11", "-O2", "-g0", "-fexceptions", "-fvisibility=hidden", "-Wall", "-Wextra"]
MSVC_FLAGS = ["/std:c11", "/O2", "/W3", "/EHsc"]

# The files that only flash_attn has, and those that only flash_attn_3 has.
OWN = {
    2: {
        "cpu/bias_shift.c",
        "cpu/max_logits.c",
        "flex/classify.c",
        "flex/dense.c",
        "flex/operate_avx2.c",
        "flex/operate_avx512.c",
        "flex/operate_neon.c",
        "gpu/bias_shift.c",
        "gpu/flex_classify.c",
        "gpu/max_logits.c",
        "gpu/sinks.c",
        "torch/ops_2.c",
        "torch/option_mods.c",
        "torch/options.c",
        "torch/direct_2.c",
        "torch/flex.c",
        "torch/flex_attend.c",
        "torch/flex_values.c",
        "torch/kept_walks.c",
        "torch/module_2.c",
        "torch/positional.c",
        "torch/sdpa.c",
        "torch/sdpa_keys.c",
        "torch/sdpa_tensors.c",
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
        define_macros=[("Py_LIMITED_API", LIMITED_API), *([("FA_NO_FLEX", None)] if generation == 3 else [])],
        libraries=[] if sys.platform == "win32" else ["m", "dl"],
        py_limited_api=True,
    )


class Objects:
    """Object files that stay for the next build in place. A file is compiled again if its source, a header that it
    includes, or the command has changed. The compiler lists the headers (-MD)."""

    def __init__(self, compiler, force):
        self.compiler, self.force = compiler, force
        found = subprocess.run([*compiler.compiler_so[:1], "--version"], capture_output=True, text=True)
        self.compiler_name = found.stdout

    def compile(self, sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                extra_postargs=None, depends=None):  # fmt: skip
        """``compile`` of setuptools' compiler."""
        (source,) = sources
        (target,) = self.compiler.object_filenames(sources, output_dir=output_dir)
        target = Path(target)
        listed, said = target.with_suffix(".d"), target.with_suffix(".command")
        command = repr((self.compiler_name, self.compiler.compiler_so, self.compiler.include_dirs, macros, include_dirs,
                        debug, extra_preargs, extra_postargs))  # fmt: skip
        same = said.exists() and said.read_text() == command and not self.force
        if not (same and is_newer(target, prerequisites(listed))):
            said.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            flags = [*(extra_postargs or []), "-MD", "-MF", str(listed)]
            self.build(sources, output_dir, macros, include_dirs, debug, extra_preargs, flags, depends)
            said.write_text(command)
        return [str(target)]

    def install(self):
        """Takes the place of the compiler's own method."""
        self.build, self.compiler.compile = self.compiler.compile, self.compile


def prerequisites(listed):
    """The files in a makefile of one rule, or None without the makefile."""
    if not listed.exists():
        return None
    words = listed.read_text().replace("\\\n", " ").split(":", 1)[1].replace("\\ ", "\0").split()
    return [Path(word.replace("\0", " ")) for word in words]


def is_newer(target, files):
    """Is the target there, and newer than all files? Not if a file is missing or if the list is None."""
    if files is None or not target.exists():
        return False
    made = target.stat().st_mtime_ns
    return all(file.exists() and file.stat().st_mtime_ns < made for file in files)


class BuildExt(build_ext):
    """Chooses the compiler's dialect and compiles MAX_JOBS files at a time. In place, only what has changed."""

    def run(self):
        self.keeps_objects = self.inplace or getattr(self, "editable_mode", False)
        super().run()  # clears inplace while it compiles

    def build_extensions(self):
        compiler = self.compiler.compiler_so[0] if self.compiler.compiler_type == "unix" else None
        if compiler and not shutil.which(compiler):
            sys.exit(f"Building needs a C compiler, and {compiler} was not found: install gcc or clang, or set CC")
        if self.keeps_objects and self.compiler.compiler_type == "unix":
            # pip's own folder for temporary files would be gone with the next install.
            self.build_temp = os.path.join("build", f"objects-{sys.implementation.cache_tag}")
            Objects(self.compiler, self.force).install()
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
