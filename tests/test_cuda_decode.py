"""flash_attn_with_kvcache on a GPU: the cases of the CPU, possible errors of splits and lanes, graphs, bad indices. On
Hopper every test runs with the decode kernel for Hopper, with the kernels for GPUs before Hopper, and with the forwards
of both, which take prompts."""

import math
import random
from dataclasses import replace

import flash_attn_2_cuda
import pytest
import torch
from compare import check, check_lse, largest, size_of_values
from harness_cuda import check_extremes, found_plainly, no_gpu, no_hopper, poisoned_repeats, with_extremes
from harness_kvcache import CASES, Cache
from harness_kvcache import run as run_on
from oracle import attention
from poison import REPEATS

from flash_attn import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")

HALF = ("bf16", "fp16")


@pytest.fixture(autouse=True, params=("sm90", "sm80", "prompts", "prompts of sm80"))
def arch(request):
    if not request.param.endswith("sm80") and no_hopper():
        pytest.skip(no_hopper())
    words = {"sm90": "decode_sm90", "sm80": "sm80", "prompts": "fwd_sm90", "prompts of sm80": "fwd_sm80"}
    flash_attn_2_cuda.set_cuda_kernels(f"any,{words[request.param]}")
    yield request.param
    flash_attn_2_cuda.set_cuda_kernels(None)


def run(case):
    run_on(case, "cuda")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_cache(case, dtype):
    run(replace(case, dtype=dtype))


@pytest.mark.parametrize("d", (8, 64, 72, 96, 128, 192, 256))
@pytest.mark.parametrize("page", (0, 1, 7, 64))
def test_head_dims_and_rows(d, page):
    """From 1 row of a key head to more than a tile, and lengths around the tiles of 64 keys."""
    for len_q, h, h_kv in ((1, 2, 2), (1, 8, 1), (1, 16, 1), (1, 24, 1), (2, 32, 1), (5, 16, 1), (70, 2, 1)):
        case = Cache(len_q, (129, 64, 0), 130, h=h, h_kv=h_kv, d=d, page=page, causal=len_q % 2 == 0, window=(100, -1))
        run(replace(case, dtype="bf16"))


SPLITS = [
    Cache(1, (5000, 1, 3333), 5001, h=8, h_kv=2, d=128),
    Cache(1, (20000,), 20000, h=16, h_kv=1, d=64, b=1, page=16),
    Cache(3, (700, 64, 65, 0, 2000), 2001, b=5, d=128, len_new=1, causal=True, page=1),
    Cache(2, (900,) * 40, 1000, b=40, h=4, h_kv=4, d=64, window=(300, 0)),
    Cache(9, (1500, 0, 77), 1600, h=16, h_kv=2, d=256, causal=True, softcap=9.0, alibi="bh"),
    Cache(1, (3000, 1000, 10), 3000, h=12, h_kv=12, d=96, leftpad=True, batch_idx=True),
    Cache(1, (700, 33), 800, b=2, h=32, h_kv=32, d=64, len_new=1),
]


@pytest.mark.parametrize("num_splits", (0, 1, 3, 128))
@pytest.mark.parametrize("case", SPLITS, ids=repr)
def test_num_splits(case, num_splits):
    run(replace(case, num_splits=num_splits, dtype="bf16"))


FEW_HEADS = [
    Cache(1, (5000,), 5001, b=1, h=8, h_kv=1, d=128),
    Cache(1, (9000, 1, 0, 300), 9000, b=4, h=2, h_kv=1, d=64, page=16),
    Cache(3, (4000,), 4003, b=1, h=15, h_kv=3, d=256, len_new=2, causal=True, softcap=9.0),
    Cache(1, (700, 33, 1025), 1100, h=32, h_kv=8, d=96, window=(600, 0), alibi="bh", leftpad=True),
    Cache(16, (2000, 16), 2020, b=2, h=2, h_kv=2, d=192, causal=True, page=1, len_new=1),
    Cache(1, (1800,), 1800, b=1, h=33, h_kv=33, d=128, batch_idx=True),
]


