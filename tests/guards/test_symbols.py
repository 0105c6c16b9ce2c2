"""The symbols that the built extension needs and exports. One binary runs everywhere only if both lists are small."""

import importlib
import re

import pytest
from build_hopper import build_hopper
from toolbox import CSRC, python_include, run, tool

LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
WEAK = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}  # of the compiler, may be absent


MODULES = {"flash_attn_2_cuda": "PyInit_flash_attn_2_cuda", "flash_attn_3._C": "PyInit__C"}


@pytest.fixture(params=MODULES)
def module(request):
    """The name of an extension. torch is loaded first."""
    pytest.importorskip("torch")
    return request.param


@pytest.fixture
def module_path(module):
    if module == "flash_attn_3._C":
        return str(build_hopper())
    return importlib.import_module(module).__file__


def test_needs_only_the_c_library(module_path):
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", run(tool("readelf"), "-d", module_path)))
    assert needed
    assert needed - LIBRARIES == set()


def test_imports_only_libc_and_the_limited_api(module_path):
    lines = run(tool("nm"), "-D", "--undefined-only", module_path).splitlines()
    imported = {line.split()[-1] for line in lines} - WEAK
    declared = run(
        tool("gcc"), "-E", "-P", "-DPY_SSIZE_T_CLEAN", *python_include(), "-include", "Python.h", "-x", "c", "/dev/null"
    )
    limited_api = set(re.findall(r"\b_?Py\w+", declared))
    foreign = {name for name in imported if "@GLIBC_" not in name and name not in limited_api}
    assert foreign == set()
    assert any(name.startswith("Py") for name in imported)


def test_exports_one_function(module, module_path):
    lines = run(tool("nm"), "-D", "--defined-only", module_path).splitlines()
    assert [line.split()[-1] for line in lines] == [MODULES[module]]


def test_is_named_for_the_stable_abi(module_path):
    assert module_path.endswith(".abi3.so")


def test_a_wheel_may_be_built_for_glibc_2_28(module_path):
    """What came after glibc 2.28 stands in system/old_glibc.h, which gives wheels older functions of the same name."""
    lines = run(tool("objdump"), "-T", module_path)
    found = re.findall(r"\*UND\*.*\(?GLIBC_(\d+)\.(\d+)(?:\.\d+)?\)? +(\w+)", lines)
    assert found
    new = {name for major, minor, name in found if (int(major), int(minor)) > (2, 28)}
    header = (CSRC / "system" / "old_glibc.h").read_text()
    named = set(re.findall(r"FA_OLD_VERSION\((\w+)\);", header)) | set(re.findall(r"extern int (\w+)\(", header))
    assert new - named == set()
