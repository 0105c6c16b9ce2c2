"""The exactness of out: on a GPU compared with cuDNN, on the CPU with the same arithmetic in plain PyTorch.

The error is |out - ref| / |ref| over all elements, with ref in float64 from the same inputs. Our error may be 1.03
times the error of the comparison.
"""

import math

import pytest
import torch
from cases import BOTH
from compare import DTYPES
from harness_cuda import no_hopper
from oracle import visible

from flash_attn import flash_attn_func

ALLOWED = 1.03
LENGTH, HEADS = 2048, 4
HALF = ("bf16", "fp16")
on_hopper = pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")


def inputs(dtype, d, factor, length=LENGTH, device="cpu"):
    """q, k, v of N(0, 1), so that scores are N(0, factor^2)."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, HEADS, d, generator=gen) for _ in range(3))
    return [x.to(device, DTYPES[dtype]) for x in (q * factor, k, v)]


def scores(q, k, causal, dtype):
    q, k = (x[0].transpose(0, 1).to(dtype) for x in (q, k))
    s = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    return s.masked_fill(~visible(s.shape[1], s.shape[2], causal).to(s.device), -math.inf) if causal else s


def relative_error(out, q, k, v, causal):
    ref = torch.softmax(scores(q, k, causal, torch.float64), dim=-1) @ v[0].transpose(0, 1).double()
    ref = ref.transpose(0, 1)
    return ((out[0].double() - ref).norm() / ref.norm()).item()


def plain(q, k, v, causal):
    """Plain attention in float32. Only P and out are rounded to the inputs' dtype, and the largest P of a row is 1."""
    s = scores(q, k, causal, torch.float32)
    p = torch.exp(s - s.amax(dim=-1, keepdim=True))
    out = p.to(v.dtype).float() @ v[0].transpose(0, 1).float() / p.sum(dim=-1, keepdim=True)
    return out.transpose(0, 1)[None].to(v.dtype)


def cudnn(q, k, v, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)


@pytest.mark.parametrize("factor", (1, 4))
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("dtype", ("fp32", *HALF))
@pytest.mark.parametrize("d", (64, 128))
def test_out_on_the_cpu(d, dtype, causal, factor):
    q, k, v = inputs(dtype, d, factor, length=512)
    ours = relative_error(flash_attn_func(q, k, v, causal=causal), q, k, v, causal)
    other = relative_error(plain(q, k, v, causal), q, k, v, causal)
    assert ours <= ALLOWED * other, f"{ours:.3e}, plainly {other:.3e}"


@on_hopper
@pytest.mark.parametrize("factor", (1, 4))
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", (64, 128, 256))
def test_out_beside_cudnn(d, dtype, causal, factor):
    q, k, v = inputs(dtype, d, factor, device="cuda")
    ours, other = (relative_error(f(q, k, v, causal=causal), q, k, v, causal) for f in (flash_attn_func, cudnn))
    assert ours <= ALLOWED * other, f"{ours:.3e}, cuDNN {other:.3e}"


@on_hopper
@pytest.mark.parametrize("factor", (1, 4))
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", (64, 128, 256))
def test_few_queries_beside_cudnn(d, dtype, factor):
    """The decode kernel: 16 rows over each head's keys."""
    q, k, v = inputs(dtype, d, factor, length=8192, device="cuda")
    q = q[:, :16]
    ours, other = (relative_error(f(q, k, v, causal=False), q, k, v, False) for f in (flash_attn_func, cudnn))
    assert ours <= ALLOWED * other, f"{ours:.3e}, cuDNN {other:.3e}"


@on_hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("len_q", (1, 500))
def test_a_key_that_dominates_a_row_is_all_it_gives(len_q, d, dtype):
    """One key of each row is 40 nats above all others. The output is the V of this key, bit for bit."""
    gen = torch.Generator().manual_seed(0)
    v = torch.randn(1, 500, HEADS, d, generator=gen).to(DTYPES[dtype])
    q, k = (torch.randn(1, n, HEADS, d, generator=gen) * 0.1 for n in (len_q, 500))
    chosen = torch.randint(500, (HEADS,), generator=gen)
    q[..., 0] = 8
    for head in range(HEADS):
        k[0, chosen[head], head, 0] = 6 * math.sqrt(d)
    out = flash_attn_func(q.to(v).cuda(), k.to(v).cuda(), v.cuda()).cpu()
    assert torch.equal(out[0], torch.stack([v[0, chosen[head], head] for head in range(HEADS)]).expand(len_q, -1, -1))
