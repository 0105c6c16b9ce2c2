"""What comes before the one forward: nested tensors, autocast, and errors in the names of the caller.

A public function comes here if the short way of a plain eager call did not serve it.
"""

import functools

import torch
from torch.compiler import is_compiling

from flash_attn import _attention, _cache
from flash_attn._arguments import NAMES, check_given, has_distributed, maybe_contiguous, split
from flash_attn._autocast import follow_autocast
from flash_attn._dispatch import is_unseen
from flash_attn._kinds import check_kinds, in_names_of_the_caller
from flash_attn._nested import has_nested, take_apart
from flash_attn._ops import check_storage
from flash_attn._ops import flash_attn_2_cuda as _direct

# ---- errors --------------------------------------------------------------------------------------------------------

_LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
_OPTIONS = (
    "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
    "return_attn_probs", "block_table", "attn_bias", "attn_mask", "sinks", "return_lse", "return_max_logits",
)  # fmt: skip


def _named(tensors, lengths, options):
    """The arguments of a call by the names that the caller knows. Nested q, k and v are checked elsewhere."""
    found = {} if not lengths and has_nested(tensors) else dict(zip(NAMES[len(tensors)], tensors))
    length_names = ("cu_seqlens", "cu_seqlens", "max_seqlen", "max_seqlen") if len(tensors) == 1 else _LENGTHS
    return {**found, **dict(zip(length_names, lengths)), **dict(zip(_OPTIONS, options))}


_RENAMED = {
    1: {
        "q": "qkv", "k": "qkv", "v": "qkv", "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens",
        "max_seqlen_q": "max_seqlen", "max_seqlen_k": "max_seqlen",
    },
    2: {"k": "kv", "v": "kv"},
}  # fmt: skip


def _raise(error, tensors, lengths, options):
    """Raises what is wrong, in the names of the caller."""
    check_kinds(_named(tensors, lengths, options))
    if len(tensors) < 3 and not has_distributed(tensors):
        check_storage(NAMES[len(tensors)][-1], tensors[-1])  # the op would tell the shape of a part
    names = _RENAMED.get(len(tensors))
    raise error if names is None else in_names_of_the_caller(error, names)


_is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

# ---- calls ---------------------------------------------------------------------------------------------------------


def _first(results):
    return results[0] if isinstance(results, tuple) else results


def _with_first(results, first):
    return (first, *results[1:]) if isinstance(results, tuple) else first


def on_ranks(function, tensors, lengths, options):
    """Returns ``function(tensors, lengths, *options)`` of plain or of distributed tensors."""
    if not has_distributed((*tensors, *options)):
        return function(tensors, lengths, *options)
    from flash_attn import _distributed  # imports torch.distributed.tensor, which a plain call does not need

    return _distributed.attend(function, _OPTIONS, tensors, lengths, options)


def _prepared(function, tensors, lengths, options):
    """Returns ``function(tensors, lengths, *options)`` of plain tensors in the dtype that autocast asks for."""
    if has_distributed((*tensors, *options)):

        def on_rank(tensors, lengths, *options):
            return _prepared(function, tensors, lengths, options)

        return on_ranks(on_rank, tensors, lengths, options)
    if lengths or not has_nested(tensors):
        if is_compiling() or _is_any_autocast_enabled():
            tensors = follow_autocast(NAMES[len(tensors)], tensors)
        return function(tensors, lengths, *options)
    values, lengths, together = take_apart(tensors)
    results = _prepared(function, values, lengths, options)
    return _with_first(results, together(_first(results)))


def _call(function, tensors, lengths, options, flags):
    if is_compiling():
        return _prepared(function, tensors, lengths, options)
    try:
        for flag in flags:  # torch's parser takes any number for a flag, and no op reads some of them
            if flag is not True and flag is not False:
                check_kinds(_named(tensors, lengths, options))
        return _prepared(function, tensors, lengths, options)
    except Exception as error:
        failure = error
    _raise(failure, tensors, lengths, options)


