"""Jagged nested tensors go to the packed kernels, forward and backward, and come back jagged."""

import pytest
import torch

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
LENGTHS, KEYS = (5, 0, 9, 1), (7, 3, 9, 2)
OPTIONS = {"causal": True, "window_size": (4, 0)}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request):
    return request.param


def randn(device, *shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return x.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def sequences(device, lengths, *shape):
    return [randn(device, n, *shape) + i for i, n in enumerate(lengths)]


def jagged(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged).requires_grad_()


CASES = {
    "dense": (flash_attn_func, [(4, 16), (2, 16), (2, 16)]),
    "kvpacked": (flash_attn_kvpacked_func, [(4, 16), (2, 2, 16)]),
    "qkvpacked": (flash_attn_qkvpacked_func, [(3, 4, 16)]),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def rows_and_nested(shapes, device):
    rows = [sequences(device, LENGTHS if i == 0 else KEYS, *shape) for i, shape in enumerate(shapes)]
    first, *others = [jagged(x) for x in rows]
    if len(others) == 2:  # k and v share their lengths
        values = torch.cat(rows[2])
        others[1] = torch.nested.nested_tensor_from_jagged(values, others[0].offsets()).detach().requires_grad_()
    return rows, [first, *others]


def test_forward_and_backward(case, device):
    function, shapes = case
    rows, nested = rows_and_nested(shapes, device)
    out = function(*nested, **OPTIONS)
    assert out.is_nested and out.layout == torch.jagged and out.shape[1] == nested[0].shape[1]
    douts = sequences(device, LENGTHS, 4, 16)
    dout = torch.nested.nested_tensor_from_jagged(torch.cat(douts), nested[0].offsets())
    grads = torch.autograd.grad(out, nested, dout)
    for i, y in enumerate(out.unbind()):
        if LENGTHS[i] == 0:
            assert y.shape == (0, 4, 16)
            continue
        leaves = [x[i][None].detach().requires_grad_() for x in rows]
        want = function(*leaves, **OPTIONS)
        torch.testing.assert_close(y, want[0], rtol=1e-5, atol=1e-5 if device == "cpu" else 2e-2)
        for got, right in zip(grads, torch.autograd.grad(want, leaves, douts[i][None])):
            assert got.is_nested
            torch.testing.assert_close(got.unbind()[i], right[0], rtol=1e-5, atol=1e-5 if device == "cpu" else 5e-2)


def test_equals_the_varlen_function(device):
    _, (q, k, v) = rows_and_nested(CASES["dense"][1], device)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, softcap=3.0)
    cu_q, cu_k = (x.offsets().int() for x in (q, k))
    want = flash_attn_varlen_func(
        *[x.values() for x in (q, k, v)], cu_q, cu_k, 9, 9, return_attn_probs=True, softcap=3.0
    )
    assert torch.equal(out.values(), want[0]) and torch.equal(lse, want[1])


def test_options_of_our_own(device):
    q = jagged(sequences(device, LENGTHS, 4, 16))
    sinks = randn(device, 4).float()
    out, lse = flash_attn_func(q, q, q, sinks=sinks, return_lse=True)
    cu = q.offsets().int()
    want = flash_attn_varlen_func(*[q.values()] * 3, cu, cu, 9, 9, sinks=sinks, return_lse=True)
    assert out.is_nested
    for mine, packed in zip((out.values(), lse), want, strict=True):  # sinks are added by torch, and by one kernel
        torch.testing.assert_close(mine, packed, rtol=0, atol=1e-6)


def test_views_with_holes(device):
    """narrow keeps the memory of longer sequences."""
    x = randn(device, 3, 8, 4, 16)
    start, length = torch.tensor([0, 2, 1], device=device), torch.tensor([5, 3, 7], device=device)
    q = torch.nested.narrow(x, 1, start, length, layout=torch.jagged)
    assert q.lengths() is not None
    out = flash_attn_func(q, q, q, causal=True)
    for i, y in enumerate(out.unbind()):
        rows = x[i : i + 1, start[i] : start[i] + length[i]].contiguous()
        atol = 1e-5 if device == "cpu" else 2e-2
        torch.testing.assert_close(y, flash_attn_func(rows, rows, rows, causal=True)[0], rtol=1e-5, atol=atol)


def test_autocast(device):
    q = torch.nested.nested_tensor([x.float() for x in sequences(device, LENGTHS, 4, 16)], layout=torch.jagged)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_attn_func(q, q, q).dtype == torch.bfloat16


def test_compiled():
    torch._dynamo.reset()
    q = jagged(sequences("cpu", LENGTHS, 4, 16))

    def function(q):
        return flash_attn_func(q.sin(), q, q, causal=True)

    compiled = torch.compile(function, backend="aot_eager")
    (want,), (got,) = [torch.autograd.grad(f(q).values().sum(), q) for f in (function, compiled)]
    assert torch.equal(compiled(q).values(), function(q).values()) and torch.equal(got.values(), want.values())


def refusals():
    plain = torch.ones(4, 5, 4, 16)
    q = jagged(sequences("cpu", LENGTHS, 4, 16))
    k = jagged(sequences("cpu", KEYS, 4, 16))
    strided = torch.nested.nested_tensor(sequences("cpu", LENGTHS, 4, 16))
    cu = q.offsets().int()
    short = jagged(sequences("cpu", LENGTHS[:2], 4, 16))
    return {
        "one of them": (lambda: flash_attn_func(q, plain, q), "k must be a nested tensor, because another argument is"),
        "strided": (lambda: flash_attn_func(strided, strided, strided), "q must be nested with layout torch.jagged"),
        "heads first": (
            lambda: flash_attn_func(q.transpose(1, 2), q, q),
            "q must have its lengths in dimension 1, .b, length, h, d.; they are in dimension 2",
        ),
        "rank": (lambda: flash_attn_qkvpacked_func(q), "qkv must have 5 dimensions.*it has 4"),
        "lengths": (lambda: flash_attn_func(q, q, k), "k and v must have the same lengths"),
        "sequences": (lambda: flash_attn_func(q, short, short), "k and v must have as many sequences as q, 4; they"),
        "varlen": (lambda: flash_attn_varlen_func(q, q, q, cu, cu, 9, 9), "q must be a plain tensor; it is nested"),
        "cache": (lambda: flash_attn_with_kvcache(q, plain, plain), "q must be a plain tensor; it is nested"),
        "slopes": (lambda: flash_attn_func(plain, plain, plain, alibi_slopes=q), "alibi_slopes must be a plain tensor"),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_cannot_be_served_has_one_sentence(name):
    call, words = refusals()[name]
    with pytest.raises((TypeError, RuntimeError), match=f"^{words}") as caught:
        call()
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None
