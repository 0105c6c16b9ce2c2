"""The forward kernels on a GPU: the cases of the CPU kernels, the same oracle, the same tolerances."""

import math
import random

import flash_attn_2_cuda
import pytest
import torch
from cases import BOTH, DENSE, PACKED, VALUES, WINDOWS, Case, each, in_dtypes, in_turns
from compare import DTYPES, check, check_lse, largest, size_of_values
from harness import expected, join, problem, rows_of, slices
from harness_cuda import (
    HALF,
    LOW,
    check_extremes,
    found_plainly,
    no_hopper,
    on_gpu,
    poisoned_repeats,
    skip_without_memory,
    with_extremes,
)
from oracle import attention, dropout_keep
from poison import REPEATS

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_forward

pytestmark = pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")

# Columns that tiles multiply. Rows of 88 columns begin amid sectors, so tiles of 112 columns and 192 rows serve them.
COLUMNS = (32, 48, 64, 80, 88, 96, 112, 128, 160, 192, 256)


def suits(case):
    """These kernels take head sizes of whole 16-byte pieces. All other sizes go to attn_fwd_any (test_cuda_any.py)."""
    return case.d % 8 == 0 and case.layout not in ("gaps", "odd_base") and not case.dropout


def run(case, with_lse=True):
    p = problem(case)
    q, k, v = (on_gpu(x) for x in (p.q, p.k, p.v))
    slopes = None if p.slopes is None else p.slopes.cuda()
    options = {
        "softmax_scale": case.scale, "causal": case.causal, "window_size": case.window, "softcap": case.softcap,
        "alibi_slopes": slopes, "dropout_p": case.dropout, "return_attn_probs": with_lse,
    }  # fmt: skip
    if case.packed:
        results = flash_attn_varlen_func(q, k, v, p.cu_q.cuda(), p.cu_k.cuda(), p.max_q, p.max_k, **options)
    else:
        results = flash_attn_func(q, k, v, **options)
    return results[:2] if with_lse else results


def verify(case):
    ref, plain, plain_fp32 = expected(case, False)
    out, lse = (x.cpu() for x in run(case))
    torch.testing.assert_close(run(case, with_lse=False).cpu(), out, rtol=0, atol=0, equal_nan=True)
    scale = max(largest(*ref.out), size_of_values(*rows_of(case, problem(case).v, 1)))
    check("out", *(join(x) for x in (rows_of(case, out, 0), ref.out, plain.out)), scale=scale)
    if case.packed:
        lse = [x.transpose(0, 1) for x in slices(case, lse.transpose(0, 1), case.len_q)]
    check_lse(*(join(list(x)) for x in (lse, ref.lse, plain_fp32.lse)), DTYPES[case.dtype])


SUITED = [case for case in in_dtypes(DENSE + PACKED, HALF) + in_turns(WINDOWS, HALF) if suits(case)]


@pytest.mark.parametrize("case", SUITED, ids=repr)
def test_case(case):
    verify(case)


@pytest.mark.parametrize("d", COLUMNS)
def test_tile_borders(d):
    """Lengths around the tiles of 64 .. 256 rows and of 64 .. 128 keys, with len_q below, at and above len_kv."""
    lengths = ((1, 1), (63, 65), (64, 64), (127, 129), (128, 128), (129, 81), (192, 192), (193, 300), (300, 79))
    for n, m in (*lengths, (256, 256), (450, 513)):
        for causal in BOTH:
            verify(Case(n, m, b=1, h=2, h_kv=1, d=d, dtype="bf16", causal=causal))
    verify(Case(150, 300, b=1, h=2, h_kv=1, d=d, dtype="bf16", window=(100, 40)))


