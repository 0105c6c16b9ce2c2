"""What programs of mods are measured with: torch itself, over broadcast index grids."""

import flash_attn_2_cuda
import torch

from flash_attn.flex import tracer


def grids(b, h, len_q, len_kv, first_q=0, first_kv=0):
    """Index tensors of shapes that broadcast to ``[b, h, len_q, len_kv]``."""
    ranges = (range(b), range(h), range(first_q, first_q + len_q), range(first_kv, first_kv + len_kv))
    return [torch.tensor(list(r)).view([-1 if j == i else 1 for j in range(4)]) for i, r in enumerate(ranges)]


def expected(mod, shape, first_q=0, first_kv=0):
    """A mod that works on whole grids, evaluated by torch."""
    result = torch.as_tensor(mod(*grids(*shape, first_q, first_kv)))
    return result.expand(shape)


def vmapped(mod, shape):
    """A mod evaluated by torch, one element at a time."""
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mod, *shape, device="cpu")


def evaluated(mod, shape, scores=None, first_q=0, first_kv=0):
    """A mod evaluated by its program."""
    program, tensors, numbers = tracer.program_of(mod, None if scores is None else scores.dtype)
    dtype = getattr(torch, flash_attn_2_cuda.flex_check(program.text))
    out = torch.empty(shape, dtype=dtype)
    flash_attn_2_cuda.flex_evaluate(program.text, tensors, numbers, out, scores, first_q, first_kv)
    return out.to(program.dtype)
