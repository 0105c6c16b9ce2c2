"""The transforms of ``torch.func`` over the ops themselves.

``torch.vmap`` over ops whose results are new tensors is one call, as of the public functions. Ops that write into their
arguments are refused. Their outputs need not lie so that their batches join, and a transform would not see that they
have no derivative: the tangent of a result would be 0.
"""

import torch
from torch.autograd import forward_ad

from flash_attn import _vmap
from flash_attn._arguments import fold, unfold
from flash_attn._ops import OPS, forget_own_kernels, refuse_tangents

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


_KEY = "FuncTorchDynamicLayerFrontMode"  # of calls within a transform. Other calls do not see its kernels


def _below_transforms(x):
    """Returns the tensor that no transform wraps, or None if a transform must know what becomes of ``x``."""
    functorch = torch._C._functorch
    while isinstance(x, torch.Tensor) and functorch.is_functorch_wrapped_tensor(x):
        if forward_ad._current_level >= 0:
            refuse_tangents((x,))
        if not functorch.is_gradtrackingtensor(x) or (x.requires_grad and torch.is_grad_enabled()):
            return None
        x = functorch.get_unwrapped(x)
    return x


def _refusing(name):
    """Returns a kernel that refuses tensors of a transform. Within grad new tensors are of grad, too, such as out."""
    op = getattr(torch.ops.flash_attn, name).default

    def call(*args, **kwargs):
        given = [*args, *kwargs.values()]
        found = [_below_transforms(x) for x in given]
        if any(x is not None and y is None for x, y in zip(given, found)):
            raise NotImplementedError(
                f"torch.func (vmap, grad and the like) takes no op that writes into its arguments, such as "
                f"flash_attn::{name}: transform the public functions of flash_attn, such as flash_attn_func"
            )
        with torch._C._DisableFuncTorch():
            return op(*found[: len(args)], **dict(zip(kwargs, found[len(args) :])))

    return call


def register():
    library = torch.library.Library("flash_attn", "IMPL")
    for name in OPS:
        if name not in _FORWARDS:
            library.impl(name, _refusing(name), _KEY)
        elif hasattr(torch.library, "register_vmap"):  # torch 2.5
            torch.library.register_vmap(
                f"flash_attn::{name}", _rule_of_forward(getattr(torch.ops.flash_attn, name).default)
            )
    torch.ops.flash_attn._library_of_transforms = library  # its kernels disappear with it
    forget_own_kernels(keys=("FuncTorchBatched", _KEY))
