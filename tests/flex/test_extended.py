"""attn_bias, attn_mask, sinks, return_lse and return_max_logits against plain arithmetic in fp64, gradients too."""

import pytest
import torch
from oracle_attention import INF, TOLERANCES, close, gradients

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn.flex.options import PackedPlaces, Places, blocks_of, shift_of_rows

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
DEVICES = ["cpu", GPU]


def distance(len_q, len_kv):
    return torch.arange(len_q)[:, None] + len_kv - len_q - torch.arange(len_kv)


def expected(q, k, v, bias=None, mask=None, sinks=None, window=(-1, -1), softcap=0.0, slopes=None):
    """out [b, len_q, h, d], lse [b, h, len_q] and max_logits [h]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores, away = q @ k.mT * q.shape[-1] ** -0.5, distance(q.shape[2], k.shape[2])
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if slopes is None else scores - slopes.double()[..., None, None] * away.abs()
    scores = scores if bias is None else scores + bias
    sees = torch.ones(away.shape, dtype=torch.bool) if mask is None else mask
    sees = sees & (away <= window[0]) if window[0] >= 0 else sees
    sees = sees & (-away <= window[1]) if window[1] >= 0 else sees
    scores = scores.masked_fill(~sees, -INF)
    has_sink = sinks is not None
    sink = sinks[:, None, None].expand(*scores.shape[:3], 1) if has_sink else scores[..., :0]
    everything = torch.cat([scores, sink], -1)
    is_empty = (everything == -INF).all(-1, keepdim=True)
    everything = torch.where(is_empty, 0.0, everything)
    weights = torch.where(is_empty, 0.0, everything.softmax(-1))
    lse = torch.where(is_empty[..., 0], -INF, everything.logsumexp(-1)).detach()
    mean = (everything.masked_fill(everything == -INF, 0.0) * weights.detach()).sum(-1)
    lse = lse + (mean - mean.detach())  # torch's own gradient of logsumexp is wrong beside scores of -1e30
    weights = weights[..., : scores.shape[-1]]
    return (weights @ v).transpose(1, 2), lse, scores.detach().amax((0, 2, 3))


def leaf(*shape, dtype=torch.float32, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.to(dtype).requires_grad_()


def compare(device, tensors, bias=None, mask=None, sinks=None, window=(-1, -1), tolerance=None, **options):
    """Compares every result and every gradient."""
    leaves = [*tensors, *(x for x in (bias, sinks) if x is not None)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    ours = [x.detach().to(device).requires_grad_() for x in leaves]
    rest = {id(x): (a, b) for x, a, b in zip(leaves, ours, wide)}
    slopes = options.pop("slopes", None)
    given = {"attn_bias": bias, "sinks": sinks}
    given = {name: x if x is None else rest[id(x)][0] for name, x in given.items()}
    out, lse, top = flash_attn_func(
        *ours[:3], window_size=window, alibi_slopes=None if slopes is None else slopes.to(device), return_lse=True,
        return_max_logits=True, attn_mask=None if mask is None else mask.to(device), **given, **options,
    )  # fmt: skip
    bias, sinks = (x if x is None else rest[id(x)][1] for x in (bias, sinks))
    want = expected(*wide[:3], bias, mask, sinks, window, slopes=slopes, **options)
    tolerance = tolerance or TOLERANCES[out.dtype]
    for has, wants in zip((out, lse, top), want, strict=True):
        close(has.cpu(), wants, tolerance)
    generator = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    dout, dlse = dout.to(out.dtype), torch.where(want[1] == -INF, 0.0, dlse).float()
    got = gradients((out, lse), ours, (dout.to(device), dlse.to(device)))
    for has, wants in zip(got, gradients(want[:2], wide, (dout.double(), dlse.double())), strict=True):
        assert has.shape == wants.shape
        close(has.cpu(), wants, 4 * tolerance)


SHAPES = [(2, 4, 70, 90), (1, 4, 70, 90), (2, 1, 1, 90), (1, 4, 1, 1), (2, 1, 70, 1), (70, 90), (1,), (4, 70, 90)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_of_every_shape(shape, device):
    tensors = [leaf(2, n, h, 24, seed=s) for n, h, s in ((70, 4, 0), (90, 2, 1), (90, 2, 2))]
    mask = leaf(*shape, seed=9) > -0.5
    compare(device, tensors, leaf(*shape), window=(30, 0))
    compare(device, tensors, mask=mask, sinks=leaf(4))
    compare(device, tensors, leaf(*shape), mask, leaf(4), softcap=3.0, slopes=torch.rand(2, 4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_without_keys(dtype, device):
    tensors = [leaf(1, n, h, 64, dtype=dtype, seed=s) for n, h, s in ((140, 4, 0), (130, 2, 1), (130, 2, 2))]
    mask = torch.rand(1, 1, 140, 130, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[:, :, 50:60] = False
    for sinks in (None, leaf(4)):
        compare(device, tensors, None, mask, sinks, window=(-1, 0))
    out, lse = flash_attn_func(*(x.to(device) for x in tensors), attn_mask=mask.to(device), return_lse=True)
    assert (out[:, 50:60] == 0).all() and (lse[:, :, 50:60] == -INF).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 5)], ids=str)
def test_sinks_alone(window, device, dropout_p=0.0):
    """The plain kernels. A sink is a key of value 0 whose score is fixed."""
    tensors = [leaf(2, n, h, 32, seed=s) for n, h, s in ((50, 4, 0), (40, 2, 1), (40, 2, 2))]
    wide = [x.detach().double().requires_grad_() for x in (*tensors, leaf(4))]
    ours = [x.detach().to(device).requires_grad_() for x in (*tensors, leaf(4))]
    out = flash_attn_func(*ours[:3], window_size=window, sinks=ours[3])
    want, want_lse, _ = expected(*wide[:3], sinks=wide[3], window=window)
    close(out.cpu(), want, 2e-5)
    with torch.no_grad():
        close(flash_attn_func(*ours[:3], window_size=window, sinks=ours[3], return_lse=True)[1].cpu(), want_lse, 2e-5)
        cached = flash_attn_with_kvcache(*ours[:3], window_size=window, sinks=ours[3])
        close(cached.cpu(), want, 2e-5)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for has, wants in zip(gradients([out], ours, [dout.to(device)]), gradients([want], wide, [dout.double()])):
        close(has.cpu(), wants, 8e-5)


def test_slopes_of_fp64_beside_a_mask():
    """A slope in fp32 times a distance is no number of fp32."""
    q, k, v = (leaf(1, 64, 2, 16, seed=s).detach().double() for s in range(3))
    slopes = torch.rand(2, generator=torch.Generator().manual_seed(0))
    want = flash_attn_func(q, k, v, alibi_slopes=slopes)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    for way in ({"attn_mask": torch.ones(1, 1, dtype=torch.bool)}, {"attn_bias": torch.zeros(1)}):
        for function in (flash_attn_func, compiled):
            torch.testing.assert_close(function(q, k, v, alibi_slopes=slopes, **way), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"attn_bias": torch.zeros(1)}, {"attn_mask": torch.ones(1, dtype=torch.bool)}])
@pytest.mark.parametrize("leaves", ["", "q", "s", "qs"])
def test_rows_behind_the_last_sequence_have_no_sink(leaves, options, device):
    """Whatever way the call takes: its lse there is -inf, and has no gradient."""
    cu = torch.tensor([0, 2], dtype=torch.int32, device=device)
    q, k, v, sinks = (leaf(*shape, seed=i).to(device).detach() for i, shape in enumerate([(4, 2, 8)] * 3 + [(2,)]))
    q.requires_grad_("q" in leaves), sinks.requires_grad_("s" in leaves)
    options = {name: x.to(device) for name, x in options.items()}

    def lse_of_call():
        out, lse = flash_attn_varlen_func(q, k, v, cu, cu, 2, 2, sinks=sinks, return_lse=True, **options)
        assert lse[:, :2].isfinite().all()
        if device == "cpu" or leaves or options:  # Hopper's plain kernels write no such rows
            assert not out[2:].any() and (lse[:, 2:] == -INF).all()
        return lse

    lse_of_call()
    for wanted in (x for name, x in (("q", q), ("s", sinks)) if name in leaves):
        assert torch.autograd.grad(lse_of_call()[:, :2].sum(), wanted)[0].any()
        assert not torch.autograd.grad(lse_of_call()[:, 2:].sum(), wanted)[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_shift_of_rows_on_a_gpu(dtype):
    """One launch gives what torch's functions give."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    places = Places(37, 300, (-1, -1))
    for shape in ((2, 3, 37, 300), (37, 300), (3, 1, 300), (300,), (2, 1, 37, 1), (1, 1, 1, 1), ()):
        bias = torch.randn(shape, device="cuda").to(dtype)
        low = torch.full_like(bias, -2000) - bias.abs()
        for x in (
            bias,
            low,
            torch.where(torch.rand_like(bias) < 0.01, bias, low),
            low - INF,
            torch.full_like(bias, -1000),
        ):
            if x.dim() and x.shape[-1] > 1:
                x = x.clone()
                (x[..., 0, :] if x.dim() > 1 else x)[..., -1] = float("nan") if x.dim() > 1 else -INF
            for y in (x, x[..., ::3], x[..., -1:].expand(*x.shape[:-1], 70)) if x.dim() else (x,):
                got = shift_of_rows(places, y, None, torch.float32)
                seen = y.masked_fill(y.isnan(), -INF)  # A mask may hide what is NaN.
                wide = seen.reshape((1,) * (4 - y.dim()) + y.shape).amax(-1).float()
                assert torch.equal(got, torch.where((wide < -1000) & ~wide.isinf(), wide, 0.0))


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sink", [None, 0.5, -INF, "low"], ids=str)
@pytest.mark.parametrize("value", [-1e4, -1e9, -1e30, LOWEST], ids=str)
def test_rows_with_a_low_bias_keep_their_digits(value, sink, device):
    tensors = [leaf(2, n, h, 16, seed=n + h) for n, h in ((40, 4), (50, 2), (50, 2))]
    bias = leaf(2, 4, 40, 50, seed=3).detach()
    bias[0, :, 3:9], bias[1, 2, :, ::2] = value, value  # whole rows, and half of the keys
    if value > -1e20:
        bias[1, 1, 7] += value
    sink = value if sink == "low" else sink
    sinks = None if sink is None else torch.full((4,), sink).requires_grad_()
    compare(device, tensors, bias.requires_grad_(), sinks=sinks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (-1, 3)], ids=str)
