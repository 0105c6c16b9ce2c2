"""The short way of flash_attn_func's options on the CPU gives what the long way gives, and is taken."""

import functools
import itertools

import pytest
import torch

import flash_attn
from flash_attn import _extended, _extended_directly, flash_attn_func, flash_attn_varlen_func

INF = float("inf")


def leaf(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.to(dtype).requires_grad_()


def mask_of(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.3


def both_ways(monkeypatch, call, leaves):
    """Results and gradients of the short way and of the long way."""
    found = []
    for short in (True, False):
        with monkeypatch.context() as patch:
            if short:
                patch.setattr(_extended, "attend", lambda *_: pytest.fail("the short way was not taken"))
            else:
                patch.setattr(_extended_directly, "_plain", lambda *_: None)
                patch.setattr(_extended_directly.flash_attn_2_cuda, "direct_mods", lambda *_: None)
                patch.setattr(_extended_directly.flash_attn_2_cuda, "direct_varlen_mods", lambda *_: None)
            results = call()
            results = results if isinstance(results, tuple) else (results,)
            wanted = [x for x in results if x.requires_grad]
            weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype) for x in wanted]
            weights = [torch.where(x.isinf(), 0.0, w) for x, w in zip(wanted, weights)]
            total = sum((torch.where(x.isinf(), 0.0, x) * w).sum() for x, w in zip(wanted, weights))
            grads = torch.autograd.grad(total, leaves, allow_unused=True) if wanted else ()
        found.append([*results, *grads])
    return found


def same(short, long, tolerance):
    assert len(short) == len(long)
    for a, b in zip(short, long):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


OPTIONS = {
    "bias": {"attn_bias": lambda b, h, q, k: leaf(b, h, q, k, seed=5)},
    "bias of keys": {"attn_bias": lambda b, h, q, k: leaf(k, seed=5)},
    "bias of heads": {"attn_bias": lambda b, h, q, k: leaf(h, 1, 1, seed=5)},
    "bias of the batch, fp64": {"attn_bias": lambda b, h, q, k: leaf(b, 1, q, k, seed=5, dtype=torch.float64)},
    "mask": {"attn_mask": lambda b, h, q, k: mask_of(q, k)},
    "mask of keys": {"attn_mask": lambda b, h, q, k: mask_of(b, 1, 1, k)},
    "sinks": {"sinks": lambda b, h, q, k: leaf(h, seed=6)},
    "sinks of bf16": {"sinks": lambda b, h, q, k: leaf(h, seed=6, dtype=torch.bfloat16)},
    "everything": {
        "attn_bias": lambda b, h, q, k: leaf(1, h, q, k, seed=5),
        "attn_mask": lambda b, h, q, k: mask_of(b, 1, q, k),
        "sinks": lambda b, h, q, k: leaf(h, seed=6),
        "alibi_slopes": lambda b, h, q, k: torch.rand(b, h, generator=torch.Generator().manual_seed(7)),
        "softcap": lambda *_: 4.0,
    },
    "lse": {"return_lse": lambda *_: True},
    "max_logits": {"return_max_logits": lambda *_: True, "return_lse": lambda *_: True},
}
MASKS = {"no mask": {}, "causal": {"causal": True}, "window": {"window_size": (9, 3)}, "left": {"window_size": (5, -1)}}


@pytest.fixture(params=["cpu", "as on a GPU"])
def as_on_gpu(request, monkeypatch):
    """The short way of a GPU's call, with tensors on the CPU: with shifts and torch's lists of blocks."""
    if request.param != "cpu":
        monkeypatch.setattr(_extended_directly, "_device_type", lambda q: "cuda")
    return request.param != "cpu"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("len_q, len_kv", [(8, 8), (150, 170)])
def test_dense(monkeypatch, as_on_gpu, len_q, len_kv, option, mask):
    tensors = [leaf(2, n, h, 24, seed=s) for n, h, s in ((len_q, 4, 0), (len_kv, 2, 1), (len_kv, 2, 2))]
    words = {name: make(2, 4, len_q, len_kv) for name, make in OPTIONS[option].items()}
    leaves = [*tensors, *(x for x in words.values() if torch.is_tensor(x) and x.requires_grad)]

    def call():
        return flash_attn_func(*tensors, **MASKS[mask], **words)

    same(*both_ways(monkeypatch, call, leaves), 3e-5)
    with torch.no_grad():
        same(*both_ways(monkeypatch, call, leaves), 3e-5)


