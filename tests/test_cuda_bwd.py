"""The backward kernels on a GPU: the cases of the CPU kernels, the same oracle, the same tolerances."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import BOTH, DENSE, PACKED, TINY, VALUES, WINDOWS, Case, each, in_dtypes, in_turns
from compare import DTYPES
from harness import check_gradients, expected, offsets, problem, rows_of, truth
from harness_cuda import HALF, no_hopper, on_gpu
from poison import REPEATS, check_repeats

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

pytestmark = pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")


def suits(case):
    """These kernels take head sizes of whole 16-byte pieces."""
    return case.d % 8 == 0 and case.layout not in ("gaps", "odd_base")


def run(case, deterministic=False, repeats=0):
    """The gradients of every sequence, the whole gradients, and dropout's (seed, offset)."""
    p = problem(case)
    q, k, v, dout = (on_gpu(x) for x in (p.q, p.k, p.v, p.dout))
    slopes = None if p.slopes is None else p.slopes.cuda()
    scale = case.d**-0.5 if case.scale is None else case.scale
    causal, window = case.causal, (case.window[0], 0 if case.causal else case.window[1])
    if case.packed:
        cu = (p.cu_q.cuda(), p.cu_k.cuda(), p.max_q, p.max_k)
        out, lse, _, rng = _flash_attn_varlen_forward(
            q, k, v, *cu, case.dropout, scale, causal, *window, case.softcap, slopes
        )  # fmt: skip
    else:
        out, lse, _, rng = _flash_attn_forward(
            q, k, v, case.dropout, scale, causal, *window, case.softcap, slopes, False
        )  # fmt: skip

    def backward():
        grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
        saved = (dout, q, k, v, out, lse, *grads)
        options = (case.dropout, scale, causal, *window, case.softcap, slopes, deterministic)
        if case.packed:
            _flash_attn_varlen_backward(*saved, *cu, *options, rng_state=rng)
        else:
            _flash_attn_backward(*saved, *options, rng_state=rng)
        return grads

    whole = backward()
    got = SimpleNamespace()
    for name, grad, which in zip(("dq", "dk", "dv"), whole, (0, 1, 1)):
        setattr(got, name, [x.cpu() for x in rows_of(case, grad, which)])
    for _ in range(repeats):
        for name, x, again in zip(("dq", "dk", "dv"), whole, backward()):
            rows = (torch.cat([y.reshape(-1) for y in rows_of(case, z, int(name != "dq"))]) for z in (x, again))
            assert torch.equal(*rows), name
    return got, [int(x) for x in rng.tolist()] if case.dropout else None


def verify(case, m_grad=None, a_grad=None, **options):
    got, rng = run(case, **options)
    if rng:
        p, dtype = problem(case), DTYPES[case.dtype]
        assert rng[1] >= 0
        ref, plain = (truth(case, p, x, True, rng[0], rng[1]) for x in (torch.float64, dtype))
    else:
        ref, plain, _ = expected(case, True)
    check_gradients(case, got, ref, plain, m_grad, a_grad)


SUITED = [
    case for case in in_dtypes(DENSE + PACKED, HALF) + in_turns(WINDOWS, HALF) if suits(case) and case.values != "huge"
]


@pytest.mark.parametrize("case", SUITED, ids=repr)
def test_case(case):
    verify(case)


@pytest.mark.parametrize("case", [c for c in in_dtypes(TINY[::3], HALF) if suits(c)], ids=repr)
def test_short_and_large(case):
    verify(case, m_grad=5.0)


@pytest.mark.parametrize("case", [c for c in in_dtypes(VALUES, HALF) if c.values == "huge"], ids=repr)
def test_huge_scores_give_finite_gradients(case):
    verify(case, m_grad=5.0)


@pytest.mark.parametrize("d", (32, 48, 64, 80, 96, 112, 128, 160, 192, 256))
@pytest.mark.parametrize("deterministic", BOTH)
def test_tile_borders(d, deterministic):
    """Lengths around the tiles of 64 and 128 rows and of 128 keys, with len_q below, at and above len_kv."""
    for n, m in ((1, 1), (63, 65), (64, 64), (127, 129), (128, 128), (129, 81), (192, 192), (193, 300), (300, 79)):
        for causal in BOTH:
            case = Case(n, m, b=1, h=2, h_kv=1, d=d, dtype="bf16", causal=causal)
            verify(case, deterministic=deterministic)