@pytest.mark.parametrize("value", [-1e9, LOWEST], ids=str)
def test_rows_that_see_only_padding(value, window, device):
    tensors = [leaf(2, 50, h, 16, seed=h) for h in (4, 2, 2)]
    bias = torch.zeros(2, 1, 1, 50)
    bias[0, ..., :20], bias[1] = value, value
    compare(device, tensors, bias.requires_grad_(), window=window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_is_each_sequence_alone(causal, device):
    lengths_q, lengths_k = [5, 0, 130, 40], [9, 7, 128, 30]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32).to(device) for n in (lengths_q, lengths_k))
    shapes = (sum(lengths_q) + 3, 4, 16), (sum(lengths_k), 2, 16), (sum(lengths_k), 2, 16)
    q, k, v, bias, sinks = (leaf(*s, seed=i).to(device).detach().requires_grad_()
                            for i, s in enumerate([*shapes, (4, 4, 130, 128), (4,)]))  # fmt: skip
    with torch.no_grad():
        bias[2, 1, 5:9] = -1e9
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 130, 128, causal=causal, attn_bias=bias, sinks=sinks, return_lse=True
    )
    assert out.shape == q.shape and lse.shape == (4, len(q))
    pairs = []
    for n, (len_q, len_k) in enumerate(zip(lengths_q, lengths_k)):
        own_q, own_k = (slice(int(cu[n]), int(cu[n + 1])) for cu in (cu_q, cu_k))
        own = flash_attn_func(
            q[None, own_q], k[None, own_k], v[None, own_k], causal=causal, sinks=sinks, return_lse=True,
            attn_bias=bias[n : n + 1, :, :len_q, :len_k],
        )  # fmt: skip
        close(out[own_q], own[0][0], 2e-5)
        close(lse[:, own_q], own[1][0], 2e-5)
        pairs += [(out[own_q].sin().sum() + lse[:, own_q].cos().sum(), own[0].sin().sum() + own[1].cos().sum())]
    inputs = [q, k, v, bias, sinks]
    got, want = (torch.autograd.grad(sum(x[i] for x in pairs), inputs, retain_graph=True) for i in (0, 1))
    for has, wants in zip(got, want):
        close(has, wants, 8e-5)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 9), (0, -1)], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
