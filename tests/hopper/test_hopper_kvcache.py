"""flash_attn_with_kvcache of flash_attn_3: the caches, paged or not, and the attention over them."""

import itertools

import pytest
import torch
from flash_attn_3 import _kvcache
from flash_attn_3.flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata
from oracle3 import INF, assert_close, assert_lse, attention
from tensors3 import E4M3, i32

B, CAPACITY, H, H_KV, D = 3, 24, 4, 2, 32


def rotate(x, cos, sin, positions, interleaved):
    """x [len, h, d] by cos, sin [rows, r / 2] at positions [len]; positions past the rows are not rotated."""
    r = 2 * cos.shape[1]
    known = (positions < len(cos))[:, None, None]
    at = positions.clamp(max=len(cos) - 1)
    c, s = cos.double()[at][:, None], sin.double()[at][:, None]
    turned, rest = x.double()[..., :r], x.double()[..., r:]
    x0, x1 = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    y0, y1 = x0 * c - x1 * s, x0 * s + x1 * c
    y = torch.stack((y0, y1), -1).flatten(-2) if interleaved else torch.cat((y0, y1), -1)
    return torch.cat((torch.where(known, y, turned), rest), -1).to(x.dtype)


class Caches:
    """Dense caches of random numbers, and the same rows in pages in random order, between pages of NaN."""

    def __init__(self, page, dtype, d_v=D, rows=B):
        self.page = page
        self.k = torch.randn(rows, CAPACITY, H_KV, D).to(dtype)
        self.v = torch.randn(rows, CAPACITY, H_KV, d_v).to(dtype)
        if page is None:
            self.given_k, self.given_v, self.table = self.k.clone(), self.v.clone(), None
            return
        columns = -(-CAPACITY // page)
        num = rows * columns + 3
        numbers = torch.randperm(num)[: rows * columns]
        self.table = numbers.view(rows, columns).to(torch.int32)
        self.given_k = torch.full((num, page, H_KV, D), float("nan")).to(dtype)
        self.given_v = torch.full((num, page, H_KV, d_v), float("nan")).to(dtype)
        for row, key in itertools.product(range(rows), range(CAPACITY)):
            self.given_k[self.table[row, key // page], key % page] = self.k[row, key]
            self.given_v[self.table[row, key // page], key % page] = self.v[row, key]

    def rows(self, of, row, num):
        """The first keys or values of a row, as the call left them."""
        if self.page is None:
            return of[row, :num]
        keys = torch.arange(num)
        return of[self.table[row].long()[keys // self.page], keys % self.page]


@pytest.mark.parametrize("page", [None, 1, 4, 64, 128])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (4, 1)}, {"chunk": 6}], ids=str)
@pytest.mark.parametrize("packs", ["", "q", "qk"], ids=["dense", "packed_q", "packed_q_and_new"])
@pytest.mark.parametrize("options", [(), ("append",), ("append", "leftpad", "idx"), ("append", "rotary", "leftpad")])
def test_cache(engine, options, packs, mask, page):
    dtype = torch.bfloat16
    caches = Caches(page, dtype, rows=B + 2)
    lens_q, lens_new = ([2, 0, 5], [4, 1, 0]) if packs else ([4] * B, [4] * B)
    lens_new = lens_new if "k" in packs or not packs else [4] * B
    q = torch.randn(sum(lens_q), H, D).to(dtype)
    new = torch.randn(2, sum(lens_new), H_KV, D).to(dtype)
    used = i32(7, 0, 20)
    rows = i32(4, 0, 2) if "idx" in options or page is None else i32(0, 1, 2)
    left = i32(3, 0, 20) if "leftpad" in options else None
    given = {"cache_seqlens": used, "cache_leftpad": left}
    if page is None or "idx" in options:
        given["cache_batch_idx"] = rows
    if page is not None:
        given["page_table"] = caches.table if "idx" in options else caches.table[:B]
    num_positions = 12 if page is None else max(page, CAPACITY)  # positions past the last row are not rotated
    cos, sin = (torch.rand(num_positions, 8).to(dtype) for _ in range(2)) if "rotary" in options else (None, None)
    offsets = i32(9, 2, 6) if "rotary" in options and "q" in packs else used
    if "rotary" in options:
        given.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=bool(mask))
        if offsets is not used:
            given["rotary_seqlens"] = offsets
    if "append" in options:
        given.update(k=new[0], v=new[1])
        if "k" in packs:
            given["cu_seqlens_k_new"] = i32(0, *itertools.accumulate(lens_new))
        else:
            given.update(k=new[0].view(B, 4, H_KV, D), v=new[1].view(B, 4, H_KV, D))
    if packs:
        given.update(cu_seqlens_q=i32(0, *itertools.accumulate(lens_q)), max_seqlen_q=max(lens_q))
    out, lse = flash_attn_with_kvcache(
        q if packs else q.view(B, 4, H, D), caches.given_k, caches.given_v, causal=mask.get("causal", False),
        window_size=mask.get("window", (-1, -1)), attention_chunk=mask.get("chunk", 0), return_softmax_lse=True,
        **given,
    )  # fmt: skip
    out = out.view(-1, H, D)
    lse = lse if packs else lse.transpose(0, 1).flatten(1)

    starts_q, starts_new = ([0, *itertools.accumulate(x)] for x in (lens_q, lens_new))
    for i, row in enumerate(rows.tolist()):
        mine = slice(starts_q[i], starts_q[i + 1])
        queries, num = q[mine], int(used[i])
        k, v = caches.k[row, :num], caches.v[row, :num]
        if "append" in options:
            fresh = slice(starts_new[i], starts_new[i + 1])
            k_new = new[0][fresh]
            if "rotary" in options:
                ahead = torch.arange(max(len(k_new), len(queries)))
                k_new = rotate(k_new, cos, sin, offsets[i] + ahead[: len(k_new)], bool(mask))
                by_row = ahead[: len(queries)] * (1 if mask and max(lens_q) > 1 else 0)
                queries = rotate(queries, cos, sin, offsets[i] + by_row, bool(mask))
            k, v = torch.cat((k, k_new)), torch.cat((v, new[1][fresh]))
            num += len(k_new)
        kept_k, kept_v = caches.rows(caches.given_k, row, num), caches.rows(caches.given_v, row, num)
        assert torch.equal(kept_v, v)
        torch.testing.assert_close(kept_k, k, rtol=1e-2 if "rotary" in options else 0, atol=0)
        first = 0 if left is None else int(left[i])
        keys, values = kept_k[first:], v[first:]
        truth, true_lse = attention(queries, keys, values, **mask)
        plain, _ = attention(queries, keys, values, dtype=dtype, **mask)
        assert_close(out[mine], truth, plain, a=2e-2 if "rotary" in options else None)
        torch.testing.assert_close(
            lse[:, mine].double(), true_lse, rtol=1e-5, atol=3e-2 if "rotary" in options else 2e-5
        )


@pytest.mark.parametrize("page", [None, 4])
def test_the_rest_of_a_cache_stays(page):
    """Bytes beside the appended rows, and pages that no sequence owns, are not touched."""
    caches = Caches(page, torch.bfloat16)
    before = caches.given_k.clone(), caches.given_v.clone()
    new = torch.randn(B, 3, H_KV, D).bfloat16()
    used = i32(5, 0, 21)
    flash_attn_with_kvcache(
        torch.randn(B, 1, H, D).bfloat16(), caches.given_k, caches.given_v, new, new, cache_seqlens=used,
        page_table=caches.table,
    )  # fmt: skip
    for old, now in zip(before, (caches.given_k, caches.given_v)):
        changed = (old.view(torch.int16) != now.view(torch.int16)).flatten(2).any(-1)
        assert changed.sum() == B * 3


@pytest.mark.parametrize("page", [None, 4, 128])
@pytest.mark.parametrize("d_v", [D, 16, 256])
def test_fp8_and_other_widths(engine, d_v, page):
    dtype = E4M3
    caches = Caches(page, dtype, d_v)
    q, used = torch.randn(B, 2, H, D).to(dtype), i32(24, 3, 11)
    new = torch.randn(B, 0, H_KV, D).to(dtype), torch.randn(B, 0, H_KV, d_v).to(dtype)
    scales = torch.rand(3, B, H_KV) + 0.5
    out, lse = flash_attn_with_kvcache(
        q, caches.given_k, caches.given_v, *new, cache_seqlens=used, page_table=caches.table, causal=True,
        q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], return_softmax_lse=True,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    for i in range(B):
        wide = q[i].double() * scales[0, i].repeat_interleave(H // H_KV)[:, None]
        k = caches.k[i, : used[i]].double() * scales[1, i][:, None]
        v = caches.v[i, : used[i]].double() * scales[2, i][:, None]
        truth, true_lse = attention(wide, k, v, causal=True)
        plain, _ = attention(
            wide.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True, dtype=torch.bfloat16, rounds_p=E4M3
        )
        assert_close(out[i], truth, plain)
        assert_lse(lse[i], true_lse)


def test_an_int_is_the_length_of_every_sequence():
    """With packed queries, too: there are as many sequences as cu_seqlens_q says."""
    caches = Caches(None, torch.float32)
    q = torch.randn(4, H, D)
    cu = i32(0, 1, 1, 4)
    given = {"cu_seqlens_q": cu, "max_seqlen_q": 3}
    expected = flash_attn_with_kvcache(q, caches.given_k, caches.given_v, cache_seqlens=i32(9, 9, 9), **given)
    assert torch.equal(flash_attn_with_kvcache(q, caches.given_k, caches.given_v, cache_seqlens=9, **given), expected)
    window = flash_attn_with_kvcache(
        q, caches.given_k, caches.given_v, cache_seqlens=9, window_size=torch.tensor([2, 0]), **given
    )
    assert not torch.equal(window, expected)


def test_scheduler_metadata_is_a_hint():
    caches = Caches(4, torch.float32)
    q, used = torch.randn(B, 1, H, D), i32(4, 20, 0)
    metadata = get_scheduler_metadata(
        B, 1, CAPACITY, H, H_KV, D, used, qkv_dtype=torch.float16, page_size=4, window_size=torch.tensor([3, 0])
    )
    assert metadata.dtype == torch.int32 and metadata.dim() == 1 and metadata.device == used.device
    call = {"cache_seqlens": used, "page_table": caches.table}
    expected = flash_attn_with_kvcache(q, caches.given_k, caches.given_v, **call)
    for _ in range(2):
        out = flash_attn_with_kvcache(q, caches.given_k, caches.given_v, scheduler_metadata=metadata, **call)
        assert torch.equal(out, expected)
    wrong = metadata.long()
    with pytest.raises(RuntimeError, match="scheduler_metadata must have dtype int32"):
        flash_attn_with_kvcache(q, caches.given_k, caches.given_v, scheduler_metadata=wrong, **call)


def test_an_empty_sequence():
    caches = Caches(None, torch.float32)
    out, lse = flash_attn_with_kvcache(
        torch.randn(B, 2, H, D), caches.given_k, caches.given_v, cache_seqlens=i32(0, 3, 0), return_softmax_lse=True
    )
    assert (out[0] == 0).all() and (lse[0] == -INF).all() and (lse[1] > -INF).all()


def test_rotary_seqlens_without_rotary_are_ignored():
    caches = Caches(None, torch.float32)
    q = torch.randn(B, 1, H, D)
    expected = flash_attn_with_kvcache(q, caches.given_k, caches.given_v, cache_seqlens=5)
    out = flash_attn_with_kvcache(q, caches.given_k, caches.given_v, cache_seqlens=5, rotary_seqlens=i32(1, 2, 3))
    assert torch.equal(out, expected)


def forward_op(q, k_cache, v_cache, k, v, cache_seqlens, return_softmax_lse, **options):
    """The raw op in place of ``flash_attn_with_kvcache``."""
    options["is_causal"] = options.pop("causal")
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k_cache, v_cache, k, v, seqused_k=cache_seqlens, **options)
    return out, lse


@pytest.mark.parametrize("function", [flash_attn_with_kvcache, forward_op])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_rotary_tables_in_fp8(packed, function):
    """Upstream wants cos and sin in the dtype of q. bf16 holds every number of e4m3."""
    cos, sin = (torch.rand(CAPACITY, 16).to(E4M3) for _ in range(2))
    q, k, v = (torch.randn(B, 2, h, D).to(E4M3) for h in (H, H_KV, H_KV))
    call = {"cache_seqlens": i32(0, 9, 22), "causal": True, "return_softmax_lse": True}
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        call.update(cu_seqlens_q=i32(0, 2, 4, 6), cu_seqlens_k_new=i32(0, 2, 4, 6), max_seqlen_q=2)
    caches = Caches(None, E4M3)
    results = []
    for dtype in (E4M3, torch.bfloat16):
        k_cache, v_cache = caches.k.clone(), caches.v.clone()
        tables = {"rotary_cos": cos.to(dtype), "rotary_sin": sin.to(dtype)}
        results.append((*function(q, k_cache, v_cache, k, v, **tables, **call), k_cache.float()))
    assert all(torch.equal(x, y) for x, y in zip(*results))
    assert not torch.equal(results[0][2], caches.k.float())
    with pytest.raises(RuntimeError, match="rotary_cos must have the same dtype as query"):
        wide = (x.bfloat16() for x in (q, caches.k, caches.v, k, v))
        function(*wide, rotary_cos=cos, rotary_sin=sin, **call)
    with pytest.raises(RuntimeError, match="rotary_sin must have the dtype of rotary_cos, bf16 or FP8"):
        function(q, caches.k, caches.v, k, v, rotary_cos=cos, rotary_sin=sin.bfloat16(), **call)


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin", "q_descale", "k_descale", "v_descale", "softcap"])
def test_a_table_or_factor_may_require_grad(name, monkeypatch):
    monkeypatch.setattr(_kvcache, "_has_warned", False)
    caches = Caches(None, E4M3)
    q, k, v = (torch.randn(B, 1, h, D).to(E4M3) for h in (H, H_KV, H_KV))
    options = {x: torch.rand(CAPACITY, 8).bfloat16() for x in ("rotary_cos", "rotary_sin")}
    options.update({f"{x}_descale": torch.rand(B, H_KV) for x in "qkv"}, softcap=torch.tensor(3.0))
    options[name] = options[name].requires_grad_()
    with pytest.warns(UserWarning, match="flash_attn_with_kvcache has no backward"):
        flash_attn_with_kvcache(q, caches.k, caches.v, k, v, cache_seqlens=2, **options)


def test_errors_name_the_cache():
    x = torch.randn(6, 4, 2, 16)
    with pytest.raises(RuntimeError, match=r"^k_cache must have a page size \(dimension 1\) of at least 1; it has 0"):
        flash_attn_with_kvcache(x[:2, :1], x[:, :0], x[:, :0], page_table=i32(0, 1).view(2, 1))
    with pytest.raises(RuntimeError, match="^k_cache must have at least one head"):
        flash_attn_with_kvcache(x[:2, :1, :0], x[:2, :, :0], x[:2, :, :0])


@pytest.mark.parametrize("is_direct", [True, False])
def test_packed_rows_of_no_sequence_are_zero(is_direct):
    """The direct function refuses a query whose columns do not lie side by side, and Python makes the result."""
    caches = Caches(None, torch.float32)
    q = torch.randn(7, H, D) if is_direct else torch.randn(7, D, H).transpose(1, 2)
    call = {"cache_seqlens": 5, "cu_seqlens_q": i32(0, 2, 3, 5), "max_seqlen_q": 2, "return_softmax_lse": True}
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    try:
        out, lse = flash_attn_with_kvcache(q, caches.given_k, caches.given_v, **call)
    finally:
        torch.use_deterministic_algorithms(before)
    assert out[5:].eq(0).all() and lse[:, 5:].eq(-INF).all() and out.isfinite().all()


def test_caches_that_cannot_be_written():
    """Nothing is written, not even the other cache."""
    q, new, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 2, 2, 16), torch.zeros(1, 4, 2, 16)
    windows = torch.zeros(200).as_strided((1, 4, 2, 16), (128, 16, 8, 1))
    for wrong, words in ((torch._neg_view(cache.clone()), "have the negative bit"), (windows, "overlap itself")):
        for name, caches in (("k_cache", (wrong, cache)), ("v_cache", (cache, wrong))):
            with pytest.raises(RuntimeError, match=f"^{name} is written and must not {words}"):
                flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=0)
            assert not caches[0].any() and not caches[1].any()
    for op in (torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3._flash_attn_forward):
        with pytest.raises(RuntimeError, match="^k is written and must not have the negative bit"):
            op(q, torch._neg_view(cache.clone()), cache, k_new=new, v_new=new, seqused_k=i32(0))
    got, want = cache.clone(), cache.clone()
    flash_attn_with_kvcache(q, got, got.clone(), torch._neg_view(-new), new, cache_seqlens=0)
    flash_attn_with_kvcache(q, want, want.clone(), new, new, cache_seqlens=0)
    assert torch.equal(got, want) and got.any()
