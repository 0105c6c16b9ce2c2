"""The calls of C for attention and for blocks. If a kernel with mods does not compile, the error names the mods."""

import functools

import flash_attn_2_cuda

from .tracer import place_of_text

MOST_LINES = 200  # of the compiler's log


def _explained(error, mods):
    """The error with what one needs to find its cause: mods, log and text."""
    log, text = flash_attn_2_cuda.compile_failure()
    if text is None or "does not compile" not in str(error):
        return error
    lines = [str(error)]
    lines += [f"{name}: {place_of_text(mod[0])}" for name, mod in mods if mod is not None]
    if log:
        lines += ["The compiler says:", *(f"    {line}" for line in log.splitlines()[:MOST_LINES])]
    lines += ["The text of the mods, flex_mods.cuh:"]
    lines += [f"{number:4}  {line}" for number, line in enumerate(text.rstrip().splitlines(), 1)]
    lines += [
        "flash_attn made this text from the mods, so the fault is in flash_attn, or the sources beside it belong to "
        "another version. Please report this message. kernel_options={'BACKEND': 'TRITON'} calls PyTorch's own kernels."
    ]
    return type(error)("\n".join(lines))


def _with_names(function, **places):
    """The function. ``places``: which of its arguments are mods, ``(text, tensors, numbers)`` or None."""

    @functools.wraps(function)
    def call(*args):
        try:
            return function(*args)
        except RuntimeError as error:
            explained = _explained(error, [(name, args[at]) for name, at in places.items()])
            if explained is error:
                raise
            raise explained from None

    return call


forward = _with_names(flash_attn_2_cuda.flex_forward, score_mod=8, mask_mod=9)
backward = _with_names(flash_attn_2_cuda.flex_backward, score_mod=13, mask_mod=14)
_classify = _with_names(lambda mask, *rest: flash_attn_2_cuda.flex_classify(*mask, *rest), mask_mod=0)


def classify(text, tensors, numbers, *rest):
    return _classify((text, tensors, numbers), *rest)
