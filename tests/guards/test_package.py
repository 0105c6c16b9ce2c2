"""The wheel and the sdist, built as users and packagers build them, in a fresh environment."""

import itertools
import os
import re
import resource
import sys
import tarfile
import zipfile

import pytest
from object_cache import cached_build, saved_seconds
from packages import CLEAN, WORKS, pip, tracked_files
from toolbox import ROOT, run, tool


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "-w", folder, source)  # isolated: finds setuptools but no torch
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, source, env={**os.environ, **CLEAN})
    (path,) = folder.glob("*.tar.gz")
    return path


def test_wheel_is_small_and_serves_every_python(wheel):
    assert wheel.name.startswith("flash_attn-2.8.3-cp39-abi3-")
    assert wheel.stat().st_size < 2 * 2**20
    names = zipfile.ZipFile(wheel).namelist()
    assert "flash_attn_2_cuda.abi3.so" in names
    expected = {name for name in tracked_files() if name.startswith("flash_attn/")}
    expected |= {name.replace("csrc", "flash_attn", 1) for name in tracked_files() if name.startswith("csrc/cuda/")}
    assert expected - set(names) == {name for name in expected if name.endswith((".md", ".csv"))}
    top = {name.split("/")[0] for name in names}
    assert top == {"flash_attn", "flash_attn_2_cuda.abi3.so", "flash_attn-2.8.3.dist-info"}


def test_metadata_is_that_of_upstream(wheel):
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    metadata = zipfile.ZipFile(wheel).read(name).decode().splitlines()
    assert "Version: 2.8.3" in metadata
    assert "Requires-Python: >=3.10" in metadata and "Classifier: Typing :: Typed" in metadata
    assert "License: BSD-3-Clause" in metadata and "Author: the flash-attn authors" in metadata
    assert sorted(line for line in metadata if line.startswith("Requires-Dist")) == [
        "Requires-Dist: einops",
        "Requires-Dist: torch",
    ]


def test_wheel_works(wheel, install, tmp_path):
    assert run(install(wheel), "-I", "-c", WORKS, cwd=tmp_path) == "works\n"


def test_sdist_is_complete(sdist):
    names = {name.split("/", 1)[1] for name in tarfile.open(sdist).getnames() if "/" in name}
    assert tracked_files() - names == set()


def test_sdist_works(sdist, install, tmp_path):
    python = install(sdist, "--no-build-isolation")
    assert run(python, "-I", "-c", WORKS, cwd=tmp_path) == "works\n"


def processor_seconds(*command, **options):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(*command, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


YARDSTICK = "".join(
    f"double f{i}(double *x, int n) {{ double s = {i}; for (int i = 0; i < n; i++) "
    f"s += x[i] * x[(i * {i + 3}) % n] - s / (x[i] + {i}.5); return s; }}\n"
    for i in range(300)
)


def test_extension_builds_in_seconds(source, tmp_path):
    """The README promises half a minute on two cores, of which the extension has 24 s. Processor time excludes waiting
    for other programs. A slow or shared core has more time: as much more as it takes to compile a fixed text, which
    takes 1 s where the promise was made.
    An object that another test has compiled counts with the seconds of that compilation."""
    (tmp_path / "yardstick.c").write_text(YARDSTICK)
    yardstick = [tool("gcc"), "-O2", "-c", tmp_path / "yardstick.c", "-o", tmp_path / "yardstick.o"]
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "o"]
    log = tmp_path / "seconds"
    slow = processor_seconds(*yardstick)
    environment = {**os.environ, **CLEAN, **cached_build(), "CACHED_CC_LOG": str(log)}
    seconds = processor_seconds(*command, cwd=source, env=environment) + saved_seconds(log)
    slow = max(1, slow, processor_seconds(*yardstick))
    assert seconds < 2 * 24 * slow, f"{seconds:.1f} s, where the fixed text takes {slow:.2f} s"
    assert (tmp_path / "flash_attn_2_cuda.abi3.so").exists()


@pytest.mark.parametrize("jobs", [1, 3])
def test_max_jobs_sets_how_many_compilers_run(source, tmp_path, jobs):
    """A compiler that only records its start and end, and makes empty files."""
    log = tmp_path / "log"
    compiler = tmp_path / "cc"
    compiler.write_text(
        f"#!/bin/sh\necho 1 >> {log}\nsleep 0.1\n"
        f'while [ "$1" != -o ]; do shift; done; mkdir -p "$(dirname "$2")"; touch "$2"\necho -1 >> {log}\n'
    )
    compiler.chmod(0o755)
    environment = {**os.environ, **CLEAN, "CC": str(compiler), "MAX_JOBS": str(jobs)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "o"]
    run(*command, cwd=source, env=environment)
    running = list(itertools.accumulate(int(step) for step in log.read_text().split()))
    assert max(running) == jobs


def test_kernels_are_compiled_with_the_headers_they_include():
    """NVRTC knows no folder, so a text can include only the files that kernel_table.c lists. nvcc would also find other
    files."""
    table = (ROOT / "csrc/plan/kernel_table.c").read_text(encoding="utf-8").replace("\\\n", " ")
    lists = dict(re.findall(r"#define (\w+_FILES)\s+(.*)", table))
    families = re.findall(r"\.files = FILES\((.*?)\)", table, re.DOTALL)
    assert len(families) >= 10
    for family in families:
        while macro := re.search(r"\b\w+_FILES\b", family):
            family = family.replace(macro[0], lists[macro[0]])
        files = re.findall(r'"([^"]+)"', family)
        for file in files:
            included = re.findall(r'^#include "([^"]+)"', (ROOT / "csrc/cuda" / file).read_text("utf-8"), re.MULTILINE)
            # Kernels with mods alone read these; kernel_source.c adds the last one, the text of a call's mods.
            of_mods = {"flex.cuh", "attn_bwd_captures.cuh", "flex_mods.cuh"}
            assert set(included) <= set(files) | of_mods, (files[0], file)
