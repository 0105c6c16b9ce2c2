"""Compiles GPU kernels while building, so that a wheel carries them. setup.py and hopper/setup.py use this file.

FLASH_ATTN_CUDA_ARCHS lists architectures in upstream's form, "80;90". The kernels that most calls need go to
flash_attn/cubins or flash_attn_3/cubins. Each kernel is one file. The file's name contains the hash of source and
options that the runtime looks for. So a file is never used after its source has changed. manifest.json lists the files.
FLASH_ATTN_BUILD_CACHE names a folder that keeps the compiled kernels, so that the next build compiles only new ones.

NVRTC compiles the kernels, as at run time. FLASH_ATTN_NVRTC, the system or the CUDA toolkit names the library. Without
NVRTC or without the variable, a wheel is complete too. Its kernels are then compiled at first use.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# An sdist of flash_attn_3 has no folder flash_attn. There the file lies here.
VARIANTS = next(
    x for x in (ROOT / "flash_attn" / "_variants.py", Path(__file__).with_name("_variants.py")) if x.exists()
)


def _load(name, path):
    """Loads a module. An extension's second phase of initialisation does not run, so no torch is needed."""
    return importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))


def _variants():
    module = _load("flash_attn_variants", VARIANTS)
    module.__spec__.loader.exec_module(module)
    return module


def wanted_archs(environment):
    """Returns ["sm_80", "sm_90a"] for "80;90", and [] if no kernel is to be compiled. Ends the build for others."""
    if environment.get("FLASH_ATTENTION_SKIP_CUDA_BUILD", "").upper() == "TRUE":
        return []
    given = environment.get("FLASH_ATTN_CUDA_ARCHS", "")
    numbers = [number for number in re.split(r"[;,\s]+", given) if number]
    archs = ["sm_90a" if number.rstrip("a") == "90" else f"sm_{number}" for number in numbers]
    known = _variants().ARCHS if archs else ()
    if not set(archs) <= set(known):
        allowed = ", ".join(arch.removeprefix("sm_").removesuffix("a") for arch in known)
        sys.exit(f"FLASH_ATTN_CUDA_ARCHS is {given!r}; allowed are {allowed}, separated by semicolons")
    return archs


def toolkit():
    """The CUDA toolkit of the nvcc on PATH, or None."""
    nvcc = shutil.which("nvcc")
    return nvcc and Path(nvcc).resolve().parents[1]


def _module_name(extension):
    return Path(extension).name.partition(".")[0]


def ship(extension, archs, jobs, say=print):
    """Compiles the common kernels of archs into flash_attn/cubins beside the extension, or flash_attn_3/cubins.

    Args:
        extension: path of the built module flash_attn_2_cuda or flash_attn_3._C.
        archs: architectures as in flash_attn/_variants.py. An empty list only clears the folder.
        jobs: number of compilers that run at once.
        say: function that is called with a message about the result.
    Returns:
        The manifest, or [] if no kernel was compiled.
    """
    place = "cubins" if _module_name(extension) == "_C" else "flash_attn/cubins"
    folder = Path(extension).resolve().parent / place
    shutil.rmtree(folder, ignore_errors=True)
    if not archs:
        return []
    with tempfile.TemporaryDirectory() as unless_kept:
        cache = Path(os.environ.get("FLASH_ATTN_BUILD_CACHE") or unless_kept).resolve()
        return _ship(extension, archs, jobs, say, folder, cache)


def _ship(extension, archs, jobs, say, folder, cache):
    module_name = _module_name(extension)
    package, generation = ("flash_attn_3", 3) if module_name == "_C" else ("flash_attn", 2)
    module = _load(module_name, extension)
    kernels = _variants().choose(module, archs, False, generation)
    before = {name: os.environ.get(name) for name in ("FLASH_ATTN_CACHE_DIR", "CUDA_HOME")}
    os.environ["FLASH_ATTN_CACHE_DIR"] = str(cache)
    if toolkit() and not before["CUDA_HOME"]:
        os.environ["CUDA_HOME"] = str(toolkit())
    try:
        module.build_cuda_kernel(*kernels[0][1:])
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda kernel: module.build_cuda_kernel(*kernel[1:]), kernels))
    except RuntimeError as error:
        if "could not be stored" in str(error) and os.environ.get("FLASH_ATTN_BUILD_CACHE"):
            raise RuntimeError(
                f"FLASH_ATTN_BUILD_CACHE must be a folder that you and nobody else can write to; it is {cache}"
            ) from error
        if "nvidia-cuda-nvrtc" not in str(error):
            raise
        say(
            f"{package}: there is no NVRTC here, so the wheel carries no compiled GPU kernels; they are compiled at use"
        )
        return []
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    folder.mkdir()
    manifest = {}  # one cubin can serve two architectures
    for name, *kernel in kernels:
        key = f"{module.cuda_kernel_key(*kernel):016x}"
        found = list(cache.glob(f"{name}-{key}-*.cubin"))
        if len(found) != 1:
            raise RuntimeError(f"{cache} (FLASH_ATTN_BUILD_CACHE) has kernels of several releases of NVRTC: empty it")
        content = found[0].read_bytes()
        (folder / f"{name}-{key}.cubin").write_bytes(content)
        manifest[name, key] = {
            "name": name, "key": key, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()
        }  # fmt: skip
    manifest = [manifest[kernel] for kernel in sorted(manifest)]
    (folder / "manifest.json").write_text(json.dumps({"archs": archs, "kernels": manifest}, indent=1) + "\n")
    say(f"{package}: {len(manifest)} GPU kernels for {', '.join(archs)} compiled into {folder}")
    return manifest
