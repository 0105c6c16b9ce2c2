"""Which GPU kernels an architecture needs ahead of the first call. Imports nothing: setup.py reads it without torch."""

import re

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")


def number_of(arch):
    """90 of ``"sm_90a"``."""
    return int(re.fullmatch(r"sm_(\d+)a?", arch)[1])


def _is_common(name, own, number):
    """Of Hopper's own kernels those without options; the generic ones where there are no others."""
    return not re.search(r"_(local|score|dropout|paged)", name) if own else number != 90


def choose(kernels, archs, all_features=False):
    """[(name, family, row, features, number of the architecture)] out of flash_attn_2_cuda.cuda_kernels()."""
    unknown = set(archs) - set(ARCHS)
    if unknown:
        raise ValueError(f"there are kernels for {', '.join(ARCHS)}, not for {', '.join(sorted(unknown))}")
    return [
        (name, family, row, features, number)
        for name, family, row, features, own in kernels
        for number in map(number_of, archs)
        if own in (0, number) and (all_features or _is_common(name, own, number))
    ]
