"""``torch.vmap`` over the ops themselves, whose results are new tensors: one call, as of the public functions.

Ops that write into their arguments are refused, because their outputs need not lie so that their batches join.
"""

import torch

from flash_attn import _vmap
from flash_attn._arguments import fold, unfold
from flash_attn._ops import OPS, forget_own_kernels

_FORWARDS = "_flash_attn_forward", "_flash_attn_varlen_forward"
_MASK = "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap"
_LENGTHS = "cu_seqlens_q", "cu_seqlens_k"
_MAX_LENGTHS = "max_seqlen_q", "max_seqlen_k"
_TENSORS = "q", "k", "v", *_LENGTHS, "alibi_slopes", "block_table"


def _rule_of_forward(op):
    arguments = op._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def rule(info, in_dims, *args, **kwargs):
        given = {**defaults, **dict(zip(names, args)), **kwargs}
        dims = dict(zip(names, in_dims))
        if given.get("leftpad_k") is not None or given.get("seqused_k") is not None:
            values, places = [given[name] for name in names], [dims.get(name) for name in names]
            device = given["q"].device if info.randomness == "same" else None
            return _vmap.one_by_one(op, info, places, values, device)

        def apply(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table, max_q, max_k, dropout_p, mask, want):
            now = dict(zip(_TENSORS, (q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table)))
            now.update(zip(_MAX_LENGTHS, (max_q, max_k)), dropout_p=dropout_p, return_softmax=want)
            now.update(zip(_MASK, unfold(mask)))
            return op(*[now.get(name, given[name]) for name in names])

        mask = fold([given[name] for name in _MASK])
        values = *map(given.get, _TENSORS), *map(given.get, _MAX_LENGTHS), given["dropout_p"], mask
        places = *map(dims.get, _TENSORS), *[None] * 5
        return _vmap.attention(apply, info, places, (*values, given["return_softmax"]))

    return rule


def _refusal_of(name):
    def rule(info, in_dims, *args, **kwargs):
        raise NotImplementedError(
            f"torch.vmap takes no op that writes into its arguments, such as flash_attn::{name}: map over the public "
            "functions of flash_attn, such as flash_attn_func"
        )

    return rule


def register():
    if not hasattr(torch.library, "register_vmap"):  # torch 2.4
        return
    for name in OPS:
        op = getattr(torch.ops.flash_attn, name).default
        rule = _rule_of_forward(op) if name in _FORWARDS else _refusal_of(name)
        torch.library.register_vmap(f"flash_attn::{name}", rule)
    forget_own_kernels(keys=("FuncTorchBatched",))
