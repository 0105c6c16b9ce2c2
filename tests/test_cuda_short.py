"""Kernels of short sequences: calls of up to 64 queries and keys. The oracle and the tolerances are those of other
kernels."""

import random
from dataclasses import replace

import flash_attn_2_cuda
import pytest
import torch
from cases import BOTH, Case
from harness_cuda import (
    HALF,
    check_extremes,
    found_plainly,
    no_gpu,
    poisoned_repeats,
    run,
    verify,
    with_extremes,
)

import flash_attn
from flash_attn import explain, flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_backward

on_gpu = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")


@pytest.fixture
def short_kernels():
    """The forward on a Hopper leaves more than 32 rows to another kernel, unless that is ruled out."""
    flash_attn_2_cuda.set_cuda_kernels("any,short")
    yield
    flash_attn_2_cuda.set_cuda_kernels(None)


# ---- which calls ----------------------------------------------------------------------------------------------------


def names_of(len_q, len_kv, d, archs="sm_90a", h_kv=4, dtype=torch.bfloat16, **options):
    q, k, v = (
        torch.empty(3, n, h, d, device="meta", dtype=dtype, requires_grad=True)
        for n, h in ((len_q, 4), (len_kv, h_kv), (len_kv, h_kv))
    )
    kernels = flash_attn.prebuild_call(flash_attn_func, q, k, v, archs=archs, compiles=False, **options)
    return [kernel.name for kernel in kernels]


@pytest.mark.parametrize(
    ("call", "tile"),
    [
        ((1, 1, 8), "d32_q16kv16"),
        ((16, 16, 40), "d48_q16kv16"),
        ((17, 1, 64), "d64_q32kv32"),
        ((1, 32, 72), "d80_q32kv32"),
        ((32, 32, 128), "d128_q32kv32"),
        ((9, 9, 136), "d160_q16kv16"),
    ],
    ids=str,
)
def test_short_calls_have_kernels_of_their_own(call, tile):
    for archs in ("sm_80", "sm_90a", "sm_120"):
        assert names_of(*call, archs=archs) == [f"attn_{way}_short_bf16_{tile}" for way in ("fwd", "bwd")]
    assert names_of(*call, dropout_p=0.1, softcap=3.0) == [
        f"attn_{way}_short_bf16_{tile}_score_dropout" for way in ("fwd", "bwd")
    ]


def test_64_rows():
    """Hopper's own forward is faster. The backward is not."""
    names = names_of(33, 64, 64)
    assert names[0].startswith("attn_fwd_sm90") and names[1:] == ["attn_bwd_short_bf16_d64_q64kv64"]
    assert names_of(64, 64, 96, archs="sm_86") == ["attn_fwd_short_bf16_d96_q64kv64", "attn_bwd_short_bf16_d96_q64kv64"]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ((65, 65, 64), {}),
        ((16, 65, 64), {}),
        ((16, 16, 168), {}),
        ((16, 16, 64), {"dtype": torch.float32}),
        ((64, 64, 160), {"archs": "sm_86"}),  # its SMs have no room for the backward's tiles
    ],
    ids=str,
)
def test_other_calls(call, options):
    assert "bwd_short" not in " ".join(names_of(*call, **options))


def names_of_packed(max_q, max_k, num=40, rows=None, **options):
    rows = rows or num * min(max_q, max_k)
    q = torch.empty(rows, 4, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.empty(num + 1, device="meta", dtype=torch.int32)
    call = flash_attn_varlen_func, q, q, q, ends, ends, max_q, max_k
    return [kernel.name for kernel in flash_attn.prebuild_call(*call, archs="sm_90a", compiles=False, **options)]


def test_packed_calls():
    assert names_of_packed(16, 9) == [f"attn_{way}_short_bf16_d64_q16kv16_varlen" for way in ("fwd", "bwd")]
    assert names_of_packed(30, 32, softcap=2.0) == [
        f"attn_{way}_short_bf16_d64_q32kv32_varlen_score" for way in ("fwd", "bwd")
    ]
    names = names_of_packed(64, 64)
    assert names[0].startswith("attn_fwd_sm90") and names[1:] == ["attn_bwd_short_bf16_d64_q64kv64_varlen"]
    assert "short" not in " ".join(names_of_packed(16, 65))
    assert "short" not in " ".join(names_of_packed(16, 16, rows=641))  # some sequence must be longer


def test_short_ones_of_many_packed_sequences():
    """They have a kernel of their own where most sequences are short. Hopper's kernel takes the others."""
    short = "attn_bwd_short_bf16_d64_q64kv64_varlen"
    assert names_of_packed(500, 500, rows=72 * 300, num=300)[1:] == [
        short,
        *(f"attn_bwd_{step}_bf16_d64_q128kv128_varlen" for step in ("prep", "sm90")),
    ]
    assert short not in names_of_packed(500, 500, rows=73 * 300, num=300)
    assert short not in names_of_packed(500, 500, rows=70 * 255, num=255)


def test_fewer_key_heads_have_the_forward_alone():
    names = names_of(16, 16, 64, h_kv=2)
    assert names[0] == "attn_fwd_short_bf16_d64_q16kv16" and not any("bwd_short" in name for name in names)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def random_case(seed):
    source = random.Random(seed)
    most = source.choice((16, 32, 64))
    lengths = source.randint(1, most), source.choice((most, source.randint(1, most)))
    return Case(
        *(lengths if source.random() < 0.5 else lengths[::-1]),
        b=source.randint(1, 9),
        h=source.randint(1, 5),
        d=8 * source.randint(1, 20),
        dtype=source.choice(HALF),
        scale=source.choice((None, None, 0.3, -0.2)),
        causal=source.random() < 0.3,
        window=source.choice(((-1, -1), (-1, -1), (3, 5), (0, 0), (-1, 7), (9, -1))),
        softcap=source.choice((0.0, 0.0, 2.0)),
        alibi=source.choice(("", "", "h", "bh")),
        dropout=source.choice((0.0, 0.0, 0.2)),
        layout=source.choice(("padded", "heads_first")),
        seed=seed,
    )


@on_gpu
@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed, short_kernels):
    case = random_case(seed)
    verify(case, backward=True)


