"""The extension module by itself: five positional functions, as clients of the original call them."""

import math

import flash_attn_2_cuda as raw
import pytest
import torch
from harness import offsets

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

GENERATOR = "generator` argument is no longer supported"


def tensors(dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    shapes = ((2, 33, 4, 24), (2, 50, 2, 24), (2, 50, 2, 24), (2, 33, 4, 24))
    return [torch.randn(shape, generator=gen).to(dtype) for shape in shapes]


def packed():
    q, k, v, dout = (x.flatten(0, 1) for x in tensors())
    return q, k, v, dout, offsets((33, 33)), offsets((50, 50))


def fwd(
    q,
    k,
    v,
    out=None,
    slopes=None,
    p=0.0,
    scale=0.2,
    causal=True,
    left=-1,
    right=-1,
    softcap=0.0,
    softmax=False,
    gen=None,
):
    return raw.fwd(q, k, v, out, slopes, p, scale, causal, left, right, softcap, softmax, gen)


def test_fwd():
    q, k, v, _ = tensors()
    result = fwd(q, k, v)
    assert isinstance(result, list) and len(result) == 4
    out, lse, s_dmask, rng = result
    want, want_lse, _ = flash_attn_func(q, k, v, softmax_scale=0.2, causal=True, return_attn_probs=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert s_dmask.shape == (0,) and rng.dtype == torch.int64 and rng.shape == (2,)


def test_integers_and_floats_mix_as_in_pybind():
    """pybind accepts an int as a float."""
    q, k, v, _ = tensors()
    want = fwd(q, k, v, scale=1.0)[0]
    assert torch.equal(fwd(q, k, v, p=0, scale=1, softcap=0)[0], want)


def test_fwd_into_a_given_out():
    q, k, v, _ = tensors()
    want = fwd(q, k, v)[0]
    buffer = torch.full((2, 33, 6, 30), 7.0)
    given = buffer[:, :, 1:5, 3:27]
    out = fwd(q, k, v, out=given)[0]
    assert out.data_ptr() == given.data_ptr() and torch.equal(given, want)
    given.fill_(7.0)
    assert (buffer == 7.0).all()


def test_varlen_fwd_takes_21_and_22_arguments():
    q, k, v, _, cu_q, cu_k = packed()
    want = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 33, 50, softmax_scale=0.2, causal=True)
    given = torch.full_like(q, math.nan)
    args = (q, k, v, given, cu_q, cu_k, None, None, None, None, 33, 50, 0.0, 0.2, False, True, -1, -1, 0.0, False, None)
    assert len(args) == 21
    out, lse, s_dmask, rng = raw.varlen_fwd(*args)
    assert out.data_ptr() == given.data_ptr() and torch.equal(given, want) and lse.shape == (4, 66)
    for num_splits in (0, 1):
        assert torch.equal(raw.varlen_fwd(*args, num_splits)[0], want)
    pages, table = torch.zeros(8, 16, 2, 24), torch.arange(8, dtype=torch.int32).view(2, 4)
    in_pages = (q, pages, pages, None, cu_q, cu_k, None, None, table, *args[9:])
    assert raw.varlen_fwd(*in_pages, 1)[0].shape == q.shape
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported for varlen paged KV"):
        raw.varlen_fwd(*in_pages, 2)


def test_bwd():
    q, k, v, dout = tensors()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(flash_attn_func(*leaves, softmax_scale=0.2, causal=True), leaves, dout)
    out, lse, _, rng = fwd(q, k, v)

    def bwd(dq, dk, dv):
        return raw.bwd(
            dout, q, k, v, out, lse, dq, dk, dv, None, 0.0, 0.2, True, -1, -1, 0.0, False, None, rng
        )  # fmt: skip

    result = bwd(None, None, None)
    assert isinstance(result, list) and len(result) == 4 and result[3].shape == (2, 4, 128)
    assert all(torch.equal(x, y) for x, y in zip(result, want))
    buffer = torch.full((2, 50, 9, 24), 7.0)
    views = (None, buffer[:, :, 2:4], buffer[:, :, 5:7])
    result = bwd(*views)
    assert result[1].data_ptr() == views[1].data_ptr() and torch.equal(views[1], want[1])
    assert torch.equal(result[0], want[0]) and torch.equal(views[2], want[2])
    assert (buffer[:, :, [0, 1, 4, 7, 8]] == 7.0).all()


def test_varlen_bwd():
    q, k, v, dout, cu_q, cu_k = packed()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_varlen_func(*leaves, cu_q, cu_k, 33, 50, softmax_scale=0.2, return_attn_probs=True)
    want = torch.autograd.grad(out, leaves, dout)
    rng = torch.zeros(2, dtype=torch.int64)
    for grads in ((None, None, None), tuple(torch.full_like(x, math.nan) for x in (q, k, v))):
        args = (
            dout,
            q,
            k,
            v,
            out.detach(),
            lse,
            *grads,
            cu_q,
            cu_k,
            None,
            33,
            50,
            0.0,
            0.2,
            False,
            False,
            -1,
            -1,
            0.0,
            False,
        )
        result = raw.varlen_bwd(*args, None, rng)
        assert len((*args, None, rng)) == 24 and len(result) == 4
        assert all(torch.equal(x, y) for x, y in zip(result, want)) and result[3].shape == (4, 66 + 128 * 2)
        if grads[0] is not None:
            assert all(torch.equal(x, y) for x, y in zip(grads, want))


def test_fwd_kvcache():
    gen = torch.Generator().manual_seed(0)
    q, k_cache, v_cache, new = (torch.randn(2, n, 2, 20, generator=gen) for n in (3, 40, 40, 5))
    lens = torch.tensor([35, 0], dtype=torch.int32)
    caches = [x.clone() for x in (k_cache, v_cache)]
    want, want_lse = flash_attn_with_kvcache(
        q, *caches, new, new, cache_seqlens=lens, causal=True, softmax_scale=0.2, return_softmax_lse=True
    )  # fmt: skip
    for given in (None, torch.full_like(q, math.nan)):
        ours = [x.clone() for x in (k_cache, v_cache)]
        args = (q, *ours, new, new, lens, None, None, None, None, None, None, given, 0.2, True, -1, -1, 0.0, True, 0)
        assert len(args) == 20
        out, lse = raw.fwd_kvcache(*args)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert all(torch.equal(x, y) for x, y in zip(ours, caches))
        assert given is None or given.data_ptr() == out.data_ptr()


def test_dropout_round_trip():
    q, k, v, dout = tensors()
    torch.manual_seed(3)
    out, lse, s_dmask, rng = fwd(q, k, v, p=0.3, softmax=True)
    assert s_dmask.shape == (2, 4, 128, 128) and rng[0] != 0
    torch.manual_seed(0)
    want = fwd(q, k, v, p=0.3, softmax=True)
    torch.manual_seed(0)
    at_q = q.clone()
    in_place = fwd(at_q, k, v, p=0.3, softmax=True, out=at_q)
    assert all(torch.equal(x, y) for x, y in zip(in_place, want))
    torch.manual_seed(3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want_out = flash_attn_func(*leaves, 0.3, softmax_scale=0.2, causal=True)
    want = torch.autograd.grad(want_out, leaves, dout)
    assert torch.equal(out, want_out)
    got = raw.bwd(dout, q, k, v, out, lse, None, None, None, None, 0.3, 0.2, True, -1, -1, 0.0, False, None, rng)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_generator_is_refused_before_everything_else():
    nonsense = torch.zeros(1, dtype=torch.int32)
    for gen in (torch.Generator(), torch.default_generator):
        calls = (
            lambda: fwd(nonsense, nonsense, nonsense, p=3.0, gen=gen),  # noqa: B023
            lambda: raw.varlen_fwd(
                *(nonsense,) * 3, None, *(nonsense,) * 2, None, None, None, None, 0, 0, 0.0, 1.0, False, False, -1, -1,
                0.0, False, gen,  # noqa: B023
            ),
            lambda: raw.bwd(
                *(nonsense,) * 6, None, None, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, gen, None  # noqa: B023
            ),
            lambda: raw.varlen_bwd(
                *(nonsense,) * 6, None, None, None, nonsense, nonsense, None, 0, 0, 0.0, 1.0, False, False, -1, -1, 0.0,
                False, gen, None,  # noqa: B023
            ),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(RuntimeError) as caught:
                call()
            assert GENERATOR in str(caught.value)


BAD_TYPES = [
    ("too_few", lambda q: raw.fwd(q, q, q)),
    ("too_many", lambda q: raw.fwd(q, q, q, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None, None)),
    ("none_for_q", lambda q: fwd(None, q, q)),
    ("list_for_k", lambda q: fwd(q, q.tolist(), q)),
    ("text_for_scale", lambda q: fwd(q, q, q, scale="1")),
    ("none_for_scale", lambda q: fwd(q, q, q, scale=None)),
    ("float_for_window", lambda q: fwd(q, q, q, left=1.5)),
    ("number_for_out", lambda q: fwd(q, q, q, out=3)),
    ("text_for_causal", lambda q: fwd(q, q, q, causal="yes")),
    ("varlen_20", lambda q: raw.varlen_fwd(*(None,) * 20)),
    ("varlen_23", lambda q: raw.varlen_fwd(*(None,) * 23)),
    ("bwd_18", lambda q: raw.bwd(*(q,) * 18)),
    ("varlen_bwd_25", lambda q: raw.varlen_bwd(*(q,) * 25)),
    ("kvcache_19", lambda q: raw.fwd_kvcache(*(q,) * 19)),
]


@pytest.mark.parametrize("call", [pytest.param(row[1], id=row[0]) for row in BAD_TYPES])
def test_wrong_types(call):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call(torch.zeros(1, 2, 1, 8))


BAD_OUT = [
    ("dtype", torch.zeros(2, 33, 4, 24, dtype=torch.float16), ["Output must have the same dtype as inputs"]),
    ("last_dim", torch.zeros(2, 33, 4, 48)[..., ::2], ["Output tensor must have contiguous last dimension"]),
    ("shape", torch.zeros(2, 32, 4, 24), ["out must have shape"]),
    ("rank", torch.zeros(33, 4, 24), ["out", "4", "3"]),
]


@pytest.mark.parametrize("given, words", [pytest.param(*row[1:], id=row[0]) for row in BAD_OUT])
def test_wrong_out(given, words):
    with pytest.raises(RuntimeError) as caught:
        fwd(*tensors()[:3], out=given)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert (given == 0).all()


def test_values_inside_index_tensors_are_checked():
    q, k, v, _, cu_q, cu_k = packed()
    bad = cu_k.clone()
    bad[-1] += 1
    args = (None, cu_q, bad, None, None, None, None, 33, 51, 0.0, 0.2, False, True, -1, -1, 0.0, False, None)
    with pytest.raises(RuntimeError, match="cu_seqlens_k"):
        raw.varlen_fwd(q, k, v, *args)