@pytest.mark.parametrize("case", FEW_HEADS, ids=repr)
def test_clusters(case):
    for dtype in HALF:
        run(replace(case, dtype=dtype))


@pytest.mark.parametrize(
    ("lengths", "h_kv", "d", "cluster"),
    [((20000,), 1, 128, 8), ((20000, 0, 1, 64, 3000), 1, 64, 4), ((1000,) * 5, 8, 256, 2)],
)
def test_clusters_repeat_bit_for_bit(arch, lengths, h_kv, d, cluster):
    q, k, v, seqlens, _ = decode_problem(lengths, max(lengths), 4 * h_kv, h_kv, d)
    options = {"cache_seqlens": seqlens, "return_softmax_lse": True}
    assert explain(flash_attn_with_kvcache, q, k, v, **options).cluster == (cluster if arch == "sm90" else 0)
    out, lse = flash_attn_with_kvcache(q, k, v, **options)
    for _ in range(1000):
        again, again_lse = flash_attn_with_kvcache(q, k, v, **options)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_one_long_sequence_among_many():
    """More splits than the kernel merges at once, with more rows than threads."""
    run(Cache(1, (20000,) + (5,) * 33, 20000, b=34, h=16, h_kv=1, d=128, dtype="bf16"))


def decode_problem(lengths, capacity, h, h_kv, d, page=0, dtype=torch.bfloat16):
    """q, caches (NaN beyond the lengths), cache_seqlens and block_table of a step with one query."""
    b = len(lengths)
    gen = torch.Generator(device="cuda").manual_seed(1)
    q = torch.randn(b, 1, h, d, device="cuda", dtype=dtype, generator=gen)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if not page:
        caches = [torch.randn(b, capacity, h_kv, d, device="cuda", dtype=dtype, generator=gen) for _ in range(2)]
        for n, length in enumerate(lengths):
            for cache in caches:
                cache[n, length:] = math.nan
        return q, *caches, seqlens, None
    columns = -(-capacity // page)
    table = torch.randperm(b * columns, device="cuda", generator=gen).view(b, columns).to(torch.int32)
    caches = [torch.randn(b * columns, page, h_kv, d, device="cuda", dtype=dtype, generator=gen) for _ in range(2)]
    return q, *caches, seqlens, table


@pytest.mark.parametrize("num_splits", (1, 4))
@pytest.mark.parametrize("page", (0, 16))
def test_fixed_splits_do_not_depend_on_the_batch(num_splits, page):
    q, k, v, seqlens, table = decode_problem((3000, 1, 0, 777, 64, 2999), 3000, 8, 2, 128, page)

    def call(n, m):
        rows = slice(n, m)
        caches = (k, v) if page else (k[rows], v[rows])
        return flash_attn_with_kvcache(
            q[rows], *caches, cache_seqlens=seqlens[rows], block_table=table[rows] if page else None,
            num_splits=num_splits, return_softmax_lse=True,
        )  # fmt: skip

    out, lse = call(0, 6)
    for n in range(6):
        alone, alone_lse = call(n, n + 1)
        assert torch.equal(alone[0], out[n]) and torch.equal(alone_lse[0], lse[n])


@pytest.mark.parametrize("num_splits", (0, 5))
def test_repeats_are_bitwise_equal(num_splits):
    q, k, v, seqlens, table = decode_problem((3000, 10, 0, 777, 1500, 2999), 3000, 16, 4, 128, 16)
    options = {"cache_seqlens": seqlens, "block_table": table, "num_splits": num_splits, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(q, k, v, **options)
    for _ in range(1000):
        again, again_lse = flash_attn_with_kvcache(q, k, v, **options)
        assert torch.equal(out, again) and torch.equal(lse, again_lse)


@pytest.mark.parametrize("page", (0, 1, 16, 256))
@pytest.mark.parametrize("num_splits", (0, 1, 3))
def test_graph_replay_while_lengths_grow(page, num_splits):
    """A graph is captured once and replayed while cache_seqlens, table and values change in place. The results equal
    eager calls."""
    q, k, v, seqlens, table = decode_problem((0, 0, 0, 0), 2048, 8, 2, 64, page)
    k.normal_(), v.normal_()
    k_new, v_new = (torch.randn(4, 1, 2, 64, device="cuda", dtype=q.dtype) for _ in range(2))
    options = {"cache_seqlens": seqlens, "block_table": table, "num_splits": num_splits, "return_softmax_lse": True}

    def call():
        return flash_attn_with_kvcache(q, k, v, k_new, v_new, **options)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths in (
        (0, 0, 0, 0),
        (1, 2, 3, 4),
        (63, 64, 65, 0),
        (2047, 0, 1, 1000),
        (2047,) * 4,
        (2048, 2047, 0, 2048),
    ):
        seqlens.copy_(torch.tensor(lengths))
        q.normal_(), k_new.normal_(), v_new.normal_()
        if page:
            table.copy_(torch.randperm(table.numel(), device="cuda").view(table.shape))
        before = k.clone(), v.clone()
        graph.replay()
        got = out.clone(), lse.clone(), k.clone(), v.clone()
        k.copy_(before[0]), v.copy_(before[1])
        want = (*call(), k, v)
        assert all(torch.equal(x, y) for x, y in zip(got, want)), lengths


def random_case(seed):
    """Few rows of a key head, so that the decode kernel serves most cases. All options that can be combined are
    combined."""
    r = random.Random(seed)
    b, len_new = r.randint(1, 5), r.choice((0, 0, 1, 1, 2, 8, 9))
    h_kv, g, len_q = r.choice(((1, 8, 1), (2, 1, 1), (3, 4, 1), (8, 4, 1), (1, 16, 4), (2, 2, 7), (2, 5, 20)))
    capacity = r.choice((40, 129, 700, 2500))
    seqlens = tuple(r.randint(0, capacity - len_new) for _ in range(b))
    return Cache(
        len_q, seqlens, capacity, len_new, h_kv * g, h_kv, r.choice((16, 64, 72, 96, 128, 192, 256)),
        r.choice(HALF), r.choice((0, 0, 1, 5, 16, 256)), r.choice((0.0, 0.5, 1.0)) if len_new else 0.0,
        r.random() < 0.5, r.random() < 0.3, r.random() < 0.3, r.random() < 0.5,
        r.choice(((-1, -1), (-1, -1), (100, -1), (30, 5))), r.choice((0.0, 0.0, 7.0)), r.choice(("", "", "h", "bh")),
        r.choice((0, 0, 0, 1, 2, 30)), b,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_random_steps(seed):
    run(random_case(seed))


@pytest.mark.parametrize("page", (0, 16))
def test_an_append_in_front_writes_the_same(page):
    """kvcache.cu appends rows that do not start at multiples of 16 bytes. Caches and output have the same bits."""
    q, k, v, seqlens, table = decode_problem((700, 63, 0, 64), 900, 8, 2, 128, page)
    aligned = [torch.randn(4, 2, 2, 128, device="cuda", dtype=q.dtype) for _ in range(2)]
    shifted = [torch.empty(4 * 2 * 2 * 128 + 1, device="cuda", dtype=q.dtype)[1:].view(4, 2, 2, 128) for _ in range(2)]
    for there, new in zip(shifted, aligned):
        there.copy_(new)
        assert there.data_ptr() % 16
    found = []
    for new in (aligned, shifted):
        caches = k.clone(), v.clone()
        out = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=seqlens, block_table=table)
        found.append([x.view(torch.int16) for x in (out, *caches)])
    assert all(torch.equal(x, y) for x, y in zip(*found))


@pytest.mark.parametrize("len_new", (3, 12))
@pytest.mark.parametrize("page", (0, 10))
def test_an_append_without_room(page, len_new):
    """Keys that fit are written, all others are not, and attention sees the whole cache. kvcache.cu appends the 12
    keys."""
    q, k, v, _, table = decode_problem((40,) * 4, 40, 4, 2, 64, page)
    seqlens = torch.tensor((40, 39, 38, 0), dtype=torch.int32, device="cuda")
    new = [torch.randn(4, len_new, 2, 64, device="cuda", dtype=q.dtype) for _ in range(2)]
    want = []
    for cache, rows in zip((k, v), new):
        flat = cache.clone() if table is None else cache[table.long()].flatten(1, 2)
        for n, start in enumerate(seqlens.tolist()):
            flat[n, start : start + len_new] = rows[n, : 40 - start]
        want.append(flat)
    out = flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=seqlens, block_table=table)
    for cache, flat in zip((k, v), want):
        assert torch.equal(cache if table is None else cache[table.long()].flatten(1, 2), flat)
    after = torch.tensor([min(n + len_new, 40) for n in seqlens.tolist()], dtype=torch.int32, device="cuda")
    assert torch.equal(out, flash_attn_with_kvcache(q, k, v, cache_seqlens=after, block_table=table))


def test_sequences_that_share_pages():
    """The sequences share pages with a common prefix. Each sequence has a page of its own for its new keys."""
    q, k, v, _, _ = decode_problem((0,) * 3, 64, 8, 2, 128, 16)
    table = torch.tensor(((0, 1, 2), (0, 1, 5), (0, 1, 7)), dtype=torch.int32, device="cuda")
    seqlens = torch.tensor((32, 40, 47), dtype=torch.int32, device="cuda")
    new = [torch.randn(3, 1, 2, 128, device="cuda", dtype=q.dtype) for _ in range(2)]
    out = flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=seqlens, block_table=table, num_splits=1)
    for n in range(3):
        alone = [x[table[n].long()].flatten(0, 1)[None].contiguous() for x in (k, v)]
        want = flash_attn_with_kvcache(q[n : n + 1], *alone, cache_seqlens=seqlens[n : n + 1] + 1, num_splits=1)
        assert torch.equal(out[n : n + 1], want)
        assert all(torch.equal(x[0, seqlens[n]], y[n, 0]) for x, y in zip(alone, new))


