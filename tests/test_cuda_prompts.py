"""Prompts over KV caches on Hopper: many queries, whose keys attn_fwd_sm90 reads from pages or from rows of a cache.
test_cuda_decode.py runs its tests with this kernel, too."""

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import flash_attn_2_cuda
import pytest
import torch
from compare import check, check_lse, largest, size_of_values
from harness_cuda import copy_texts, module_in, no_hopper, poisoned_repeats
from harness_kvcache import random_prompt, run
from oracle import attention
from poison import REPEATS

import flash_attn
from flash_attn import explain, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")


@pytest.fixture(autouse=True)
def only_the_forward():
    flash_attn_2_cuda.set_cuda_kernels("any,fwd_sm90")
    yield
    flash_attn_2_cuda.set_cuda_kernels(None)


@pytest.mark.parametrize("seed", range(60))
def test_random_prompts(seed):
    run(random_prompt(seed), "cuda")


@pytest.mark.parametrize("seed", range(60))
def test_random_few_queries(seed):
    """Heads of a key head share a work tile, as many as its rows hold and the group allows."""
    r = random.Random(seed)
    case = random_prompt(seed)
    h_kv, group = r.choice(((1, 2), (2, 3), (1, 4), (2, 6), (1, 8), (2, 8), (1, 16), (1, 12), (1, 5)))
    len_q = r.choice((1, 5, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 96, 130))
    run(replace(case, len_q=min(len_q, case.len_new) if case.len_new else len_q, h=h_kv * group, h_kv=h_kv), "cuda")


@pytest.mark.parametrize("seed", range(60))
def test_random_parts(seed):
    """Keys in as many parts as num_splits says, more than there are key tiles among them."""
    r = random.Random(seed)
    case = random_prompt(seed)
    h_kv, group = r.choice(((1, 4), (2, 1), (1, 8), (2, 3)))
    len_q = min(r.choice((17, 40, 64, 130)), case.len_new or 200)
    run(replace(case, len_q=len_q, h=h_kv * group, h_kv=h_kv, num_splits=r.choice((2, 3, 4, 7, 128))), "cuda")


def beside_one_part(q, k, v, num_splits, **options):
    """The results of num_splits parts agree with those of one. Returns them."""
    assert explain(flash_attn_with_kvcache, q, k, v, num_splits=num_splits, **options).num_splits == num_splits
    found, want = (
        flash_attn_with_kvcache(q, k, v, num_splits=n, return_softmax_lse=True, **options) for n in (num_splits, 1)
    )
    torch.testing.assert_close(found[0], want[0], atol=1e-2, rtol=1e-2, equal_nan=True)
    torch.testing.assert_close(found[1], want[1], atol=1e-4, rtol=1e-4, equal_nan=True)
    return found


