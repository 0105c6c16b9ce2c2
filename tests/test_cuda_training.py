"""A training step on a GPU is recorded as one graph and repeats bit for bit. Its memory grows linearly with the
length."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from cases import BOTH
from harness_cuda import no_gpu, skip_without_memory
from torch import nn

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")

HALF = (torch.bfloat16, torch.float16)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


class Layer(nn.Module):
    """Predicts the next token from the earlier tokens of its sequence."""

    def __init__(self, tokens=50, heads=4, d=64):
        super().__init__()
        self.heads, width = heads, heads * d
        self.token, self.qkv, self.out = (
            nn.Embedding(tokens, width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, tokens),
        )

    def forward(self, x, cu, longest):
        qkv = self.qkv(self.token(x)).unflatten(-1, (3, self.heads, -1))
        return self.out(flash_attn_varlen_qkvpacked_func(qkv, cu, longest, causal=True, deterministic=True).flatten(-2))


@pytest.mark.parametrize("dtype", HALF)
def test_a_whole_step_as_one_graph(dtype):
    """Forward, backward and optimizer of packed sequences whose lengths change from replay to replay."""
    torch.manual_seed(0)
    model = Layer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    x = torch.randint(50, (300,), device="cuda")
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def step(model, optimizer):
        with torch.autocast("cuda", dtype, cache_enabled=False):
            scores = model(x, cu, 300)
        loss = F.cross_entropy(scores.float(), x.roll(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, optimizer)
    torch.cuda.synchronize()
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, capturable=True)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizer)
    seen = []
    for lengths in ([0, 7, 300], [0, 300, 300], [0, 0, 300], [0, 299, 300], [0, 150, 300]):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        x.random_(50)
        graph.replay()
        assert torch.equal(loss, step(twin, twin_optimizer))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
        seen.append(loss.item())
    assert len(set(seen)) == len(seen) and all(map(math.isfinite, seen))


def test_the_backward_of_a_replay_drops_what_its_forward_dropped():
    torch.manual_seed(0)
    q, k, v, dout = (randn(2, 200, 4, 64) for _ in range(4))
    rest = (0.3, 0.125, True, -1, -1, 0.0, None)

    def backward(out, lse, rng):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *grads, *rest, True, rng)
        return grads

    def call():
        out, lse, _, rng = _flash_attn_forward(q, k, v, *rest, False)
        return out, lse, rng, backward(out, lse, rng)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, rng, grads = call()
    states = []
    for _ in range(3):
        graph.replay()
        want = backward(out, lse, rng.clone())
        assert all(torch.equal(x, y) for x, y in zip(grads, want))
        states.append(tuple(rng.tolist()))
    assert len(set(states)) == 3


@pytest.mark.parametrize("d, dtype", ((64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)))
@pytest.mark.parametrize("packed", BOTH)
def test_a_thousand_repeats_in_a_fixed_order(d, packed, dtype):
    torch.manual_seed(0)
    leaves = [randn(2, 400, 4, d, dtype=dtype).requires_grad_() for _ in range(3)]
    if packed:
        cu = torch.tensor([0, 500, 530, 800], dtype=torch.int32, device="cuda")
        flat = [x.flatten(0, 1) for x in leaves]
        out = flash_attn_varlen_func(*flat, cu, cu, 500, 500, causal=True, deterministic=True)
    else:
        out = flash_attn_func(*leaves, causal=True, deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for x, y in zip(first, again):
            different += (x.view(torch.int16) != y.view(torch.int16)).sum()
    assert different.item() == 0 and all(x.isfinite().all() and x.any() for x in first)


def peak(function):
    """The largest memory of a call beyond the memory in use before, in bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("packed", BOTH)
def test_memory_grows_with_the_length_only(d, deterministic, packed):
    """The bound has out, three gradients in 16 bit and the sums of dq in fp32. It has lse, softmax_d and two more
    floats for each row, in whole blocks of 128 rows. The allocator gives each tensor up to 1 MiB more. Scores alone
    would be 10 to 40 times that."""
    n, h = 16384, 4
    leaves = [randn(n, h, d).requires_grad_() for _ in range(3)]
    dout = randn(n, h, d)
    cu = torch.tensor([0, n // 3, n], dtype=torch.int32, device="cuda")

    def step():
        if packed:
            out = flash_attn_varlen_func(*leaves, cu, cu, n, n, causal=True, deterministic=deterministic)
        else:
            out = flash_attn_func(*(x[None] for x in leaves), causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, dout.view(out.shape))

    step()
    rows = (n + 3 * 128) * h
    assert peak(step) <= rows * (d * (4 * 2 + 4) + 4 * 4) + (8 << 20)


@pytest.mark.parametrize("h, d", ((128, 128), (64, 256)))
@pytest.mark.parametrize("large", ("queries", "keys"))
def test_beyond_2_to_the_31_elements(large, h, d):
    """The last sequence of a batch whose tensors, gradients and workspace have more than 2^31 elements."""
    skip_without_memory(30)
    b, n = 17, 8192
    many, few = torch.empty(b, n, h, d, device="cuda", dtype=torch.bfloat16), randn(b, 256, h, d)
    assert many.numel() > 2**31
    many[-1].normal_()
    q, k, v = (many, few, few) if large == "queries" else (few, many, many)
    found = []
    for part in (slice(None), slice(-1, None)):
        leaves = [x[part] for x in (q, k, v)]
        out, lse, _, rng = _flash_attn_forward(*leaves, 0.0, 0.1, False, -1, -1, 0.0, None, False)
        grads = [torch.empty_like(x) for x in leaves]
        _flash_attn_backward(out, *leaves, out, lse, *grads, 0.0, 0.1, False, -1, -1, 0.0, None, True, rng)
        found.append([x[-1].clone() for x in (out, *grads)])
        del out, lse, grads, leaves
    assert all(torch.equal(x, y) and x.any() and x.isfinite().all() for x, y in zip(*found))