@pytest.mark.parametrize("d", (40, 64, 96, 128))
@pytest.mark.parametrize("causal", BOTH)
def test_many_short_sequences(causal, d):
    """More tiles than CTAs. The order is static, or from 300 sequences on the counter gives the order. Up to 128 tokens
    two CTAs of 128 rows share an SM at 64 columns. Of packed sequences their mean length decides."""
    for n in (17, 64, 77, 128, 200, 300):
        verify(Case(n, n, b=80, h=4, d=d, dtype="bf16", causal=causal))
    lengths = [random.Random(n).randint(0, 128) for n in range(90)]
    for dtype, values in (("bf16", "normal"), ("fp16", "rising"), ("bf16", "huge"), ("fp16", "wide")):
        verify(Case(100, 100, b=80, h=4, d=d, dtype=dtype, causal=causal, values=values))
        packed = {"h": 4, "h_kv": 2, "d": d, "dtype": dtype, "causal": causal, "values": values}
        verify(Case(tuple(lengths), tuple(reversed(lengths)), **packed))
        verify(Case((*lengths, 500), (*lengths, 300), **packed))


@pytest.mark.parametrize("d", (32, 64, 88, 128, 160, 256))
@pytest.mark.parametrize("case", each(Case(300, 700, b=1), values=("rising", "falling", "huge", "wide")), ids=repr)
def test_moving_maximum(case, d):
    verify(Case(**{**case.__dict__, "d": d, "dtype": "bf16"}))


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize(
    ("d", "rows", "n"), ((64, 50, 900), (64, 900, 900), (64, 1000, 1000), *((d, 900, 900) for d in COLUMNS if d != 64))
)
def test_tiles_that_overflow_are_done_again(d, rows, n, causal):
    """The kernel walks keys from the last to the first. In every third head the scores grow towards the first key
    by more than floats can hold. So the maximum of the first visited keys is useless there. There are more tiles
    than SMs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 60, d) for _ in range(3))
    grows = (torch.arange(60) % 3 == 0)[:, None]
    q = torch.where(grows, q.abs(), q)
    k = torch.where(grows, k.abs() * torch.linspace(30, 0.1, n)[:, None, None], k)
    q, k, v = (x.bfloat16() for x in (q[:, -rows:], k, v))
    out, lse, _ = flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=causal, return_attn_probs=True)
    found = []
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        found.append(attention(*(x[0].to(dtype) for x in (q, k, v)), causal=causal))
    ref, plain, plain_fp32 = found
    assert ref[1].max() > 96 * math.log(2)
    check("out", out[0].cpu(), ref[0], plain[0])
    check_lse(lse[0].cpu(), ref[1], plain_fp32[1], DTYPES["bf16"])


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("d", (32, 64, 72, 112, 128, 160, 256))
def test_a_tile_done_again_stores_only_the_rows_that_failed(d, causal):
    """Rows of other warps have the same bits as without the row that overflows, because they are stored once."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 600, 60, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 0, 0
    k[:, 200, :, 0] = 8
    plain = flash_attn_func(q, k, v, causal=causal)
    q[:, 405, ::2, 0] = 25 * math.sqrt(d)  # 200 nats above the keys that the kernel sees first
    out = flash_attn_func(q, k, v, causal=causal)
    assert torch.equal(out[:, 405, ::2], v[:, 200, ::2])
    others = torch.arange(600) // 16 != 405 // 16
    assert torch.equal(out[:, others], plain[:, others])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", COLUMNS)
@pytest.mark.parametrize("window", ((-1, 0), (70, 20), (-1, 130)), ids=str)
def test_what_v_holds_reaches_the_rows_that_see_it(window, d, dtype):
    """NaN and inf in V at two keys, in some columns. Rows that see neither key and other columns do not change."""
    n, left, right = 500, window[0] if window[0] >= 0 else 500, window[1]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 3, d).to(DTYPES[dtype]) for _ in range(3))
    ref, plain = (attention(*(x[0].to(t) for x in (q, k, v)), window=window)[0] for t in (torch.float64, DTYPES[dtype]))
    hit = torch.zeros(n, 3, d, dtype=torch.bool)
    row = torch.arange(n)
    for key, columns, bad in ((203, slice(0, d, 3), math.nan), (350, slice(1, d, 7), math.inf)):
        v[:, key, 1:, columns] = bad
        hit[(key - right <= row) & (row <= key + left), 1:, columns] = True
    out = flash_attn_func(q.cuda(), k.cuda(), v.cuda(), window_size=window)[0].cpu()
    assert not out[hit].isfinite().any()
    check("out", out.masked_fill(hit, 0), ref.masked_fill(hit, 0), plain.masked_fill(hit, 0), scale=largest(ref))


