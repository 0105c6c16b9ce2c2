"""Biases of short sequences on the CPU, and their gradients. The kernels read the bias of a whole tile and write the
gradient of a whole tile, without the evaluator of mods (csrc/cpu/flex_bias.h)."""

import math

import flash_attn_2_cuda
import pytest
import torch
from compare import DTYPES

from flash_attn import flash_attn_func
from flash_attn.explain import explain

NAN, LEAST = float("nan"), torch.finfo(torch.float32).min
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 4e-3}
# queries, keys, heads, key heads, d: few rows, one tile, more than one tile, and borders of vectors and of words
SHAPES = [
    (1, 1, 3, 3, 8),
    (1, 577, 4, 2, 64),
    (2, 1030, 3, 3, 40),
    (15, 15, 2, 2, 32),
    (16, 16, 4, 2, 64),
    (17, 17, 3, 3, 72),
    (25, 31, 2, 1, 33),
    (49, 49, 4, 4, 32),
    (65, 49, 2, 1, 16),
    (81, 130, 4, 2, 64),
]
BIASES = ["bhqk", "1hqk", "11qk", "b11k", "1h1k", "bhq1", "qk", "turned", "sliced"]
BATCH = 3


def inputs_of(shape, dtype="fp32", seed=0):
    len_q, len_kv, h, h_kv, d = shape
    generator = torch.Generator().manual_seed(seed + len_q + len_kv)
    sizes = (len_q, h), (len_kv, h_kv), (len_kv, h_kv), (len_q, h)
    return [torch.randn(BATCH, n, heads, d, generator=generator).to(DTYPES[dtype]) for n, heads in sizes]


def bias_of(kind, shape, dtype="fp32"):
    len_q, len_kv, h = shape[:3]
    generator = torch.Generator().manual_seed(len_q)
    sizes = {"b": BATCH, "h": h, "q": len_q, "k": len_kv, "1": 1}
    letters = "1hqk" if kind in ("turned", "sliced") else kind
    wide = [sizes[letter] * (2 if kind == "sliced" and letter == "k" else 1) for letter in letters]
    bias = torch.randn(*wide, generator=generator).to(DTYPES[dtype])
    if kind == "turned":
        bias = bias.mT.contiguous().mT
    return bias[..., ::2] if kind == "sliced" else bias


def exact_gradients(q, k, v, dout, bias, causal=False):
    """out and the gradients in fp64. Pairs with a bias of -inf are masked, whatever their values are."""
    q, k, v, bias = leaves = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    g = q.shape[2] // k.shape[2]
    rows, keys, values = (x.transpose(1, 2) for x in (q, k.repeat_interleave(g, 2), v.repeat_interleave(g, 2)))
    scores = rows @ keys.mT * q.shape[-1] ** -0.5 + bias
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:]).tril(scores.shape[-1] - scores.shape[-2]).bool(), -math.inf
        )
    out = (scores.softmax(-1).nan_to_num(0.0) @ values).transpose(1, 2)
    return out, torch.autograd.grad(out, leaves, dout.double())


