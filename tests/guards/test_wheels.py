"""The wheels for others. ``make wheel`` builds them and runs this file, which needs the folder of the wheels:

FLASH_ATTN_WHEELS=dist python -m pytest tests/guards/test_wheels.py
"""

import hashlib
import json
import os
import re
import zipfile
from pathlib import Path

import pytest
from packages import ALONE, WORKS, WORKS_OF_3
from toolbox import ROOT, run

WHEELS = os.environ.get("FLASH_ATTN_WHEELS")
pytestmark = pytest.mark.skipif(not WHEELS, reason="no FLASH_ATTN_WHEELS, the folder of built wheels")
PACKAGES = {"flash_attn": WORKS, "flash_attn_3": WORKS_OF_3.format(**ALONE)}


@pytest.fixture(params=PACKAGES)
def package(request):
    return request.param


@pytest.fixture
def wheel(package):
    (path,) = (ROOT / WHEELS).resolve().glob(f"{package}-[0-9]*.whl")
    return path


def test_the_name_says_old_systems(wheel):
    assert re.search(r"-cp39-abi3-(manylinux_2_\d+_\w+?\.)*manylinux_2_28_(x86_64|aarch64)\.whl$", wheel.name)


def test_no_library_came_along(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if re.search(r"\.libs/|\.so\.\d|libtorch|libc10", name)] == []
    assert len([name for name in names if name.endswith(".so")]) == 1


def test_at_most_20_mb(wheel):
    assert wheel.stat().st_size <= 20 * 10**6


def test_compiled_kernels_are_those_of_the_manifest(wheel, package):
    archive = zipfile.ZipFile(wheel)
    cubins = {Path(name).name: archive.read(name) for name in archive.namelist() if name.endswith(".cubin")}
    if not cubins:
        pytest.skip("built without NVRTC")
    listed = json.loads(archive.read(f"{package}/cubins/manifest.json"))["kernels"]
    hashes = {f"{entry['name']}-{entry['key']}.cubin": entry["sha256"] for entry in listed}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in cubins.items()} == hashes


def test_a_bare_environment_runs_it(wheel, package, install, tmp_path):
    """No compiler is on PATH, and the environment has nothing but torch."""
    python = install(wheel)
    bare = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": ""}
    assert run(python, "-I", "-c", PACKAGES[package], cwd=tmp_path, env=bare) == "works\n"


def test_compiled_kernels_are_found(wheel, package, install, tmp_path):
    """A kernel of the wheel is not compiled again: the program finds it by its name and key."""
    names = [Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".cubin")]
    if not names:
        pytest.skip("built without NVRTC")
    manifest = json.loads(zipfile.ZipFile(wheel).read(f"{package}/cubins/manifest.json"))
    module, generation = ("flash_attn_2_cuda", 2) if package == "flash_attn" else ("flash_attn_3._C", 3)
    program = f"""
import importlib, runpy, torch
module = importlib.import_module({module!r})
choose = runpy.run_path({str(ROOT / "flash_attn" / "_variants.py")!r})["choose"]
kernels = choose(module, {manifest["archs"]}, False, {generation})
files = {{f"{{name}}-{{module.cuda_kernel_key(*kernel):016x}}.cubin" for name, *kernel in kernels}}
assert files == set({names}), files.symmetric_difference({names})
for name, *kernel in kernels[:: max(1, len(kernels) // 8)]:
    assert not module.build_cuda_kernel(*kernel), name
print("found")
"""
    environment = {**os.environ, "FLASH_ATTN_NVRTC": str(tmp_path / "none.so"), "FLASH_ATTN_CACHE_DIR": str(tmp_path)}
    assert run(install(wheel), "-c", program, cwd=tmp_path, env={**environment, "PYTHONPATH": ""}) == "found\n"
