"""What C does to rows for options, against torch's functions: shifts of low biases, sinks and their gradient."""

import math

import flash_attn_2_cuda
import pytest
import torch

import flash_attn
from flash_attn import _calls, _extended, _sinks, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flex import options

INF = float("inf")
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
DEVICES = ["cpu", GPU]

SHIFTS = {  # of a bias and sinks: the sizes of the bias, and whether heads have sinks
    "rows": ((2, 3, 9, 11), False), "sinks": ((2, 3, 9, 11), True), "sinks of one bias": ((1, 1, 9, 11), True),
    "keys": ((11,), True), "keys of heads": ((3, 1, 11), False), "one": ((), True), "rows alone": ((9, 1), False),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts_of_rows(monkeypatch, name, dtype, device):
    """Dense and packed calls, with windows. Tensors have strides."""
    shape, has_sinks = SHIFTS[name]
    generator = torch.Generator().manual_seed(len(name))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 14], [0, 4, 15]))
    for low in (0, -1500, -2e4):
        bias = torch.randn([2 * n for n in shape], generator=generator) * 700 + low
        bias = torch.where(torch.rand(bias.shape, generator=generator) < 0.05, -INF, bias).to(dtype)
        bias = bias.to(device)[tuple(slice(None, None, 2) for _ in shape)]
        sinks = torch.tensor([low - 5.0, 0, low, 0, -INF, 0], device=device)[::2] if has_sinks else None
        for window in ((-1, -1), (-1, 0), (-1, 3), (4, 0), (2, 2)):
            for places in (options.Places(9, 11, window), options.PackedPlaces(cu_q, cu_k, 16, 17, window)):
                found = options.shift_of_rows(places, bias, sinks, torch.float32)
                with monkeypatch.context() as patch:
                    patch.setattr(options, "is_unseen", lambda: False)
                    want = options.shift_of_rows(places, bias, sinks, torch.float32)
                assert found.dtype == want.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert torch.equal(found.expand(want.shape), want) and found.dim() == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("unseen", [True, False])