@pytest.mark.parametrize("mask", ["no mask", "causal", "window"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("lengths_q, lengths_kv", [((3, 5, 0, 9), (4, 5, 7, 0)), ((100, 60), (90, 100))])
def test_packed(monkeypatch, as_on_gpu, lengths_q, lengths_kv, option, mask):
    rows, keys = sum(lengths_q) + 2, sum(lengths_kv) + 1  # some belong to no sequence
    tensors = [leaf(n, h, 24, seed=s) for n, h, s in ((rows, 4, 0), (keys, 2, 1), (keys, 2, 2))]
    cu = [
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_kv)
    ]
    longest = max(lengths_q), max(lengths_kv)
    words = {name: make(len(lengths_q), 4, *longest) for name, make in OPTIONS[option].items()}
    leaves = [*tensors, *(x for x in words.values() if torch.is_tensor(x) and x.requires_grad)]

    def call():
        return flash_attn_varlen_func(*tensors, *cu, *longest, **MASKS[mask], **words)

    same(*both_ways(monkeypatch, call, leaves), 3e-5)


@pytest.mark.parametrize("option", ["bias", "mask", "sinks", "everything", "lse"])
@pytest.mark.parametrize("form", ["qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked"])
def test_tensors_in_one(monkeypatch, form, option):
    """Packed q, k and v, or k and v. The gradient is packed, too."""
    is_qkv, lengths = "qkv" in form, (4, 7)
    words = {name: make(2, 4, 7, 7) for name, make in OPTIONS[option].items()}
    one = leaf(2, 7, 3 if is_qkv else 2, 4 if is_qkv else 2, 24)
    tensors = [one] if is_qkv else [leaf(2, 7, 4, 24, seed=1), one]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    places = () if "varlen" not in form else (cu, 7) if is_qkv else (cu, cu, 7, 7)
    function = getattr(flash_attn, f"flash_attn_{form}_func")

    def call():
        given = [x.flatten(0, 1) for x in tensors] if places else tensors
        return function(*given, *places, causal=True, **words)

    leaves = [*tensors, *(x for x in words.values() if torch.is_tensor(x) and x.requires_grad)]
    same(*both_ways(monkeypatch, call, leaves), 3e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(monkeypatch, dtype):
    tensors = [leaf(1, n, 2, 16, seed=s, dtype=dtype) for n, s in ((40, 0), (50, 1), (50, 2))]
    bias, sinks = leaf(40, 50, seed=5), leaf(2, seed=6)

    def call():
        return flash_attn_func(*tensors, causal=True, attn_bias=bias, sinks=sinks, return_lse=True)

    same(*both_ways(monkeypatch, call, [*tensors, bias, sinks]), 1e-6 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("option", ["bias", "mask", "sinks", "lse"])
@pytest.mark.parametrize("case", ["autocast", "nested", "columns apart"])
def test_what_is_made_plain_takes_it_too(monkeypatch, case, option):
    """Tensors that autocast casts, sequences of nested tensors, and tensors that must be copied."""
    tensors = [leaf(2, 9, 4, 24, seed=s) for s in range(3)]
    words = {name: make(2, 4, 9, 9) for name, make in OPTIONS[option].items()}
    leaves = [*tensors, *(x for x in words.values() if torch.is_tensor(x) and x.requires_grad)]

    def call():
        given = [x[..., ::2] for x in tensors] if case == "columns apart" else tensors
        if case == "nested":
            given = [torch.nested.as_nested_tensor([*x.unbind()], layout=torch.jagged) for x in tensors]
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            results = flash_attn_func(*given, causal=True, **words)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(x.values() if x.is_nested else x for x in results)

    same(*both_ways(monkeypatch, call, leaves), 2e-2 if case == "autocast" else 3e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("low", [-1e9, -2000.0])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_low_biases(monkeypatch, as_on_gpu, dtype, is_packed, low, has_sinks):
    """The shift of such rows is subtracted before the kernel, and added to lse and max_logits.

    Two sinks are far above the biases of some rows, which need no shift then.
    """
    tensors = [leaf(2, 12, 4, 16, seed=s) for s in range(3)]
    bias = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(4)).to(dtype)
    bias[0, :, 3:7] += low
    bias[1, :, :, :5] = low
    bias[1, :, 9] = -INF
    words = {"causal": True, "attn_bias": bias.requires_grad_(), "return_lse": True, "return_max_logits": True}
    sinks = torch.tensor([low - 2, low + 999, -500, 3]).requires_grad_()
    cu = torch.tensor([0, 12, 24], dtype=torch.int32)

    def call():
        given = {**words, "sinks": sinks if has_sinks else None}
        if is_packed:
            return flash_attn_varlen_func(*(x.flatten(0, 1) for x in tensors), cu, cu, 12, 12, **given)
        return flash_attn_func(*tensors, **given)

    same(*both_ways(monkeypatch, call, [*tensors, bias, *[sinks] * has_sinks]), 3e-5)


@pytest.mark.parametrize("low", [-1e9, -2000.0])
@pytest.mark.parametrize("causal", [False, True])
def test_low_biases_of_keys(monkeypatch, as_on_gpu, causal, low):
    """A causal mask cuts a bias of keys alone: the first rows see only low biases."""
    tensors = [leaf(1, 12, 2, 16, seed=s) for s in range(3)]
    for shape in ((1, 1, 1, 12), (12,), (2, 1, 12)):
        bias = torch.zeros(shape)
        bias[..., :4] = low
        for given in (bias, torch.full(shape, low), torch.full(shape, -INF)):
            call = functools.partial(flash_attn_func, *tensors, causal=causal, attn_bias=given, return_lse=True)
            same(*both_ways(monkeypatch, call, tensors), 3e-5)


def test_what_is_kept_of_packed_sequences_follows_them(monkeypatch):
    monkeypatch.setattr(_extended_directly, "_device_type", lambda q: "cuda")
    tensors = [leaf(24, 2, 16, seed=s) for s in range(3)]
    cu_q, cu_k = torch.tensor([0, 5, 24], dtype=torch.int32), torch.tensor([0, 5, 24], dtype=torch.int32)
    mask = mask_of(24, 24)

    def call():
        return flash_attn_varlen_func(*tensors, cu_q, cu_k, 24, 24, attn_mask=mask)

    same(*both_ways(monkeypatch, call, tensors), 3e-5)
    cu_q[1] = 9
    same(*both_ways(monkeypatch, call, tensors), 3e-5)
    cu_k[1] = 17
    same(*both_ways(monkeypatch, call, tensors), 3e-5)
    cu_q.data = torch.tensor([0, 11, 24], dtype=torch.int32)
    same(*both_ways(monkeypatch, call, tensors), 3e-5)


def test_a_changed_bias_is_seen_by_the_backward():
    q, k, v = (leaf(1, 8, 1, 16, seed=s) for s in range(3))
    bias = torch.zeros(8, 8)
    out = flash_attn_func(q, k, v, attn_bias=bias)
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("has_shift", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_kind_has_programs(is_packed, has_shift):
    """The tensors of programs are those of the call, whatever dimensions a bias and a mask have."""
    for dims in itertools.product((False, True), repeat=4):
        score, mask, _ = _extended_directly._mods_of_kind(
            torch.float32,
            is_packed,
            True,
            (True,),
            (dims, torch.bfloat16),
            (dims[:3], torch.float32) if has_shift else None,
            dims,
            True,
            True,
        )
        assert {_extended_directly.BIAS, _extended_directly.SLOPES} <= set(score.tensors)
        assert (_extended_directly.SHIFT in score.tensors) == has_shift
        assert _extended_directly.MASK in mask.tensors


def test_a_mask_of_inference_may_be_trained_with():
    q, mask = leaf(1, 200, 2, 16), torch.rand(1, 1, 200, 200) < 0.5
    with torch.inference_mode():
        flash_attn_func(q, q, q, attn_mask=mask)
    flash_attn_func(q, q, q, attn_mask=mask).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("low", (-1e12, -1e25, torch.finfo(torch.float64).min))
def test_a_low_bias_in_fp64_keeps_its_digits(low):
    q, k, v = (leaf(1, 6, 2, 16, seed=n) for n in range(3))
    bias = torch.randn(1, 1, 6, 6, dtype=torch.float64).index_fill(2, torch.tensor([1, 4]), low)
    out = flash_attn_func(q, k, v, attn_bias=bias)
    x, y, z = (t.detach().double().transpose(1, 2).requires_grad_() for t in (q, k, v))
    scores = x @ y.mT / 4
    scores = torch.where(bias < -1e20, scores - scores.detach(), scores)  # no digits, but gradients
    scores = scores + torch.where(bias < -1e3, 0.0, bias)
    exact = (scores.softmax(-1) @ z).transpose(1, 2)
    dout = torch.randn(out.shape)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(exact, (x, y, z), dout.double()), strict=True
    ):
        torch.testing.assert_close(mine.double(), theirs.transpose(1, 2), rtol=1e-3, atol=1e-3)
