"""Activations against float64 PyTorch and autograd."""

import pytest
import torch
import torch.nn.functional as F

from flash_attn.ops.activations import (
    bias_gelu_back,
    bias_gelu_impl,
    fast_gelu_impl,
    gelu_bwd,
    gelu_fwd,
    relu_bwd,
    sqrelu_bwd,
    sqrelu_fwd,
    swiglu,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def close(ours, exact):
    """Compares with a tolerance of a few roundings of our dtype."""
    eps = torch.finfo(ours.dtype).eps
    assert ours.dtype != exact.dtype
    torch.testing.assert_close(ours.double(), exact, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward_functions(dtype):
    x, g = (3 * torch.randn(2, 5, 7)).to(dtype), torch.randn(2, 5, 7).to(dtype)
    x[0, 0, 0] = 0
    for forward, backward, exact in (
        (gelu_fwd, gelu_bwd, gelu),
        (sqrelu_fwd, sqrelu_bwd, lambda x: F.relu(x) ** 2),
        (F.relu, relu_bwd, F.relu),
    ):
        reference = x.double().requires_grad_()
        expected = exact(reference)
        close(forward(x), expected.detach())
        dx = torch.autograd.grad(expected, reference, g.double())[0]
        if backward is relu_bwd:
            dx[0, 0, 0] = g[0, 0, 0]  # the derivative at zero is one
        close(backward(g, x), dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ours, exact, shapes",
    [
        (swiglu, lambda x, y: F.silu(x) * y, [(3, 4, 6), (3, 4, 6)]),
        (fast_gelu_impl, gelu, [(3, 4, 6)]),
        (bias_gelu_impl, lambda y, bias: gelu(y + bias), [(3, 4, 6), (6,)]),
    ],
)
def test_gradients(ours, exact, shapes, dtype):
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    references = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = ours(*inputs), exact(*references)
    dout = torch.randn(expected.shape).to(dtype)
    out.backward(dout), expected.backward(dout.double())
    eps = torch.finfo(dtype).eps
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=8 * eps, atol=8 * eps)
    for x, reference in zip(inputs, references):
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad.double(), reference.grad, rtol=16 * eps, atol=16 * eps)


def test_bias_gelu_back_is_the_gradient():
    y, bias, g = torch.randn(4, 5, requires_grad=True), torch.randn(5, requires_grad=True), torch.randn(4, 5)
    expected = torch.autograd.grad(gelu(y + bias), (y, bias), g)
    for ours, exact in zip(bias_gelu_back(g, y, bias), expected):
        torch.testing.assert_close(ours, exact)


def test_swiglu_keeps_only_its_inputs():
    """Two tensors are saved for the backward, but not silu(x)."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        swiglu(torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True))
    assert len(saved) == 2