def _attend_parts(tensors, lengths, options):
    """``attend`` of tensors in one, on the short way of q, k and v, or None.

    Not if autograd would record the call: then the gradient has to come in one piece.
    """
    if not is_unseen() or (torch.is_grad_enabled() and any(getattr(x, "requires_grad", True) for x in tensors)):
        return None
    parts = _in_one(tensors, len(lengths) > 0)
    if parts is None:
        return None
    if not lengths:
        return _direct.direct_attention(*parts, *options)
    no_table = (None,) if len(options) == 8 else ()
    return _direct.direct_varlen_attention(*parts, *lengths, *options, *no_table)


def attend(tensors, lengths, *options):
    """Computes a public function. ``tensors`` is (q, k, v), (q, kv) or (qkv,); ``lengths`` is () or has four values."""
    if len(tensors) < 3:
        out = _attend_parts(tensors, lengths, options)
        if out is not None:
            return out
    return _call(_attention.attend, tensors, lengths, options, (options[2], *options[6:8]))


@functools.cache
def _short_way():
    from flash_attn._extended_directly import attend  # imports flex_attention of torch

    return attend


def _extended(tensors, lengths, *options):
    from flash_attn._extended import attend  # imports flex_attention of torch, which a plain call does not need

    check_given(tensors, len(lengths) > 0)
    parts = split(tensors)
    if not is_compiling():  # autocast, nested and distributed tensors are plain ones by now
        parts = [maybe_contiguous(x) for x in parts]
        results = _short_way()(*parts, lengths, *options)
        if results is not None:
            return results
    return attend(*parts, lengths, *options)


def _in_one(tensors, varlen):
    """q, k and v as C takes them: k and v are None if they lie in the tensor before. None: C does not take them."""
    if len(tensors) == 3:
        return tensors
    packed = tensors[-1]
    if type(packed) is not torch.Tensor or packed.is_nested or packed.dim() != 5 - varlen:
        return None
    return (packed, None, None) if len(tensors) == 1 else (*tensors, None)


def _parts(tensors, varlen):
    """q, k and v of plain tensors, or None. The tensors may be anything.

    ``unbind`` is one operation with one gradient, and ``split`` several.
    """
    if len(tensors) == 3:
        return tensors
    *given, packed = tensors
    if type(packed) is not torch.Tensor or packed.is_nested:
        return None
    if packed.dim() != 5 - varlen or packed.shape[-3] != 3 - len(given):
        return None
    try:
        return *given, *packed.unbind(-3)
    except RuntimeError:  # the storage is too small, which the long way says in the caller's words
        return None


def attend_extended(tensors, lengths, *options):
    """Computes a call with options that upstream does not have."""
    if not is_compiling():
        for find in (_in_one, _parts) if len(tensors) < 3 else (_in_one,):
            parts = find(tensors, len(lengths) > 0)
            results = None if parts is None else _short_way()(*parts, lengths, *options)
            if results is not None:
                return results
    return _call(_extended, tensors, lengths, options, (options[2], *options[6:8], *options[12:]))


_CACHE_NAMES = (
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
    "alibi_slopes", "num_splits", "return_softmax_lse",
)  # fmt: skip


def attend_with_cache(*arguments, sinks=None):
    """Returns ``(out, softmax_lse)`` of ``flash_attn_with_kvcache``. The arguments are those of ``_CACHE_NAMES``.

    Only distributed tensors come with sinks.
    """
    if has_distributed((*arguments, sinks)):
        from flash_attn import _distributed

        return _distributed.attend_with_cache((*_CACHE_NAMES[:-1], "sinks"), (*arguments[:-1], sinks))
    if is_compiling():
        return _cache.attend_with_cache(*arguments[:-1])

    def named():
        return dict(zip(_CACHE_NAMES, arguments)), ("k", "v")

    try:
        for flag in (arguments[12], arguments[15], arguments[18]):
            if flag is not True and flag is not False:
                check_kinds(*named())
        if type(arguments[17]) is not int or isinstance(arguments[7], bool):  # the parser makes integers of them, too
            check_kinds(*named())
        return _cache.attend_with_cache(*arguments[:-1])
    except Exception as error:
        failure = error
    check_kinds(*named())
    raise failure