FLAGS = [
    Case(333, 450, h=4, h_kv=2),
    Case(450, 333, h=4, h_kv=1, causal=True),
    Case(333, 450, window=(40, 77)),
    Case(450, 333, window=(200, 3), softcap=5.0),
    Case(333, 450, alibi="bh", causal=True),
    Case(333, 450, h=4, h_kv=2, dropout=0.3),
    Case(333, 450, dropout=0.3, softcap=8.0, alibi="h", window=(100, 0)),
    Case((300, 0, 5, 450), (450, 9, 0, 300), h=4, h_kv=2, causal=True),
    Case((300, 0, 5, 450), (450, 9, 0, 300), h=2, window=(30, 90), dropout=0.2, alibi="h"),
]


@pytest.mark.parametrize(
    "case",
    [replace(c, d=d, dtype=t) for c in FLAGS for d in (32, 40, 64, 80, 96, 104, 128, 160, 192, 256) for t in HALF],
    ids=repr,
)
def test_several_tiles(case):
    verify(case)


@pytest.mark.parametrize(
    "case", [replace(c, d=d, dtype="bf16") for c in FLAGS for d in (64, 72, 128, 144, 192, 200)], ids=repr
)
def test_a_fixed_order_repeats_bitwise(case):
    verify(case, deterministic=True, repeats=30)


@pytest.mark.parametrize("d", (32, 40, 64))
@pytest.mark.parametrize("deterministic", BOTH)
def test_long_and_causal(d, deterministic):
    """More than 1024 keys. Without a fixed order and up to 64 columns, a separate warp converts the sums to dQ."""
    for n, m in ((1100, 1300), (1300, 1100), (200, 1030), ((1100, 0, 5, 450), (1200, 9, 0, 300))):
        case = Case(n, m, b=1, h=4, h_kv=2, d=d, dtype="bf16", causal=True)
        verify(case, deterministic=deterministic, repeats=10 if deterministic else 0)


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("h", (8, 6))
def test_a_fixed_order_of_many_tiles(d, causal, h):
    """More tiles than SMs, so that tiles wait for tiles that other CTAs have not begun yet.

    With 6 heads 24 tiles remain for the third round of an H100, and these are cut. A sequence alone has other cuts.
    """
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 3000, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=causal, deterministic=True)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(first, torch.autograd.grad(out, leaves, dout, retain_graph=True)))
    loose = torch.autograd.grad(flash_attn_func(*leaves, causal=causal), leaves, dout)
    halves = ([x[i : i + 1].detach().requires_grad_() for x in leaves] for i in range(2))
    alone = [torch.autograd.grad(flash_attn_func(*x, causal=causal), x, dout[i : i + 1]) for i, x in enumerate(halves)]
    for x, y, *parts in zip(first, loose, *alone):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(x, torch.cat(parts), atol=2e-2, rtol=2e-2)


CUT_TILES = [
    Case(600, 700, b=1, h=8, h_kv=1, causal=True),  # 2 pieces of 4 query heads
    Case(1100, 1300, b=1, h=16, h_kv=1, causal=True),  # 8 pieces of 2 query heads
    Case(600, 500, h=12, h_kv=2, window=(300, 100), dropout=0.2, alibi="h"),  # 2 pieces of 3 query heads
    Case((700, 0, 5, 450), (700, 9, 0, 600), h=16, h_kv=2, causal=True, softcap=5.0),
    Case((700, 0, 5, 450), (700, 9, 0, 600), h=8, h_kv=2),
    Case(1100, 4100, b=4, h=16, h_kv=1),  # 4 pieces of whole groups, or 2 at 64 columns
]


@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize(
    "case", [replace(c, d=d, dtype="bf16") for c in CUT_TILES for d in (32, 40, 64, 80, 96, 112, 128)], ids=repr
)
def test_key_tiles_that_are_cut(case, deterministic):
    """The pieces add dK and dV in their order."""
    verify(case, deterministic=deterministic, repeats=10 if deterministic else 0)