def test_a_nan_is_no_bias(monkeypatch, unseen, dtype, device):
    """A mask may hide it."""
    bias = torch.full((4, 4), -4992.0)
    bias[0, 1] = bias[1, 3] = bias[3] = float("nan")
    bias[2, 1:3] = torch.tensor([float("nan"), 3])
    monkeypatch.setattr(options, "is_unseen", lambda: unseen)
    for window in ((-1, -1), (-1, 0)):
        found = options.shift_of_rows(options.Places(4, 4, window), bias.to(device, dtype), None, torch.float32)
        assert found.flatten().tolist() == [-4992, -4992, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", [float("nan"), -INF, -1e7])
def test_low_biases_beside_hidden_ones(hidden, device):
    """Only the masked keys have the hidden bias, so it changes nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (numbers(generator, device, 1, 200, 2, 8) for _ in range(3))
    bias, mask = numbers(generator, device, 1, 2, 200, 200) - 1e7, numbers(generator, device, 1, 2, 200, 200) < 0
    out = flash_attn_func(q, k, v, attn_bias=bias.masked_fill(~mask, hidden), attn_mask=mask)
    wide = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = bias.double().masked_fill(~mask, -INF)
    want = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=scores).transpose(1, 2)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def numbers(generator, device, *shape):
    return torch.randn(shape, generator=generator).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype, shift",
    [(torch.float32, None), (torch.bfloat16, "rows"), (torch.float16, "heads"), (torch.float64, "one")],
    ids=str,
)
@pytest.mark.parametrize("b, h, rows", [(2, 3, 5), (1, 2, 4097), (700, 2, 1), (3, 33, 600), (2, 3, 0)])
def test_sinks_and_their_gradient(monkeypatch, b, h, rows, dtype, shift, device):
    """dtype is that of sinks. Some rows saw no key, and softmax_d has more rows than lse."""
    generator = torch.Generator().manual_seed(rows)
    sinks = numbers(generator, device, 2 * h).to(dtype)[::2]
    sinks[0] = -INF
    out, dout = (numbers(generator, device, b, rows, h, 24) for _ in range(2))
    lse = numbers(generator, device, b, h, rows)
    lse[..., ::3], lse[..., 1::5] = -INF, INF
    out[:, ::3], out[:, 1::5] = 0, 0
    dlse, delta = numbers(generator, device, b, h, rows), torch.full((b, h, rows + 9), float("nan"), device=device)
    if shift is not None:
        shift = numbers(generator, device, *{"rows": (b, h, rows), "heads": (1, h, 1), "one": (1, 1, 1)}[shift])
    found = []
    for unseen in (True, False):
        mine, after = out.clone(), lse.clone()
        with monkeypatch.context() as patch:
            patch.setattr(_sinks, "is_unseen", lambda: unseen)  # noqa: B023
            mine, after, _ = _sinks.add_sinks(mine, after, sinks)
            delta[..., :rows] = _sinks._delta(mine, dout, dlse)
            given = (delta, shift) if unseen else (None, shift)
            grad = _sinks.gradient_of_sinks(sinks, mine, after, dout, dlse, *given)
        assert grad.dtype == dtype and grad.shape == sinks.shape
        found.append((mine, after, grad))
    for has, wants in zip(*found):
        tolerance = 2e-5 if has.dtype in (torch.float32, torch.float64) else 1e-2
        torch.testing.assert_close(has, wants, rtol=tolerance, atol=tolerance * max(1, rows * b) ** 0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_the_last_sequence_have_no_part_in_the_gradient(device):
    lse, delta, sinks = torch.zeros(2, 9, device=device), torch.ones(2, 9 + 256, device=device), torch.zeros(2)
    delta[:, 6:] = float("nan")
    for ends, want in (([0, 2, 6], -6.0), ([0, 0], 0.0)):
        ends = torch.tensor(ends, dtype=torch.int32, device=device)
        grad = flash_attn_2_cuda.gradient_of_sinks(sinks.to(device), lse, delta, None, ends)
        assert grad.tolist() == [want] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_sinks_of_packed_sequences(dtype, device):
    """It is the sum of those of the sequences alone. Rows behind the last sequence have softmax_d of old memory."""
    generator = torch.Generator().manual_seed(2)
    total, ends = 900, [0, 150, 150, 400]
    q, k, v, dout = (numbers(generator, device, total, 2, 64).to(dtype) for _ in range(4))
    sinks, cu = numbers(generator, device, 2).requires_grad_(), torch.tensor(ends, dtype=torch.int32, device=device)
    q.requires_grad_()
    out = flash_attn_varlen_func(q, k, v, cu, cu, 250, 250, sinks=sinks, causal=True)
    poison = [torch.full((2, total + 128 * 3), float("nan"), device=device) for _ in range(4)]
    del poison
    grad = torch.autograd.grad(out, (q, sinks), dout)[1]
    want = torch.zeros_like(sinks)
    for first, end in zip(ends, ends[1:]):
        if end > first:
            out = flash_attn_func(*(x[None, first:end] for x in (q, k, v)), sinks=sinks, causal=True)
            want += torch.autograd.grad(out, sinks, dout[None, first:end])[0]
    torch.testing.assert_close(grad, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_sinks_has_the_same_bits_each_time(device):
    generator = torch.Generator().manual_seed(0)
    lse, delta = (numbers(generator, device, 3, 4, 5000) for _ in range(2))
    sinks = numbers(generator, device, 4)
    grads = [flash_attn_2_cuda.gradient_of_sinks(sinks, lse, delta, None, None) for _ in range(5)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_what_does_not_fit_gets_none():
    out, lse, sinks = torch.zeros(2, 5, 3, 8), torch.zeros(2, 3, 5), torch.zeros(3)
    for wrong in (
        (out, lse[:, :, :4], sinks), (out, lse, sinks[:2]), (out, lse.double(), sinks), (out, lse, sinks.int()),
        (out.int(), lse, sinks), (out, lse[:, :, :1].expand(2, 3, 5), sinks),
    ):  # fmt: skip
        assert flash_attn_2_cuda.add_sinks(*wrong) is None
    for wrong in (
        (sinks[:2], lse, lse, None, None), (sinks, lse, lse[:, :, :4], None, None), (sinks, lse, None, None, None),
        (sinks, lse, lse.double(), None, None), (sinks, lse, lse, None, torch.zeros(2)),
        (sinks, sinks, lse, None, None),
    ):  # fmt: skip
        assert flash_attn_2_cuda.gradient_of_sinks(*wrong) is None
    bias, places = torch.zeros(2, 3, 5, 7), torch.zeros(5, dtype=torch.int64)
    for wrong in (
        (bias.int(), -1, None, None, None, None, None), (bias[None], -1, None, None, None, None, None),
        (bias, -1, sinks[:2], None, None, None, None), (bias[:0], -1, None, None, None, None, None),
        (bias, -1, None, None, None, places, places[:4]), (bias, -1, None, None, None, places.int(), places),
    ):  # fmt: skip
        assert flash_attn_2_cuda.shift_of_biases(*wrong) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", ["sinks alone", "sinks and v", "all"])
def test_gradients_of_some_inputs(wanted, device):
    """Without gradients of q, k and v no backward runs, and softmax_d comes from torch's functions."""
    generator = torch.Generator().manual_seed(1)
    tensors = [numbers(generator, device, 2, 30, 2, 16) for _ in range(3)] + [numbers(generator, device, 2)]
    dout = numbers(generator, device, 2, 30, 2, 16)
    leaves = {"sinks alone": tensors[3:], "sinks and v": tensors[2:], "all": tensors}[wanted]
    grads = []
    for attn_bias in (None, torch.zeros(30, 30, device=device)):
        for x in tensors:
            x.requires_grad_(any(x is y for y in leaves))
        out = flash_attn_func(*tensors[:3], sinks=tensors[3], attn_bias=attn_bias, causal=True)
        grads.append(torch.autograd.grad(out, leaves, dout)[-1])
    for x in tensors:
        x.requires_grad_()
    out = flash_attn_func(*tensors[:3], sinks=tensors[3], causal=True)
    want = torch.autograd.grad(out, tensors, dout)[-1]
    for grad in grads:
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_largest_score_of_each_head(monkeypatch, is_packed, device):
    """C's is that of torch's functions: of low biases, NaN, hidden rows and no rows."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (numbers(generator, device, 3, n, 5, 16) for n in (170, 90, 90))
    q[1, 7, 2] = float("nan")
    q[:, :, 3] = 0
    bias = torch.zeros(3, 5, 170, 90, device=device)
    bias[:, 1], bias[:, 4], bias[0, 3] = -5000, -INF, 7
    sinks = numbers(generator, device, 5)
    cu_q, cu_k = (torch.arange(4, device=device, dtype=torch.int32) * n for n in (170, 90))
    for wanted in ({}, {"attn_bias": bias}, {"attn_bias": bias, "sinks": sinks, "causal": True}):
        for rows in (170, 0):
            found = []
            for way in ("short", "long", "torch"):
                with monkeypatch.context() as patch:
                    if way != "short":
                        patch.setattr(_calls, "_short_way", lambda: lambda *_: None)
                        patch.setattr(_extended, "is_unseen", lambda by_c=way == "long": by_c)
                    given = {**wanted, **({"attn_bias": bias[:, :, :rows]} if "attn_bias" in wanted else {})}
                    if is_packed:
                        packed = *(x.flatten(0, 1) for x in (q[:, :rows], k, v)), cu_q * (rows > 0), cu_k
                        results = flash_attn_varlen_func(*packed, rows, 90, return_max_logits=True, **given)
                    else:
                        results = flash_attn_func(q[:, :rows], k, v, return_max_logits=True, **given)
                    found.append(results[1])
            for other in found[1:]:
                torch.testing.assert_close(found[0], other, rtol=1e-6, atol=1e-6, equal_nan=True)
            assert found[0].shape == (5,) and found[0].dtype == torch.float32
            assert (found[0] == -INF).all() == (rows == 0)


# ---- sinks in the kernels of GPUs ----------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
KERNELS = ["", "any,sm80", "any"]  # those for Hopper, those before, and the generic ones


@pytest.fixture
def chosen(request):
    flash_attn_2_cuda.set_cuda_kernels(request.param or None)
    yield request.param
    flash_attn_2_cuda.set_cuda_kernels(None)


SINKS = torch.tensor([0.5, -INF, INF, 40.0, -3.0, 2e4, -1e30, float("nan")], dtype=torch.float64)


def of_sinks(device, dtype, size=8):
    """Finite and infinite sinks, with a stride."""
    return SINKS.to(dtype).repeat_interleave(2)[: 2 * size].to(device)[::2]


@needs_gpu
@pytest.mark.parametrize("chosen", KERNELS, indirect=True)
@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sinks_of_every_kernel(chosen, d, dtype):
    """Results and lse are the CPU's: with rows that see no key, dense, packed and of a cache."""
    generator = torch.Generator().manual_seed(d)
    q, k, v = (numbers(generator, "cpu", 2, n, h, d).to(dtype) for n, h in ((200, 8), (130, 2), (130, 2)))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 90, 90, 190], [0, 0, 40, 130]))
    lengths = torch.tensor([130, 0], dtype=torch.int32)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    for of in (torch.float32, torch.bfloat16, torch.float64):
        found = []
        for device in ("cuda", "cpu"):
            wide = dtype if device == "cuda" else torch.float32
            x, y, z = (t.to(device, wide) for t in (q, k, v))
            sinks, used = of_sinks(device, of), lengths.to(device)
            packed = *(t.flatten(0, 1)[:n] for t, n in ((x, 193), (y, 140), (z, 140))), cu_q.to(device), cu_k.to(device)
            results = [
                *(flash_attn_func(x, y, z, causal=c, sinks=sinks, return_lse=True) for c in (False, True)),
                flash_attn_func(x, y, z, window_size=(30, 3), softcap=5.0, sinks=sinks, return_lse=True),
                flash_attn_varlen_func(*packed, 100, 90, causal=True, sinks=sinks, return_lse=True),
                flash_attn_varlen_func(
                    *packed, 100, 90, sinks=sinks, attn_mask=used.new_ones(1).bool(), return_lse=True
                ),
                flash_attn_func(x, y, z, sinks=sinks, attn_bias=sinks.new_full((1,), -2e3).float(), return_lse=True),
            ]
            for rows, splits in ((1, 0), (1, 3), (5, 0), (40, 0)):
                cache = y.clone(), z.clone()
                new = y[:, :rows], z[:, :rows]
                results.append(
                    flash_attn_with_kvcache(x[:, :rows], *cache, cache_seqlens=used, causal=True, num_splits=splits,
                                            return_softmax_lse=True, sinks=sinks)
                )  # fmt: skip
                results.append(
                    flash_attn_with_kvcache(x[:, :rows], *cache, *new, cache_seqlens=used // 2, sinks=sinks,
                                            return_softmax_lse=True)
                )  # fmt: skip
            found.append(results)
        for i, (has, want) in enumerate(zip(*found, strict=True)):
            for a, b in zip(has, want, strict=True):
                a, b = (a[:190], b[:190]) if i in (3, 4) and a.dim() == 3 else (a, b)  # rows of sequences
                a, b = (a[:, :190], b[:, :190]) if i in (3, 4) and a.dim() == 2 else (a, b)
                torch.testing.assert_close(a.cpu().float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@needs_gpu
@pytest.mark.parametrize("chosen", KERNELS, indirect=True)
@pytest.mark.parametrize("call", ["dense", "packed", "cache", "mods", "fp64 bias", "autocast"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sinks_round_once(chosen, d, call):
    """Two keys of the same score. The mean of their values is no bf16, so a second rounding would show."""
    generator = torch.Generator().manual_seed(d)
    q = torch.zeros(2, 70, 4, d, device="cuda", dtype=torch.bfloat16)
    k, v = torch.zeros(2, 2, 4, d).to(q), numbers(generator, "cuda", 2, 2, 4, d).to(q)
    sinks = torch.tensor([-1.0, 0.3, 1.7, 4.0], device="cuda")
    q = q[:, :1] if call == "cache" else q
    cu_q, cu_k = (torch.arange(3, device="cuda", dtype=torch.int32) * n for n in (70, 2))
    if call == "dense":
        out = flash_attn_func(q, k, v, sinks=sinks)
    elif call == "packed":
        out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, 70, 2, sinks=sinks).view_as(q)
    elif call == "cache":
        out = flash_attn_with_kvcache(q, k, v, sinks=sinks)
    elif call == "fp64 bias":
        out = flash_attn_func(q, k, v, sinks=sinks, attn_bias=torch.zeros(2, device="cuda", dtype=torch.float64))
    elif call == "autocast":
        with torch.autocast("cuda", torch.bfloat16):
            out = flash_attn_func(*(x.float() for x in (q, k, v)), sinks=sinks)
    else:
        out = flash_attn_func(q, k, v, sinks=sinks, attn_mask=torch.ones(70, 2, device="cuda", dtype=torch.bool))
    exact = v.double().sum(1, keepdim=True) / (2 + sinks.double().exp())[:, None]
    unit = 2.0 ** (exact.abs().clamp(min=2.0**-120).log2().floor() - 7)
    assert ((out.double() - exact).abs() / unit).max() < 0.505


# ---- sinks and parts of the keys -----------------------------------------------------------------------------------

CACHES = {"cache": {}, "3 splits": {"num_splits": 3}, "16 splits": {"num_splits": 16}, "pages": {"page": 256}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("call", [*CACHES, "plain", "attn_bias", "attn_mask", "packed", "packed attn_bias"])
def test_parts_of_the_keys_share_one_sink(call, rows, device):
    """Few queries have their keys cut into parts, which are merged. The sink is one key more of the whole row.

    All scores are 0, and some sinks weigh as much as all keys. A sink for each part would give what ``wrong`` gives.
    """
    keys, h, d = 6144, 4, 64
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(rows)
    q = torch.zeros(1, rows, h, d, device=device, dtype=dtype)
    k, v = (numbers(generator, device, 1, keys, 2, d).to(dtype) for _ in range(2))
    v = v / 8 + 1
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], device=device) + math.log(keys)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (rows, keys))
    options = {"sinks": sinks, "return_lse": True}
    if "attn_bias" in call:
        options["attn_bias"] = torch.zeros(keys, device=device)
    if "attn_mask" in call:
        options["attn_mask"] = torch.ones(keys, dtype=torch.bool, device=device)
    function, arguments = flash_attn_func, (q, k, v)
    if call in CACHES:
        function, options = flash_attn_with_kvcache, {"sinks": sinks, "return_softmax_lse": True, **CACHES[call]}
        page = options.pop("page", None)
        if page is not None:
            arguments = q, *(x.view(-1, page, 2, d) for x in (k, v))
            options["block_table"] = torch.arange(keys // page, dtype=torch.int32, device=device)[None]
            options["cache_seqlens"] = keys
    elif "packed" in call:
        function, arguments = flash_attn_varlen_func, (q[0], k[0], v[0], cu_q, cu_k, rows, keys)
    out, lse = function(*arguments, **options)
    mean = v.double().mean(1, keepdim=True).repeat_interleave(2, dim=2)
    want_lse = torch.logaddexp(sinks.double(), torch.tensor(math.log(keys), dtype=torch.float64, device=device))
    want = (mean * (math.log(keys) - want_lse).exp()[:, None]).expand(1, rows, h, d)
    parts = [flash_attn_func(q, *x, sinks=sinks, return_lse=True) for x in zip(k.chunk(2, 1), v.chunk(2, 1))]
    wrong, wrong_lse = flash_attn.merge_attention(*zip(*parts))
    tolerance = 1e-2 if device == "cuda" else 1e-5
    torch.testing.assert_close(out.double().view_as(want), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().view(h, rows), want_lse[:, None].expand(h, rows), rtol=1e-5, atol=1e-5)
    assert ((wrong - want).abs() > 3 * tolerance).all() and (wrong_lse > want_lse[:, None] + 0.1).all()
    if device == "cuda":
        assert flash_attn.explain(function, *arguments, **options).num_splits != 1
