"""Biases, masks and mods of short sequences: calls of up to 64 queries and keys. The kernels of short sequences take
them on every GPU."""

import random

import pytest
import torch
from oracle_attention import INF, TOLERANCES, attention, close, gradients

import flash_attn
from flash_attn import flash_attn_func
from flash_attn.flex_attention import create_block_mask, create_mask, flex_attention

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
DEVICES = ["cpu", GPU]


# ---- which calls ----------------------------------------------------------------------------------------------------


def kernels_of(len_q, len_kv, h_kv=4, d=64, archs="sm_90a", function=flash_attn_func, options=None, **shapes):
    q, k, v = (
        torch.empty(2, n, h, d, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for n, h in ((len_q, 4), (len_kv, h_kv), (len_kv, h_kv))
    )
    for name, shape in shapes.items():
        is_mask = name == "attn_mask"
        dtype = torch.bool if is_mask else torch.bfloat16
        shapes[name] = torch.empty(shape, device="meta", dtype=dtype, requires_grad=not is_mask)
    made = flash_attn.prebuild_call(function, q, k, v, archs=archs, compiles=False, **shapes, **(options or {}))
    return [kernel.name for kernel in made if not kernel.name.startswith(("bias_shift", "flex_"))]


@pytest.mark.parametrize("archs", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(
    ("lengths", "shapes", "rows"),
    [
        ((16, 16), {"attn_bias": (1, 4, 16, 16)}, 16),
        ((16, 3), {"attn_mask": (2, 1, 1, 3)}, 16),
        ((17, 32), {"attn_bias": (2, 4, 17, 32), "attn_mask": (17, 32)}, 32),
        ((49, 64), {"attn_bias": (1, 1, 1, 64)}, 64),
    ],
    ids=str,
)
def test_short_calls_with_options(lengths, shapes, rows, archs):
    names = kernels_of(*lengths, archs=archs, **shapes)
    assert [x.split("_flex_")[0] for x in names] == [
        f"attn_{way}_short_bf16_d64_q{rows}kv{rows}" for way in ("fwd", "bwd")
    ]


def test_other_calls():
    """Longer ones, gradients in a fixed order, fewer key heads backward, and largest scores have other kernels."""
    bias = {"attn_bias": (1, 4, 16, 16)}
    assert not any("short" in x for x in kernels_of(16, 65, attn_bias=(1, 4, 16, 65)))
    for names in (kernels_of(16, 16, h_kv=2, **bias), kernels_of(16, 16, options={"deterministic": True}, **bias)):
        assert "short" in names[0] and not any("short" in x for x in names[1:])
    assert "short" not in kernels_of(16, 16, options={"return_max_logits": True}, **bias)[0]
    assert "short" not in kernels_of(16, 16, options={"softmax_scale": 1e30}, **bias)[0]
    table = torch.empty(2, device="meta", requires_grad=True)

    def by_score(q, k, v):
        mod = lambda s, b, h, i, j: s + table[(s > 0).long()]  # noqa: E731
        return flex_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mod)

    names = kernels_of(16, 16, function=by_score)
    assert "short" in names[0] and all("_any" in x for x in names[1:])


# ---- numbers --------------------------------------------------------------------------------------------------------


def expected(q, k, v, bias, mask, slopes, sinks, right):
    """out [b, len_q, h, d] and lse [b, h, len_q]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    away = torch.arange(scores.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    scores = scores if slopes is None else scores - slopes.double()[:, None, None] * away.abs()
    scores = scores if bias is None else scores + bias
    sees = torch.ones(away.shape, dtype=torch.bool) if mask is None else mask
    sees = sees if right < 0 else sees & (-away <= right)
    scores = scores.masked_fill(~sees, -INF)
    rest = scores[..., :0] if sinks is None else sinks[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, rest], -1)
    is_empty = (scores == -INF).all(-1, keepdim=True)
    finite = torch.where(is_empty, 0.0, scores)
    weights = torch.where(is_empty, 0.0, finite.softmax(-1))
    lse = torch.where(is_empty[..., 0], -INF, finite.logsumexp(-1))
    return (weights[..., : k.shape[2]] @ v).transpose(1, 2), lse


def drawn(seed):
    """A call: its tensors, which may be None behind q, k and v, and the keys that a causal window leaves to a row."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    len_q, len_kv = r.choice([(1, 1), (7, 7), (16, 16), (17, 33), (32, 32), (49, 49), (64, 64), (64, 16), (5, 60)])
    b, h_kv, group = r.choice([1, 3, 40]), r.choice([1, 2, 3]), r.choice([1, 1, 1, 2])
    h, d, dtype = h_kv * group, r.choice([8, 32, 40, 64, 128, 160]), r.choice([torch.bfloat16, torch.float16])

    def normal(*shape):
        return torch.randn(shape, generator=g).to(dtype)

    def shape(key_is_read):
        return *(r.choice([n, n, 1]) for n in (b, h, len_q)), len_kv if key_is_read else r.choice([len_kv, 1])

    q, k, v = (normal(b, n, heads, d) for n, heads in ((len_q, h), (len_kv, h_kv), (len_kv, h_kv)))
    bias = mask = slopes = sinks = None
    # The gradient of a bias that all keys share is 0, and ours is noise of roundings.
    if r.random() < 0.7:
        bias = normal(*shape(True))
        bias = bias.float() if r.random() < 0.3 else bias
        if r.random() < 0.3:
            bias[torch.rand(bias.shape, generator=g) < 0.2] = r.choice([-INF, -1e4, torch.finfo(dtype).min])
    if r.random() < (0.3 if bias is not None else 0.7):
        mask = torch.rand(shape(False), generator=g) < 0.7
    if r.random() < 0.3:
        slopes = torch.rand(h, generator=g)
    if r.random() < 0.3:
        sinks = torch.randn(h, generator=g)
    return (q, k, v, bias, sinks), mask, slopes, r.choice([-1, -1, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed, device):
    tensors, mask, slopes, right = drawn(seed)
    ours = [None if x is None else x.to(device).requires_grad_() for x in tensors]
    wide = [None if x is None else x.double().requires_grad_() for x in tensors]
    moved = [None if x is None else x.to(device) for x in (mask, slopes)]
    out, lse = flash_attn_func(
        *ours[:3], window_size=(-1, right), attn_bias=ours[3], sinks=ours[4], attn_mask=moved[0],
        alibi_slopes=moved[1], return_lse=True,
    )  # fmt: skip
    want = expected(*wide[:3], wide[3], mask, slopes, wide[4], right)
    tolerance = TOLERANCES[out.dtype]
    for has, wants in zip((out, lse), want, strict=True):
        close(has.cpu(), wants, tolerance)
    generator = torch.Generator().manual_seed(seed)
    dout, dlse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    dout, dlse = dout.to(out.dtype), torch.where(want[1] == -INF, 0.0, dlse).float()
    leaves = [[x for x in of if x is not None] for of in (ours, wide)]
    got = gradients((out, lse), leaves[0], (dout.to(device), dlse.to(device)))
    wants = gradients(want, leaves[1], (dout.double(), dlse.double()))
    for x, has, wanted in zip(leaves[0], got, wants, strict=True):
        assert has.shape == x.shape and has.dtype == x.dtype
        close(has.cpu(), wanted, 4 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [8, 24, 64, 128])
def test_blocks_that_lie_across_a_unit(block, device):
    """A block mask of smaller blocks, too: some are empty, some full."""
    table = torch.randn(97, generator=torch.Generator().manual_seed(block)).to(device).requires_grad_()

    def seen(b, h, i, j):
        return (i // 8 + j // 8 + b) % 3 != 0

    def score(x, b, h, i, j):
        return x + table[i - j + 48]

    q, k, v = (
        torch.randn(5, 3, 49, 64, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in range(3)
    )
    ours = [x.to(device).requires_grad_() for x in (q, k, v)]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    blocks = create_block_mask(seen, 5, 3, 49, 49, device=device, BLOCK_SIZE=block)
    out = flex_attention(*ours, score, blocks)
    of_cpu = table.detach().cpu().double().requires_grad_()
    want = attention(*wide, lambda x, b, h, i, j: x + of_cpu[i - j + 48], create_mask(seen, 5, 3, 49, 49, "cpu"))[0]
    close(out.cpu(), want, 2e-2)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    got = torch.autograd.grad(out, [*ours, table], dout.to(device))
    for has, wants in zip(got, torch.autograd.grad(want, [*wide, of_cpu], dout.double()), strict=True):
        close(has.cpu(), wants, 8e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [INF, float("nan")], ids=str)
def test_what_a_mask_hides_reaches_nobody(bad, device):
    """NaN and inf in a key, its value, and in a query that sees nothing."""
    for n in (1, 16, 49):
        q, k, v = (torch.randn(3, n, 2, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
        mask = torch.ones(3, 1, n, n, dtype=torch.bool)
        mask[0, :, :, n // 2] = mask[1, :, n // 3] = False
        dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
        results = []
        for x in (0.0, bad):
            k[0, n // 2], v[0, n // 2], q[1, n // 3] = x, x, x
            leaves = [y.clone().to(device).requires_grad_() for y in (q, k, v)]
            bias = torch.zeros(1, 2, n, n, device=device, dtype=torch.bfloat16, requires_grad=True)
            out = flash_attn_func(*leaves, attn_bias=bias, attn_mask=mask.to(device))
            results.append([out, *torch.autograd.grad(out, [*leaves, bias], dout.to(device))])
        for clean, beside in zip(*results):
            torch.testing.assert_close(clean, beside, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_batch", [False, True], ids=["of all sequences", "of each sequence"])
@pytest.mark.parametrize(("b", "n"), [(3001, 7), (701, 33)])
def test_many_sequences_of_a_unit(b, n, of_batch, device):
    """A unit adds up the gradients of a bias over its sequences. Their number is no multiple of those of a unit."""
    q, k, v, dout = (torch.randn(b, n, 4, 32, generator=torch.Generator().manual_seed(i)).half() for i in range(4))
    shape = (b, 1, 1, n) if of_batch else (1, 4, n, n)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5)).half()
    wide = [x.double().requires_grad_() for x in (q, k, v, bias)]
    ours = [x.to(device).requires_grad_() for x in (q, k, v, bias)]
    want, out = expected(*wide, None, None, None, -1)[0], flash_attn_func(*ours[:3], attn_bias=ours[3])
    close(out.cpu(), want, 3e-3)
    got = torch.autograd.grad(out, ours, dout.to(device))
    for has, wants in zip(got, torch.autograd.grad(want, wide, dout.double()), strict=True):
        close(has.cpu(), wants, 1e-2)
