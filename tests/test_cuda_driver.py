"""The search for NVIDIA's driver, without a driver. A C program asks for a GPU, and a library replaces libcuda.so.1."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
GCC = shutil.which("gcc")

pytestmark = [
    pytest.mark.skipif(GCC is None, reason="gcc is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="only on Linux the driver is libcuda.so.1"),
]

# Asks twice for the GPU of a number. Prints the error, or its compute capability and multiprocessors.
PROGRAM = r"""
#include "gpu/driver.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

fa_status fa_fail(fa_error *err, fa_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(err->text, sizeof err->text, format, values);
    va_end(values);
    return status;
}

int main(int argc, char **argv) {
    const fa_gpu *gpu;
    fa_error err;
    for (int i = 0; i < 2; i++)
        if (fa_gpu_get(argc > 1 ? atoi(argv[1]) : 0, &gpu, &err) == FA_OK)
            printf("%d %d\n", gpu->capability, gpu->num_sms);
        else
            puts(err.text);
    return 0;
}
"""

# Every function succeeds and does nothing, except the functions below.
FUNCTIONS = r"""
#include "gpu/driver.h"
#define FUNCTION(symbol, parameters) __attribute__((weak)) CUresult symbol parameters { return 0; }
FA_DRIVER_SYMBOLS(FUNCTION)
"""
DRIVER = r"""
#include "gpu/driver.h"
CUresult cuInit(unsigned flags) { return flags + STARTS; }
CUresult cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
CUresult cuGetErrorName(CUresult error, const char **name) { *name = "A_NAME"; return error < 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "a reason"; return error < 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132
           : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
    return device;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver_program")
    (folder / "main.c").write_text(PROGRAM)
    files = [folder / "main.c", *(CSRC / f"{name}.c" for name in ("gpu/driver", "system/library"))]
    command = [GCC, "-std=c11", "-D_GNU_SOURCE", "-I", CSRC, *files, "-ldl", "-lpthread"]
    subprocess.run([*command, "-o", folder / "ask"], check=True)
    return folder / "ask"


@pytest.fixture
def ask(program, tmp_path):
    """The program's two lines. tmp_path / "libcuda.so.1" comes before a driver of this machine."""

    def ask(*arguments):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
        done = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return ask


def write_driver(folder, version="FA_OLDEST_DRIVER", starts=0, without="cuNothing"):
    for name, text in (("functions.c", FUNCTIONS), ("driver.c", DRIVER)):
        (folder / name).write_text(text)
    constants = [f"-DVERSION={version}", f"-DSTARTS={starts}", f"-D{without}=no_{without}"]
    files = [folder / "functions.c", folder / "driver.c", "-o", folder / "libcuda.so.1"]
    subprocess.run([GCC, "-std=c11", "-shared", "-fPIC", "-I", CSRC, *constants, *files], check=True)


def test_a_gpu(ask, tmp_path):
    write_driver(tmp_path)
    assert ask() == ["90 132"] * 2


def test_no_driver(ask, tmp_path):
    """No driver can be loaded."""
    (tmp_path / "libcuda.so.1").write_text("not a library")
    words = "flash_attn: CUDA tensors need NVIDIA's driver, and libcuda.so.1 is not on this machine"
    assert ask() == [words] * 2


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        ({"version": 12020}, "flash_attn needs a driver for CUDA 12.3 or newer: this machine's is for CUDA 12.2"),
        (
            {"without": "cuLibraryLoadData"},
            "flash_attn needs a driver for CUDA 12.3 or newer: this machine's lacks cuLibraryLoadData",
        ),
        ({"starts": 100}, "flash_attn: the CUDA driver does not start: a reason"),
    ],
    ids=str,
)
def test_a_driver_that_does_not_serve(driver, words, ask, tmp_path):
    write_driver(tmp_path, **driver)
    assert ask() == [words] * 2


def test_no_such_gpu(ask, tmp_path):
    write_driver(tmp_path)
    assert ask("1") == ["flash_attn: looking for the GPU failed with A_NAME (101): a reason"] * 2
    assert ask("1000")[0].startswith("flash_attn: the GPU has index 1000; up to ")
