"""The wheel and the sdist of hopper/, built as users and packagers build them, in a fresh environment."""

import os
import sys
import tarfile
import zipfile

import pytest
from packages import ALONE, CLEAN, WORKS_OF_3, pip, tracked_files
from toolbox import run, tool


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "-w", folder, source / "hopper")  # isolated: finds setuptools but no torch
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", folder, source / "hopper"]
    run(*command, env={**os.environ, **CLEAN})
    (path,) = folder.glob("*.tar.gz")
    return path


def test_wheel_is_small_and_serves_every_python(wheel):
    assert wheel.name.startswith("flash_attn_3-3.0.0-cp39-abi3-")
    assert wheel.stat().st_size < 1.3e6
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "flash_attn_3/_C.abi3.so" in names
    expected = {name[len("hopper/") :] for name in tracked_files() if name.startswith("hopper/flash_attn")}
    expected |= {name.replace("csrc", "flash_attn_3", 1) for name in tracked_files() if name.startswith("csrc/cuda/")}
    assert expected - names == {name for name in expected if name.endswith((".md", ".csv"))}
    top = {name.split("/")[0] for name in names}
    assert top == {"flash_attn_3", "flash_attn_interface.py", "flash_attn_config.py", "flash_attn_3-3.0.0.dist-info"}


def test_wheel_works_alone(wheel, install, tmp_path):
    python = install(wheel)
    assert run(python, "-I", "-c", WORKS_OF_3.format(**ALONE), cwd=tmp_path) == "works\n"
    # A kernel's text is found beside the module. There is no GPU, so NVRTC or the compilation may be missing.
    found = "import torch; from flash_attn_3 import _C\ntry: _C.build_cuda_kernel(*_C.cuda_kernels()[0][1:])\n"
    said = run(python, "-I", "-c", found + "except Exception as error: print(error)", cwd=tmp_path)
    assert "sources are not in" not in said


@pytest.mark.parametrize("order", ["flash_attn first", "flash_attn_3 first"])
def test_both_packages_in_one_process(order, tmp_path):
    """Each has its own ops, and neither disturbs the other."""
    from build_hopper import HOPPER, build_hopper

    build_hopper()
    two, three = "import flash_attn", "import flash_attn_interface"
    text = f"""
import sys; sys.path.insert(0, {str(HOPPER)!r})
{two if order == "flash_attn first" else three}
{three if order == "flash_attn first" else two}
import torch
q = torch.randn(1, 9, 2, 32)
assert torch.equal(flash_attn.flash_attn_func(q, q, q, causal=True),
                   flash_attn_interface.flash_attn_func(q, q, q, causal=True))
assert torch.equal(torch.ops.flash_attn_3.fwd(q, q, q)[0], flash_attn.flash_attn_func(q, q, q))
try: flash_attn.flash_attn_func(q, q[:, :4], q)
except RuntimeError as error: assert "num_heads_k, head_size)" in str(error), error
print("works")
"""
    assert run(sys.executable, "-c", text) == "works\n"


FAKE_NVRTC = """
#include <stddef.h>
#include <string.h>
typedef int result;
result nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
const char *nvrtcGetErrorString(result r) { return "none"; }
result nvrtcCreateProgram(void **p, const char *a, const char *b, int n, void *c, void *d) { return *p = "", 0; }
result nvrtcDestroyProgram(void **p) { return 0; }
result nvrtcCompileProgram(void *p, int n, const char *const *options) { return 0; }
result nvrtcGetProgramLogSize(void *p, size_t *bytes) { return *bytes = 0; }
result nvrtcGetProgramLog(void *p, char *log) { return 0; }
result nvrtcGetCUBINSize(void *p, size_t *bytes) { return *bytes = 6, 0; }
result nvrtcGetCUBIN(void *p, char *cubin) { return memcpy(cubin, "cubin", 6), 0; }
"""


def test_both_packages_share_compiled_kernels(tmp_path):
    """A kernel that one package compiled is found by the other. The compiler is a fake that returns a text."""
    from build_hopper import HOPPER, build_hopper

    build_hopper()
    (tmp_path / "nvrtc.c").write_text(FAKE_NVRTC)
    run(tool("gcc"), "-shared", "-fPIC", "-w", tmp_path / "nvrtc.c", "-o", tmp_path / "nvrtc.so")
    text = f"""
import sys; sys.path.insert(0, {str(HOPPER)!r})
import torch, flash_attn_2_cuda
from flash_attn_3 import _C
kernels = [kernel for kernel in _C.cuda_kernels() if kernel[-1] == 90][:3]
print([_C.build_cuda_kernel(*rest) for _, *rest in kernels])
print([flash_attn_2_cuda.build_cuda_kernel(*rest) for _, *rest in kernels])
"""
    environment = {"FLASH_ATTN_CACHE_DIR": str(tmp_path / "cache"), "FLASH_ATTN_NVRTC": str(tmp_path / "nvrtc.so")}
    said = run(sys.executable, "-c", text, env={**os.environ, **environment})
    assert said == "[True, True, True]\n[False, False, False]\n"


def test_sdist_is_complete_by_itself(sdist):
    names = {name.split("/", 1)[1] for name in tarfile.open(sdist).getnames() if "/" in name}
    expected = {name[len("hopper/") :] for name in tracked_files() if name.startswith("hopper/")}
    sources = {name for name in tracked_files() if name.startswith("csrc/") and "/measurements/" not in name}
    assert (expected | sources | {"LICENSE"}) - names == set()
    assert not any(name.endswith((".o", ".so", ".csv")) for name in names)


def test_sdist_works(sdist, install, tmp_path):
    python = install(sdist, "--no-build-isolation")
    assert run(python, "-I", "-c", WORKS_OF_3.format(**ALONE), cwd=tmp_path) == "works\n"