FEW_TILES = (
    {},
    {"causal": True},
    {"window": (300, 20)},
    {"softcap": 5.0, "causal": True},
    {"alibi": "h"},
    {"layout": "heads_first"},
)


@pytest.mark.parametrize("options", FEW_TILES, ids=str)
@pytest.mark.parametrize("sizes", ((64, 3000, 4, 2), (33, 1025, 8, 1), (200, 2048, 2, 2), (700, 513, 3, 3)), ids=str)
@pytest.mark.parametrize("d", (64, 72, 96, 128, 192, 256))
def test_few_work_tiles(d, sizes, options):
    """The keys count as a cache: heads share tiles, and keys are cut into parts (test_cuda_few_tiles.py)."""
    len_q, len_kv, h, h_kv = sizes
    verify(Case(len_q, len_kv, b=1, h=h, h_kv=h_kv, d=d, dtype="bf16", **options))


SEEN = [{}, {"causal": True}, {"window": (90, 20)}, {"softcap": 30.0}]


@pytest.fixture(params=(None, "any,sm80", "any"))
def kernels(request):
    flash_attn_2_cuda.set_cuda_kernels(request.param)
    yield request.param
    flash_attn_2_cuda.set_cuda_kernels(None)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", COLUMNS)
def test_extremes_that_are_seen(d, dtype):
    """Dense, and packed between other sequences. With more rows than keys, some rows see no key."""
    for len_q, len_kv in ((600, 600), (200, 700), (300, 140)):
        q, k, v = with_extremes(len_q, len_kv, d, dtype)
        on = [x.cuda() for x in (q, k, v)]
        packed = [torch.cat([x[:33], x, x[:7]]) for x in on]
        cu = [torch.tensor([0, 33, n + 33, n + 40], dtype=torch.int32, device="cuda") for n in (len_q, len_kv)]
        for options in SEEN:
            name, found = f"{len_q} x {len_kv}, {options}", found_plainly(q, k, v, **options)
            asked = {"window_size" if key == "window" else key: x for key, x in options.items()}
            out, lse, _ = flash_attn_func(*(x[None] for x in on), return_attn_probs=True, **asked)
            check_extremes(name, out[0], lse[0], v, *found)
            out, lse, _ = flash_attn_varlen_func(*packed, *cu, len_q, len_kv, return_attn_probs=True, **asked)
            rows = slice(33, len_q + 33)
            check_extremes(f"{name}, packed", out[rows], lse[:, rows], v, *found)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", (64, 80, 112, 128, 160, 256))
def test_extremes_that_are_seen_with_dropout(d, dtype):
    """Heads with scores of -inf. A dropped element is multiplied by zero."""
    q, k, v = (x[:, :6] for x in with_extremes(300, 400, d, dtype))
    out, lse, _, rng = _flash_attn_forward(
        *(x[None].cuda() for x in (q, k, v)), 0.3, d**-0.5, True, -1, -1, 0.0, None, False
    )
    seed, offset = (int(x) for x in rng.tolist())
    options = {"causal": True, "keep": dropout_keep(seed, offset, 0, 6, 300, 400, 0.3), "dropout_p": 0.3}
    check_extremes("dropout", out[0], lse[0], v, *found_plainly(q, k, v, **options))


