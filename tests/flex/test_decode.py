"""flex_attention with q_offset, kv_len and block_table: mods see logical indices, wherever queries and keys lie."""

import random

import pytest
import torch
from oracle_attention import INF, TOLERANCES, close
from oracle_decode import (
    LENGTH,
    MASKS,
    alibi,
    causal,
    documents,
    draw,
    in_pages,
    int32,
    per_batch,
    tensors,
    want_of,
    window,
)
from torch.nn.attention.flex_attention import BlockMask

from flash_attn import explain
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention


def run(q, k, v, **kwargs):
    out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True), **kwargs)
    return out, aux.lse, aux.max_scores


def compare(has, want, dtype):
    for x, wants in zip(has, want, strict=True):
        close(x, wants, TOLERANCES[dtype] if dtype != torch.float64 else 1e-6)


@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("len_q", range(1, 9))
def test_equals_the_dense_computation(len_q, name, is_paged, isa):
    rng = random.Random(f"{len_q} {name} {is_paged}")
    for _ in range(3):
        (q, k, v), kv_len, q_offset = draw(rng, len_q)
        score_mod, mask_mod = rng.choice([None, alibi(rng)]), MASKS[name](rng)
        want = want_of(q, k, v, kv_len, q_offset, score_mod, mask_mod)
        table = None
        if is_paged:
            k, v, table = in_pages(rng, k, v, kv_len, rng.choice([1, 3, 16, 64]))
        else:
            for b_idx, n in enumerate(kv_len):
                k[b_idx, :, n:] = v[b_idx, :, n:] = float("nan")
        places = {"q_offset": int32(q_offset), "kv_len": int32(kv_len), "block_table": table}
        mods = {"score_mod": score_mod, "mask_mod": mask_mod}
        compare(run(q, k, v, **mods, **places), want, q.dtype)
        out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True), **mods, **places)
        compare((out, aux.lse), want[:2], q.dtype)  # the kernel for few rows keeps no maximum


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
def test_growing_lengths_equal_one_prefill(name, is_paged, isa):
    rng = random.Random(name)
    total = 75
    q, k, v = tensors(rng, 2, 4, 2, total, total, 32, 32, torch.float32)
    mask_mod, score_mod = MASKS[name](rng), alibi(rng)
    block_mask = create_block_mask(mask_mod, None, None, total, total, device="cpu", BLOCK_SIZE=16)
    whole = run(q, k, v, score_mod=score_mod, block_mask=block_mask)
    table = None
    if is_paged:
        k, v, table = in_pages(rng, k, v, [total, total], 16)
    at = 0
    while at < total:
        len_q = min(rng.randint(1, 8), total - at)
        places = {"q_offset": at, "kv_len": at + len_q, "block_table": table}
        rows = q[:, :, at : at + len_q]
        for mask in ({"mask_mod": mask_mod}, {"block_mask": block_mask}):
            for x, want in zip(run(rows, k, v, score_mod=score_mod, **mask, **places), whole, strict=True):
                close(x, want[:, :, at : at + len_q], 1e-5)
        at += len_q


@pytest.mark.parametrize("size", [16, (8, 32), (128, 64), 128])
@pytest.mark.parametrize("seed", range(6))
def test_the_block_mask_of_the_whole_sequence(size, seed, isa):
    """Rows of the mask count from 0 in the sequence. Queries of one call may lie in several rows of blocks."""
    rng = random.Random(seed)
    (q, k, v), kv_len, _ = draw(rng, rng.randint(1, 40), torch.float32)
    b, h, len_q, len_kv = *q.shape[:3], k.size(2)
    q_offset = [rng.randint(0, LENGTH - len_q) for _ in kv_len]
    mask_mod = rng.choice([causal, window, documents(rng), per_batch(rng)])
    mask = create_block_mask(mask_mod, b, rng.choice([None, h]), LENGTH, len_kv, device="cpu", BLOCK_SIZE=size)
    want = want_of(q, k, v, kv_len, q_offset, None, mask_mod)
    places = {"q_offset": int32(q_offset), "kv_len": int32(kv_len)}
    compare(run(q, k, v, block_mask=mask, **places), want, q.dtype)


