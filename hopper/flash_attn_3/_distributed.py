"""Distributed tensors (DTensor): the layouts of this package's functions. flash_attn divides the work among the ranks.

The letters name the dimensions: b for the batch, h for the heads of q, g for the heads of k, a point for the rest. If
q or k is packed, there is no batch dimension to divide.
"""

import torch

from flash_attn_3._kvcache import flash_attn_with_kvcache

try:
    from flash_attn._distributed import check_lengths, check_written, layout, run
except ImportError as error:
    raise ImportError(
        "flash_attn_3 takes DTensors with the help of the package flash_attn beside it, which is not installed, or not "
        "from the same source tree: run `pip install .` there"
    ) from error

_PER_BATCH = layout(
    seqused_q="b", seqused_k="b", q_descale="bg", k_descale="bg", v_descale="bg", cache_seqlens="b",
    cache_batch_idx="b", cache_leftpad="b", page_table="b.", rotary_seqlens="b",
)  # fmt: skip
_OPTIONS = (
    "qv", "q_descale", "k_descale", "v_descale", "softmax_scale", "causal", "window_size", "attention_chunk", "softcap",
    "num_splits", "pack_gqa", "sm_margin",
)  # fmt: skip
_INDICES = "cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table"
_LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"


def _without_batch(letters):
    return {name: tuple(["." if letter == "b" else letter for letter in letters[name]]) for name in letters}


def _layout(q_is_packed, k_is_packed, **letters):
    rows, keys = ".h." if q_is_packed else "b.h.", ".g." if k_is_packed else "b.g."
    letters = {**layout(q=rows, qv=rows, k=keys, v=keys, out=rows, lse="h." if q_is_packed else "bh."), **letters}
    letters = {**letters, **_PER_BATCH}
    return _without_batch(letters) if q_is_packed or k_is_packed else letters


def attend(function, tensors, num_heads_q, lengths, options, deterministic, return_lse):
    """Returns ``function`` of these arguments, the one forward of this package."""
    num = len(tensors)
    letters = _layout(
        lengths[0] is not None, lengths[1] is not None, **layout(qkv="b..h." if num_heads_q is None else "b...")
    )

    def call(*values):
        parts, rest = values[:num], values[num:]
        return function(parts, num_heads_q, rest[:6], rest[6:], deterministic, return_lse)

    names = (*(("q", "k", "v") if num == 3 else ("qkv",)), *_LENGTHS, *_OPTIONS)
    return run(call, letters, names, (*tensors, *lengths, *options), (letters["out"], letters["lse"]))


def attend_with_cache(named):
    """Returns ``(out, softmax_lse)`` of ``flash_attn_with_kvcache``, whose arguments come by name."""
    is_packed = named["cu_seqlens_q"] is not None
    is_pooled = named["page_table"] is not None or named["cache_batch_idx"] is not None
    letters = _layout(is_packed, named["cu_seqlens_k_new"] is not None)
    cache = letters["k"] if not is_packed and not is_pooled and named["cu_seqlens_k_new"] is None else tuple("..g.")
    letters = {**letters, "k_cache": cache, "v_cache": cache}
    names, values = tuple(named), tuple(named.values())
    written = ("k_cache", "v_cache") if named["k"] is not None else ()
    check_written(named, written)

    def call(*values):
        return flash_attn_with_kvcache(**dict(zip(names, values)), return_softmax_lse=True)

    with torch.no_grad():
        check_lengths(flash_attn_with_kvcache, named, _INDICES)
        return run(call, letters, names, values, (letters["out"], letters["lse"]), written)


def combine(function, out_partial, lse_partial, out, out_dtype):
    """Returns ``flash_attn_combine`` of these arguments."""
    letters = layout(out_partial=".b.h.", lse_partial=".b.h", out="b.h.")
    names = "out_partial", "lse_partial", "out", "out_dtype"
    results = tuple("b.h."), tuple("b.h")
    values = out_partial, lse_partial, out, out_dtype

    def call(parts, lses, *rest):  # the rows of lses that came from other ranks need not lie side by side
        return function(parts, lses.transpose(-1, -2).contiguous().transpose(-1, -2), *rest)

    found, lse = run(call, letters, names, values, results, leading=names[:3], outputs=("out",))
    return (found if out is None else out), lse
