"""Compiles GPU kernels before their first use."""

from flash_attn._ops import flash_attn_2_cuda
from flash_attn._variants import choose


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