def test_blocks_of_the_whole_sequence_without_a_mask_mod():
    """Only the lists say what is seen, so a wrong row of blocks shows."""
    num = int32([[[1, 1, 1]]])
    places = int32([[[[2, 0, 1], [0, 1, 2], [1, 0, 2]]]])
    mask = BlockMask.from_kv_blocks(num, places, BLOCK_SIZE=8, seq_lengths=(24, 24))
    rng = random.Random(0)
    q, k, v = tensors(rng, 2, 2, 2, 4, 24, 16, 16, torch.float32)
    seen = [2, 0, 1]
    mask_mod = lambda b, h, i, j: int32(seen)[i // 8] == j // 8  # noqa: E731
    offsets = [6, 15]
    want = want_of(q, k, v, [24, 24], offsets, None, mask_mod)
    compare(run(q, k, v, block_mask=mask, q_offset=int32(offsets)), want, q.dtype)


def test_a_row_of_a_block_mask_as_in_torch(isa):
    """torch's pattern for one token: a row of blocks is sliced out, and the mods get the position as an offset."""
    rng = random.Random(1)
    q, k, v = tensors(rng, 2, 2, 1, 1, 128, 32, 32, torch.float32)
    big = create_block_mask(window, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
    for at in (0, 31, 32, 77, 127):
        row = big[:, :, [at // 32]]
        row.mask_mod, row.seq_lengths = window, (1, 128)
        want = want_of(q, k, v, [at + 1] * 2, [at] * 2, None, window)
        compare(run(q, k, v, block_mask=row, q_offset=at, kv_len=at + 1), want, q.dtype)


def test_a_mask_of_fewer_keys_than_the_pages_hold():
    rng = random.Random(2)
    q, k, v = tensors(rng, 1, 2, 2, 3, 100, 16, 16, torch.float32)
    want = want_of(q, k, v, [100], [97], None, causal)
    mask = create_block_mask(causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=64)
    k, v, table = in_pages(rng, k, v, [100], 16)  # 7 pages: 112 keys
    compare(run(q, k, v, block_mask=mask, q_offset=97, kv_len=100, block_table=table), want, q.dtype)


def test_lengths_without_mods_run_plain_kernels(isa):
    rng = random.Random(3)
    for dtype in (torch.float32, torch.bfloat16):
        for is_paged in (False, True):
            q, k, v = tensors(rng, 3, 8, 2, 2, 90, 64, 64, dtype)
            kv_len = [0, 90, 41]
            want = want_of(q, k, v, kv_len, [0] * 3)
            k, v, table = in_pages(rng, k, v, kv_len, 16) if is_paged else (k, v, None)
            places = {"kv_len": int32(kv_len), "block_table": table, "q_offset": int32([7, 8, 9])}
            out, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True, **places)
            compare((out, lse), want[:2], dtype)
            assert out[0].eq(0).all() and lse[0].eq(-INF).all()


@pytest.mark.parametrize("form", ["tensors", "numbers", "block mask"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("lag", [0, 5, -4])
def test_windows_of_the_last_queries_run_plain_kernels(form, is_paged, lag, isa):
    """Where every query lies as far from its last key as the others, a causal mask is one of the plain kernels."""
    rng = random.Random(lag)
    q, k, v = tensors(rng, 2, 4, 2, 3, 90, 32, 32, torch.float32)
    kv_len = [71, 71 if form == "numbers" else 40]
    q_offset = [n - 3 + lag for n in kv_len]
    want = want_of(q, k, v, kv_len, q_offset, None, window)
    mask = create_block_mask(window, None, None, LENGTH, 96, device="cpu", BLOCK_SIZE=16)
    mask = {"block_mask": mask} if form == "block mask" else {"mask_mod": window}
    k, v, table = in_pages(rng, k, v, kv_len, 16) if is_paged else (k, v, None)
    places = {"q_offset": int32(q_offset), "kv_len": int32(kv_len), "block_table": table}
    if form == "numbers":
        places |= {"q_offset": q_offset[0], "kv_len": kv_len[0]}
    call = lambda: flex_attention(q, k, v, enable_gqa=True, **mask, **places)  # noqa: E731
    compare((call(),), want[:1], q.dtype)
    assert ("_flex" in explain(call).kernel) == (lag < 0)


def test_queries_at_other_places_do_not_run_plain_kernels():
    q, k, v = tensors(random.Random(10), 2, 2, 2, 3, 40, 16, 16, torch.float32)
    kv_len, q_offset = torch.tensor([20, 30], dtype=torch.uint8), torch.tensor([17, 26])
    call = lambda: flex_attention(q, k, v, mask_mod=causal, kv_len=kv_len, q_offset=q_offset)  # noqa: E731
    compare((call(),), want_of(q, k, v, [20, 30], [17, 26], None, causal)[:1], q.dtype)
    assert "_flex" in explain(call).kernel


def test_all_pages_are_full_without_kv_len():
    rng = random.Random(4)
    q, k, v = tensors(rng, 2, 2, 2, 5, 48, 16, 16, torch.float32)
    want = want_of(q, k, v, [48, 48], [43, 40], None, causal)
    k, v, table = in_pages(rng, k, v, [48, 48], 16)
    compare(run(q, k, v, mask_mod=causal, q_offset=int32([43, 40]), block_table=table), want, q.dtype)


def test_a_cache_of_heads_beside_rows():
    """attention-gym's cache is [1, Hkv, pages * page, D]: a view of it has pages, and nothing is copied."""
    rng = random.Random(5)
    q, k, v = tensors(rng, 2, 4, 2, 1, 40, 16, 16, torch.float32)
    want = want_of(q, k, v, [40, 33], [39, 32], None, causal)
    k, v, table = in_pages(rng, k, v, [40, 33], 8)
    caches = [x.transpose(0, 1).reshape(1, 2, -1, 16) for x in (k, v)]
    k, v = (x[0].view(2, -1, 8, 16).transpose(0, 1) for x in caches)
    compare(run(q, k, v, mask_mod=causal, q_offset=int32([39, 32]), kv_len=int32([40, 33]), block_table=table),
            want, q.dtype)  # fmt: skip


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_block_mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_with_an_offset(has_block_mask, dtype, isa):
    rng = random.Random(6)
    q, k, v = (x.requires_grad_() for x in tensors(rng, 2, 4, 2, 9, 60, 24, 16, dtype))
    bias = torch.randn(LENGTH, requires_grad=True, generator=torch.Generator().manual_seed(0))
    score_mod = lambda s, b, h, i, j: s + bias[i] * (j % 3)  # noqa: E731
    offsets = [30, 11]
    mask = {"mask_mod": window}
    if has_block_mask:
        mask = {"block_mask": create_block_mask(window, None, None, LENGTH, 60, device="cpu", BLOCK_SIZE=16)}
    places = {"q_offset": int32(offsets)}
    out, lse, _ = run(q, k, v, score_mod=score_mod, **mask, **places)
    want = want_of(q, k, v, [60, 60], offsets, score_mod, window)
    compare((out, lse), want[:2], dtype)
    inputs, generator = (q, k, v, bias), torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=generator) for x in (out, lse))
    has = torch.autograd.grad((out, lse), inputs, (dout.to(dtype), dlse))
    wants = torch.autograd.grad(want[:2], inputs, (dout.double(), dlse.double()))
    for x, wanted in zip(has, wants, strict=True):
        close(x, wanted, 1e-4)


def test_a_changed_offset_is_found_in_the_backward():
    q, k, v = (x.requires_grad_() for x in tensors(random.Random(7), 1, 1, 1, 2, 9, 8, 8, torch.float32))
    q_offset = int32([3])
    out = flex_attention(q, k, v, mask_mod=causal, q_offset=q_offset)
    q_offset += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- torch.compile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
def test_one_graph_serves_all_steps(is_paged):
    torch._dynamo.reset()
    rng = random.Random(8)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    total = 40
    q, k, v = tensors(rng, 2, 4, 2, total, total, 16, 16, torch.float32)
    mask = create_block_mask(window, None, None, total, 48, device="cpu", BLOCK_SIZE=16)
    score_mod = alibi(rng)
    pages, table = (k, v), None
    if is_paged:
        *pages, table = in_pages(rng, k, v, [total, total], 16)

    def step(q, block_mask, q_offset, kv_len):
        return flex_attention(
            q, *pages, score_mod, block_mask, enable_gqa=True, q_offset=q_offset, kv_len=kv_len, block_table=table
        )

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for at in (0, 7, 22, 39):
        places = int32([at, at // 2]), int32([at + 1, at // 2 + 1])
        row = q[:, :, at : at + 1]
        want = want_of(row, k, v, places[1].tolist(), places[0].tolist(), score_mod, window)[0]
        close(compiled(row, mask, *places), want, 1e-5)
        close(step(row, mask, *places), want, 1e-5)
    assert len(graphs) == 1


def test_a_compiled_bare_mask_and_its_gradient():
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in tensors(random.Random(9), 2, 2, 2, 5, 40, 16, 16, torch.float32))

    def step(q_offset):
        return flex_attention(q, k, v, mask_mod=window, q_offset=q_offset)

    q_offset = int32([20, 3])
    want = torch.autograd.grad(step(q_offset).sum(), (q, k, v))
    for backend in ("eager", "aot_eager"):
        has = torch.autograd.grad(torch.compile(step, backend=backend, fullgraph=True)(q_offset).sum(), (q, k, v))
        for x, wanted in zip(has, want, strict=True):
            close(x, wanted, 1e-6)


# ---- errors --------------------------------------------------------------------------------------------------------


def refuses(exception, text, shapes=None, **kwargs):
    q, k, v = tensors(random.Random(0), *(shapes or (2, 2, 2, 3, 20)), 8, 8, torch.float32)
    with pytest.raises(exception, match=text):
        flex_attention(q, k, v, **kwargs)


def test_what_does_not_fit_is_refused():
    refuses(TypeError, "q_offset must be a tensor of integers, not float", q_offset=1.5)
    refuses(TypeError, "kv_len must be a tensor of integers, not of torch.float32", kv_len=torch.ones(2))
    refuses(TypeError, "block_table must be a tensor of integers, not int", block_table=1)
    refuses(ValueError, r"kv_len must have the shape \[B\] with B=2, but has \(3,\)", kv_len=int32([1, 2, 3]))
    refuses(ValueError, r"block_table must have the shape \[B, pages of a seq", block_table=int32([1, 2]))
    refuses(ValueError, "kv_len must be on the device of query, cpu", kv_len=torch.ones(2, device="meta").int())
    refuses(RuntimeError, "kv_len must be from 0 to the 20 keys that there are; element 1 is 21", kv_len=int32([3, 21]))
    refuses(RuntimeError, "kv_len must be from 0 .* element 0 is -1", kv_len=int32([-1, 2]))
    refuses(RuntimeError, "q_offset must be from 0 to .* element 1 is -4", q_offset=int32([0, -4]), mask_mod=causal)
    refuses(
        RuntimeError, r"block_table must name pages below 2; entry \(1, 0\) is 2", block_table=int32([[0, 1], [2, 1]])
    )
    for far in (2**32 + 3, 3 - 2**32):  # 3 as int32
        far = torch.tensor([3, far])
        refuses(RuntimeError, "kv_len must be from 0 .* element 1 is", kv_len=far)
        refuses(RuntimeError, "q_offset must be from 0 .* element 1 is", q_offset=far, mask_mod=causal)
        refuses(
            RuntimeError, r"block_table must name pages below 2; entry \(0, 1\)", block_table=(far - 3).expand(2, 2)
        )
    refuses(RuntimeError, r"entry \(0, 1\) is -1", block_table=int32([[0, -1], [0, 1]]), kv_len=int32([21, 20]))
    refuses(
        ValueError,
        "have no q_offset, kv_len, block_table and dropout_p",
        q_offset=0,
        kernel_options={"BACKEND": "TRITON"},
    )


def test_block_masks_that_do_not_fit_are_refused():
    small = create_block_mask(causal, None, None, 32, 20, device="cpu", BLOCK_SIZE=16)
    text = "q_offset must leave the queries in the 32 rows of the block mask; element 1 is 30, and there are 3 queries"
    refuses(RuntimeError, text, block_mask=small, q_offset=int32([29, 30]))
    refuses(
        ValueError, "block_mask was created for", block_mask=small
    )  # without an offset its rows must be the queries
    wide = create_block_mask(causal, None, None, 32, 10, device="cpu", BLOCK_SIZE=16)
    refuses(ValueError, "but got q_len=3 and kv_len=20", block_mask=wide, q_offset=0, kv_len=10)
    short = create_block_mask(causal, None, None, 2, 20, device="cpu", BLOCK_SIZE=16)
    refuses(ValueError, "created for a smaller length", block_mask=short, q_offset=0)


@pytest.mark.parametrize("name", ["kv_len", "block_table"])
def test_gradients_through_a_cache_are_refused(name):
    q, k, v = tensors(random.Random(0), 1, 1, 1, 2, 4, 8, 8, torch.float32)
    places = {"kv_len": {"kv_len": 3}, "block_table": {"block_table": int32([[0]])}}[name]
    q.requires_grad_()
    text = f"flex_attention computes no gradients with {name}="
    with pytest.raises(NotImplementedError, match=text):
        flex_attention(q, k, v, mask_mod=causal, **places)
    with pytest.raises(NotImplementedError, match=text):
        flex_attention(q, k, v, **places)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(lambda: flex_attention(q, k, v, mask_mod=causal, **places), backend="eager", fullgraph=True)()
    with torch.no_grad():
        want = want_of(q, k, v, [places.get("kv_len", 4)], [0], None, causal)[0]
        close(flex_attention(q, k, v, mask_mod=causal, **places), want, 1e-5)
