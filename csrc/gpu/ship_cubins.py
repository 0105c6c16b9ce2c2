"""Compiles GPU kernels while building, so that a wheel carries them. setup.py and hopper/setup.py use this file.

FLASH_ATTN_CUDA_ARCHS lists architectures in upstream's form, "80;90". The kernels that most calls need go to
flash_attn/cubins or flash_attn_3/cubins. Each kernel is one file. The file's name contains the hash of source and
options that the runtime looks for. So a file is never used after its source has changed. manifest.json lists the files.

NVRTC compiles the kernels, as at run time. FLASH_ATTN_NVRTC, the system or the CUDA toolkit names the library. Without
NVRTC or without the variable, a wheel is complete too. Its kernels are then compiled at first use.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
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


def wanted_archs(environment):
    """Returns ["sm_80", "sm_90a"] for "80;90", and [] if no kernel is to be compiled."""
    if environment.get("FLASH_ATTENTION_SKIP_CUDA_BUILD", "").upper() == "TRUE":
        return []
    numbers = re.split(r"[;,\s]+", environment.get("FLASH_ATTN_CUDA_ARCHS", "").strip())
    return ["sm_90a" if number.rstrip("a") == "90" else f"sm_{number}" for number in numbers if number]


def toolkit():
    """The CUDA toolkit of the nvcc on PATH, or None."""
    nvcc = shutil.which("nvcc")
    return nvcc and Path(nvcc).resolve().parents[1]


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
    module_name = Path(extension).name.partition(".")[0]
    package, generation = ("flash_attn_3", 3) if module_name == "_C" else ("flash_attn", 2)
    folder = Path(extension).resolve().parent / ("cubins" if generation == 3 else "flash_attn/cubins")
    shutil.rmtree(folder, ignore_errors=True)
    if not archs:
        return []
    variants = _load("flash_attn_variants", VARIANTS)
    variants.__spec__.loader.exec_module(variants)
    module = _load(module_name, extension)
    kernels = variants.choose(module.cuda_kernels(), archs, False, generation)
    before = {name: os.environ.get(name) for name in ("FLASH_ATTN_CACHE_DIR", "CUDA_HOME")}
    os.environ["FLASH_ATTN_CACHE_DIR"] = str(folder)
    if toolkit() and not before["CUDA_HOME"]:
        os.environ["CUDA_HOME"] = str(toolkit())
    try:
        module.build_cuda_kernel(*kernels[0][1:])
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda kernel: module.build_cuda_kernel(*kernel[1:]), kernels))
    except RuntimeError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if "nvidia-cuda-nvrtc" not in str(error):
            raise
        say(
            f"{package}: there is no NVRTC here, so the wheel carries no compiled GPU kernels; they are compiled at use"
        )
        return []
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    manifest = []
    for path in sorted(folder.glob("*.cubin")):
        name, key, _compiler = path.stem.rsplit("-", 2)  # one wheel has kernels of one compiler
        path = path.rename(path.with_name(f"{name}-{key}.cubin"))
        content = path.read_bytes()
        manifest.append(
            {"name": name, "key": key, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        )
    (folder / "manifest.json").write_text(json.dumps({"archs": archs, "kernels": manifest}, indent=1) + "\n")
    say(f"{package}: {len(manifest)} GPU kernels for {', '.join(archs)} compiled into {folder}")
    return manifest
