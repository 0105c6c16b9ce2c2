"""Runs the C test program tests/c/check_kernels.c: each CPU kernel against the reference, plain and sanitized."""

import os
from pathlib import Path

import pytest
from toolbox import ROOT, lacking, run, tool

SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer"
BUILDS = {
    "gcc": ("gcc", "-O2"),
    "clang": ("clang", "-O2"),
    "gcc with AddressSanitizer and UBSan": ("gcc", f"-O1 -g1 {SANITIZERS}"),
}


@pytest.mark.parametrize(("compiler", "flags"), BUILDS.values(), ids=BUILDS)
def test_kernels_meet_the_reference(compiler, flags, tmp_path):
    if not list(Path("/usr/include").glob("**/cmocka.h")):
        lacking("cmocka.h is not installed: apt-get install libcmocka-dev")
    command = [tool("make"), "-j", str(os.cpu_count()), "--output-sync", "-C", ROOT / "tests" / "c"]
    printed = run(*command, f"CC={tool(compiler)}", f"CFLAGS={flags}", f"BUILD={tmp_path}", "check")
    assert "[  PASSED  ]" in printed, printed
    assert "[  SKIPPED ]" not in printed, printed


def test_generic_gpu_kernels_meet_the_reference(tmp_path):
    """Their texts, compiled for the CPU (tests/c/cuda_emulation.h)."""
    if not list(Path("/usr/include").glob("**/cmocka.h")):
        lacking("cmocka.h is not installed: apt-get install libcmocka-dev")
    command = [tool("make"), "-j", str(os.cpu_count()), "-C", ROOT / "tests" / "c", f"CC={tool('gcc')}"]
    printed = run(*command, f"CXX={tool('g++')}", f"BUILD={tmp_path}", "check_cuda")
    assert "[  PASSED  ]" in printed and "[  SKIPPED ]" not in printed, printed