def test_lists_of_blocks(is_packed, window):
    """The lists that a GPU takes hold every visible pair, and a full block holds no other."""
    cu_q, cu_k = torch.tensor([0, 200, 200, 420]).int(), torch.tensor([0, 300, 310, 500]).int()
    places = PackedPlaces(cu_q, cu_k, 430, 500, window) if is_packed else Places(430, 500, window)
    first, last = places.bounds("cpu")
    j = torch.arange(500)
    sees = (first[:, None] <= j) & (j <= last[:, None])
    _, _, num, at, full_num, full_at = blocks_of(places, 430, 500, "cpu", True)
    kinds = torch.zeros(4, 4, dtype=torch.int)
    for kind, counts, columns in ((1, num, at), (2, full_num, full_at)):
        for row in range(4):
            kinds[row, columns[0, 0, row, : counts[0, 0, row]].long()] = kind
    for row in range(4):
        for column in range(4):
            block = sees[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            assert kinds[row, column] == (2 if block.all() else int(kinds[row, column] > 0))
            assert kinds[row, column] > 0 or not block.any()


def test_packed_tensors_and_compile():
    qkv = leaf(2, 40, 3, 4, 16)
    bias = leaf(4, 40, 40)
    q, k, v = qkv.unbind(2)
    want = flash_attn_func(q, k, v, attn_bias=bias, causal=True)
    for out in (
        flash_attn_qkvpacked_func(qkv, attn_bias=bias, causal=True),
        flash_attn_kvpacked_func(q, qkv[:, :, 1:], attn_bias=bias, causal=True),
        torch.compile(flash_attn_func, backend="eager")(q, k, v, attn_bias=bias, causal=True),
    ):
        assert torch.equal(out, want) and out.requires_grad


@pytest.mark.parametrize("name, value, words", [
    ("attn_bias", torch.zeros(2, 4, 9, 8), "attn_bias must have the shape"),
    ("attn_bias", torch.ones(9, 9, dtype=torch.bool), "attn_bias must be fp16, bf16, fp32 or fp64"),
    ("attn_bias", torch.ones(9, 9).to(torch.float8_e4m3fn), "attn_bias must be fp16, bf16, fp32 or fp64; it is"),
    ("attn_mask", torch.ones(3, 1, 9, 9, dtype=torch.bool), "attn_mask must have the shape"),
    ("attn_mask", torch.ones(9, 9), "attn_mask must be bool"),
    ("sinks", torch.zeros(2), "sinks must have the shape"),
    ("sinks", torch.zeros(4, dtype=torch.int32), "sinks must be floating"),
])  # fmt: skip
def test_wrong_options(name, value, words):
    q = torch.zeros(2, 9, 4, 8)
    with pytest.raises(RuntimeError, match=words):
        flash_attn_func(q, q, q, **{name: value})


@pytest.mark.parametrize("names", [("sinks",), ("attn_bias",), ("attn_bias", "sinks"), ("attn_mask",)])
def test_forward_mode_and_second_derivatives_are_refused(names):
    q = leaf(1, 8, 2, 16)
    made = {"sinks": leaf(2), "attn_bias": leaf(1, 2, 8, 8), "attn_mask": torch.ones(8, 8, dtype=torch.bool)}
    options = {name: made[name] for name in names}

    def attend(q):
        return flash_attn_func(q, q, q, **options)

    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no jvp"):
        attend(torch.autograd.forward_ad.make_dual(q.detach(), q.detach()))
    leaves = [q, *(x for x in options.values() if x.requires_grad)]
    grads = torch.autograd.grad(attend(q).sin().sum(), leaves, create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="flash_attn has no second derivatives"):
            torch.autograd.grad(grad.sum(), leaves, retain_graph=True)


def test_refusals():
    q = leaf(1, 9, 4, 8)
    with pytest.raises(RuntimeError, match="return_attn_probs cannot be combined"):
        flash_attn_func(q, q, q, return_attn_probs=True, return_lse=True)


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_bias(device):
    """The gradient of a bias has the same bits each time."""
    q = leaf(1, 300, 4, 16).to(device)
    bias = leaf(1, 300).detach().to(device).requires_grad_()
    out = flash_attn_func(q, q, q, attn_bias=bias, deterministic=True)
    found = [torch.autograd.grad(out.sin().sum(), bias, retain_graph=True)[0] for _ in range(3)]
    assert all(torch.equal(x, found[0]) for x in found)


def results_and_gradients(function, tensors, *arguments, **options):
    """The results of a call with all options, and the gradients of their sums. A row that sees nothing counts 0."""
    leaves = [x for x in (*tensors, options["attn_bias"], options["sinks"]) if x is not None]
    out, lse, top = function(*tensors, *arguments, return_lse=True, return_max_logits=True, **options)
    return out, lse, top, torch.autograd.grad(out.sum() + torch.where(lse.isinf(), 0.0, lse).sum(), leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("b, len_q, len_k", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
def test_empty_dimensions(b, len_q, len_k, has_sinks, device):
    q, k, v = (leaf(b, n, h, 16).to(device).detach().requires_grad_() for n, h in ((len_q, 4), (len_k, 2), (len_k, 2)))
    bias, sinks = (leaf(*shape).to(device).detach().requires_grad_() for shape in ((1, 4, len_q, len_k), (4,)))
    mask, sinks = torch.ones(len_q, 1, dtype=torch.bool, device=device), sinks if has_sinks else None
    options = {"attn_bias": bias, "attn_mask": mask, "sinks": sinks}
    out, lse, top, grads = results_and_gradients(flash_attn_func, (q, k, v), **options)
    assert out.shape == q.shape and not out.any() and (top == -INF).all() and top.shape == (4,)
    want = sinks[None, :, None].expand(b, 4, len_q) if has_sinks else lse.new_full((b, 4, len_q), -INF)
    assert torch.equal(lse, want)
    assert all(grad.shape == x.shape for grad, x in zip(grads, (q, k, v, bias, sinks)))
    assert not any(map(torch.any, grads[:4]))
    if has_sinks:
        assert (grads[4] == b * len_q).all()  # lse is the sink


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
@pytest.mark.parametrize("lengths_q, lengths_k", [([], []), ([0, 0], [0, 3]), ([2, 3], [0, 0])], ids=str)
def test_empty_sequences(lengths_q, lengths_k, window, device):
    """Rows behind the last sequence see nothing, not even a sink."""
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32).to(device) for n in (lengths_q, lengths_k))
    q, k, v = (leaf(n, h, 16).to(device).detach().requires_grad_() for n, h in ((6, 4), (7, 2), (7, 2)))
    bias, sinks = (leaf(*shape).to(device).detach().requires_grad_() for shape in ((len(lengths_q), 4, 3, 1), (4,)))
    for options in ({"attn_bias": bias, "sinks": None}, {"attn_bias": None, "sinks": sinks}):
        out, lse, top, grads = results_and_gradients(
            flash_attn_varlen_func, (q, k, v), cu_q, cu_k, 3, 3, window_size=window, **options
        )
        assert not out.any() and (top == -INF).all() and not any(map(torch.any, grads[:3]))
        want = lse.new_full((4, 6), -INF)
        if options["sinks"] is not None:
            want[:, : cu_q[-1]] = sinks.detach()[:, None]
        assert torch.equal(lse, want)


def test_fp64():
    """The scores are fp64. lse is fp32, so its digits limit sinks and gradients."""
    tensors = [leaf(2, n, h, 24, seed=s, dtype=torch.float64) for n, h, s in ((70, 4, 0), (90, 2, 1), (90, 2, 2))]
    bias, sinks = (leaf(*shape, dtype=torch.float64) for shape in ((4, 70, 90), (4,)))
    mask = leaf(70, 90, seed=9) > -0.5
    for given in ({"bias": bias}, {"sinks": sinks}, {"bias": bias, "mask": mask, "sinks": sinks, "window": (30, 0)}):
        compare("cpu", tensors, **given, tolerance=1e-6)
    wide = expected(*tensors, bias, mask)[0]
    close(flash_attn_func(*tensors, attn_bias=bias, attn_mask=mask), wide, TOLERANCES[torch.float64])
    with torch.no_grad():
        assert flash_attn_func(*tensors, sinks=sinks).dtype == torch.float64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_plain", [True, False])
def test_infinite_sinks(is_plain, device):
    """A sink of -inf is no sink. One of inf takes all weight, and nothing has a gradient."""
    q, k, v, bias = (
        leaf(*shape, seed=i).to(device).detach().requires_grad_()
        for i, shape in enumerate([(2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (9, 11)])
    )
    sinks = torch.tensor([INF, -INF, 1e38, 0.5], device=device).requires_grad_()
    options, leaves = ({}, [q, k, v]) if is_plain else ({"attn_bias": bias, "return_lse": True}, [q, k, v, bias])
    runs = []
    for given in (sinks, None):
        results = flash_attn_func(q, k, v, sinks=given, causal=True, **options)
        out, lse = (results, None) if is_plain else results
        total = out[:, :, 1].sin().sum() + (0 if lse is None else lse[:, 1].cos().sum())
        runs.append((out[:, :, 1], *torch.autograd.grad(total, leaves, retain_graph=True)))
        if given is not None:
            assert not out[:, :, ::2].any()
            assert is_plain or all((lse[:, i] == sinks[i]).all() for i in (0, 2))
            grads = torch.autograd.grad(out[:, :, :3].sum(), [sinks, *leaves], retain_graph=True)
            assert not grads[0][:3].any() and all(x.isfinite().all() for x in grads)
            assert not torch.autograd.grad(out[:, :, ::2].sum(), q)[0].any()
    for has, wants in zip(*runs, strict=True):
        close(has, wants, 2e-5)