@pytest.mark.parametrize("d", (32, 40, 64, 72, 112, 128, 256))
@pytest.mark.parametrize("deterministic", BOTH)
def test_gradients_repeat_bitwise(d, deterministic):
    """All gradients repeat in a fixed order, and dk and dv also without it. Tiles share the rows of a
    query tile's dQ."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 1000, 4, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=True, deterministic=deterministic)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(1000):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        assert not deterministic or torch.equal(first[0], again[0])


# Most key tiles have no query. The columns are lengths of queries and keys, of sequences or packed; window.
EMPTY_TILES = {
    "window_far_from_most_keys": ([200] * 8, [40000] * 8, (126, 278)),
    "few_queries": ([3] * 2, [20000] * 2, (0, 0)),
    "no_query": ([0, 0, 70], [9000, 16000, 130], (-1, -1)),
    "thousands_of_empty_sequences": ([0, 0, 3, 0] * 1000, [0, 5, 0, 0] * 1000, (-1, -1)),
    "one_sequence_among_thousands": ([0] * 2000 + [300] + [0] * 2000, [0] * 2000 + [300] + [1] * 2000, (-1, 0)),
}


@pytest.mark.parametrize(
    "d, dtype",
    ((32, "bf16"), (64, "bf16"), (80, "bf16"), (96, "fp16"), (128, "bf16"), (192, "fp16"), (256, "bf16"), (64, "fp32")),
)
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("name", EMPTY_TILES)
def test_every_element_is_written_again_and_again(name, d, dtype, deterministic):
    """The memory of the gradients holds NaN. The generic kernels serve fp32."""
    lengths_q, lengths_kv, window = EMPTY_TILES[name]
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": DTYPES[dtype]}
    rest = (0.0, d**-0.5, False, *window, 0.0, None)
    if len(set(lengths_q)) == len(set(lengths_kv)) == 1:
        q, k = (torch.randn(len(n), n[0], 2, d, **options) for n in (lengths_q, lengths_kv))
        v, dout = torch.randn_like(k), torch.randn_like(q)
        out, lse, _, rng = _flash_attn_forward(q, k, v, *rest, False)
        saved, backward = (), _flash_attn_backward
    else:
        q, k = (torch.randn(sum(n), 2, d, **options) for n in (lengths_q, lengths_kv))
        v, dout = torch.randn_like(k), torch.randn_like(q)
        saved = (offsets(lengths_q).cuda(), offsets(lengths_kv).cuda(), max(lengths_q), max(lengths_kv))
        out, lse, _, rng = _flash_attn_varlen_forward(q, k, v, *saved, *rest)
        backward = _flash_attn_varlen_backward
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    check_repeats(
        lambda: backward(dout, q, k, v, out, lse, dq, dk, dv, *saved, *rest, deterministic, rng_state=rng),
        {"dq": dq, "dk": dk, "dv": dv},
        REPEATS if dtype != "fp32" else REPEATS // 20,
        in_any_order=() if deterministic else ("dq",),
    )


@pytest.mark.parametrize("d", (32, 48, 64, 80, 96, 112, 128, 192, 256))
@pytest.mark.parametrize("deterministic", BOTH)
@pytest.mark.parametrize("n", (300, 1300))
def test_rows_whose_scores_are_all_minus_infinity(d, n, deterministic):
    """Rows whose scores are all -inf see no key. dq is zero although k holds infinities, and the rows add nothing to dk
    and dv."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, h, d, device="cuda", dtype=torch.bfloat16) for h in (2, 1, 1, 2))
    blind = 100
    q[..., 0], k[..., 0] = 1, 0
    k[:, :blind, :, 0] = -math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(*leaves, causal=True, deterministic=deterministic)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert (out[:, :blind] == 0).all() and (dq[:, :blind] == 0).all()
    assert (dk[:, :blind] == 0).all() and (dv[:, :blind] == 0).all()
    others = [x[:, blind:].detach().requires_grad_() for x in leaves]
    want = torch.autograd.grad(flash_attn_func(*others, causal=True), others, dout[:, blind:])
    # in column 0 dq is 0 times -inf, as in plain arithmetic
    for x, y in zip((dq[..., 1:], dk, dv), (want[0][..., 1:], *want[1:])):
        torch.testing.assert_close(x[:, blind:], y, atol=2e-2, rtol=2e-2)


