"""The transforms of ``torch.func`` over a function that autograd records, such as attention with options.

The function runs below all transforms, on plain tensors, and its graph is kept. The backward asks autograd for the
gradients of this graph. So the function needs no rules of its own:

    grad, vjp      one call, as without a transform
    vmap           one call if the rule can join the entries to one batch, or else a call for each entry
    jacrev         one forward, and a backward for each element of the result
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from flash_attn import _vmap
from flash_attn._ops import NO_JVP, NO_SECOND_DERIVATIVE


class Rule(NamedTuple):
    """What a transform knows of a function of tensors, which may be None. The function returns a tuple of tensors."""

    function: Callable
    num_differentiable: int  # the first tensors have gradients
    device: torch.device | None  # where the function draws random numbers
    join: Callable  # join(num, tensors, dims): the tensors of one call for num entries, or None. Results begin with b


class _Kept:
    """The graph of a call: its leaves and results. Or what is kept for the entries of a vmap."""

    leaves = results = entries = None

    def first(self):
        return self if self.entries is None else self.entries[0].first()


def _requires_grad(x):
    """Does a transform, or autograd, want the gradient of a tensor?"""
    while x is not None:
        if x.requires_grad:
            return True
        x = torch._C._functorch.get_unwrapped(x) if torch._C._functorch.is_functorch_wrapped_tensor(x) else None
    return False


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(rule, kept, wanted, *tensors):
        with torch.enable_grad():
            kept.leaves = [None if x is None else x.detach().requires_grad_(want) for x, want in zip(tensors, wanted)]
            kept.results = rule.function(*kept.leaves)
        return tuple(x.detach() for x in kept.results)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rule, ctx.kept, ctx.wanted, *tensors = inputs
        ctx.num = len(output)
        ctx.mark_non_differentiable(*[x for x, y in zip(output, ctx.kept.first().results) if not y.requires_grad])
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx, *douts):
        grads = _Gradients.apply(ctx.rule, ctx.kept, ctx.wanted, ctx.num, *douts, *ctx.saved_tensors)
        return None, None, None, *grads

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_JVP)

    @staticmethod
    def vmap(info, in_dims, rule, kept, wanted, *tensors):
        num, dims = info.batch_size, in_dims[3:]
        joined = rule.join(num, tensors, dims) if num else None
        if joined is not None:
            results = _Call.apply(rule, kept, wanted, *joined)
            return tuple(_vmap.parted(x, num, len(x) // num) for x in results), (0,) * len(results)
        kept.entries = []

        def call(*entry):
            kept.entries.append(_Kept())
            return _Call.apply(rule, kept.entries[-1], wanted, *entry)

        return _vmap.one_by_one(call, info, dims, tensors, rule.device if info.randomness == "same" else None)


class _Gradients(torch.autograd.Function):
    """The gradients of a kept graph. The results and tensors of the call are arguments only because transforms look at
    them: the gradients depend on them."""

    @staticmethod
    def forward(rule, kept, wanted, num, *tensors):
        results, douts = zip(*((x, dout) for x, dout in zip(kept.results, tensors) if x.requires_grad))
        leaves = [x for x in kept.leaves if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(results, leaves, douts, retain_graph=True, allow_unused=True))
        found = [next(grads) if x is not None and x.requires_grad else None for x in kept.leaves]
        return tuple(torch.zeros_like(x) if want and y is None else y for x, y, want in zip(kept.leaves, found, wanted))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)

    @staticmethod
    def jvp(ctx, *_):
        raise NotImplementedError(NO_SECOND_DERIVATIVE)

    @staticmethod
    def vmap(info, in_dims, rule, kept, wanted, num, *tensors):
        dims = in_dims[4:]
        was_mapped = any(dim is not None for dim in dims[num : 2 * num])  # the forward
        num_entries, joined = info.batch_size, None
        if was_mapped and num_entries:
            joined = rule.join(num_entries, tensors[2 * num :], dims[2 * num :])
        if joined is not None:
            of_results = [_vmap.join_first(x, dim, num_entries) for x, dim in zip(tensors[: 2 * num], dims)]
            grads = _Gradients.apply(rule, kept, wanted, num, *of_results, *joined)
            grads = tuple(None if x is None else _vmap.parted(x, num_entries, len(x) // num_entries) for x in grads)
            return grads, tuple(None if x is None else 0 for x in grads)
        entries = iter(kept.entries if was_mapped else [kept] * max(num_entries, 1))
        return _vmap.one_by_one(
            lambda *entry: _Gradients.apply(rule, next(entries), wanted, num, *entry), info, dims, tensors
        )


def transformed(rule, *tensors):
    """Returns ``rule.function(*tensors)`` where transforms are active."""
    has_grad = torch.is_grad_enabled()
    wanted = [i < rule.num_differentiable and has_grad and _requires_grad(x) for i, x in enumerate(tensors)]
    if rule.device is not None:
        _vmap.check_randomness([x for x in tensors if x is not None])
    return _Call.apply(rule, _Kept(), tuple(wanted), *tensors)
