"""Chooses the GPU kernels to compile before the first call. This file imports nothing: setup.py has no torch."""

import re

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")


def number_of(arch):
    """Returns 90 for ``"sm_90a"``."""
    return int(re.fullmatch(r"sm_(\d+)a?", arch)[1])


def _is_common(name, own, number, generation):
    """Is the kernel common? On Hopper its own kernels without options are. Over caches those of causal prompts are, but
    not those that load single keys, and the kernel that combines parts of keys. Elsewhere the generic kernels are, and
    those before Hopper without options and caches.
    Left out is what only the other package calls: flash_attn (generation 2) or flash_attn_3."""
    if number == 90 and re.fullmatch("combine_(bf16|fp16)", name):
        return True
    of_3 = re.search(r"^quantize|^combine|_e4m3_|_of3$", name)
    # flash_attn_3's generic forward always has its additions (the lse of a row without keys), its backward rarely.
    not_of_3 = r"^(flex|sinks|bias_shift|max_logits)|_flex$|^attn_probs|^attn_fwd_any(?!.*_of3$)|^kvcache(?!.*_of3$)"
    not_of_3 += r"|^attn_(bwd|delta)_any.*_of3$"
    if of_3 if generation == 2 else re.search(not_of_3, name):
        return False
    if (own or "_sm80_" in name) and re.search(r"_(local|score|alibi|dropout)", name):
        return False
    # Dense calls of few work tiles read their keys as a cache.
    of_few_tiles = generation == 2 and re.fullmatch(r"attn_fwd_sm90_\w+_d\d+_q\d+kv\d+_cache", name)
    # A wheel of flash_attn_3 has no room for caches of 64 columns whose values have 256.
    of_prompts = "_causal" in name and not re.search(r"_d\d+v" if generation == 2 else r"_d64v256", name)
    if "_cache" in name and not (of_few_tiles or of_prompts):
        return False
    if "_single" in name:
        return False
    # Short pages of 192 columns are rare. A wheel has no room for tiles of few queries of 256 columns, and that of
    # flash_attn_3 for 128 columns alone.
    if "_whole" in name and not re.search(r"_d128_" if generation == 3 else r"_d(128_|256_q128)", name):
        return False
    # A wheel has no room for packed sequences of rarer head dimensions, and of few tokens at the wider ones.
    packed = r"_sm90_\w+_(d(48|112|160)_|d(128|192|256)_q64|d128_q128kv64)\w*_varlen"
    if own and (re.search(packed, name) or re.search(r"_sm90_\w+_d128_q64kv64(_causal)?$", name)):
        return False
    # A wheel has no room for the kernels of short sequences.
    if "_short_" in name:
        return False
    # A wheel of flash_attn_3 has no room for tiles of rarer head dimensions.
    rare = r"^attn_(fwd|bwd)_sm90_\w+_d(32|48|112|160)_|^attn_\w+_sm80_\w+_d(32|48|80|112|160)_"
    if generation == 3 and re.search(rare, name):
        return False
    if own:
        return True
    return number != 90 or (generation == 3 and bool(re.search(r"^quantize|^combine", name)))


def numbers_of(archs):
    """Returns [90] for ``["sm_90a"]``, and for one name. "sm_90" is another name of "sm_90a"."""
    archs = ["sm_90a" if arch == "sm_90" else arch for arch in ([archs] if isinstance(archs, str) else archs)]
    unknown = set(archs) - set(ARCHS)
    if unknown:
        raise ValueError(f"there are kernels for {', '.join(ARCHS)}, not for {', '.join(sorted(unknown))}")
    return list(dict.fromkeys(map(number_of, archs)))


def choose(extension, archs, all_features=False, generation=2):
    """Returns [(name, family, row, features, architecture's number)] of an extension's kernels for these GPUs."""
    numbers = numbers_of(archs)
    return [
        (name, family, row, features, number)
        for name, family, row, features, own in extension.cuda_kernels()
        for number in numbers
        if own in (0, number)
        and (all_features or _is_common(name, own, number, generation))
        and extension.cuda_kernel_is_taken(family, row, features, number)
    ]
