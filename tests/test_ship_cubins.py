"""Compiled GPU kernels inside a wheel. The environment chooses them, they are found by name and key, and none is
required."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import flash_attn_2_cuda
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = Path(flash_attn_2_cuda.__file__)

pytestmark = pytest.mark.skipif(not (ROOT / "csrc" / "gpu" / "ship_cubins.py").exists(), reason="not a source tree")

# Ships two small kernels beside a copy of the extension, in a process that has no torch, and prints the manifest.
PROGRAM = """
import json, sys
sys.path.insert(0, {root!r})
import ship_cubins
archs = sys.argv[2:]
load = ship_cubins._load

def few(name, path):
    module = load(name, path)
    if name == "flash_attn_variants":
        run = module.__spec__.loader.exec_module

        def exec_module(variants):
            run(variants)
            choose = variants.choose
            variants.choose = lambda *args: [k for k in choose(*args) if k[0].startswith("kvcache_")][:2]

        module.__spec__.loader.exec_module = exec_module
    return module

ship_cubins._load = few
manifest = ship_cubins.ship(sys.argv[1], archs, 2, say=lambda text: print(text, file=sys.stderr))
assert "torch" not in sys.modules
print(json.dumps(manifest))
"""


@pytest.fixture
def built(tmp_path):
    """A folder like that of a build: the extension, and the kernels' texts beside it."""
    shutil.copy(EXTENSION, tmp_path)
    shutil.copytree(ROOT / "csrc" / "cuda", tmp_path / "flash_attn" / "cuda")
    return tmp_path


def ship(built, *archs, **environment):
    environment = {**os.environ, **environment}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-c", PROGRAM.format(root=str(ROOT / "csrc" / "gpu")), built / EXTENSION.name, *archs]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("environment", "archs"),
    [
        ({}, []),
        ({"FLASH_ATTN_CUDA_ARCHS": ""}, []),
        ({"FLASH_ATTN_CUDA_ARCHS": "80;90"}, ["sm_80", "sm_90a"]),
        ({"FLASH_ATTN_CUDA_ARCHS": "90a, 120"}, ["sm_90a", "sm_120"]),
        ({"FLASH_ATTN_CUDA_ARCHS": "90", "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}, []),
    ],
    ids=str,
)
def test_the_environment_chooses(environment, archs, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "csrc" / "gpu"))
    import ship_cubins

    assert ship_cubins.wanted_archs(environment) == archs


def test_a_misspelt_architecture_ends_the_build(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "csrc" / "gpu"))
    import ship_cubins

    with pytest.raises(SystemExit, match="^FLASH_ATTN_CUDA_ARCHS is '90;bogus'; allowed are 80, 86, .*90, .*120"):
        ship_cubins.wanted_archs({"FLASH_ATTN_CUDA_ARCHS": "90;bogus"})


def test_nothing_is_compiled_unless_asked_for(built):
    (built / "flash_attn" / "cubins").mkdir()
    (built / "flash_attn" / "cubins" / "old-0.cubin").write_text("of an earlier build")
    assert ship(built) == ([], "")
    assert not (built / "flash_attn" / "cubins").exists()


def test_without_a_compiler_the_build_goes_on(built, tmp_path):
    manifest, said = ship(built, "sm_80", FLASH_ATTN_NVRTC=str(tmp_path / "none.so"), CUDA_HOME=str(tmp_path))
    if manifest:
        pytest.skip("the system has an NVRTC")
    assert said.startswith("flash_attn: there is no NVRTC here") and said.count("\n") == 1
    assert not (built / "flash_attn" / "cubins").exists()


def test_an_unknown_architecture_is_an_error(built):
    with pytest.raises(AssertionError, match="there are kernels for sm_80, .*, not for sm_42"):
        ship(built, "sm_42")


def test_one_cubin_serves_86_and_89_and_later_builds(built, tmp_path):
    kept = tmp_path / "kept"
    manifest, said = ship(built, "sm_86", "sm_89", FLASH_ATTN_BUILD_CACHE=str(kept))
    if not manifest:
        pytest.skip("no NVRTC")
    assert len(manifest) == len(list(kept.glob("*.cubin"))) == 1 and "sm_86, sm_89" in said  # of two kernels
    times = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert ship(built, "sm_86", "sm_89", FLASH_ATTN_BUILD_CACHE=str(kept))[0] == manifest
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == times
    path = min(times)
    path.with_name(path.name.replace(path.stem[-8:], "01234567")).write_text("of another compiler")
    with pytest.raises(AssertionError, match="several releases of NVRTC: empty it"):
        ship(built, "sm_86", FLASH_ATTN_BUILD_CACHE=str(kept))


@pytest.mark.skipif(sys.platform == "win32", reason="folders have other rights there")
def test_a_folder_of_kept_kernels_that_others_may_write_to(built, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    kept.chmod(0o777)
    try:
        manifest, _ = ship(built, "sm_80", FLASH_ATTN_BUILD_CACHE=str(kept))
    except AssertionError as error:
        assert f"FLASH_ATTN_BUILD_CACHE must be a folder that you and nobody else can write to; it is {kept}" in str(
            error
        )
    else:
        assert not manifest
        pytest.skip("no NVRTC")


def test_a_relative_folder_of_kept_kernels_is_that_of_the_caller(monkeypatch, tmp_path):
    """wheels.py builds from a copy of the sources, which it removes."""
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    monkeypatch.chdir(tmp_path)
    import wheels

    assert wheels.environment("80", "kept")["FLASH_ATTN_BUILD_CACHE"] == str(tmp_path / "kept")


def test_only_quantize_is_compiled_for_89():
    names = {}
    for name, family, row, features, own in flash_attn_2_cuda.cuda_kernels():
        if own == 0 and not name.endswith("_flex"):
            keys = [flash_attn_2_cuda.cuda_kernel_key(family, row, features, arch) for arch in (80, 86, 89)]
            names.setdefault(len(set(keys)), set()).add(name.partition("_")[0])
    assert names.keys() == {2, 3} and names[3] == {"quantize"} and "quantize" not in names[2]


def test_what_is_shipped_is_found(built):
    manifest, said = ship(built, "sm_80")
    if not manifest:
        pytest.skip("no NVRTC")
    folder = built / "flash_attn" / "cubins"
    listed = json.loads((folder / "manifest.json").read_text())
    assert listed == {"archs": ["sm_80"], "kernels": manifest} and "2 GPU kernels for sm_80" in said
    for entry in manifest:
        content = (folder / f"{entry['name']}-{entry['key']}.cubin").read_bytes()
        assert len(content) == entry["bytes"] and hashlib.sha256(content).hexdigest() == entry["sha256"]
    # The runtime takes shipped kernels instead of compiling, but not after the source has changed.
    program = """
import importlib.util, sys
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("flash_attn_2_cuda", sys.argv[1]))
kernels = [k for k in module.cuda_kernels() if k[0].startswith("kvcache_")][:2]
print([module.build_cuda_kernel(*k[1:4], 80) for k in kernels])
"""
    environment = {**os.environ, "FLASH_ATTN_CACHE_DIR": str(built / "cache")}
    command = [sys.executable, "-c", program, built / EXTENSION.name]
    assert subprocess.check_output(command, text=True, env=environment) == "[False, False]\n"
    with open(built / "flash_attn" / "cuda" / "kvcache.cu", "a") as source:
        source.write("/* changed */\n")
    assert subprocess.check_output(command, text=True, env=environment) == "[True, True]\n"
