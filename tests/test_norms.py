"""Norms with fused operations, against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from flash_attn.ops import layer_norm as layer_norm_ops
from flash_attn.ops import rms_norm as rms_norm_ops
from flash_attn.ops.triton.layer_norm import (
    LayerNormFn,
    LayerNormLinearFn,
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

BOTH = (False, True)
N = 24


def formula(r, weight, bias, eps, is_rms, zero_centered=False):
    """norm(r) * weight + bias, in the dtype of r."""
    centered = r if is_rms else r - r.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y * (weight + 1 if zero_centered else weight)
    return y if bias is None else y + bias


def doubled(tensors):
    return {name: None if t is None else t.detach().double().requires_grad_() for name, t in tensors.items()}


def close(ours, exact, roundings=2):
    """The dtype's own rounding of an fp32 result."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact.double(), rtol=roundings * eps, atol=max(roundings * eps, 2e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("second", ["none", "x1", "weight1", "both", "rowscale"])
@pytest.mark.parametrize("has_residual", BOTH)
@pytest.mark.parametrize("has_bias", BOTH)
@pytest.mark.parametrize("zero_centered", BOTH)
@pytest.mark.parametrize("is_rms", BOTH)
def test_formula(is_rms, zero_centered, has_bias, has_residual, second, dtype):
    has_x1, has_weight1, has_rowscale = second in ("x1", "both"), second in ("weight1", "both"), second == "rowscale"

    def random(*shape, there=True, kind=dtype):
        return (1 + torch.randn(*shape)).to(kind).requires_grad_() if there else None

    tensors = {
        "x": random(2, 3, N),
        "weight": random(N, kind=torch.float32),
        "bias": random(N, there=has_bias, kind=torch.float32),
        "residual": random(2, 3, N, there=has_residual, kind=torch.float32),
        "x1": random(2, 3, N, there=has_x1),
        "weight1": random(N, there=has_weight1, kind=torch.float32),
        "bias1": random(N, there=has_weight1 and has_bias, kind=torch.float32),
    }
    rowscale = torch.rand(2, 3) if has_rowscale else None
    exact = doubled(tensors)
    r = exact["x"] if rowscale is None else exact["x"] * rowscale[..., None].double()
    for name in ("x1", "residual"):
        r = r if exact[name] is None else r + exact[name]
    expected = [formula(r, exact["weight"], exact["bias"], 1e-6, is_rms, zero_centered)]
    if has_weight1:
        expected.append(formula(r, exact["weight1"], exact["bias1"], 1e-6, is_rms, zero_centered))
    expected.append(r)

    options = {"rowscale": rowscale, "prenorm": True, "zero_centered_weight": zero_centered, "residual_in_fp32": True}
    outputs = layer_norm_fn(**tensors, **options, is_rms_norm=is_rms)
    assert [y.dtype for y in outputs] == [dtype] * (len(outputs) - 1) + [torch.float32]
    assert len(outputs) == len(expected)
    for y, y_expected in zip(outputs, expected):
        close(y.detach(), y_expected.detach(), 4)
    gradients = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    torch.autograd.backward(expected, [g.double() for g in gradients])
    for name, tensor in tensors.items():
        if tensor is not None:
            close(tensor.grad, exact[name].grad, 16)

    if is_rms:
        again = rms_norm_fn(**tensors, **options)
        assert all(a.equal(b) for a, b in zip(again, outputs))


@pytest.mark.parametrize("is_rms", BOTH)
def test_references_are_the_formula(is_rms):
    x, x1, residual = (torch.randn(5, N, dtype=torch.bfloat16) for _ in range(3))
    weight, bias, weight1 = torch.randn(N), torch.randn(N), torch.randn(N)
    mask, mask1 = torch.rand(5, N) < 0.5, torch.rand(5, N) < 0.5
    reference = rms_norm_ref if is_rms else layer_norm_ref
    y, y1, r = reference(
        x, weight, bias, residual, x1, weight1, None, 1e-5, 0.5, None, True, True, mask, mask1, upcast=True
    )
    exact = 2 * x.double() * mask + 2 * x1.double() * mask1 + residual.double()
    close(r, exact)
    close(y, formula(exact, weight.double(), bias.double(), 1e-5, is_rms, True))
    close(y1, formula(exact, weight1.double(), None, 1e-5, is_rms, True))
    scaled = reference(x, weight, None, rowscale=torch.full((5,), 2.0), upcast=True)
    close(scaled, formula(2 * x.double(), weight.double(), None, 1e-6, is_rms))


