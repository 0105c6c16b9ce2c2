"""Chooses the GPU kernels to compile before the first call. This file imports nothing: setup.py has no torch."""

import re

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")


def number_of(arch):
    """Returns 90 for ``"sm_90a"``."""
    return int(re.fullmatch(r"sm_(\d+)a?", arch)[1])


def _is_common(name, own, number):
    """Is the kernel common? On Hopper its own kernels without options are, elsewhere the generic kernels. What only
    flash_attn_3 calls is not."""
    if re.search(r"^quantize|^combine|_e4m3_|_of3$", name):
        return False
    if own:
        return not re.search(r"_(local|score|dropout|paged)", name)
    return number != 90


def numbers_of(archs):
    """Returns [90] for ``["sm_90a"]``, and for one name. "sm_90" is another name of "sm_90a"."""
    archs = ["sm_90a" if arch == "sm_90" else arch for arch in ([archs] if isinstance(archs, str) else archs)]
    unknown = set(archs) - set(ARCHS)
    if unknown:
        raise ValueError(f"there are kernels for {', '.join(ARCHS)}, not for {', '.join(sorted(unknown))}")
    return list(dict.fromkeys(map(number_of, archs)))


def choose(kernels, archs, all_features=False):
    """Returns [(name, family, row, features, architecture's number)], chosen from flash_attn_2_cuda.cuda_kernels()."""
    numbers = numbers_of(archs)
    return [
        (name, family, row, features, number)
        for name, family, row, features, own in kernels
        for number in numbers
        if own in (0, number) and (all_features or _is_common(name, own, number))
    ]
