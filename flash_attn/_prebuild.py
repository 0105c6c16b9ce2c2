"""Compiles GPU kernels before their first use, and says where they are kept."""

from pathlib import Path

from flash_attn._ops import flash_attn_2_cuda
from flash_attn._variants import choose


def kernel_root():
    """Returns the folder that keeps compiled GPU kernels, as a ``pathlib.Path``.

    It is ``FLASH_ATTN_CACHE_DIR``, or ``flash_attn`` in the user's cache folder. The first compiled kernel makes it.
    ``python -m flash_attn.build --list`` lists its kernels.

    Raises:
        RuntimeError: there is no home folder, so compiled kernels are not kept.
    """
    folder = flash_attn_2_cuda.cuda_kernel_folder()
    if folder is None:
        raise RuntimeError("flash_attn: there is no home folder to keep compiled kernels in; set FLASH_ATTN_CACHE_DIR")
    return Path(folder)


def kept_kernels():
    """Returns [(name, bytes)] of the compiled kernels in kernel_root(), sorted by name.

    A kernel with the mods of a user has the hash of its mods at the end of its name. A kernel that several releases of
    NVRTC or versions of flash-attn have compiled comes several times.
    """
    files = [file for file in kernel_root().glob("*.cubin") if file.is_file()]
    return sorted((file.name.split("-")[0], file.stat().st_size) for file in files)


def prebuild(archs=("sm_90a",), all_features=False, progress=None):
    """Compiles the kernels that the disk cache lacks.

    Args:
        archs: any of ``"sm_80"``, ``"sm_86"``, ``"sm_89"``, ``"sm_90a"``, ``"sm_100"``, ``"sm_103"``, ``"sm_120"``,
            ``"sm_121"``.
        all_features: also compile kernels for windows, softcap, ALiBi and dropout. For sm_90a also compile the generic
            kernels, which serve the calls that Hopper's own kernels do not take.
        progress: called after each kernel with (number done, number in all, name, whether it was compiled).
    Returns:
        The names of the kernels that were compiled.
    Raises:
        RuntimeError: there is no NVRTC, a kernel does not compile, or the kernel cannot be kept.
    """
    kernels = choose(flash_attn_2_cuda.cuda_kernels(), archs, all_features)
    compiled = []
    for done, (name, *variant) in enumerate(kernels, 1):
        is_new = flash_attn_2_cuda.build_cuda_kernel(*variant)
        if is_new:
            compiled.append(name)
        if progress:
            progress(done, len(kernels), name, is_new)
    return compiled