def test_dropout_masks_tell_what_was_kept():
    x, x1, weight = torch.ones(64, N), torch.ones(64, N), torch.ones(N)
    y, r, mask, mask1 = layer_norm_fn(
        x, weight, None, x1=x1, dropout_p=0.25, prenorm=True, return_dropout_mask=True, residual_in_fp32=True
    )
    assert mask.dtype == torch.bool and not mask.equal(mask1)
    torch.testing.assert_close(r, (mask.float() + mask1.float()) / 0.75)
    assert 0.7 < mask.float().mean() < 0.8
    torch.manual_seed(3)
    first = layer_norm_fn(x, weight, None, dropout_p=0.5)
    torch.manual_seed(3)
    assert layer_norm_fn(x, weight, None, dropout_p=0.5).equal(first)
    assert not layer_norm_fn(x, weight, None, dropout_p=0.5).equal(first)
    y, mask, mask1 = layer_norm_fn(x, weight, None, return_dropout_mask=True)
    assert mask is None and mask1 is None
    assert layer_norm_fn(x, weight, None, dropout_p=1.0, prenorm=True)[1].eq(0).all()


def test_dtypes_and_given_memory():
    x, weight = torch.randn(4, N, dtype=torch.float16), torch.ones(N)
    assert layer_norm_fn(x, weight, None, prenorm=True)[1].dtype == torch.float16
    assert layer_norm_fn(x, weight, None, x.bfloat16(), prenorm=True)[1].dtype == torch.bfloat16
    assert rms_norm_fn(x, weight, None, out_dtype=torch.float32).dtype == torch.float32
    out, residual_out = torch.empty(4, N), torch.empty(4, N)
    y, r = rms_norm_fn(x, weight, None, x, prenorm=True, out=out, residual_out=residual_out)
    assert y.data_ptr() == out.data_ptr() and r.data_ptr() == residual_out.data_ptr()
    close(y, formula(2 * x.double(), weight.double(), None, 1e-6, True))
    with pytest.raises(AssertionError, match="rowscale"):
        layer_norm_fn(x, weight, None, x1=x, rowscale=torch.ones(4))
    with pytest.raises(AssertionError, match="residual is"):
        layer_norm_fn(x, weight, None, residual=torch.zeros(1, N))


@pytest.mark.parametrize("is_rms", BOTH)
def test_norm_and_linear(is_rms):
    x, residual = torch.randn(2, 3, N, requires_grad=True), torch.randn(2, 3, N)
    norm_weight, weight, bias = torch.randn(N), torch.randn(5, N, requires_grad=True), torch.randn(5)
    y, r = layer_norm_linear_fn(x, norm_weight, None, weight, bias, residual, prenorm=True, is_rms_norm=is_rms)
    exact = formula((x + residual).double(), norm_weight.double(), None, 1e-6, is_rms)
    torch.testing.assert_close(y.double(), F.linear(exact, weight.double(), bias.double()), rtol=1e-4, atol=1e-4)
    assert r.equal(x + residual)
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer_norm_linear_fn(x, norm_weight, None, weight, bias, is_rms_norm=is_rms).dtype == torch.bfloat16


def test_rms_norm_modules():
    x = torch.randn(3, N)
    exact = formula(x.double(), torch.ones(N).double(), None, 1e-5, True)
    for module in (RMSNorm(N), RMSNorm(N, zero_centered_weight=True), rms_norm_ops.RMSNorm(N)):
        close(module(x).detach(), exact)
        assert list(module.state_dict()) == ["weight"] and module.bias is None
    y, r = RMSNorm(N)(x, residual=x, prenorm=True)
    assert r.equal(2 * x)
    dropping = RMSNorm(N, dropout_p=0.5)
    assert not dropping(x).equal(dropping(x))
    assert dropping.eval()(x).equal(dropping(x))


# ---- ops.layer_norm and ops.rms_norm -------------------------------------------------------------------------------


def names(is_rms):
    module, name = (rms_norm_ops, "rms") if is_rms else (layer_norm_ops, "layer")
    return [getattr(module, f"dropout_add_{name}_norm{form}") for form in ("", "_subset", "_parallel_residual")]