def test_gradients_of_views_and_none():
    """dq, dk, dv may be slices of one buffer. A gradient that is None is not computed."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 140, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse, _, rng = _flash_attn_forward(q, k, v, 0.0, 0.2, True, -1, -1, 0.0, None, False)

    def backward(*grads):
        saved = (dout, q, k, v, out, lse, *grads)
        return _flash_attn_backward(*saved, 0.0, 0.2, True, -1, -1, 0.0, None, True, rng)

    want = [torch.full_like(q, math.nan) for _ in range(3)]
    softmax_d = backward(*want)
    delta = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(softmax_d[..., :140].double(), delta, rtol=1e-5, atol=1e-4)
    buffer = torch.full((2, 142, 5, 3, 80), 7.0, device="cuda", dtype=torch.bfloat16)
    views = [buffer[:, 1:-1, i + 1, :, 8:72] for i in range(3)]
    backward(*views)
    assert all(torch.equal(x, y) for x, y in zip(views, want))
    for view in views:
        view.fill_(7.0)
    assert (buffer == 7.0).all(), "something outside the given views was written"
    for i in range(3):
        grads = [None, None, None]
        grads[i] = torch.full_like(q, math.nan)
        backward(*grads)
        assert torch.equal(grads[i], want[i])


@pytest.mark.parametrize("infinity", (math.inf, -math.inf))
def test_lse_of_blind_rows_by_either_sign(infinity):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (70, 33, 33, 70))
    out, lse, _, rng = _flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    lse = lse.masked_fill(lse.isinf(), infinity)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, True, -1, -1, 0.0, None, False, rng)
    assert all(x.isfinite().all() for x in (dq, dk, dv)) and (dq[:, :37] == 0).all()


@pytest.mark.parametrize("name", ("expanded", "transposed", "strided_last"))
def test_dout_of_any_layout(name):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(2, 200, 3, 64, requires_grad=True, **options) for _ in range(3))
    dout = {
        "expanded": torch.ones((), **options).expand(2, 200, 3, 64),
        "transposed": torch.randn(2, 3, 200, 64, **options).transpose(1, 2),
        "strided_last": torch.randn(2, 200, 3, 128, **options)[..., ::2],
    }[name]
    want = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True), (q, k, v), dout.contiguous())
    got = torch.autograd.grad(flash_attn_func(q, k, v, deterministic=True), (q, k, v), dout)
    assert all(torch.equal(x, y) for x, y in zip(got, want))


@pytest.mark.parametrize("causal", BOTH)
def test_graph_replay_sees_new_values_and_lengths(causal):
    """Forward and backward of packed sequences in one graph."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def call():
        out = flash_attn_varlen_func(*leaves, cu, cu, 300, 300, causal=causal, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = call()
    for lengths in ([0, 7, 300], [0, 300, 300], [0, 0, 300], [0, 299, 300]):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        with torch.no_grad():
            q.normal_()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(grads, call()))


def test_bad_offsets_stay_inside_the_tensors():
    """cu_seqlens may hold any values. Rows outside the tensors are neither read nor written."""
    q, k, v, dout = (torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    good = torch.tensor([0, 30, 60, 100], dtype=torch.int32, device="cuda")
    out, lse, _, rng = _flash_attn_varlen_forward(
        q, k, v, good, good, 100, 100, 0.0, 0.1, True, -1, -1, 0.0, None
    )  # fmt: skip
    for bad in ([0, 1000, -5, 2**31 - 1], [-(2**31), 50, 40, 7], [99, 100, 2**30, 0]):
        cu = torch.tensor(bad, dtype=torch.int32, device="cuda")
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        _flash_attn_varlen_backward(
            dout, q, k, v, out, lse, *grads, cu, cu, 100, 100, 0.0, 0.1, True, -1, -1, 0.0, None, False, rng_state=rng
        )  # fmt: skip
    torch.cuda.synchronize()


def test_dropout_keeps_what_the_forward_kept():
    for case in each(Case(150, 200, h=4, h_kv=2), d=(40, 64, 128, 192), causal=BOTH, dropout=(0.17, 0.6), dtype=HALF):
        verify(case)