def test_a_row_whose_first_keys_have_no_score():
    """The last tile's scores are -inf. All other scores are below the range of floats relative to an anchor of zero."""
    q, k, v = (torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 1, 0
    k[:, -128:, :, 0] = -math.inf
    q[..., 1], k[..., 1] = LOW, -LOW
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=1 / 8, return_attn_probs=True)
    ref, ref_lse = attention(*(x[0].double().cpu() for x in (q, k, v)), scale=1 / 8)
    assert (out[0].double().cpu() - ref).abs().max() < 0.01 and (lse[0].cpu() - ref_lse).abs().max() < 1e-3


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("sign", (1, -1))
def test_scores_that_overflow_in_units_of_log2_only(sign, d):
    """Such scores are infinite: the row is NaN, or sees no key. 2.9e38 fits fp32, but times log2(e) it overflows."""
    q, k = (torch.zeros(1, 300, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, 300, 2, d, device="cuda", dtype=torch.bfloat16)
    q[:, ::2, :, 0], k[..., 0] = 1.7e19, sign * 1.7e19
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=1.0, return_attn_probs=True)
    if sign > 0:
        assert out[:, ::2].isnan().all() and lse[..., ::2].isnan().all()
    else:
        assert (out[:, ::2] == 0).all() and (lse[..., ::2] == math.inf).all()
    mean = v.float().mean(1, keepdim=True)
    assert (out[:, 1::2].float() - mean).abs().max() < 1e-2
    assert (lse[..., 1::2] - math.log(300)).abs().max() < 1e-5


MOSTLY_IDLE = [
    (8, 200, 40000, {"window_size": (126, 278)}),
    (4, 2000, 300, {"causal": True}),
    (2, 5000, 5000, {"window_size": (0, 0)}),
    (300, 70, 20, {"causal": True}),
]


@pytest.mark.parametrize("d", (32, 64, 72, 112, 128, 160, 192))
@pytest.mark.parametrize(("b", "len_q", "len_kv", "options"), MOSTLY_IDLE)
def test_every_element_is_written(b, len_q, len_kv, options, d):
    """Few keys of many are visible, or few rows see a key."""
    q = torch.randn(b, len_q, 2, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, len_kv, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    poisoned_repeats(lambda: flash_attn_func(q, k, v, return_attn_probs=True, **options)[:2], REPEATS)


@pytest.mark.parametrize("d", (32, 64, 72, 128, 160, 256))
@pytest.mark.parametrize("causal", BOTH)
def test_every_element_is_written_of_sequences_mostly_empty(causal, d):
    """3000 packed sequences, most of which have no row, no key or both."""
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (2, 3000), generator=gen) * (torch.rand(2, 3000, generator=gen) < 0.05)
    cu_q, cu_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)).int().cuda() for x in lengths)
    q, k, v = (torch.randn(int(n), 2, d, device="cuda", dtype=torch.bfloat16) for n in (cu_q[-1], cu_k[-1], cu_k[-1]))
    longest = [int(x.max()) for x in lengths]
    call = (  # noqa: E731
        lambda: flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, causal=causal, return_attn_probs=True)[:2]
    )
    poisoned_repeats(call, REPEATS)


@pytest.mark.parametrize("case", [case for case in in_turns(VALUES, HALF) if suits(case)], ids=repr)
def test_repeats_are_bitwise_equal(case):
    out, lse = run(case)
    for _ in range(100):
        again, again_lse = run(case)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("causal", BOTH)
