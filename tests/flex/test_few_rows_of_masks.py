"""A bare mask_mod of few queries on a GPU. A kernel without lists reads all keys, unless there are many of them and
lists would leave nearly all out."""

import random

import pytest
import torch
from oracle_attention import TOLERANCES, attention, close

import flash_attn
from flash_attn import _calls, _imagined, flash_attn_func
from flash_attn.flex import ops
from flash_attn.flex.patterns import keys_within
from flash_attn.flex.tracer import program_of
from flash_attn.flex_attention import AuxRequest, create_mask, flex_attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def mods(len_kv, len_q):
    shift, pad = len_kv - len_q, torch.arange(len_kv) % 7 != 3
    return {
        "causal": lambda b, h, i, j: (i + shift >= j) & (j != 5),
        "padding": lambda b, h, i, j: (j <= i + shift) & (j < len_kv - 40) & (j % 7 != 3),
        "captured": lambda b, h, i, j: pad[j] & (j <= i + shift),
        "window": lambda b, h, i, j: (i + shift >= j) & (i + shift - j < 90) & (j != 5),
        "ends": lambda b, h, i, j: ((j < 4) | (i + shift - j < 100)) & (i + shift >= j) & (j != 1),
    }


def reads_all(capability, function, *args, **kwargs):
    """Does a kernel without lists run? Of many rows on Hopper that is the forward, which takes the keys as a cache."""
    with _imagined.imagined_gpu(capability, _imagined.NOTED):
        kernel = flash_attn.explain(function, *args, **kwargs).kernel
    return kernel.startswith("attn_decode_") or "_cache_flex_" in kernel


