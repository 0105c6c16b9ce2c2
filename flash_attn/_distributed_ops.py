"""The ops of namespace ``flash_attn`` take distributed tensors, too: each rank calls the op on its part.

The functions of this package call the ops on plain tensors (_distributed.py). This file serves direct calls of the ops
and of the private functions, and the gradients of such calls. It is imported with flash_attn if
torch.distributed.tensor has been imported before, or else when the first DTensor comes to a private function.
"""

import torch
from torch.distributed.tensor import DTensor

from flash_attn._distributed import CACHED, DENSE, PACKED, PAGED, POOLED, layout, run
from flash_attn._ops import register_once

_GRADIENTS = "dq", "dk", "dv"
_LEADING = (
    "dout", "q", "k", "v", "k_cache", "v_cache", "out", "softmax_lse", *_GRADIENTS, "out_partial", "lse_partial"
)  # fmt: skip
_SAVED = layout(dout="b.h.", out="b.h.", softmax_lse="bh.", dq="b.h.", dk="b.g.", dv="b.g.")
_PACKED_SAVED = layout(dout=".h.", out=".h.", softmax_lse="h.", dq=".h.", dk=".g.", dv=".g.")
_PER_BATCH = layout(leftpad_k=".", seqused_k=".")  # of packed sequences
_FORWARD, _PACKED_FORWARD = ("b.h.", "bh.", "bh..", "."), (".h.", "h.", ".h..", ".")


def _layout_of(name, given):
    """The letters of the arguments and of the results, the caches that are written, and the outputs."""
    if name == "_combine":
        return layout(out_partial=".b.h.", lse_partial=".b.h"), ("b.h.", "b.h"), (), ()
    if name == "fwd_kvcache":
        is_pooled = given["block_table"] is not None or given["cache_batch_idx"] is not None
        is_pooled = is_pooled or given["k_cache"].shape[0] != given["q"].shape[0]
        written = ("k_cache", "v_cache") if given["k"] is not None else ()
        return {**(POOLED if is_pooled else CACHED), **layout(out="b.h.")}, ("bh.",), written, ("out",)
    if "varlen" in name:
        letters = {**(PACKED if given.get("block_table") is None else PAGED), **_PACKED_SAVED, **_PER_BATCH}
        results = _PACKED_FORWARD
    else:
        letters, results = {**DENSE, **_SAVED}, _FORWARD
    if "backward" in name:
        return letters, results[1:2], (), _GRADIENTS
    return (letters, results[1:], (), ("out",)) if "out" in given else (letters, results, (), ())


def _rule(name, op):
    names = [argument.name for argument in op._schema.arguments]

    def on_ranks(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {**dict(zip(names, args)), **kwargs}
        letters, results, written, outputs = _layout_of(name, given)

        def call(*values):
            return func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :])))

        # Autograd has been here. NOTE: torch 2.11 cannot redistribute here what requires grad.
        values = tuple([x.detach() if isinstance(x, DTensor) else x for x in given.values()])
        with torch.no_grad():
            return run(
                call, letters, tuple(given), values, tuple(map(tuple, results)), written,
                given.get("dropout_p", 0.0) if "backward" not in name else 0.0, _LEADING, outputs,
            )  # fmt: skip

    return on_ranks


def _register():
    for name in (
        "_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward",
        "fwd", "varlen_fwd", "fwd_kvcache", "_combine",
    ):  # fmt: skip
        op = getattr(torch.ops.flash_attn, name).default
        torch.library.register_torch_dispatch(f"flash_attn::{name}", DTensor, _rule(name, op))


register_once("rules for DTensors", _register)