def test_graph_replay_sees_new_values_and_lengths(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def call():
        return flash_attn_varlen_func(q, k, v, cu, cu, 300, 300, causal=causal)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([0, 7, 300], [0, 300, 300], [0, 0, 300], [0, 299, 300]):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        q.normal_()
        graph.replay()
        assert torch.equal(out, call())


def test_another_stream_and_many_calls_at_once():
    """There are more tiles than SMs, so each launch counts its own tiles."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 513, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected_out = flash_attn_func(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(flash_attn_func(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected_out) for out in outs)


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("d", (32, 48, 64, 80, 96, 112, 128, 160, 192, 256))
def test_packed_sequences_give_what_each_gives_alone(d, causal):
    """More sequences than the kernel examines together, some of which have unused keys. As above, every third head
    repeats tiles. By then the kernel has begun tiles of later sequences. Alone, a sequence stays where it is, and the
    others are empty: the plan may take another size of tile for fewer rows or keys. 192 and 256 columns have one size,
    so there a dense call gives the same, too."""
    torch.manual_seed(0)
    lengths = torch.randint(65, 400, (2, 70))
    lengths[:, ::9] = torch.tensor([0, 1, 64, 65, 127, 128, 129, 257])
    used = (lengths[1] * torch.rand(70)).int()
    cu_q, cu_k = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int()
    q = torch.randn(int(cu_q[-1]), 6, d)
    k, v = (torch.randn(int(cu_k[-1]), 6, d) for _ in range(2))
    falling = torch.cat([torch.linspace(30, 0.1, int(n)) for n in lengths[1]])
    q[:, ::3] = q[:, ::3].abs()
    k[:, ::3] = k[:, ::3].abs() * falling[:, None, None]
    q, k, v = (x.bfloat16().cuda() for x in (q, k, v))
    scale = d**-0.5
    whole = int(lengths[0].max()), int(lengths[1].max()), 0.0, scale, causal
    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, cu_q.cuda(), cu_k.cuda(), *whole, seqused_k=used.cuda())
    for i in range(70):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i] + used[i])
        ends = (torch.where(torch.arange(71) <= i, cu[i], cu[i + 1]).cuda() for cu in (cu_q, cu_k))
        alone, alone_lse, *_ = _flash_attn_varlen_forward(q, k, v, *ends, *whole, seqused_k=used.cuda())
        assert torch.equal(out[rows], alone[rows]) and torch.equal(lse[:, rows], alone_lse[:, rows])
        if d > 160:
            alone, alone_lse, *_ = _flash_attn_forward(
                q[None, rows], k[None, keys], v[None, keys], 0.0, scale, causal, -1, -1, 0.0, None, False
            )
            assert torch.equal(out[rows], alone[0]) and torch.equal(lse[:, rows], alone_lse[0])


def test_bad_offsets_stay_inside_the_tensors():
    """cu_seqlens may hold any values. Rows outside the tensors are neither read nor written."""
    q, k, v = (torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for bad in ([0, 1000, -5, 2**31 - 1], [-(2**31), 50, 40, 7], [99, 100, 2**30, 0]):
        cu = torch.tensor(bad, dtype=torch.int32, device="cuda")
        flash_attn_varlen_func(q, k, v, cu, cu, 100, 100, causal=True)
    torch.cuda.synchronize()


def test_beyond_2_to_the_31_elements():
    """The last sequence of a batch whose tensors have more than 2^31 elements."""
    skip_without_memory(30)
    b, n, h, d = 17, 8192, 128, 128
    q = torch.empty(b, n, h, d, device="cuda", dtype=torch.bfloat16)
    q[-1].normal_()
    out = flash_attn_func(q, q[:, :256], q[:, :256])
    alone = flash_attn_func(q[-1:], q[-1:, :256], q[-1:, :256])
    assert torch.equal(out[-1:], alone)


DROPPED = each(
    Case(150, 200, h=4, h_kv=2, dtype="bf16"), d=(40, 64, 72, 104, 128, 160, 192, 256), causal=BOTH, dropout=(0.17, 0.6)
)


@pytest.mark.parametrize("case", DROPPED, ids=repr)
def test_dropout_keeps_what_the_generator_says(case):
    p = problem(case)
    q, k, v = (on_gpu(x) for x in (p.q, p.k, p.v))
    scale = case.d**-0.5
    out, lse, _, rng = _flash_attn_forward(q, k, v, case.dropout, scale, case.causal, -1, -1, 0.0, None, False)
    seed, offset = (int(x) for x in rng.tolist())
    outs, refs, plains = [], [], []
    for n in range(case.b):
        keep = dropout_keep(seed, offset, n, case.h, case.len_q, case.len_kv, case.dropout)
        for dtype, found in ((torch.float64, refs), (torch.bfloat16, plains)):
            args = (x[n].to(dtype) for x in (p.q, p.k, p.v))
            found.append(attention(*args, causal=case.causal, keep=keep, dropout_p=case.dropout)[0])
        outs.append(out[n].cpu())
    check("out", torch.stack(outs), torch.stack(refs), torch.stack(plains))


def test_dropout_draws_anew_in_every_replay_and_follows_the_seed():
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first = flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(5)
    assert [torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16).shape for _ in range(3)]
    assert torch.equal(first, flash_attn_func(q, k, v, 0.5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v, 0.5)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