def draw(len_q, len_kv=2048, h=4, h_kv=2, d=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(len_q)
    sizes = (h, len_q), (h_kv, len_kv), (h_kv, len_kv)
    return [torch.randn(1, *size, d, generator=generator).to(dtype) for size in sizes]


@pytest.mark.parametrize("capability", (80, 90))
@pytest.mark.parametrize("name", list(mods(9, 9)))
@pytest.mark.parametrize("few_keys", (0, None))
def test_which_kernel(few_keys, name, capability, monkeypatch):
    """Of few keys lists are never made. Of many keys an "or" often hides how many a row sees."""
    if few_keys is not None:
        monkeypatch.setattr(ops, "FEW_KEYS", few_keys)
    for len_q in (1, 16, 32):
        q, k, v = draw(len_q)
        mod = mods(2048, len_q)[name]
        found = reads_all(capability, flex_attention, q, k, v, mask_mod=mod, enable_gqa=True)
        assert found == (few_keys is None or name not in ("window", "ends"))


@pytest.mark.parametrize("capability", (80, 90))
def test_calls_that_have_lists(capability):
    q, k, v = draw(16)
    asked = {"mask_mod": mods(2048, 16)["causal"], "enable_gqa": True}

    def decodes(q, k, v, **more):
        return reads_all(capability, flex_attention, q, k, v, **asked, **more)

    assert decodes(q, k, v)
    assert not decodes(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert not decodes(*(x.float() for x in (q, k, v)))
    assert not decodes(*(x.requires_grad_() for x in draw(16)))  # the backward walks over the lists
    assert not decodes(*draw(33))  # 66 rows of a key head
    assert not decodes(*draw(16, len_kv=255))


@pytest.mark.parametrize("is_direct", (True, False))
@pytest.mark.parametrize("window", ({"causal": True}, {"window_size": (-1, 0)}, {"window_size": (-1, 9)}), ids=str)
def test_one_query_sees_all_keys(window, is_direct, monkeypatch):
    """A causal mask hides nothing from it. A left window does."""
    if not is_direct:
        monkeypatch.setattr(_calls, "_short_way", lambda: lambda *args: None)
    q, k, v = (x.transpose(1, 2) for x in draw(1))
    bias = torch.randn(1, 1, 1, 2048, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    out = flash_attn_func(q, k, v, attn_bias=bias, **window)
    assert torch.equal(out, flash_attn_func(q, k, v, attn_bias=bias))
    left = flash_attn_func(q, k, v, attn_bias=bias, window_size=(99, 0))
    close(left, flash_attn_func(q, k[:, -100:], v[:, -100:], attn_bias=bias[..., -100:]), TOLERANCES[q.dtype])
    for capability in (80, 90):
        assert reads_all(capability, flash_attn_func, q, k, v, attn_bias=bias, **window)


def test_keys_within():
    """No row sees a key outside, and comparisons joined by "and" are exact at both ends."""
    rng, ids, num_exact = random.Random(0), torch.arange(40) // 9, 0

    def side(depth):
        kind = rng.randrange(6 if depth else 4)
        a, c, swaps = rng.randint(-2, 2), rng.randint(-30, 40), rng.random() < 0.5
        if kind == 0:
            return (lambda i, j: a * i + c <= j) if swaps else (lambda i, j: j < c - i)
        if kind == 1:
            return (lambda i, j: (i - j + c).abs() < 5) if swaps else (lambda i, j: i < c)
        if kind == 2:
            return lambda i, j: c - i >= -j
        if kind == 3:
            return (lambda i, j: ids[i] == ids[j]) if swaps else (lambda i, j: (i + j) % 3 != 1)
        x, y = side(depth - 1), side(depth - 1)
        return (lambda i, j: x(i, j) & y(i, j)) if kind == 4 else (lambda i, j: x(i, j) | y(i, j))

    for _ in range(300):
        len_q, len_kv, condition = rng.randint(1, 30), rng.randint(1, 40), side(2)

        def mod(b, h, i, j, condition=condition):
            return condition(i, j) & (b == b)

        program, _, numbers = program_of(mod)
        first, end = keys_within(program, numbers, len_q, len_kv)
        seen = create_mask(mod, 1, 1, len_q, len_kv, "cpu")[0, 0].any(0)
        keys = seen.nonzero()
        assert not len(keys) or (first <= keys.min() and keys.max() < end)
        num_exact += len(keys) > 0 and (first, end) == (int(keys.min()), int(keys.max()) + 1)
    assert num_exact > 60


@needs_gpu
@pytest.mark.parametrize("name", list(mods(9, 9)))
@pytest.mark.parametrize("is_compiled", (False, True))
def test_results(name, is_compiled):
    call = torch.compile(flex_attention, fullgraph=True, backend="aot_eager") if is_compiled else flex_attention
    for len_q in (1, 16, 32, 40):
        q, k, v = draw(len_q)
        mask = mods(2048, len_q)[name]
        seen = create_mask(mask, 1, 1, len_q, 2048, "cpu")
        want = attention(*(x.double() for x in (q, k, v)), None, seen)[0]
        if name == "captured":
            pad = (torch.arange(2048) % 7 != 3).cuda()
            shift = 2048 - len_q
            mask = lambda b, h, i, j, pad=pad, shift=shift: pad[j] & (j <= i + shift)  # noqa: E731
        out = call(*(x.cuda() for x in (q, k, v)), mask_mod=mask, enable_gqa=True)
        close(out.cpu(), want, TOLERANCES[out.dtype])


@needs_gpu
def test_gradients():
    tensors = [x.cuda().requires_grad_() for x in draw(16)]
    mod = mods(2048, 16)["causal"]
    out = flex_attention(*tensors, mask_mod=mod, enable_gqa=True)
    with torch.no_grad():
        decoded = flex_attention(*tensors, mask_mod=mod, enable_gqa=True)
    close(out.detach().cpu(), decoded.cpu().double(), TOLERANCES[out.dtype])
    exact = [x.detach().cpu().double().requires_grad_() for x in tensors]
    want = attention(*exact, None, create_mask(mod, 1, 1, 16, 2048, "cpu"))[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    wants = torch.autograd.grad(want, exact, dout.cpu().double())
    for has, wanted in zip(torch.autograd.grad(out, tensors, dout), wants, strict=True):
        assert (has.cpu().double() - wanted).abs().max() <= TOLERANCES[out.dtype] * wanted.abs().max()


@needs_gpu
def test_an_attn_mask_beside_a_causal_mask():
    q, k, v = (x.transpose(1, 2).cuda() for x in draw(16))
    mask = (torch.arange(2048) % 5 != 2).cuda()
    seen = create_mask(lambda b, h, i, j: (j <= i + 2032) & (j % 5 != 2), 1, 1, 16, 2048, "cpu")
    want = attention(*(x.double().cpu() for x in draw(16)), None, seen)[0]
    close(flash_attn_func(q, k, v, causal=True, attn_mask=mask).transpose(1, 2).cpu(), want, TOLERANCES[q.dtype])