@pytest.mark.parametrize("is_rms", BOTH)
def test_dropout_add_norm(is_rms):
    dropout_add_norm = names(is_rms)[0]
    x0 = torch.randn(2, 5, N, dtype=torch.bfloat16, requires_grad=True)
    residual, weight, rowscale, layerscale = torch.randn(2, 5, N), torch.randn(N), torch.rand(2, 5), torch.rand(N)
    bias = None if is_rms else torch.randn(N)
    y, r, mask = dropout_add_norm(
        x0, residual, weight, bias, 0.5, 1e-5, rowscale, layerscale, prenorm=True, return_dropout_mask=True
    )
    assert (y.dtype, r.dtype, mask.dtype) == (torch.bfloat16, torch.float32, torch.uint8)
    exact = 2 * x0.double() * rowscale[..., None] * layerscale * mask + residual
    close(r.detach(), exact.detach())
    close(y.detach(), formula(exact, weight.double(), None if bias is None else bias.double(), 1e-5, is_rms).detach())
    y.sum().backward()
    assert x0.grad.ne(0).eq(mask.bool()).all()
    alone = dropout_add_norm(x0, None, weight, bias, 0.0, 1e-5)
    close(alone.detach(), formula(x0.double(), weight.double(), None if bias is None else bias.double(), 1e-5, is_rms))
    assert dropout_add_norm(x0, None, weight, bias, 0.0, 1e-5, prenorm=True)[1].dtype == torch.bfloat16
    assert dropout_add_norm(x0, None, weight, bias, 0.0, 1e-5, None, None, True, True)[1].dtype == torch.float32
    assert dropout_add_norm(x0, None, weight, bias, 0.0, 1e-5, return_dropout_mask=True)[1].eq(1).all()


@pytest.mark.parametrize("is_rms", BOTH)
def test_subset(is_rms):
    """Row 1 of the residual has no x0, and rows 0 and 4 are not needed."""
    subset = names(is_rms)[1]
    x0, residual, weight, bias = torch.randn(4, N), torch.randn(5, N), torch.randn(N), torch.randn(N)
    x0_subset = torch.tensor([1, 0, 2, 3, 4], dtype=torch.int32)
    out_subset = torch.tensor([0, 1, 2, 3, 0], dtype=torch.int32)
    y, r = subset(x0, residual, weight, bias, 0.0, 1e-5, None, x0_subset, out_subset, 2.0, 3, prenorm=True)
    spread = torch.zeros(5, N, dtype=torch.double)
    spread[[0, 2, 3, 4]] = 2.0 * x0.double()
    exact = spread + residual
    close(r, exact)
    close(y, formula(exact[1:4], weight.double(), bias.double(), 1e-5, is_rms))
    whole = subset(x0, residual[:4], weight, bias, 0.0, 1e-5)
    close(whole, formula(x0.double() + residual[:4], weight.double(), bias.double(), 1e-5, is_rms))


@pytest.mark.parametrize("is_rms", BOTH)
def test_subset_of_sequences(is_rms):
    """Stochastic depth: sequences 0 and 2 of x0 are there, sequences 1 and 2 of y are wanted."""
    x0, residual = torch.randn(2, 5, N, requires_grad=True), torch.randn(3, 5, N, requires_grad=True)
    weight, bias = torch.randn(N), torch.randn(N)
    rows = torch.arange(1, 11, dtype=torch.int32).view(2, 5)
    x0_subset, out_subset = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    x0_subset[[0, 2]], out_subset[1:] = rows, rows
    y, r, mask = names(is_rms)[1](
        x0, residual, weight, bias, 0.5, 1e-5, None, x0_subset, out_subset, 2.0, 10, True, return_dropout_mask=True
    )
    assert (y.shape, r.shape, mask.shape) == ((2, 5, N), (3, 5, N), (2, 5, N))
    exact = residual.detach().double()
    exact[[0, 2]] += 2.0 * 2.0 * (x0 * mask).detach().double()
    close(r.detach(), exact)
    close(y.detach(), formula(exact, weight.double(), bias.double(), 1e-5, is_rms)[1:])
    y.sum().backward()
    assert x0.grad[0].eq(0).all() and x0.grad[1].eq(0).equal(~mask[1].bool())
    assert residual.grad[0].eq(0).all() and residual.grad[1:].ne(0).all()
    nothing = names(is_rms)[1](x0, residual, weight, bias, 0.0, 1e-5, None, x0_subset, torch.zeros_like(out_subset))
    assert nothing.shape == (0, 5, N)
    with pytest.raises(AssertionError, match="out_numrows is 7, .* multiples of 5"):
        names(is_rms)[1](x0, residual, weight, bias, 0.0, 1e-5, None, x0_subset, out_subset, 2.0, 7)
    for wrong in ((x0_subset - 1, out_subset), (x0_subset + 9, out_subset), (x0_subset, out_subset - 1)):
        with pytest.raises(IndexError, match="out of range|out of bounds"):
            names(is_rms)[1](x0, residual, weight, bias, 0.0, 1e-5, None, *wrong, 2.0, 10)


