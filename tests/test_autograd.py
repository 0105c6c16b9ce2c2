"""Autograd around attention in a training step, on every device. Whatever the graph around a call, the call's gradients
are those of the call alone, bit for bit."""

import harness
import numpy
import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from flash_attn import _attention, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
TRACED = "aot_eager_decomp_partition"
OPTIONS = {"causal": True, "deterministic": True}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)


def randn(device, *shape):
    return harness.randn(*shape, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def leaves(device, *shape, count=3):
    return [randn(device, *shape).add_(i).requires_grad_() for i in range(count)]


def gradients(out, tensors):
    return torch.autograd.grad(out, tensors, randn(out.device.type, *out.shape))


def assert_equal(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert x.isfinite().all() and y.any() and torch.equal(x, y)


# ---- the graph around a call ---------------------------------------------------------------------------------------


def test_tensors_used_twice_in_one_graph(device):
    q, k, v = leaves(device, 2, 150, 4, 64)
    outs = flash_attn_func(q, k, v, **OPTIONS), flash_attn_func(k, v, q, **OPTIONS)
    dout = randn(device, *q.shape)
    together = torch.autograd.grad(outs, (q, k, v), (dout, dout), retain_graph=True)
    apart = [torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for out in outs]
    assert_equal(together, [x + y for x, y in zip(*apart)])
    assert_equal(torch.autograd.grad(outs, (q, k, v), (dout, dout)), together)


def test_one_tensor_as_queries_keys_and_values(device):
    (x,) = leaves(device, 2, 150, 4, 64, count=1)
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    dq, dk, dv = gradients(flash_attn_func(*parts, **OPTIONS), parts)
    (dx,) = gradients(flash_attn_func(x, x, x, **OPTIONS), [x])
    torch.testing.assert_close(dx, dq + dk + dv, rtol=0, atol=2 * float(dx.abs().max()) * torch.finfo(dx.dtype).eps)


def test_gradients_arrive_in_the_views_that_were_given(device):
    """q, k and v are views of one tensor. Its gradient holds their gradients, and zero in unused parts."""
    whole = randn(device, 2, 5, 160, 3, 80).requires_grad_()
    parts = [whole[:, i, 3:153, :, 8:72] for i in (0, 2, 4)]
    alone = [x.detach().clone().requires_grad_() for x in parts]
    want = gradients(flash_attn_func(*alone, **OPTIONS), alone)
    (got,) = gradients(flash_attn_func(*parts, **OPTIONS), [whole])
    assert_equal([got[:, i, 3:153, :, 8:72] for i in (0, 2, 4)], want)
    for i in (0, 2, 4):
        got[:, i, 3:153, :, 8:72] = 0
    assert not got.any()


@pytest.mark.parametrize("name", ("heads_first", "rows_first", "every_second_row", "one_head_for_all", "odd_address"))
def test_leaves_of_any_layout(device, name):
    n, h, d = 150, 4, 64
    make = {
        "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "rows_first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "every_second_row": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
        "one_head_for_all": lambda x: x[:, :, :1].expand(-1, -1, h, -1),
        "odd_address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    }[name]
    views = [make(randn(device, 2, n, h, d) + i).requires_grad_() for i in range(3)]
    plain = [x.detach().contiguous().clone().requires_grad_() for x in views]
    got, want = (gradients(flash_attn_func(*x, **OPTIONS), x) for x in (views, plain))
    for x, y in zip(got, want):
        assert x.shape == y.shape
        # Other kernels serve an odd address, and they round differently.
        atol = 4 * float(y.abs().max()) * torch.finfo(y.dtype).eps if name == "odd_address" else 0
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


CHANGES = {  # an option, and how the caller may write it between forward and backward
    "window_size": (lambda: [8, 8], lambda x: x.__setitem__(slice(None), [2, 0])),
    "softmax_scale": (lambda: torch.tensor(0.3), torch.zero_),
    "softcap": (lambda: torch.tensor(5.0), lambda x: x.fill_(1.0)),
    "causal": (lambda: torch.tensor(True), torch.zero_),
    "dropout_p": (lambda: torch.tensor(0.5), lambda x: x.fill_(0.1)),
    "softmax_scale as an array": (lambda: numpy.array(0.3), lambda x: x.fill(3.0)),
    "softcap as an array": (lambda: numpy.array(5.0), lambda x: x.fill(1.0)),
    "window_size of arrays": (lambda: [numpy.array(8), 8], lambda x: x[0].fill(2)),
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_the_backward_has_the_options_of_the_forward(device, name, sinks):
    if sinks and device == "cuda":
        pytest.skip("numbers and what holds them take two kernels there, whose bf16 differs by 5% of these gradients")
    make, write = CHANGES[name]
    name = name.split()[0]
    tensors, option = leaves(device, 2, 40, 4, 64), make()
    kept = tuple(map(int, option)) if isinstance(option, list) else option.tolist()
    further = {"sinks": torch.zeros(4, device=device)} if sinks else {}
    torch.manual_seed(0)
    want = flash_attn_func(*tensors, **{name: kept}, **further)
    torch.manual_seed(0)
    got = flash_attn_func(*tensors, **{name: option}, **further)
    write(option)
    dout = randn(device, *want.shape)
    for x, y in zip(torch.autograd.grad(got, tensors, dout), torch.autograd.grad(want, tensors, dout)):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("further", ({}, {"return_lse": True}), ids=str)
@pytest.mark.parametrize("name", ("softmax_scale", "softcap"))
def test_a_number_that_requires_grad_is_refused(device, name, further):
    q, number = randn(device, 1, 5, 2, 32), torch.tensor(0.5, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{name} gets no gradient, and it requires grad: detach it"):
        flash_attn_func(q, q, q, **{name: number}, **further)
    with torch.no_grad():
        flash_attn_func(q, q, q, **{name: number}, **further)


@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_return_attn_probs_changes_no_gradient(device, dropout_p):
    tensors, found = leaves(device, 2, 150, 4, 64), []
    for probs in (False, True):
        torch.manual_seed(3)
        out = flash_attn_func(*tensors, dropout_p, return_attn_probs=probs, **OPTIONS)
        out, lse, p = out if probs else (out, None, None)
        found.append([out, *gradients(out, tensors)])
    assert lse.isfinite().all() and (p.numel() > 0) == bool(dropout_p)
    if device == "cpu":
        assert_equal(*found)
    for x, y in zip(*found):  # on a GPU other kernels give the probabilities and round differently
        torch.testing.assert_close(x, y, rtol=0, atol=4 * float(x.abs().max()) * torch.finfo(x.dtype).eps)


WAYS = {
    "plain": lambda x: {},
    "softmax_lse": lambda x: {"return_attn_probs": True},
    "return_lse": lambda x: {"return_lse": True},
    "sinks": lambda x: {"sinks": x.new_zeros(4), "return_lse": True},
    "attn_bias": lambda x: {"attn_bias": x.new_zeros(1, 1, 9, 9)},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_backward_takes_other_forms_of_its_tensors(device, way):
    """A gradient with PyTorch's negative bit, and saved tensors to which hooks gave other strides."""
    tensors = leaves(device, 2, 9, 4, 32)

    def attend():
        out = flash_attn_func(*tensors, **OPTIONS, **WAYS[way](tensors[0]))
        return out[0] if isinstance(out, tuple) else out

    dout = randn(device, 2, 9, 4, 32)
    want = torch.autograd.grad(attend(), tensors, dout)
    assert_equal(torch.autograd.grad(attend(), tensors, torch._neg_view(-dout)), want)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mT.contiguous().mT if x.dim() > 1 else x, lambda x: x):
        out = attend()
    assert_equal(torch.autograd.grad(out, tensors, dout), want)


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_checkpoint_repeats_the_forward(device, dropout_p, reentrant):
    def block(x):
        return flash_attn_qkvpacked_func(x.sin(), dropout_p, **OPTIONS).cos()

    (x,) = leaves(device, 2, 150, 3, 4, 64, count=1)
    found = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x.grad, out = None, run(x)
        out.backward(randn(device, *out.shape))
        found.append([out, x.grad])
    assert_equal(*found)


def test_the_switch_of_torch_asks_for_a_fixed_order(device, monkeypatch):
    """On the CPU the order is always fixed, so the test only sees that torch's switch is read."""
    asked, backward = [], _attention.backward

    def watched(varlen, *arguments):
        asked.append(arguments[16])
        return backward(varlen, *arguments)

    monkeypatch.setattr(_attention, "backward", watched)
    tensors = leaves(device, 1, 1500, 4, 64)
    want = gradients(flash_attn_func(*tensors, **OPTIONS), tensors)
    try:
        torch.use_deterministic_algorithms(True)
        for _ in range(3):
            assert_equal(gradients(flash_attn_func(*tensors, causal=True), tensors), want)
    finally:
        torch.use_deterministic_algorithms(False)
    gradients(flash_attn_func(*tensors, causal=True), tensors)
    assert asked == [True] * 4 + [False]


# ---- one graph -----------------------------------------------------------------------------------------------------


def dense(q, k, v):
    return flash_attn_func(q.sin(), k, v, **OPTIONS).cos()


def packed(q, k, v):
    cu = torch.tensor([0, 70, 300], dtype=torch.int32, device=q.device)
    flat = (x.flatten(0, 1) for x in (q.sin(), k, v))
    return flash_attn_varlen_func(*flat, cu, cu, 230, 230, **OPTIONS).cos()


@pytest.mark.parametrize("function", (dense, packed))
def test_forward_and_backward_are_one_graph_each(device, function):
    """The graph of the forward has no break. Nor has that of the backward, if compiled autograd takes it whole."""
    tensors = leaves(device, 2, 150, 4, 64)
    want = [function(*tensors), *gradients(function(*tensors), tensors)]
    forward = CompileCounterWithBackend(TRACED)
    out = torch.compile(function, backend=forward, fullgraph=True)(*tensors)
    backward = CompileCounterWithBackend("eager")
    with compiled_autograd._enable(torch.compile(backend=backward, fullgraph=True)):
        grads = gradients(out, tensors)
    assert forward.frame_count == 1 and backward.frame_count == 1 and not counters["graph_break"]
    assert counters["aot_autograd"]["total"] == counters["aot_autograd"]["ok"] == 1
    assert_equal([out, *grads], want)