def random_packed(seed):
    source, case = random.Random(seed), random_case(seed)
    most_q, most_k = (16 << source.randrange(3) for _ in range(2))
    len_q = tuple(source.randint(0, most_q) for _ in range(source.randint(1, 12)))
    same = source.random() < 0.5
    return replace(case, len_q=len_q, len_kv=len_q if same else tuple(source.randint(0, most_k) for _ in len_q))


@on_gpu
@pytest.mark.parametrize("seed", range(60))
def test_random_packed_calls(seed, short_kernels):
    verify(random_packed(seed), backward=True)


@on_gpu
@pytest.mark.parametrize("seed", range(24))
def test_short_sequences_beside_long_ones(seed):
    source = random.Random(seed)
    lengths = [source.choice((0, 1, 9, 30, 63, 64, 65, 129, 190)) for _ in range(256)]
    same = source.random() < 0.5
    len_kv = lengths if same else source.sample(lengths, len(lengths))
    case = replace(random_case(seed), len_q=tuple(lengths), len_kv=tuple(len_kv), h=1, scale=None)
    verify(case, backward=True, deterministic=seed % 2 == 0)


@on_gpu
@pytest.mark.parametrize("rows", (16, 32, 64))
@pytest.mark.parametrize("d", (32, 48, 64, 80, 96, 128, 160))
@pytest.mark.parametrize("causal", BOTH)
def test_whole_tiles(rows, d, causal, short_kernels):
    """More sequences than fit on a GPU at once, and heads that are no multiple of a CTA's units."""
    case = Case(rows, rows, b=41, h=13, d=d, dtype="bf16", causal=causal)
    q = torch.empty(41, rows, 13, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plan = explain(flash_attn_func, q, q, q, causal=causal)
    assert plan.kernel.startswith("attn_fwd_short") and plan.backward.kernel.startswith("attn_bwd_short")
    verify(case, backward=True)


@on_gpu
def test_fewer_key_heads(short_kernels):
    for h_kv in (1, 2, 3):
        verify(Case(30, 20, b=3, h=6, h_kv=h_kv, d=64, dtype="bf16"), backward=True)


@on_gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", (32, 64, 128, 160))
@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (9, 4)}), ids=str)
@pytest.mark.parametrize("lengths", ((13, 16), (30, 31), (64, 64)), ids=str)
def test_extremes_that_are_seen(lengths, options, d, dtype, short_kernels):
    q, k, v = with_extremes(*lengths, d, dtype)
    asked = {"window_size" if key == "window" else key: x for key, x in options.items()}
    out, lse, _ = flash_attn_func(*(x.cuda()[None] for x in (q, k, v)), return_attn_probs=True, **asked)
    check_extremes(str(options), out[0], lse[0], v, *found_plainly(q, k, v, **options))


@on_gpu
def test_dropout_is_that_of_other_kernels():
    for d, lengths in ((64, (16, 16)), (32, (20, 31)), (128, (64, 50))):
        case = Case(*lengths, d=d, dtype="bf16", dropout=0.3)
        found = []
        for kernels in ("any,short", "any"):
            flash_attn_2_cuda.set_cuda_kernels(kernels)
            torch.cuda.manual_seed(3)
            found.append(run(case, backward=True))
        flash_attn_2_cuda.set_cuda_kernels(None)
        assert found[0][1] == found[1][1]  # seed and offset
        for x, y in zip(*(one[0].whole for one in found)):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