@pytest.mark.parametrize("is_rms", BOTH)
def test_parallel_residual(is_rms):
    parallel = names(is_rms)[2]
    x0, x1, residual = (torch.randn(3, N) for _ in range(3))
    weights = torch.randn(4, N)
    y0, y1, r, mask0, mask1 = parallel(x0, x1, residual, *weights, 0.5, 1e-5, prenorm=True, return_dropout_mask=True)
    exact = 2 * x0.double() * mask0 + 2 * x1.double() * mask1 + residual
    close(r, exact)
    for y, i in ((y0, 0), (y1, 2)):
        close(y, formula(exact, weights[i].double(), weights[i + 1].double(), 1e-5, is_rms))
    y0, y1 = parallel(x0, None, residual, weights[0], None, None, None, 0.0, 1e-5)
    assert y1 is None
    close(y0, formula(x0.double() + residual, weights[0].double(), None, 1e-5, is_rms))


@pytest.mark.parametrize("is_rms", BOTH)
def test_modules(is_rms):
    cls = rms_norm_ops.DropoutAddRMSNorm if is_rms else layer_norm_ops.DropoutAddLayerNorm
    module = cls(N, prenorm=True, p=0.5, residual_in_fp32=True, dtype=torch.bfloat16)
    x = torch.randn(3, N, dtype=torch.bfloat16)
    assert set(module.state_dict()) == ({"weight"} if is_rms else {"weight", "bias"})
    assert not module(x)[1].equal(module(x)[1])
    y, r = module.eval()(x, residual=x.float())
    assert r.equal(2 * x.float())
    close(y.detach(), formula(2 * x.double(), torch.ones(N).double(), None, 1e-5, is_rms))


def test_plain_forms():
    x, weight, bias = torch.randn(3, N), torch.randn(N), torch.randn(N)
    close(
        layer_norm_ops.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x.double(), (N,), weight.double(), bias.double())
    )
    close(rms_norm_ops.rms_norm(x, weight, 1e-5), formula(x.double(), weight.double(), None, 1e-5, True))


def test_function_classes():
    """``apply`` takes the arguments in another order than the functions. Every argument differs from its neighbours."""
    x0, x1, residual, weights = torch.randn(2, N), torch.randn(2, N), torch.randn(2, N), torch.randn(4, N)
    rows, columns, (w, b, w1, b1) = torch.rand(2), torch.rand(N), weights
    both = torch.tensor([1, 2])
    for is_rms in BOTH:
        add, subset, parallel = names(is_rms)
        for ours, expected in (
            (
                rms_norm_ops.DropoutAddLayerNormFn.apply(
                    x0, residual, w, b, rows, columns, 0.0, 1e-3, True, True, is_rms, True
                ),
                add(x0, residual, w, b, 0.0, 1e-3, rows, columns, True, True, True),
            ),
            (
                layer_norm_ops.DropoutAddLayerNormSubsetFn.apply(
                    x0, residual, w, b, columns, both, both.flip(0), 0.0, 1e-3, 3.0, 2, True, True, is_rms
                ),
                subset(x0, residual, w, b, 0.0, 1e-3, columns, both, both.flip(0), 3.0, 2, True, True),
            ),
            (
                layer_norm_ops.DropoutAddLayerNormParallelResidualFn.apply(
                    x0, x1, residual, w, b, w1, b1, 0.0, 1e-3, True, True, is_rms
                ),
                parallel(x0, x1, residual, w, b, w1, b1, 0.0, 1e-3, True, True),
            ),
        ):
            assert len(ours) == len(expected) > 1 and all(a.equal(e) for a, e in zip(ours, expected))
    assert LayerNormFn.apply(x0, w, b, residual).equal(layer_norm_fn(x0, w, b, residual))
    linear = torch.randn(3, N), torch.randn(3)
    assert LayerNormLinearFn.apply(x0, w, b, *linear).equal(layer_norm_linear_fn(x0, w, b, *linear))
