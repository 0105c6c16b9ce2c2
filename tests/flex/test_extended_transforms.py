"""torch.func over attention with bias, mask, sinks, lse and largest logits, and over merge_attention.

Each test compares with autograd, and with a loop over the entries.
"""

import pytest
import torch
from torch.func import grad, jacrev, jvp, vjp, vmap

from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_varlen_func, merge_attention

pytestmark = pytest.mark.filterwarnings("error", "ignore:`torch.jit.script")
N = 3  # entries of a mapped dimension
CU = torch.tensor([0, 2, 5], dtype=torch.int32)


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


Q, K = (2, 5, 4, 8), (2, 6, 2, 8)
MASK = randn(5, 6) > -0.5
FUNCTIONS = {
    "lse": (lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_lse=True), [Q, K, K]),
    "sinks": (lambda q, k, v, sinks: flash_attn_func(q, k, v, softcap=3.0, sinks=sinks), [Q, K, K, (4,)]),
    "bias": (
        lambda q, k, v, bias: flash_attn_func(q, k, v, window_size=(3, 1), attn_bias=bias),
        [Q, K, K, (1, 4, 5, 6)],
    ),
    "mask": (lambda q, k, v: flash_attn_func(q, k, v, attn_mask=MASK, return_lse=True), [Q, K, K]),
    "all": (
        lambda q, kv, bias, sinks: flash_attn_kvpacked_func(
            q, kv, attn_bias=bias, sinks=sinks, attn_mask=MASK, return_lse=True
        ),
        [Q, (2, 6, 2, 2, 8), (2, 1, 5, 1), (4,)],
    ),
    "varlen": (
        lambda q, k, v, bias, sinks: flash_attn_varlen_func(
            q, k, v, CU, CU, 3, 3, causal=True, attn_bias=bias, sinks=sinks, return_lse=True
        ),
        [(5, 4, 8), (5, 2, 8), (5, 2, 8), (2, 4, 3, 3), (4,)],
    ),
    "merge": (
        lambda a, b, c, lses: merge_attention([a.float(), b.float(), c.float()], list(lses.float().unbind())),
        [Q, Q, Q, (3, 2, 4, 5)],
    ),
}