@on_gpu
@pytest.mark.parametrize("rows", (16, 31, 64))
def test_every_element_is_written_with_the_same_bits(rows, short_kernels):
    torch.manual_seed(0)
    q, k, v, dout = (randn(300, rows, 5, 64) for _ in range(4))

    def call():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    poisoned_repeats(call, 50)


@on_gpu
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("rows", (12, 27, 60))
def test_nan_reaches_only_what_sees_it(bad, rows, short_kernels):
    """NaN and inf in the last key and value, and in the first query and its dO. A causal mask hides the last key from
    all rows but the last. Other heads and sequences see nothing of it."""
    torch.manual_seed(0)
    leaves = [randn(3, rows, 4, 64).requires_grad_() for _ in range(3)]
    dout = randn(3, rows, 4, 64)
    clean = flash_attn_func(*leaves, causal=True)
    wanted = clean, *torch.autograd.grad(clean, leaves, dout)
    with torch.no_grad():
        leaves[1][1, -1, 2, 5] = leaves[2][1, -1, 2, 6] = bad
    out = flash_attn_func(*leaves, causal=True)
    found = out, *torch.autograd.grad(out, leaves, dout)
    for x, y in zip(found[:2], wanted[:2]):  # out and dq of rows before the last: they multiply weights in fp32
        torch.testing.assert_close(x[:, : rows - 1], y[:, : rows - 1], atol=2e-2, rtol=2e-2)
    for x, y in zip(found, wanted):
        others = torch.ones(3, 4, dtype=torch.bool, device="cuda")
        others[1, 2] = False
        assert torch.equal(x.transpose(1, 2)[others], y.transpose(1, 2)[others])
    assert not found[0][1, -1, 2].isfinite().all()
    with torch.no_grad():
        leaves[1][1, -1, 2, 5] = leaves[2][1, -1, 2, 6] = 0
        dout[1, 0, 2, 3] = bad
    out = flash_attn_func(*leaves, causal=True)
    dk, dv = torch.autograd.grad(out, leaves[1:], dout)
    assert dk[:, 1:].isfinite().all() and dv[:, 1:].isfinite().all() and not dv[1, 0, 2].isfinite().all()


@on_gpu
def test_gradients_that_nobody_wants(short_kernels):
    torch.manual_seed(0)
    q, k, v, dout = (randn(4, 20, 2, 64) for _ in range(4))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    want = [torch.empty_like(q) for _ in range(3)]
    _flash_attn_backward(dout, q, k, v, out, lse, *want, 0.0, 64**-0.5, False, -1, -1, 0.0, None, False)
    for i in range(3):
        leaves = [x.clone().requires_grad_(i == at) for at, x in enumerate((q, k, v))]
        flash_attn_func(*leaves).backward(dout)
        assert torch.equal(leaves[i].grad, want[i])


@on_gpu
def test_no_sequences(short_kernels):
    leaves = [randn(0, 9, 2, 64).requires_grad_() for _ in range(3)]
    out = flash_attn_func(*leaves)
    out.sum().backward()
    assert out.shape == (0, 9, 2, 64) and all(x.grad.shape == out.shape for x in leaves)


@on_gpu
def test_no_keys_and_no_queries(short_kernels):
    q, k = randn(3, 9, 2, 64).requires_grad_(), randn(3, 0, 2, 64).requires_grad_()
    out = flash_attn_func(q, k, k)
    out.sum().backward()
    assert not out.any() and not q.grad.any()
    out = flash_attn_func(k, q, q)
    q.grad = None
    out.sum().backward()
    assert out.shape == (3, 0, 2, 64) and not q.grad.any()


@on_gpu
def test_sinks_and_their_gradient(short_kernels):
    torch.manual_seed(0)
    q, k, v = (randn(5, 20, 3, 64).requires_grad_() for _ in range(3))
    sinks = torch.randn(3, device="cuda", requires_grad=True)
    out = flash_attn_func(q, k, v, causal=True, sinks=sinks)
    found = torch.autograd.grad(out, (q, k, v, sinks), torch.ones_like(out))
    flash_attn_2_cuda.set_cuda_kernels("any")
    other = flash_attn_func(q, k, v, causal=True, sinks=sinks)
    torch.testing.assert_close(out, other, atol=1e-2, rtol=1e-2)
    for x, y in zip(found, torch.autograd.grad(other, (q, k, v, sinks), torch.ones_like(out))):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


