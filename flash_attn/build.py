"""Compiles GPU kernels before their first use: ``python -m flash_attn.build``.

A kernel is compiled once, in a few seconds, when a call needs it first. The compiled kernel is then kept on disk. An
image or a server that must not wait compiles before. NVRTC, which comes with PyTorch for CUDA, is the compiler. No GPU
is needed.

    python -m flash_attn.build           fp16 and bf16, dense and packed, causal or not, every head dimension
    python -m flash_attn.build --all     windows, softcap, ALiBi and dropout too
    python -m flash_attn.build --call kernels:step
                                         what step() of kernels.py calls, with its score_mods and mask_mods
    python -m flash_attn.build --list    lists the kernels that are kept, and compiles none

The kernels go to FLASH_ATTN_CACHE_DIR, or to ~/.cache/flash_attn.
"""

import argparse
import importlib
import os
import sys

from flash_attn import _variants
from flash_attn._prebuild import kept_kernels, kernel_root, prebuild, prebuild_call


def _bar(done, total, name, _is_new):
    """Shows the progress on one line of a terminal, otherwise on one line for each kernel."""
    if sys.stderr.isatty():
        filled = 30 * done // total
        print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} {name:<70.70}", end="", file=sys.stderr)
        if done == total:
            print(file=sys.stderr)
    else:
        print(f"{done}/{total} {name}", file=sys.stderr)


def _list():
    kernels = kept_kernels()
    for name, num_bytes in kernels:
        print(f"{num_bytes / 1024:8.0f} KiB  {name}")
    print(f"{len(kernels)} kernels in {kernel_root()}")


def _function_of(place):
    """The function that ``module:function`` names. Modules of the working folder are found, too."""
    module, _, name = place.partition(":")
    if not module or not name:
        sys.exit(f"--call takes module:function, not {place!r}")
    sys.path.insert(0, os.getcwd())
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        sys.exit(f"--call {place}: {error}")
    return function


def _build_call(place, archs):
    kernels = prebuild_call(_function_of(place), archs=archs)
    for kernel in kernels:
        print(f"{'compiled' if kernel.is_compiled else 'was there'}  sm_{kernel.arch}  {kernel.name}", file=sys.stderr)
    return [kernel.name for kernel in kernels if kernel.is_compiled]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flash_attn.build", description=__doc__.splitlines()[0])
    names = sorted([*_variants.ARCHS, "sm_90"], key=_variants.number_of)
    parser.add_argument(
        "--arch", nargs="+", choices=names, metavar="ARCH",
        help=f"the GPUs to compile for: {', '.join(names)} (default: sm_90a, which is Hopper; sm_90 is the same)",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="windows, softcap, ALiBi and dropout too")
    what.add_argument(
        "--call",
        nargs="+",
        metavar="MODULE:FUNCTION",
        help="only the kernels that these functions call, with their mods; each makes its tensors on the CPU",
    )
    what.add_argument("--list", action="store_true", help="list the kernels that are kept, and compile none")
    options = parser.parse_args()
    if options.list and options.arch:
        parser.error("--list lists the kernels of all GPUs: leave out --arch")
    archs = options.arch or ["sm_90a"]
    try:
        if options.list:
            return _list()
        if options.call:
            compiled = [name for place in options.call for name in _build_call(place, archs)]
        else:
            compiled = prebuild(archs, options.all, _bar)
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"{len(compiled)} kernels compiled; the others were there")


if __name__ == "__main__":
    main()