@pytest.fixture(params=FUNCTIONS)
def case(request):
    """(a function of a list of tensors to one vector, its tensors, a batch of each tensor)"""
    function, shapes = FUNCTIONS[request.param]

    def flat(*tensors):
        results = function(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        return torch.cat([torch.where(x.isfinite(), x, 0).double().flatten() for x in results])

    return flat, [randn(*shape) for shape in shapes], [randn(N, *shape) for shape in shapes]


def square(function):
    return lambda *tensors: (
        (function(*tensors) * torch.arange(7).repeat(1000)[: len(function(*tensors))]).square().sum()
    )


def gradients(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(square(function)(*leaves), leaves)


def close(got, want):
    got, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert y.any()
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def stacked(rows):
    return [torch.stack(x) for x in zip(*rows)]


def test_grad_and_vjp(case):
    function, tensors, _ = case
    close(grad(square(function), tuple(range(len(tensors))))(*tensors), gradients(function, tensors))
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, pull = vjp(function, *tensors)
    dout = randn(*out.shape)
    close(out, function(*tensors))
    close(pull(dout), torch.autograd.grad(function(*leaves), leaves, dout))
    close(pull(2 * dout), [2 * x for x in pull(dout)])


def test_vmap(case):
    function, tensors, batch = case
    close(vmap(function)(*batch), torch.stack([function(*x) for x in zip(*batch)]))
    last = [x.movedim(0, -1) for x in batch]
    close(vmap(function, -1, 1)(*last), torch.stack([function(*x) for x in zip(*batch)], 1))


def test_vmap_over_grad_and_grad_over_vmap(case):
    function, _, batch = case
    argnums = tuple(range(len(batch)))
    want = stacked([gradients(function, x) for x in zip(*batch)])
    close(vmap(grad(square(function), argnums))(*batch), want)
    close(grad(lambda *x: vmap(square(function))(*x).sum(), argnums)(*batch), want)
    twice = [torch.stack([x, -x]) for x in batch]
    close(vmap(vmap(grad(square(function), argnums)))(*twice), stacked([
        stacked([gradients(function, x) for x in zip(*part)]) for part in zip(*twice)
    ]))  # fmt: skip


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_no_entries(case):
    function, tensors, batch = case
    argnums = tuple(range(len(tensors)))
    nothing = [x[:0] for x in batch]
    assert vmap(function)(*nothing).shape == (0, *function(*tensors).shape)
    for x, grads in zip(batch, vmap(grad(square(function), argnums))(*nothing)):
        assert grads.shape == (0, *x.shape[1:])
    assert [x.shape for x in grad(lambda *x: vmap(square(function))(*x).sum(), argnums)(*nothing)] == [
        x.shape for x in nothing
    ]
    out, pull = vjp(function, *tensors)
    assert [x.shape for x in vmap(pull)(out.new_zeros(0, *out.shape))] == [(0, *x.shape) for x in tensors]


def test_gradients_per_sample(case):
    """One argument is mapped, and all have a gradient for each sample."""
    function, tensors, batch = case
    for i in range(len(tensors)):
        mixed = [batch[j] if i == j else tensors[j] for j in range(len(tensors))]
        dims = tuple(0 if i == j else None for j in range(len(tensors)))
        rows = [[batch[j][n] if i == j else tensors[j] for j in range(len(tensors))] for n in range(N)]
        got = vmap(grad(square(function), tuple(range(len(tensors)))), dims)(*mixed)
        close(got, stacked([gradients(function, x) for x in rows]))


def test_jacrev(case):
    function, tensors, _ = case
    some = lambda *x: function(*x)[::29]  # noqa: E731
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = some(*leaves)
    want = stacked([torch.autograd.grad(out, leaves, unit, retain_graph=True) for unit in torch.eye(len(out)).double()])
    close(jacrev(some, tuple(range(len(tensors))))(*tensors), want)


@pytest.mark.parametrize("num", [1, 3])
def test_batches_of_gradients(case, num):
    """``is_grads_batched`` maps with a vmap of its own, as ``torch.autograd.functional`` does to vectorize."""
    function, tensors, _ = case
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    douts = randn(num, *out.shape)
    got = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    assert [x.shape for x in got] == [(num, *x.shape) for x in leaves]
    close(got, stacked([torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_with_sinks(randomness):
    """out is linear in v, so its product with the gradient of v tells whether both passes drop the same."""
    q, k, sinks = randn(N, *Q), randn(N, *K), randn(4)

    def both(q, k, v):
        loss = lambda v: flash_attn_func(q, k, v, dropout_p=0.4, sinks=sinks).sum()  # noqa: E731
        dv, value = torch.func.grad_and_value(loss)(v)
        return value, (dv * v).sum(), dv

    q[1:], k[1:] = q[:1], k[:1]
    values, sums, dv = vmap(both, randomness=randomness)(q, k, k)
    torch.testing.assert_close(values, sums, rtol=1e-6, atol=1e-5)
    assert torch.equal(dv[0], dv[1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="flash_attn draws random numbers, refused by randomness='error'"):
        vmap(both)(q, k, k)


def test_largest_logits_and_masks_of_their_own():
    q, k, masks = randn(N, *Q), randn(N, *K), randn(N, 2, 1, 5, 6) > -0.3

    def function(q, k, mask):
        return flash_attn_func(q, k, k, attn_mask=mask, return_max_logits=True, return_lse=True)

    close(vmap(function)(q, k, masks), stacked([function(*x) for x in zip(q, k, masks)]))
    masked = lambda q, k, mask: flash_attn_func(q, k, k, attn_mask=mask)  # noqa: E731
    close(vmap(masked)(q, k, masks), torch.stack([masked(*x) for x in zip(q, k, masks)]))
    close(vmap(masked, (0, 0, None))(q, k, masks[0]), torch.stack([masked(*x, masks[0]) for x in zip(q, k)]))


def test_what_does_not_exist(case):
    function, tensors, _ = case
    with pytest.raises(NotImplementedError, match="^flash_attn has no jvp"):
        jvp(function, tuple(tensors), tuple(tensors))


@pytest.mark.parametrize("name", ["sinks", "bias", "lse"])
def test_second_derivatives_are_refused(name):
    function, shapes = FUNCTIONS[name]
    tensors = [randn(*shape) for shape in shapes]
    first = grad(lambda *x: function(*x)[0].square().sum())
    with pytest.raises(RuntimeError, match="^flash_attn has no second derivatives"):
        grad(lambda *x: first(*x).sum())(*tensors)