@pytest.mark.parametrize("d", (64, 96, 128, 256))
@pytest.mark.parametrize("num_splits", (2, 5))
@pytest.mark.parametrize("len_q", (48, 300))
@pytest.mark.parametrize("page", (0, 1, 16))
def test_parts_agree_with_one(d, num_splits, len_q, page):
    """Options of all kinds. One sequence has no key, one has fewer keys than queries and fewer key tiles than parts.
    With a causal mask the first rows of a tile see nothing of the last part, with a window the last rows nothing of
    the first. Then V holds NaN in a key that few rows see, and inf in one of another part."""
    torch.manual_seed(0)
    lengths = (1500, 0, 70, 2000)
    size = page or 2048
    pool, table = pages_of((2048,) * 4, size, 2, d)
    k, v = (x.cuda() for x in pool)
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = torch.randn(4, len_q, 8, d, device="cuda", dtype=torch.bfloat16)
    where = {"cache_seqlens": used} | ({"block_table": table.cuda()} if page else {"cache_batch_idx": used * 0 + 1})
    masks = {"causal": True}, {"window_size": (600, 100)}, {"window_size": (100, 0), "causal": True}, {}
    scores = {}, {"softcap": 5.0}, {"alibi_slopes": torch.rand(8, device="cuda")}
    sinks = {"sinks": torch.randn(8, device="cuda")}
    choices = [{**mask, **score} for mask in masks for score in scores[: 3 if len_q == 48 else 1]]
    for options in (*choices, {**masks[0], **sinks}, sinks):
        out, lse = beside_one_part(q, k, v, num_splits, **where, **options)
        assert not out[1].any() and ("sinks" in options or (lse[1] == math.inf).all())
    for sequence, key, value in ((0, 1499, math.nan), (3, 100, math.inf), (3, 1990, math.nan), (2, 70, math.nan)):
        row = int(table[sequence, key // size]) if page else 1
        v[row, key % size, :, 3] = value
    for options in masks:
        out, _ = beside_one_part(q, k, v, num_splits, **where, **options)
        assert out[0].isnan().any() and out[3].isnan().any() and not out[1:3].isnan().any()


@pytest.mark.parametrize("d", (64, 128, 256))
def test_parts_do_not_depend_on_the_batch(d):
    torch.manual_seed(0)
    used = torch.tensor((3000, 17, 4096, 900), dtype=torch.int32, device="cuda")
    k, v = (torch.randn(4, 4096, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for len_q in (20, 64, 200):
        q = torch.randn(4, len_q, 8, d, device="cuda", dtype=torch.bfloat16)
        for num_splits in (1, 3, 16):
            options = {"causal": True, "num_splits": num_splits}
            together = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **options)
            for n in range(4):
                alone = flash_attn_with_kvcache(
                    q[n : n + 1], k[n : n + 1], v[n : n + 1], cache_seqlens=used[n : n + 1], **options
                )
                assert torch.equal(alone, together[n : n + 1]), (len_q, num_splits, n)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_parts_of_large_scores(dtype):
    """Scores up to 10^4, whose maxima lie in different parts, and scores that are all equal."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 4, 128).to(dtype) for n in (40, 1000, 1000))
    for factor in (1000, 0):
        on_gpu = (q * factor).cuda(), k.cuda(), v.cuda()
        for num_splits in (2, 7):
            options = {"cache_seqlens": 1000, "num_splits": num_splits}
            assert explain(flash_attn_with_kvcache, *on_gpu, **options).num_splits == num_splits
            out, lse = flash_attn_with_kvcache(*on_gpu, **options, return_softmax_lse=True)
            ref, ref_lse = attention(*(x[0].double() for x in (q * factor, k, v)))
            plain, _ = attention(*(x[0] for x in (q * factor, k, v)))
            _, plain_lse = attention(*(x[0].float() for x in (q * factor, k, v)))
            check("out", out[0].cpu(), ref, plain, scale=max(largest(ref), size_of_values(v)))
            check_lse(lse[0].cpu(), ref_lse, plain_lse, dtype)


def test_few_tiles_are_cut_by_themselves():
    """In a call and in a graph, whose lengths change. The results lie within rounding of those of one part."""
    flash_attn_2_cuda.set_cuda_kernels(None)
    torch.manual_seed(0)
    k, v = (torch.randn(2, 8192, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(2, 64, 32, 128, device="cuda", dtype=torch.bfloat16)
    used = torch.full((2,), 8192, dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": used, "causal": True}
    plan = explain(flash_attn_with_kvcache, q, k, v, **options)
    assert plan.kernel.startswith("attn_fwd_sm90_") and plan.num_splits > 1 and plan.tile_heads > 1
    assert f"key splits       {plan.num_splits}" in str(plan)
    flash_attn_with_kvcache(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(q, k, v, **options)
    for lengths in ((8192, 8192), (0, 63), (1, 8191), (129, 4000)):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, flash_attn_with_kvcache(q, k, v, **options))
        want = flash_attn_with_kvcache(q, k, v, num_splits=1, **options)
        torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("d", (64, 96, 128, 256))
@pytest.mark.parametrize(("group", "len_q"), ((2, 64), (4, 32), (4, 17), (8, 1), (8, 16), (6, 20), (16, 5), (12, 70)))
def test_heads_that_share_a_tile(group, len_q, d):
    """Beside the same call with a key head for each query head. Sinks and slopes differ between heads. Then keys that
    some rows do not see hold NaN, so tiles are repeated, and one sequence has no key."""
    torch.manual_seed(0)
    lengths = torch.tensor((300, 0, 7, 513), dtype=torch.int32, device="cuda")
    q = torch.randn(4, len_q, 2 * group, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(4, 640, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True, "num_splits": 1}
    plan = explain(flash_attn_with_kvcache, q, k, v, **options)
    assert plan.kernel.startswith("attn_fwd_sm90_") and (plan.tile_heads > 1 or d == 64)
    by_head = {"sinks": torch.randn(2 * group, device="cuda"), "alibi_slopes": torch.rand(2 * group, device="cuda")}
    for spoils in (False, True):
        if spoils:
            v[0, 299], v[3, 512, :, 3] = math.nan, math.inf
        wide = [x.repeat_interleave(group, 2) for x in (k, v)]
        for name in (None, *by_head):
            chosen = {name: by_head[name]} if name else {}
            out, lse = flash_attn_with_kvcache(q, k, v, **options, **chosen)
            want, want_lse = flash_attn_with_kvcache(q, *wide, **options, **chosen)
            torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2, equal_nan=True)
            torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


def pages_of(lengths, page, h_kv, d, dtype=torch.bfloat16):
    """Pages at random, and the block table. Beyond the lengths the table names no page."""
    columns = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * columns).view(len(lengths), columns).to(torch.int32)
    for row, length in zip(table, lengths):
        row[-(-length // page) :] = -1
    pool = [torch.randn(len(lengths) * columns, page, h_kv, d).to(dtype) for _ in range(2)]
    return pool, table


def keys_of(pool, table, length):
    return [x[table[: -(-length // x.shape[1])].long()].flatten(0, 1)[:length] for x in pool]


@pytest.mark.parametrize("page", (1, 8, 12, 16, 48, 64, 256))
@pytest.mark.parametrize(
    ("d", "dtype"), ((64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (256, torch.float16))
)
@pytest.mark.parametrize("causal", (False, True))
def test_packed_prompts_over_pages(page, d, dtype, causal):
    """Long and short prompts, one token, none, more queries than keys, and no key."""
    torch.manual_seed(0)
    len_q, len_kv, h, h_kv = (300, 1, 0, 150, 64, 5), (600, 333, 100, 90, 64, 0), 4, 2
    pool, table = pages_of(len_kv, page, h_kv, d, dtype)
    q = torch.randn(sum(len_q), h, d).to(dtype)
    cu_q, cu_k = (torch.tensor((0, *torch.tensor(x).cumsum(0)), dtype=torch.int32) for x in (len_q, len_kv))
    call = (q.cuda(), *(x.cuda() for x in pool), cu_q.cuda(), cu_k.cuda(), max(len_q), max(len_kv))
    options = {"causal": causal, "block_table": table.cuda()}
    plan = explain(flash_attn_varlen_func, *call, **options)
    assert plan.kernel.startswith("attn_fwd_sm90_") and plan.kernel.endswith("_single") == (page % 8 != 0)
    out, lse, _ = flash_attn_varlen_func(*call, return_attn_probs=True, **options)
    for n, (rows, keys) in enumerate(zip(len_q, len_kv)):
        at = slice(int(cu_q[n]), int(cu_q[n + 1]))
        k, v = keys_of(pool, table[n], keys)
        ref, ref_lse = attention(*(x.double() for x in (q[at], k, v)), causal=causal)
        plain, _ = attention(q[at], k, v, causal=causal)
        _, plain_lse = attention(*(x.float() for x in (q[at], k, v)), causal=causal)
        if rows:
            check("out", out[at].cpu(), ref, plain, scale=max(largest(ref), size_of_values(v)) if keys else None)
            check_lse(lse[:, at].cpu(), ref_lse, plain_lse, dtype)


@pytest.mark.parametrize("page", (0, 1, 16, 64))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_pages_agree_with_packed_keys(d, page):
    """Packed calls may have other tiles, so only a second call has the same bits. Then unused keys become NaN, which no
    row sees. A tile with NaN is repeated, in another order of its sums."""
    torch.manual_seed(0)
    lengths, h, h_kv = (1000, 700, 128), 8, 2
    q = torch.randn(3, 300, h, d, device="cuda", dtype=torch.bfloat16)
    size = page or 1024
    pool, table = pages_of(lengths, size, h_kv, d)
    if not page:
        table = torch.arange(3, dtype=torch.int32)[:, None]
    pool = [x.cuda() for x in pool]
    k, v = (torch.cat(x) for x in zip(*(keys_of(pool, table[n].cuda(), lengths[n]) for n in range(3))))
    cu_q, cu_k = (
        torch.tensor((0, *torch.tensor(x).cumsum(0)), dtype=torch.int32).cuda() for x in ((300,) * 3, lengths)
    )
    want = flash_attn_varlen_func(q.flatten(0, 1), k, v, cu_q, cu_k, 300, max(lengths), causal=True)
    options = {"block_table": table.cuda()} if page else {}
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    got = flash_attn_with_kvcache(q, *pool, cache_seqlens=seqlens, causal=True, **options)
    torch.testing.assert_close(got.flatten(0, 1), want, atol=1e-2, rtol=1e-2)
    again = flash_attn_with_kvcache(q, *pool, cache_seqlens=seqlens, causal=True, **options)
    assert torch.equal(again, got)
    for n in range(3):
        for x in pool:
            rows = x.view(-1, size, h_kv, d)[int(table[n, lengths[n] // size])] if lengths[n] % size else None
            if rows is not None:
                rows[lengths[n] % size :] = math.nan
    spoilt = flash_attn_with_kvcache(q, *pool, cache_seqlens=seqlens, causal=True, **options)
    torch.testing.assert_close(spoilt, got, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("page", (8, 16, 40))
@pytest.mark.parametrize("d", (128, 192, 256))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_whole_keys_in_every_layout_of_pages(page, d, dtype):
    """Pages lie side by side, with heads first, as pages of K and V in turns, those of V alone apart, or a row apart.
    The last are loaded chunk by chunk, with the same products. Behind the keys and between pages lies NaN."""
    torch.manual_seed(0)
    lengths, h, h_kv = (1500, 0, 333), 8, 2
    pool, table = pages_of(lengths, page, h_kv, d, dtype)
    for x in pool:
        for row, length in zip(table, lengths):
            if length % page:
                x[int(row[length // page]), length % page :] = math.nan
    q = torch.randn(3, 300, h, d).to(dtype)
    used = torch.tensor(lengths, dtype=torch.int32)
    options = {"cache_seqlens": used.cuda(), "block_table": table.cuda(), "causal": True, "num_splits": 1}
    shape = pool[0].shape
    in_turns = torch.stack(pool, dim=1).cuda()
    room = [torch.full((shape[0], page + 1, *shape[2:]), math.nan, dtype=dtype, device="cuda") for _ in pool]
    for to, x in zip(room, pool):
        to[:, :page] = x.cuda()
    layouts = {
        "side by side": [x.cuda() for x in pool],
        "heads first": [x.transpose(1, 2).contiguous().cuda().transpose(1, 2) for x in pool],
        "in turns": [in_turns[:, 0], in_turns[:, 1]],
        "V apart": [pool[0].cuda(), torch.stack([pool[1], torch.full_like(pool[1], math.nan)], dim=1).cuda()[:, 0]],
        "a row apart": [x[:, :page] for x in room],
    }
    outs = {}
    for name, (k, v) in layouts.items():
        plan = explain(flash_attn_with_kvcache, q.cuda(), k, v, **options)
        assert plan.kernel.endswith("_cache" if name == "a row apart" else "_cache_whole"), name
        outs[name] = flash_attn_with_kvcache(q.cuda(), k, v, **options)
    for name, out in outs.items():
        assert torch.equal(out, outs["side by side"]), name
    for n, length in enumerate(lengths):
        k, v = keys_of(pool, table[n], length)
        ref, _ = attention(*(x.double() for x in (q[n], k, v)), causal=True)
        plain, _ = attention(q[n], k, v, causal=True)
        check("out", out[n].cpu(), ref, plain, scale=max(largest(ref), size_of_values(v)) if length else None)


@pytest.mark.parametrize("page", (1, 2, 12, 100))
@pytest.mark.parametrize("d", (40, 64, 80, 96, 128, 160, 192, 256))
def test_copies_of_pages_agree_with_single_keys(d, page):
    """Many queries read copies of the pages, and num_splits = 1 loads the keys one by one. Rows behind the keys and
    pages that no table names hold NaN."""
    torch.manual_seed(0)
    lengths = (3000, 0, 1025, 2176)
    pool, table = pages_of(lengths, page, 2, d)
    k, v = (torch.full_like(x, math.nan).cuda() for x in pool)
    for row, length in zip(table, lengths):
        for to, x in ((k, pool[0]), (v, pool[1])):
            pages = row[: -(-length // page)].long()
            part = x[pages].flatten(0, 1)
            part[length:] = math.nan
            to[pages.cuda()] = part.unflatten(0, (-1, page)).cuda()
    q = torch.randn(4, 2048, 8, d, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": used, "block_table": table.cuda(), "causal": True, "return_softmax_lse": True}
    for num_splits, gathers in ((0, True), (1, False)):
        plan = explain(flash_attn_with_kvcache, q, k, v, num_splits=num_splits, **options)
        assert plan.kernel.startswith("attn_fwd_sm90_") and plan.gathers == gathers
        assert plan.kernel.endswith("_single") != gathers
    (want, want_lse), (out, lse) = (flash_attn_with_kvcache(q, k, v, num_splits=n, **options) for n in (0, 1))
    torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)
    again, _ = flash_attn_with_kvcache(q, k, v, num_splits=1, **options)
    assert torch.equal(again, out) and not out.isnan().any()


@pytest.mark.parametrize("page", (0, 1, 16, 256))
def test_repeats_write_every_row(page):
    torch.manual_seed(0)
    lengths = (900, 0, 3, 650)
    pool, table = pages_of(lengths, page or 900, 2, 128)
    options = {"block_table": table.cuda()} if page else {}
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    q = torch.randn(4, 333, 8, 128, device="cuda", dtype=torch.bfloat16)
    pool = [x.cuda() for x in pool]
    for window, num_splits in (
        ((-1, -1), 0),
        ((100, 0), 0),
        ((-1, -1), 1),
        ((100, 0), 1),
        ((-1, -1), 3),
        ((100, 0), 3),
    ):
        mask = {"window_size": window, "num_splits": num_splits}
        poisoned_repeats(
            lambda mask=mask: flash_attn_with_kvcache(
                q, *pool, cache_seqlens=seqlens, return_softmax_lse=True, **mask, **options
            ),
            REPEATS,
        )


@pytest.mark.parametrize(("page", "num_splits"), ((0, 1), (1, 0), (1, 1), (16, 1), (0, 3), (16, 3)))
def test_graph_replay_while_lengths_grow(page, num_splits):
    """The append, the rotation and the prompt are captured once. Lengths, table and values change in place."""
    torch.manual_seed(0)
    pool, table = pages_of((1024,) * 3, page or 1024, 2, 64)
    k, v, table = (x.cuda() for x in (*pool, table))
    seqlens = torch.zeros(3, dtype=torch.int32, device="cuda")
    q = torch.randn(3, 200, 4, 64, device="cuda", dtype=torch.bfloat16)
    new = [torch.randn(3, 200, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    turns = [torch.rand(1024, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    options = {"cache_seqlens": seqlens, "causal": True, "num_splits": num_splits}
    options |= {"block_table": table} if page else {}

    def call():
        return flash_attn_with_kvcache(q, k, v, *new, *turns, **options)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ((0, 0, 0), (1, 200, 824), (127, 128, 129), (500, 0, 1024)):
        seqlens.copy_(torch.tensor(lengths))
        q.normal_(), new[0].normal_(), new[1].normal_()
        if page:
            table.copy_(torch.randperm(table.numel(), device="cuda").view(table.shape))
        before = k.clone(), v.clone()
        graph.replay()
        got = out.clone(), k.clone(), v.clone()
        k.copy_(before[0]), v.copy_(before[1])
        assert all(torch.equal(x, y) for x, y in zip(got, (call(), k, v))), lengths


def test_packed_keys_are_no_cache():
    """Left padding of packed keys. The plan leaves such keys to kernels that know where a sequence begins."""
    flash_attn_2_cuda.set_cuda_kernels(None)
    torch.manual_seed(0)
    lengths, pads, d = (700, 500, 900), (30, 0, 200), 128
    q, k, v = (torch.randn(n, h, d, dtype=torch.bfloat16) for n, h in ((900, 8), (2100, 2), (2100, 2)))
    cu_q, cu_k, left = ((0, 300, 600, 900), (0, 700, 1200, 2100), pads)
    cu_q, cu_k, left = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (cu_q, cu_k, left))
    tensors = [x.cuda() for x in (q, k, v)]
    options = None, None, 300, 900, 0.0, d**-0.5, False, True, -1, -1, 0.0, False, None
    out, *_ = flash_attn_2_cuda.varlen_fwd(*tensors, None, cu_q, cu_k, None, left, *options)
    for n, (length, pad) in enumerate(zip(lengths, pads)):
        rows, end = slice(300 * n, 300 * n + 300), int(cu_k[n + 1])
        keys = slice(end - length + pad, end)
        ref, _ = attention(*(x.double() for x in (q[rows], k[keys], v[keys])), causal=True)
        plain, _ = attention(q[rows], k[keys], v[keys], causal=True)
        check("out", out[rows].cpu(), ref, plain, scale=max(largest(ref), size_of_values(v)))


@pytest.mark.parametrize("page", (0, 1, 16))
def test_a_cache_or_a_table_without_rows(page):
    """cache_batch_idx names rows that are not there. No row sees a key."""
    shape = (5, page, 2, 64) if page else (0, 64, 2, 64)
    q = torch.randn(2, 300, 8, 64, device="cuda", dtype=torch.bfloat16)
    pool = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    rows = torch.arange(2, dtype=torch.int32, device="cuda")
    table = {"block_table": rows[:0].view(0, 3)} if page else {}
    out, lse = flash_attn_with_kvcache(
        q, *pool, cache_seqlens=rows + 1, cache_batch_idx=rows, return_softmax_lse=True, **table
    )
    assert not out.any() and (lse == math.inf).all()


WAITS = {
    "value": "mbarrier_wait(&smem.given[",
    "query": "mbarrier_wait(&smem.q_empty[",
    "leader": "mbarrier_wait(&smem.read[",
}
LATE = """
import torch
from flash_attn import flash_attn_with_kvcache
torch.manual_seed(0)
for d, num_splits in ((128, 1), (256, 1), (128, 3)):
    q = torch.randn(4, 1000, 8, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(4, 640, 2, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    single = [x.view(4 * 640, 1, 2, d) for x in (k, v)]
    table = torch.arange(4 * 640, dtype=torch.int32, device="cuda").view(4, 640)
    for lengths in ((0, 0, 0, 0), (64, 3, 0, 64), (640, 0, 64, 1)):
        used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        for cache, options in (((k, v), {}), (single, {"block_table": table})):
            out = flash_attn_with_kvcache(q, *cache, cache_seqlens=used, num_splits=num_splits, **options)
            for n, length in enumerate(lengths):
                keys, values = (x[n, :length].float().repeat_interleave(4, 1) for x in (k, v))
                probs = torch.softmax(torch.einsum("ihd,jhd->hij", q[n].float(), keys) * d**-0.5, -1)
                assert (out[n] - torch.einsum("hij,jhd->ihd", probs, values)).abs().max() < 3e-2
"""


@pytest.mark.parametrize("wait", WAITS)
def test_warps_and_lanes_that_come_late(wait, tmp_path):
    """The warp that loads V, or a lane of the warp that loads Q, or its leader, looks at an mbarrier 50 us late.
    Meanwhile tiles without keys must not pass by."""
    module_in(tmp_path)
    lane = 0 if wait == "leader" else 5
    late = f"if (CACHE && threadIdx.x % 32 == {lane}) __nanosleep(50000); " + WAITS[wait]
    copy_texts(tmp_path / "csrc" / "cuda", "attn_fwd_producer.cuh", WAITS[wait], late)
    path = os.pathsep.join([str(tmp_path), str(Path(flash_attn.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "FLASH_ATTN_CUDA_KERNEL": "any,fwd_sm90"}
    subprocess.run([sys.executable, "-c", LATE], cwd=tmp_path, env=environment, check=True, timeout=120)


def test_the_plan_takes_the_kernel_for_prompts():
    flash_attn_2_cuda.set_cuda_kernels(None)
    pool, table = pages_of((2048,) * 16, 16, 8, 128)
    pool = [x.cuda() for x in pool]
    for len_q, name in (
        (1, "attn_decode_sm90_"),
        (4, "attn_decode_sm90_"),
        (64, "attn_fwd_sm90_"),
        (512, "attn_fwd_sm90_"),
    ):
        q = torch.randn(16, len_q, 32, 128, device="cuda", dtype=torch.bfloat16)
        plan = explain(flash_attn_with_kvcache, q, *pool, cache_seqlens=2048, block_table=table.cuda(), causal=True)
        assert plan.kernel.startswith(name)


@pytest.mark.parametrize("group", (1, 4))
@pytest.mark.parametrize("len_q", (5, 40, 150))
def test_dropout_over_pages_drops_what_other_kernels_drop(group, len_q):
    """Heads of a key head share work tiles where queries are few. Each drops elements of its own."""
    torch.manual_seed(0)
    h, page, lengths = 2 * group, 64, (300, 77)
    q = torch.randn(2 * len_q, h, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 16, page, 2, 64, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(16, device="cuda", dtype=torch.int32)[:10].view(2, 5)
    cu_q = torch.tensor([0, len_q, 2 * len_q], device="cuda", dtype=torch.int32)
    cu_k = torch.tensor([0, lengths[0], sum(lengths)], device="cuda", dtype=torch.int32)
    found = []
    for kernels in ("any,fwd_sm90", "any"):
        flash_attn_2_cuda.set_cuda_kernels(kernels)
        torch.cuda.manual_seed(1)
        found.append(flash_attn_varlen_func(q, k, v, cu_q, cu_k, len_q, max(lengths), 0.3, block_table=table))
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
