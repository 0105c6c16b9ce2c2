"""Cross entropy against PyTorch's and against the formula in float64; over a split vocabulary, on two processes."""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks

from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton import cross_entropy as implementation
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

IGNORED = -100


def formula(x, labels, smoothing, scale, z_scale, ignore_index=IGNORED):
    """(losses, z-losses) from the definition, in the dtype of x."""
    x = x * scale
    lse = x.logsumexp(-1)
    kept = labels != ignore_index
    x_label = x.gather(1, labels.where(kept, 0)[:, None])[:, 0]
    z_losses = torch.where(kept, z_scale * lse**2, 0.0)
    losses = torch.where(kept, lse - (1 - smoothing) * x_label - smoothing * x.mean(-1), 0.0)
    return losses + z_losses, z_losses


def problem(n=9, classes=37, dtype=torch.float32):
    x = (4 * torch.randn(n, classes)).to(dtype)
    labels = torch.randint(0, classes, (n,))
    labels[::4] = IGNORED
    return x, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("z_scale", [0.0, 1e-2])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.9])
@pytest.mark.parametrize("chunk", [1, 80, 1 << 22])
def test_formula(chunk, smoothing, scale, z_scale, inplace, dtype, monkeypatch):
    """Chunks of one row, of two rows with one row left, and of all rows."""
    monkeypatch.setattr(implementation, "CHUNK_ELEMENTS", chunk)
    values, labels = problem(dtype=dtype)
    reference = values.double().requires_grad_()
    expected, expected_z = formula(reference, labels, smoothing, scale, z_scale)
    x = values.clone().requires_grad_()
    losses, z_losses = cross_entropy_loss(
        x, labels, label_smoothing=smoothing, logit_scale=scale, lse_square_scale=z_scale, inplace_backward=inplace
    )
    assert losses.dtype == z_losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not z_losses.requires_grad
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z_losses.double(), expected_z, rtol=1e-5, atol=1e-6)
    dlosses = torch.randn_like(losses)
    (dx,) = torch.autograd.grad(losses, x, dlosses)
    (dx_expected,) = torch.autograd.grad(expected, reference, dlosses.double())
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if values.element_size() > 2 else {"rtol": 1e-2, "atol": 1e-4}
    torch.testing.assert_close(dx.double(), dx_expected, **tolerance)
    assert (dx.data_ptr() == x.data_ptr()) == inplace
    assert not dx[::4].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_module_is_pytorchs(smoothing, reduction):
    values, labels = problem()
    labels[1] = 5
    options = {"ignore_index": 5, "reduction": reduction, "label_smoothing": smoothing}
    labels[labels == IGNORED] = 7
    x, reference = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss, expected = CrossEntropyLoss(**options)(x, labels), F.cross_entropy(reference, labels, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.sum().backward(), expected.sum().backward()
    torch.testing.assert_close(x.grad, reference.grad, rtol=1e-5, atol=1e-6)


def test_logits_whose_squares_overflow():
    """Without a z-loss nothing is squared. A small weight keeps a z-loss finite."""
    values, labels = torch.tensor([[3e19, 1e19, 0.0], [1.0, 2.0, 3.0]]), torch.tensor([1, 2])
    for z_scale in (0.0, 1e-10):
        x, reference = values.clone().requires_grad_(), values.double().requires_grad_()
        losses, z_losses = cross_entropy_loss(x, labels, lse_square_scale=z_scale)
        expected, expected_z = formula(reference, labels, 0.0, 1.0, z_scale)
        torch.testing.assert_close(losses.double(), expected)
        torch.testing.assert_close(z_losses.double(), expected_z)
        losses.sum().backward(), expected.sum().backward()
        torch.testing.assert_close(x.grad.double(), reference.grad)


def test_module_z_loss():
    x, labels = problem()
    kept = (labels != IGNORED).sum()
    losses, z_losses = formula(x, labels, 0.0, 1.0, 0.1)
    loss, z_loss = CrossEntropyLoss(lse_square_scale=0.1, return_z_loss=True)(x, labels)
    torch.testing.assert_close(loss, losses.sum() / kept)
    torch.testing.assert_close(z_loss, z_losses.sum() / kept)
    with pytest.raises(NotImplementedError, match="'max'"):
        CrossEntropyLoss(reduction="max")


def test_precomputed_lse():
    """A given lse is used with scale 1 and no smoothing. Then a wrong lse shows. With scale or smoothing it is
    ignored."""
    x, labels = problem()
    lse = x.logsumexp(-1)
    right = cross_entropy_loss(x, labels)[0]
    torch.testing.assert_close(cross_entropy_loss(x, labels, lse)[0], right)
    torch.testing.assert_close(cross_entropy_loss(x, labels, lse + 1)[0], torch.where(labels < 0, right, right + 1))
    for options in ({"label_smoothing": 0.1}, {"logit_scale": 2.0}):
        wrong, ours = cross_entropy_loss(x, labels, lse + 1, **options)[0], cross_entropy_loss(x, labels, **options)[0]
        assert wrong.equal(ours)


def test_edges():
    """Infinite and huge logits, NaN in a row that is ignored, one class, no rows."""
    x = torch.tensor([[1e4, -1e4, 0.0], [float("-inf"), 0.0, 0.0], [float("nan")] * 3], requires_grad=True)
    labels = torch.tensor([0, 1, IGNORED])
    losses, _ = cross_entropy_loss(x, labels)
    torch.testing.assert_close(losses, torch.tensor([1.0, 2.0, 1.0]).log())
    losses.sum().backward()
    assert x.grad.tolist() == [[0, 0, 0], [0, -0.5, 0.5], [0, 0, 0]]
    assert cross_entropy_loss(torch.randn(3, 1), torch.zeros(3, dtype=torch.int32))[0].tolist() == [0, 0, 0]
    none = torch.randn(0, 5, requires_grad=True)
    losses, z_losses = cross_entropy_loss(none, torch.zeros(0, dtype=torch.long))
    losses.sum().backward()
    assert losses.shape == z_losses.shape == (0,) and none.grad.shape == (0, 5)
    strided = torch.randn(5, 8)[:, ::2].requires_grad_()
    torch.testing.assert_close(
        cross_entropy_loss(strided, torch.arange(5) % 4)[0],
        F.cross_entropy(strided, torch.arange(5) % 4, reduction="none"),
    )


def test_refusals():
    with pytest.raises(ValueError, match=r"\(4,\)"):
        cross_entropy_loss(torch.randn(3, 5), torch.zeros(4, dtype=torch.long))
    for label in (5, -1):
        with pytest.raises(IndexError, match=f"labels has {label}, allowed are 0 to 4"):
            cross_entropy_loss(torch.randn(2, 5), torch.tensor([0, label]))


def split_vocabulary(rank, group):
    """On each rank losses equal the losses of the whole vocabulary, and gradients equal its columns."""
    torch.manual_seed(0)
    for smoothing, scale, z_scale in ((0.0, 1.0, 0.0), (0.2, 0.7, 0.01)):
        values, labels = problem(n=11, classes=24)
        whole = values.clone().requires_grad_()
        expected, expected_z = cross_entropy_loss(whole, labels, None, smoothing, scale, z_scale, IGNORED)
        dlosses = torch.randn(11)
        expected.backward(dlosses)
        columns = slice(12 * rank, 12 * rank + 12)
        part = values[:, columns].clone().requires_grad_()
        losses, z_losses = cross_entropy_loss(part, labels, None, smoothing, scale, z_scale, IGNORED, False, group)
        losses.backward(dlosses)
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(z_losses, expected_z)
        torch.testing.assert_close(part.grad, whole.grad[:, columns])


def test_split_vocabulary(tmp_path):
    on_ranks(split_vocabulary, tmp_path)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dloss_requires_grad", [False, True])
def test_there_is_no_second_derivative(dloss_requires_grad, inplace):
    x, labels = problem()
    x.requires_grad_()
    loss = CrossEntropyLoss(inplace_backward=inplace)(x, labels)
    dloss = torch.ones((), requires_grad=dloss_requires_grad)
    (dx,) = torch.autograd.grad(loss, x, dloss, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(dx.square().sum(), x)
