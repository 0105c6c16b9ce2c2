"""flash_attn_combine of flash_attn_3 against the formula in fp64."""

import pytest
import torch
from flash_attn_3.flash_attn_interface import flash_attn_combine, flash_attn_func
from oracle3 import INF, attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


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
