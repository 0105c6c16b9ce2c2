"""flash_attn_combine of flash_attn_3 against the formula in fp64."""

import pytest
import torch
from flash_attn_3.flash_attn_interface import flash_attn_combine, flash_attn_func
from oracle3 import INF, attention
from tensors3 import DEVICES


def make(n, b, rows, h, d, views=False):
    """Parts, and lse with rows side by side; with views both are slices of larger tensors."""
    if views:
        return torch.randn(n, b, rows, h + 1, 2 * d)[..., 1:, :d], torch.randn(n, b, h + 2, rows).transpose(2, 3)[
            ..., 2:
        ]
    return torch.randn(n, b, rows, h, d), torch.randn(n, b, h, rows).transpose(2, 3) * 3


def formula(parts, lse):
    parts, lse = parts.double(), lse.double()
    total = torch.logsumexp(lse, 0)
    weights = torch.where(lse == -INF, 0, torch.exp(lse - total))
    return (weights[..., None] * parts.nan_to_num()).sum(0), total


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5, 17, 133, 256])
@pytest.mark.parametrize("sizes", [(2, 1, 3, 64), (1, 113, 2, 96), (3, 5, 4, 7), (0, 5, 4, 8), (2, 0, 4, 8)], ids=str)
def test_combine(sizes, n, dtype):
    parts, lse = make(n, *sizes, views=n % 2 == 1)
    if n > 1 and sizes[0] > 1:
        lse[n // 2 :, 0] = -INF  # half of the parts count for nothing
        parts[n // 2 :, 0] = float("nan")
    if n > 1 and sizes[0] > 1 and sizes[1] > 1:
        lse[:, 1, 0] = -INF
    out, total = flash_attn_combine(parts, lse, out_dtype=dtype)
    truth, true_total = formula(parts, lse)
    assert out.dtype == (dtype or torch.float32) and out.shape == truth.shape
    assert total.shape == true_total.shape and total.transpose(1, 2).is_contiguous()
    error = (out.double() - truth).abs().max() if out.numel() else 0
    allowed = 2 * (truth.to(out.dtype).double() - truth).abs().max() if out.numel() else 0
    assert error <= max(allowed, 1e-5)
    torch.testing.assert_close(total.double(), true_total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_columns_have_an_lse(device):
    parts, lse = make(9, 2, 5, 3, 0)
    out, total = flash_attn_combine(parts.to(device), lse.to(device))
    assert out.shape == (2, 5, 3, 0)
    torch.testing.assert_close(total.cpu(), torch.logsumexp(lse, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_lse_is_that_of_no_key(device):
    """flash_attn_func says +inf if there are no keys at all, and flash_attn 2 says +inf for every row without keys."""
    q, k, v = torch.randn(1, 9, 2, 32), torch.randn(1, 30, 2, 32), torch.randn(1, 30, 2, 32)
    results = [flash_attn_func(q, k[:, cut], v[:, cut], return_attn_probs=True) for cut in (slice(0), slice(0, 30))]
    assert (results[0][1] == INF).all()
    parts, lse = torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results]).transpose(2, 3)
    parts[0] = float("nan")
    out, total = flash_attn_combine(parts.to(device), lse.to(device))
    assert torch.equal(out.cpu(), parts[1]) and torch.equal(total.cpu(), lse[1])
    lse[1, :, 4] = float("nan")
    out, total = flash_attn_combine(parts.to(device), lse.to(device))
    assert torch.equal(total.isnan().cpu(), lse[1].isnan()) and torch.equal(out[..., 0].isnan().cpu(), lse[1].isnan())


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_row_without_parts_is_zero(sign):
    parts, lse = make(3, 1, 2, 1, 8)
    lse[:, :, 0] = sign * INF
    out, total = flash_attn_combine(parts, lse)
    assert (out[:, 0] == 0).all() and (total[:, 0] == -INF).all() and (out[:, 1] != 0).any()


@pytest.mark.parametrize("d", [6, 64])
def test_out_is_written(d):
    parts, lse = make(3, 2, 5, 4, d)
    memory = torch.full((2, 5, 4, d + 3), 9.0, dtype=torch.bfloat16)
    out, _ = flash_attn_combine(parts, lse, memory[..., :d], torch.bfloat16)
    expected, _ = flash_attn_combine(parts, lse, out_dtype=torch.bfloat16)
    assert out.data_ptr() == memory.data_ptr() and torch.equal(memory[..., :d], expected)
    assert (memory[..., d:] == 9).all()


def test_parts_of_a_sequence_are_the_sequence():
    q, k, v = torch.randn(1, 9, 2, 32), torch.randn(1, 30, 2, 32), torch.randn(1, 30, 2, 32)
    cuts = [slice(0, 4), slice(4, 21), slice(21, 30)]
    results = [flash_attn_func(q, k[:, cut], v[:, cut], return_attn_probs=True) for cut in cuts]
    lse = torch.stack([lse for _, lse in results]).transpose(2, 3)
    out, total = flash_attn_combine(torch.stack([out for out, _ in results]), lse)
    truth, true_lse = attention(q[0], k[0], v[0])
    torch.testing.assert_close(out[0].double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total[0].T.double(), true_lse, rtol=1e-5, atol=1e-5)


def leaves(*tensors):
    return [x.detach().requires_grad_() for x in tensors]


def wrongs(found, truth):
    """The largest error of each gradient, over the largest truth."""
    return [((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(found, truth)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradients(through, dtype):
    given = leaves(*make(5, 2, 7, 3, 16))
    with torch.no_grad():
        given[1][3:, 0], given[0][3:, 0] = -INF, 7
        given[1][2, 1], given[1][:, 1, 4] = INF, -INF  # a part, and a row without parts
    wide = leaves(*(x.double() for x in given))
    out, total = flash_attn_combine(*given, out_dtype=dtype)
    lse = torch.where(wide[1].isinf(), -INF, wide[1])
    true_total = torch.logsumexp(torch.where((lse == -INF).all(0), 0, lse), 0)
    weights = torch.exp(lse - true_total)
    true_out = (weights[..., None] * wide[0]).sum(0)
    assert out.requires_grad and total.requires_grad
    pairs = [((out, true_out), torch.randn(out.shape).to(out.dtype)), ((total, true_total), torch.randn(total.shape))]
    pairs[1][1][1, 4] = 0  # the formula's lse of the row without parts is another
    pairs = {"out": pairs[:1], "lse": pairs[1:], "both": pairs}[through]
    ours, truth = (
        torch.autograd.grad([x[i] for x, _ in pairs], inputs, [w.to(x[i].dtype) for x, w in pairs], allow_unused=True)
        for i, inputs in enumerate((given, wide))
    )
    truth = [torch.zeros_like(x) if y is None else y for x, y in zip(wide, truth)]
    assert all(x.dtype == torch.float32 for x in ours)
    if through == "lse":
        assert (ours[0] == 0).all() and wrongs(ours[1:], truth[1:])[0] < 1e-5
    else:
        assert max(wrongs(ours, truth)) < 1e-5
    assert all((x[3:, 0] == 0).all() and (x[2, 1] == 0).all() and (x[:, 1, 4] == 0).all() for x in ours)


@pytest.mark.parametrize("largest", [1e3, 1e7])
def test_gradients_beside_a_large_lse(largest):
    """Its rounding is larger than what tells the parts' weights apart."""
    parts, lse = (x.requires_grad_() for x in make(3, 1, 5, 2, 8))
    with torch.no_grad():
        lse += largest
    dout = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(4))
    wide = [x.detach().double().requires_grad_() for x in (parts, lse)]
    want = torch.autograd.grad((wide[1].softmax(0)[..., None] * wide[0]).sum(0), wide, dout.double())
    for has, wants in zip(torch.autograd.grad(flash_attn_combine(parts, lse)[0], (parts, lse), dout), want):
        torch.testing.assert_close(has.double(), wants, rtol=1e-5, atol=1e-5)


def test_gradients_of_no_parts():
    parts, lse = (x[:0].requires_grad_() for x in make(1, 1, 5, 2, 8))
    out, total = flash_attn_combine(parts, lse)
    grads = torch.autograd.grad(out.sum(), (parts, lse))
    assert not out.any() and [x.shape for x in grads] == [parts.shape, lse.shape]


def test_gradients_of_parts_that_hold_nan():
    parts, lse = leaves(*make(3, 1, 4, 2, 8))
    with torch.no_grad():
        lse[1], parts[1] = -INF, float("nan")
    flash_attn_combine(parts, lse)[0].sum().backward()
    assert (parts.grad[1] == 0).all() and (lse.grad[1] == 0).all()
    assert parts.grad.isfinite().all() and lse.grad.isfinite().all() and (lse.grad[0] != 0).any()


def test_second_derivatives():
    given = leaves(*make(3, 1, 4, 2, 8))
    wide = leaves(*(x.double() for x in given))
    second = []
    for (parts, lse), out in ((given, flash_attn_combine(*given)[0]), (wide, formula_with_gradients(*wide))):
        first = torch.autograd.grad(out.square().sum(), (parts, lse), create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), (parts, lse)))
    assert max(wrongs(*second)) < 1e-5


def formula_with_gradients(parts, lse):
    return (torch.softmax(lse, 0)[..., None] * parts).sum(0)


def test_a_given_out_gets_the_gradient():
    parts, lse = leaves(*make(3, 2, 5, 4, 16))
    memory = torch.zeros(2, 5, 4, 19)
    out, _ = flash_attn_combine(parts, lse, memory[..., :16])
    assert out.data_ptr() == memory.data_ptr()
    expected = torch.autograd.grad(flash_attn_combine(parts, lse)[0].sum(), (parts, lse))
    assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(memory.sum(), (parts, lse)), expected))
    for wrong in (torch.zeros(2, 5, 4, 17), torch.zeros(2, 5, 4, 16).half(), torch.zeros(5, 4, 16)):
        with pytest.raises(RuntimeError, match="out must have shape"):
            flash_attn_combine(parts, lse, wrong)
    with pytest.raises(RuntimeError, match="out is written and must not require grad"):
        flash_attn_combine(parts, lse, torch.zeros(2, 5, 4, 16, requires_grad=True) * 1)
    with torch.no_grad():
        assert not flash_attn_combine(parts, lse)[0].requires_grad


@pytest.mark.parametrize("has_out", [False, True])
def test_compiled_gradients(has_out):
    def combine(parts, lse):
        out = torch.zeros(1, 9, 2, 32) if has_out else None
        return flash_attn_combine(parts, lse, out)

    parts, lse = leaves(*make(2, 1, 9, 2, 32))
    compiled = torch.compile(combine, fullgraph=True, backend="aot_eager")
    results = [torch.autograd.grad(sum(x.sum() for x in f(parts, lse)), (parts, lse)) for f in (combine, compiled)]
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_vmap():
    parts, lse = make(3, 4, 5, 2, 8)
    out, total = torch.vmap(lambda *x: flash_attn_combine(*(y[:, None] for y in x)), in_dims=1)(parts, lse)
    expected, expected_total = flash_attn_combine(parts, lse)
    assert torch.equal(out[:, 0], expected) and torch.equal(total[:, 0], expected_total)