def test_many_streams_at_once():
    problems = [decode_problem((2000 - 400 * i, 5 + i), 2000, 8, 2, 128) for i in range(4)]
    want = [flash_attn_with_kvcache(q, k, v, cache_seqlens=n) for q, k, v, n, _ in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    outs = []
    for _ in range(30):
        for i, (q, k, v, n, _) in enumerate(problems):
            with torch.cuda.stream(streams[i]):
                outs.append((i, flash_attn_with_kvcache(q, k, v, cache_seqlens=n)))
    torch.cuda.synchronize()
    assert all(torch.equal(out, want[i]) for i, out in outs)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d", (64, 96, 128, 256))
@pytest.mark.parametrize(("len_q", "len_kv"), ((1, 3000), (3, 700), (16, 1100)))
def test_extremes_that_are_seen(len_q, len_kv, d, dtype):
    """The keys are one split, many splits, or splits in clusters, and also lie in pages."""
    q, k, v = with_extremes(len_q, len_kv, d, dtype)
    on, page = [x[None].cuda() for x in (q, k, v)], 20
    pools = [x[0].view(-1, page, *x.shape[2:]) for x in on[1:]]
    table = torch.arange(len_kv // page, dtype=torch.int32, device="cuda")[None]
    seqlens = torch.tensor([len_kv], dtype=torch.int32, device="cuda")
    for options in ({}, {"causal": True}, {"window": (900, 0)}, {"softcap": 30.0}):
        found = found_plainly(q, k, v, **options)
        asked = {"window_size" if key == "window" else key: x for key, x in options.items()}
        asked |= {"cache_seqlens": seqlens, "return_softmax_lse": True}
        for num_splits in (0, 1, 5):
            out, lse = flash_attn_with_kvcache(*on, num_splits=num_splits, **asked)
            check_extremes(f"{options}, {num_splits}", out[0], lse[0], v, *found)
            out, lse = flash_attn_with_kvcache(on[0], *pools, block_table=table, num_splits=num_splits, **asked)
            check_extremes(f"{options}, {num_splits}, pages", out[0], lse[0], v, *found)


NAN_SHAPES = ((3, 200, 8, (-1, 0)), (33, 170, 2, (-1, 0)), (70, 90, 2, (20, 5)), (5, 64, 2, (9, -1)))


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=HALF)
@pytest.mark.parametrize("page", (0, 4))
@pytest.mark.parametrize(("len_q", "len_kv", "h", "window"), NAN_SHAPES)
@pytest.mark.parametrize("d", (24, 64, 96, 128, 192, 256))
def test_nan_in_v_stays_where_it_is_seen(d, len_q, len_kv, h, window, page, dtype, value):
    """The NaN lies in tiles that some rows see in part: under the diagonal and at both ends of a window."""
    lengths = ((len_q, h), (len_kv, 2), (len_kv, 2))
    q, k, v = (torch.randn(2, n, heads, d, device="cuda", dtype=dtype) for n, heads in lengths)
    spoilt = v.clone()
    for j in range(max(len_kv - len_q - 12, 0), len_kv, 7):
        spoilt[1, j, 1, j % d] = value
    num_pages = -(-len_kv // page) if page else 0
    table = torch.randperm(2 * num_pages, device="cuda", dtype=torch.int32).view(2, num_pages) if page else None

    def cache(x):
        if not page:
            return x
        pool = torch.zeros(2 * num_pages, page, 2, d, device="cuda", dtype=dtype)
        rows = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, num_pages * page - len_kv))
        pool[table.flatten().long()] = rows.reshape(-1, page, 2, d)
        return pool

    clean, out = (
        flash_attn_with_kvcache(q, cache(k), cache(x), cache_seqlens=len_kv, window_size=window, block_table=table)
        for x in (v, spoilt)
    )
    i, j = torch.arange(len_q, device="cuda")[:, None] + len_kv - len_q, torch.arange(len_kv, device="cuda")
    left, right = (len_kv + len_q if side < 0 else side for side in window)
    sees = (i - left <= j) & (j <= i + right)
    is_hit = torch.zeros_like(out, dtype=torch.bool)
    is_hit[1, :, h // 2 :] = ((sees.float() @ (~spoilt[1, :, 1].isfinite()).float()) > 0)[:, None]
    assert torch.equal(out.isfinite(), ~is_hit)
    torch.testing.assert_close(out[~is_hit], clean[~is_hit], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page", (0, 16))
@pytest.mark.parametrize("num_splits", (0, 1, 7))
def test_every_element_is_written(num_splits, page):
    """Most caches are empty, or their keys lie outside the window."""
    for lengths, window in (((0,) * 100 + (3000, 1), (-1, -1)), ((0, 0), (-1, -1)), ((5000,) * 3 + (0,) * 20, (10, 0))):
        q, k, v, seqlens, table = decode_problem(lengths, max(lengths) + 1, 8, 2, 128, page)
        options = {"cache_seqlens": seqlens, "block_table": table, "num_splits": num_splits, "window_size": window}
        poisoned_repeats(
            lambda: flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options),  # noqa: B023
            REPEATS,
        )


BAD = (-(2**31), -1, 10**6, 2**31 - 1)


@pytest.mark.parametrize("num_splits", (0, 1, 2))
@pytest.mark.parametrize("page", (0, 4))
def test_bad_indices_stay_inside_the_tensors(num_splits, page):
    """Lengths, tables, paddings and rows out of range are clamped to the range. A bad page counts as the last page."""
    bad = torch.tensor(BAD, dtype=torch.int32, device="cuda")
    q, k, v, seqlens, table = decode_problem((30, 31, 32, 33), 40, 4, 2, 64, page)
    k.normal_(), v.normal_()
    changed = [
        ("cache_seqlens", bad, bad.clamp(0, 40)),
        ("cache_leftpad", bad, torch.minimum(bad.clamp(min=0), seqlens)),
        ("cache_batch_idx", bad, bad.clamp(0, 3)),
    ]
    if page:
        bad_table = table.clone()
        bad_table[:, ::3] = bad[:, None]
        known = bad_table.where((bad_table >= 0) & (bad_table < len(k)), torch.full_like(table, len(k) - 1))
        changed.append(("block_table", bad_table, known))
    k_new = torch.randn(4, 3, 2, 64, device="cuda", dtype=q.dtype)
    for name, found, meant in changed:
        options = {"cache_seqlens": seqlens, "block_table": table, "num_splits": num_splits}
        out = flash_attn_with_kvcache(q, k, v, **{**options, name: found})
        assert torch.equal(out, flash_attn_with_kvcache(q, k, v, **{**options, name: meant})), name
        flash_attn_with_kvcache(q, k.clone(), v.clone(), k_new, k_new, causal=True, **{**options, name: found})
    torch.cuda.synchronize()


@pytest.mark.parametrize("page", (1, 5, 16, 256))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("len_q", ((1, 1, 1), (3, 0, 40), (100, 1, 17)), ids=str)
def test_packed_queries_over_pages(len_q, causal, page):
    torch.manual_seed(0)
    len_kv, h, h_kv, d = (300, 64, 129), 8, 2, 64
    columns = -(-max(len_kv) // page)
    table = torch.randperm(3 * columns).view(3, columns).to(torch.int32)
    pool = [torch.randn(3 * columns, page, h_kv, d).to(torch.bfloat16) for _ in range(2)]
    q = torch.randn(sum(len_q), h, d).to(torch.bfloat16)
    cu_q, cu_k = (torch.tensor((0, *torch.tensor(x).cumsum(0)), dtype=torch.int32) for x in (len_q, len_kv))
    out, lse, _ = flash_attn_varlen_func(
        q.cuda(), *(x.cuda() for x in pool), cu_q.cuda(), cu_k.cuda(), max(len_q), max(len_kv), causal=causal,
        block_table=table.cuda(), return_attn_probs=True,
    )  # fmt: skip
    for n, (rows, keys) in enumerate(zip(len_q, len_kv)):
        at = slice(int(cu_q[n]), int(cu_q[n + 1]))
        k, v = (x[table[n].long()].flatten(0, 1)[:keys] for x in pool)
        ref, ref_lse = attention(*(x.double() for x in (q[at], k, v)), causal=causal)
        plain, _ = attention(q[at], k, v, causal=causal)
        _, plain_lse = attention(*(x.float() for x in (q[at], k, v)), causal=causal)
        if rows:
            check("out", out[at].cpu(), ref, plain, scale=max(largest(ref), size_of_values(v)))
            check_lse(lse[:, at].cpu(), ref_lse, plain_lse, torch.bfloat16)


def test_few_queries_over_many_keys_are_split(arch):
    """flash_attn_func with one query also reads the keys on all SMs."""
    if arch.startswith("prompts"):
        pytest.skip("decode kernels only")
    torch.manual_seed(0)
    q = torch.randn(1, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 20000, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert explain(flash_attn_func, q, k, v).kernel.startswith(f"attn_decode_{arch}_")
    out = flash_attn_func(q, k, v)
    ref, _ = attention(*(x[0].double().cpu() for x in (q, k, v)))
    plain, _ = attention(*(x[0].cpu() for x in (q, k, v)))
    check("out", out[0].cpu(), ref, plain, scale=size_of_values(v.cpu()))


def names_of(arch, name, *tiles):
    """Before Hopper a kernel's name says how many teams and slots its GPU has memory for."""
    return [f"attn_decode_{arch}_{name}{tile}" for tile in (tiles if arch == "sm80" else ("",))]


def test_the_plan_names_the_tile(arch):
    if arch.startswith("prompts"):
        pytest.skip("decode kernels only")
    q, k, v, seqlens, table = decode_problem((30, 40), 64, 32, 2, 128, 16)
    plan = explain(flash_attn_with_kvcache, q, k, v, cache_seqlens=seqlens, block_table=table)
    assert plan.kernel in names_of(arch, "bf16_d128_q16", "t4s3", "t3s3") and plan.num_splits == 0
    q = torch.randn(2, 3, 32, 128, device="cuda", dtype=torch.float16)
    k, v = k.half(), v.half()
    plan = explain(flash_attn_with_kvcache, q, k, v, cache_seqlens=seqlens, block_table=table, num_splits=2)
    assert plan.kernel in names_of(arch, "fp16_d128_q64", "t1s3", "t1s4") and plan.num_splits == 1  # one tile of keys