def our_gradients(q, k, v, dout, bias, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    out = flash_attn_func(*leaves[:3], attn_bias=leaves[3], **options)
    return out.detach(), torch.autograd.grad(out, leaves, dout)


def verify(inputs, bias, tolerance, **options):
    out, found = our_gradients(*inputs, bias, **options)
    want, wanted = exact_gradients(*inputs, bias, **options)
    for name, x, t in zip(("out", "dq", "dk", "dv", "dbias"), (out, *found), (want, *wanted), strict=True):
        assert (x.double() - t).abs().max() <= tolerance * (1 + t.abs().max()), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", BIASES)
def test_every_shape(shape, kind, isa):
    verify(inputs_of(shape), bias_of(kind, shape), TOLERANCE["fp32"])


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[6], SHAPES[7], SHAPES[9]], ids=str)
@pytest.mark.parametrize("kind", ["bhqk", "1hqk", "b11k", "sliced"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_dtypes(shape, kind, dtype, isa):
    verify(inputs_of(shape, dtype), bias_of(kind, shape, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[7], SHAPES[9]], ids=str)
def test_beside_a_causal_mask(shape, isa):
    verify(inputs_of(shape), bias_of("1hqk", shape), TOLERANCE["fp32"], causal=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [-math.inf, LEAST, -1e30, -1e4, math.inf, NAN])
@pytest.mark.parametrize("is_whole", [False, True])
def test_unusual_biases(shape, dtype, value, is_whole, isa):
    """One value in some pairs, and perhaps in a row as a whole. The reference, which reads pair by pair, decides."""
    inputs, bias = inputs_of(shape, dtype), bias_of("1hqk", shape)
    bias[:, :, ::3, shape[1] // 2 :] = value
    if is_whole:
        bias[:, 0, shape[0] // 2] = value
    out, found = our_gradients(*inputs, bias)
    flash_attn_2_cuda.set_cpu_isa("reference")
    want, wanted = our_gradients(*inputs, bias)
    for name, x, t in zip(("out", "dq", "dk", "dv", "dbias"), (out, *found), (want, *wanted), strict=True):
        x, t = x.double(), t.double()
        assert (x.isnan() == t.isnan()).all(), name
        assert (x - t).nan_to_num(0.0).abs().max() <= TOLERANCE[dtype] * (1 + t.nan_to_num(0.0).abs().max()), name


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[7]], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.inf, NAN])
def test_masked_elements_reach_nobody(shape, dtype, bad, isa):
    """The last key has a bias of -inf in all rows, and the first row in all keys. Their V and dO are not finite."""
    inputs, bias = inputs_of(shape, dtype), bias_of("1hqk", shape)
    bias[..., -1] = -math.inf
    if shape[0] > 1:
        bias[..., 0, :] = -math.inf
    _, wanted = our_gradients(*inputs, bias)
    q, k, v, dout = (x.clone() for x in inputs)  # q and k: inf - inf would be NaN
    v[:, -1] = bad
    if shape[0] > 1:
        dout[:, 0] = bad
    _, found = our_gradients(q, k, v, dout, bias)
    for name, x, t in zip(("dq", "dk", "dv", "dbias"), found, wanted, strict=True):
        assert (x.double() - t.double()).abs().max() <= TOLERANCE[dtype] * (1 + t.double().abs().max()), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", BIASES)
def test_threads_change_no_bit(shape, kind):
    inputs, bias = inputs_of(shape), bias_of(kind, shape)
    inputs, bias = [x.repeat(8, 1, 1, 1) for x in inputs], bias.repeat(8, 1, 1, 1) if kind[0] == "b" else bias
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            out, found = our_gradients(*inputs, bias)
            results.append((out, *found))
    finally:
        torch.set_num_threads(before)
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_which_kernel_takes_a_bias():
    def kernel(shape, kind, **options):
        q, k, v, _ = (x.requires_grad_() for x in inputs_of(shape))
        return explain(
            flash_attn_func, q, k, v, attn_bias=bias_of(kind, shape).requires_grad_(), **options
        ).backward.kernel

    assert "bwd_rows" in kernel(SHAPES[3], "1hqk") and "bwd_rows" in kernel(SHAPES[1], "b11k")
    assert "rows" not in kernel(SHAPES[6], "1hqk") + kernel(SHAPES[3], "1hqk", causal=True)


def test_a_gradient_of_lse(isa):
    shape = SHAPES[3]
    inputs, bias = inputs_of(shape), bias_of("1hqk", shape)
    q, k, v, bias = leaves = [x.requires_grad_() for x in (*inputs[:3], bias)]
    _, lse = flash_attn_func(q, k, v, attn_bias=bias, return_lse=True)
    found = torch.autograd.grad(lse.sum(), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    g = q.shape[2] // k.shape[2]
    rows, keys = wide[0].transpose(1, 2), wide[1].repeat_interleave(g, 2).transpose(1, 2)
    exact = (rows @ keys.mT * q.shape[-1] ** -0.5 + wide[3]).logsumexp(-1).sum()
    for x, t in zip(found, torch.autograd.grad(exact, wide, allow_unused=True), strict=True):
        assert (x - (0 if t is None else t)).abs().max() <= 2e-5
