"""dq, dk and dv are as exact as cuDNN's. The test compares relative errors against float64, with the same inputs."""

import pytest
import torch
import torch.nn.functional as F
from cases import BOTH
from compare import DTYPES
from harness_cuda import no_hopper
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func


def gradients(attend, inputs, dout):
    """dq, dk and dv in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return [x.double() for x in torch.autograd.grad(attend(*leaves), leaves, dout.to(leaves[0].dtype))]


def plain(q, k, v, scale, causal):
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def cudnn(q, k, v, scale, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, scale=scale)
    return out.transpose(1, 2)


def errors(device, dtype, length, d, factor, causal, peer):
    """{name: (our error, the peer's error)}, as norms of the differences divided by the norm."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, length, 4, d, device=device).to(DTYPES[dtype]) for _ in range(4)]
    *inputs, dout = inputs
    scale = factor * d**-0.5
    truth = gradients(lambda *x: plain(*x, scale, causal), [x.double() for x in inputs], dout)
    ours = gradients(lambda *x: flash_attn_func(*x, softmax_scale=scale, causal=causal), inputs, dout)
    theirs = gradients(lambda *x: peer(*x, scale, causal), inputs, dout)
    return {
        name: [float((x - t).norm() / t.norm()) for x in (x, y)]
        for name, x, y, t in zip(("dq", "dk", "dv"), ours, theirs, truth)
    }


@pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("factor", (1, 4))
@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_as_exact_as_cudnn(dtype, d, factor, causal):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN's numbers are known of Hopper")
    found = errors("cuda", dtype, 2048, d, factor, causal, cudnn)
    assert all(ours <= 1.03 * theirs for ours, theirs in found.values()), found


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
def test_as_exact_as_plain_arithmetic_on_the_cpu(dtype, causal):
    found = errors("cpu", dtype, 256, 64, 1, causal, plain)
    assert all(ours <= 1.03 * theirs for ours, theirs in found.values()), found
