"""Runs the C test programs for 64-bit ARM on emulated processors, some cases of each kind."""

import shlex

import pytest
from object_cache import SETUP_FLAGS, cached
from toolbox import ROOT, arm_compiler, run, tool


def test_kernels_of_arm_meet_the_reference(tmp_path):
    """One processor multiplies bf16. The other one does not, so a kernel with BFDOT would end the program."""
    tool("qemu-aarch64")
    compiler = shlex.join([*cached(arm_compiler("gcc")[0]), "-fPIC", *SETUP_FLAGS])
    c = ROOT / "tests" / "c"
    if not (c / "build" / "arm_packages" / "usr").is_dir():
        pytest.skip("cmocka for ARM is not there: make -C tests/c arm_packages")
    options = [f"ARM_CC={compiler}", "CFLAGS=-O2 -DFEW_SEEDS=3", f"BUILD={tmp_path}", "ONLY=test_?wd_*"]
    printed = run(tool("make"), "-j2", "-C", c, *options, "check_arm")
    assert printed.count("[  PASSED  ]") == 8 and "[  SKIPPED ]" not in printed, printed
