"""Which GPU kernels there are to compile ahead, and the loop that does it."""

import re

from flash_attn._ops import flash_attn_2_cuda

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")
_COMMON = re.compile(r"attn_fwd_\w+?_d\d+_q\d+kv\d+(_causal)?(_varlen)?")


def _is_common(name, own, number):
    """Of Hopper's own kernels those without options; the generic ones where there are no others."""
    return bool(_COMMON.fullmatch(name)) if own else number != 90


def prebuild(archs=("sm_90a",), all_features=False, progress=None):
    """Compiles the kernels that the disk cache lacks.

    Args:
        archs: of ``"sm_80"``, ``"sm_86"``, ``"sm_89"``, ``"sm_90a"``, ``"sm_100"``, ``"sm_103"``, ``"sm_120"``,
            ``"sm_121"``.
        all_features: also kernels for windows, softcap, ALiBi and dropout, and for sm_90a the generic ones, which serve
            what Hopper's own do not.
        progress: called after each kernel with (number done, number in all, name, whether it was compiled).
    Returns:
        The names of the kernels that were compiled.
    Raises:
        RuntimeError: no NVRTC, a kernel that does not compile, or nowhere to keep it.
    """
    unknown = set(archs) - set(ARCHS)
    if unknown:
        raise ValueError(f"there are kernels for {', '.join(ARCHS)}, not for {', '.join(sorted(unknown))}")
    numbers = {int(arch.removeprefix("sm_").rstrip("a")): arch for arch in archs}
    kernels = [
        (name, family, row, features, number)
        for name, family, row, features, own in flash_attn_2_cuda.cuda_kernels()
        for number in numbers
        if own in (0, number) and (all_features or _is_common(name, own, number))
    ]
    compiled = []
    for done, (name, *variant) in enumerate(kernels, 1):
        is_new = flash_attn_2_cuda.build_cuda_kernel(*variant)
        if is_new:
            compiled.append(name)
        if progress:
            progress(done, len(kernels), name, is_new)
    return compiled