@on_gpu
def test_probabilities(short_kernels):
    torch.manual_seed(0)
    q, k, v = (randn(2, 20, 2, 64) for _ in range(3))
    out, lse, probs = flash_attn_func(q, k, v, dropout_p=0.2, return_attn_probs=True)
    weights = probs[:, :, :20, :20].float()  # a negative one was dropped
    kept = weights.clamp(min=0) / weights.abs().sum(-1, keepdim=True) / 0.8
    torch.testing.assert_close((kept @ v.transpose(1, 2).float()).transpose(1, 2), out.float(), atol=2e-2, rtol=2e-2)


@on_gpu
def test_packed_calls_agree():
    torch.manual_seed(0)
    leaves = [randn(7, 24, 3, 80).requires_grad_() for _ in range(3)]
    ends = torch.arange(8, device="cuda", dtype=torch.int32) * 24
    out = flash_attn_func(*leaves, causal=True)
    packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in leaves), ends, ends, 24, 24, causal=True)
    dout = randn(7, 24, 3, 80)
    torch.testing.assert_close(out.flatten(0, 1), packed, atol=1e-2, rtol=1e-2)
    grads = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(packed, leaves, dout.flatten(0, 1))
    for x, y in zip(*grads):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


def packed_results(q, k, v, dout, ends, most, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_varlen_func(*leaves, ends, ends, most, most, return_attn_probs=True, **options)
    return lse, out, *torch.autograd.grad(out, leaves, dout)


@on_gpu
@pytest.mark.parametrize("most", (10, 30, 64))
@pytest.mark.parametrize("options", ({}, {"causal": True, "softcap": 3.0}, {"window_size": (40, 9)}), ids=str)
@pytest.mark.parametrize("d", (40, 64, 160))
def test_sequences_that_are_longer_than_max_seqlen(d, options, most, short_kernels):
    """Their lengths are on the GPU, so no call can refuse them."""
    torch.manual_seed(0)
    ends = torch.tensor([0] * 20 + [7, 7, 150, 151, 216, 220], device="cuda", dtype=torch.int32)
    q, k, v, dout = (randn(220, 3, d) for _ in range(4))
    found = packed_results(q, k, v, dout, ends, most, **options)
    want = packed_results(q, k, v, dout, ends, 143, **options)
    for x, y in zip(found, want):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


@on_gpu
def test_dropout_of_longer_sequences(short_kernels):
    torch.manual_seed(0)
    ends = torch.tensor([0] * 8 + [20, 150], device="cuda", dtype=torch.int32)
    q, k, v, dout = (randn(150, 2, 64) for _ in range(4))
    found = []
    for most in (20, 130):
        torch.cuda.manual_seed(1)
        found.append(packed_results(q, k, v, dout, ends, most, dropout_p=0.3))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


@on_gpu
@pytest.mark.parametrize("most", (9, 20, 50))
@pytest.mark.parametrize("num", (1, 700))
def test_rows_of_no_sequence(num, most, short_kernels):
    """lse is -inf there, and out is 0 on the kernels of short sequences. Every other element has the same bits again,
    whatever memory held before."""
    torch.manual_seed(0)
    ends = torch.randint(0, most + 1, (num + 1,)).cumsum(0).sub_(3).clamp_(0).int()
    ends[0] = 0
    owned = int(ends[-1])
    q, k, v, dout = (randn(owned + 333, 3, 64) for _ in range(4))
    ends = ends.cuda()

    def call():
        lse, *rest = packed_results(q, k, v, dout, ends, most, causal=True)
        assert (lse[:, owned:] == -torch.inf).all()
        assert not rest[0][owned:].any()
        return lse, *(x[:owned] for x in rest)

    poisoned_repeats(call, 20)


@on_gpu
@pytest.mark.parametrize("rows", (12, 27, 60))
def test_packed_neighbours_see_nothing(rows, short_kernels):
    """NaN in one sequence reaches no other one, although their rows lie side by side."""
    torch.manual_seed(0)
    q, k, v, dout = (randn(5 * rows, 4, 64) for _ in range(4))
    ends = torch.arange(6, device="cuda", dtype=torch.int32) * rows
    clean = packed_results(q, k, v, dout, ends, rows)
    for x in (q, k, v, dout):
        x[2 * rows : 3 * rows] = float("nan")
    found = packed_results(q, k, v, dout, ends, rows)
    others = torch.ones(5 * rows, dtype=torch.bool, device="cuda")
    others[2 * rows : 3 * rows] = False
    for x, y in zip(found[1:], clean[1:]):
        assert torch.equal(x[others], y[others]) and x[~others].isnan().all()


@on_gpu
def test_odd_head_dimensions():
    """Odd head dimensions come as copies with aligned rows, or go to the generic kernels."""
    for d in (33, 47):
        verify(replace(random_case(1), d=d, dropout=0.0), backward=True)
