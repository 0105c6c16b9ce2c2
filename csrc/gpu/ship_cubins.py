"""Compiles GPU kernels while building, so that a wheel carries them: part of setup.py.

FLASH_ATTN_CUDA_ARCHS lists architectures as upstream's does, "80;90". The kernels that most calls need go to
flash_attn/cubins, one file each, named by the hash of source and options that the runtime looks for: a file whose
source has changed is never met. manifest.json lists them. NVRTC compiles, the same as at run time: that of
FLASH_ATTN_NVRTC, the system, or the CUDA toolkit. Without it, or without the variable, a wheel is complete too: its
kernels are compiled when they are first used.
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


def _load(name, path):
    """The module without its initialisation where it has a second phase, as extensions do: no torch is needed."""
    return importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))


def wanted_archs(environment):
    """["sm_80", "sm_90a"] for "80;90"; [] where nothing is to be compiled."""
    if environment.get("FLASH_ATTENTION_SKIP_CUDA_BUILD", "").upper() == "TRUE":
        return []
    numbers = re.split(r"[;,\s]+", environment.get("FLASH_ATTN_CUDA_ARCHS", "").strip())
    return ["sm_90a" if number.rstrip("a") == "90" else f"sm_{number}" for number in numbers if number]


def toolkit():
    """The CUDA toolkit of the nvcc on PATH, or None."""
    nvcc = shutil.which("nvcc")
    return nvcc and Path(nvcc).resolve().parents[1]


def ship(extension, archs, jobs, say=print):
    """Compiles the common kernels of archs into flash_attn/cubins beside the extension; an empty list only clears it.

    Args:
        extension: path of the built module flash_attn_2_cuda.
        archs: of flash_attn/_variants.py.
        jobs: compilers that run at once.
        say: told what happened, if anything.
    Returns:
        The manifest, [] if nothing was compiled.
    """
    folder = Path(extension).resolve().parent / "flash_attn" / "cubins"
    shutil.rmtree(folder, ignore_errors=True)
    if not archs:
        return []
    variants = _load("flash_attn_variants", ROOT / "flash_attn" / "_variants.py")
    variants.__spec__.loader.exec_module(variants)
    module = _load("flash_attn_2_cuda", extension)
    kernels = variants.choose(module.cuda_kernels(), archs)
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
            "flash_attn: there is no NVRTC here, so the wheel carries no compiled GPU kernels; they are compiled at use"
        )
        return []
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    manifest = []
    for path in sorted(folder.glob("*.cubin")):
        name, key, _compiler = path.stem.rsplit("-", 2)  # a wheel is made with one compiler
        path = path.rename(path.with_name(f"{name}-{key}.cubin"))
        content = path.read_bytes()
        manifest.append(
            {"name": name, "key": key, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        )
    (folder / "manifest.json").write_text(json.dumps({"archs": archs, "kernels": manifest}, indent=1) + "\n")
    say(f"flash_attn: {len(manifest)} GPU kernels for {', '.join(archs)} compiled into {folder}")
    return manifest
