"""Shared code of the guards: folders, the run of a tool, and the treatment of missing tools."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from object_cache import INSTALLED_FLAGS, SETUP_FLAGS, cached

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

# The flags of setup.py, with every warning as an error.
C_FLAGS = [*SETUP_FLAGS, "-Werror", "-I", str(CSRC)]

DEBIAN_PACKAGE = {
    "gcc": "gcc",
    "g++": "g++",
    "clang": "clang",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "aarch64-linux-gnu-objdump": "binutils-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "nm": "binutils",
    "objdump": "binutils",
    "make": "make",
    "readelf": "binutils",
    "git": "git",
}


def tool(name):
    """The path of a program, of this Python's environment or of the system."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path:
        return path
    where = f"apt-get install {DEBIAN_PACKAGE[name]}" if name in DEBIAN_PACKAGE else "make test installs it"
    lacking(f"{name} is not installed: {where}")


def lacking(reason):
    """A requirement of the test is missing. CI installs everything, so there it is an error."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def share_of(cases, part):
    """Every part-th of alike cases that take seconds each, or all of them with FLASH_ATTN_TEST_ALL_KERNELS=1."""
    return list(cases)[:: 1 if os.environ.get("FLASH_ATTN_TEST_ALL_KERNELS") == "1" else part]


def git_files(*options):
    """The files of the project, as git lists them. Outside of git nothing says which files belong to the project."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    return run(tool("git"), "ls-files", *options, cwd=ROOT).splitlines()


def run(*command, **options):
    """Runs a command and returns its output. A failure shows the command line and the output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        pytest.fail(f"$ {shlex.join(words)}\n{done.stdout}(exit status {done.returncode})", pytrace=False)
    return done.stdout


def compile_object(compiler, path, object_file):
    """Compiles a file of the extension, with gcc to the object that is installed."""
    flags = INSTALLED_FLAGS if compiler == "gcc" else ["-fPIC"]
    run(*cached(tool(compiler)), *flags, *C_FLAGS, *python_include(), "-c", path, "-o", object_file)


def arm_compiler(compiler):
    """The command of a compiler for 64-bit ARM. clang uses the headers of gcc's package."""
    gcc = tool("aarch64-linux-gnu-gcc")
    return [gcc] if compiler == "gcc" else [tool("clang"), "--target=aarch64-linux-gnu"]


def c_sources():
    """The files of the extension, each a translation unit of its own."""
    return sorted([*CSRC.glob("*.c"), *CSRC.glob("*/*.c")])


def c_headers():
    return sorted([*CSRC.glob("*.h"), *(path for path in CSRC.glob("*/*.h") if path.parent.name != "cuda")])


def relative(path):
    return path.relative_to(ROOT).as_posix()


def python_include():
    return ["-I", sysconfig.get_paths()["include"], "-DPy_LIMITED_API=0x03090000"]
