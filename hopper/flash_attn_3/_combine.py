"""``flash_attn_combine``."""

import torch

from flash_attn_3._arguments import call_op
from flash_attn_3._ops import ops


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Combines partial results over different keys of the same queries into the result over all keys.

        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) out_i

    Args:
        out_partial: fp32 ``[n, b, len, h, d]``, last dimension contiguous; n is at most 256.
        lse_partial: fp32 ``[n, b, len, h]`` with rows (the dimension of len) side by side in memory. A part whose lse
            is infinite, of either sign, saw no key and counts for nothing.
        out: ``[b, len, h, d]`` to write; None: a new tensor.
        out_dtype: fp32 (the default), fp16 or bf16.
    Returns:
        ``(out, lse)``: lse is fp32 ``[b, len, h]``, a transposed view of memory ``[b, h, len]``. If every part has an
        infinite lse, out is 0 and lse is -inf. A NaN in lse_partial makes the row NaN.
    Raises:
        RuntimeError: the message names the argument that does not fit, what came and what is allowed.
    There are no gradients.
    """
    if out is None:
        return tuple(call_op(ops._combine.default, out_partial, lse_partial, out_dtype))
    if torch.compiler.is_compiling():
        combined, lse = ops._combine.default(out_partial, lse_partial, out_dtype)
        return out.copy_(combined), lse
    return tuple(call_op(ops.fwd_combine.default, out_partial, lse_partial, out, out_dtype))
