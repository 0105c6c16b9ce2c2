"""Hopper's forward with mods beside offsets, lengths and pages: many queries, and few work tiles whose keys are cut
into parts, beside all pairs in fp64."""

import random
from contextlib import contextmanager

import flash_attn_2_cuda
import pytest
import torch
from harness_cuda import no_hopper
from oracle_decode import in_pages
from oracle_pairs import LONGEST, MODS, all_pairs, captured

from flash_attn import explain, flash_attn_func
from flash_attn.flex_attention import AuxRequest, flex_attention

pytestmark = pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")

NAN = float("nan")
SHAPES = [(64, 64, 4, 4), (72, 72, 8, 1), (96, 96, 8, 2), (128, 128, 4, 2), (128, 128, 16, 2), (160, 160, 2, 2),
          (192, 192, 4, 1), (256, 256, 8, 4), (64, 128, 4, 2), (192, 128, 2, 1), (64, 256, 2, 2)]  # fmt: skip


@contextmanager
def only(kernels):
    flash_attn_2_cuda.set_cuda_kernels(kernels)
    try:
        yield
    finally:
        flash_attn_2_cuda.set_cuda_kernels(None)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def compare(args, asked, want, want_lse):
    """The kernel's result twice, with lse and without, beside what it should be. Returns the plan."""
    plan = explain(flex_attention, *args, **asked)
    assert plan.kernel.startswith("attn_fwd_sm90") and "_cache" in plan.kernel, plan
    out, aux = flex_attention(*args, return_aux=AuxRequest(lse=True), **asked)
    assert torch.equal(out, flex_attention(*args, **asked))
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(aux.lse.double(), want_lse, atol=2e-3, rtol=2e-3)
    return plan


@pytest.mark.parametrize("pages", [0, 16, 24, 64, 256, 12], ids=lambda n: f"pages of {n}" if n else "dense")
@pytest.mark.parametrize("d, d_v, h, h_kv", SHAPES)
@pytest.mark.parametrize("name", MODS)
def test_equals_all_pairs(name, d, d_v, h, h_kv, pages):
    rng = random.Random(f"{name} {d} {d_v} {h} {pages}")
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    b, len_q, longest = rng.choice((1, 3)), rng.choice((20, 65, 128, 257, 300)), rng.choice((1, 300, 1111, LONGEST))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype)
               for shape in ((b, h, len_q, d), (b, h_kv, longest, d), (b, h_kv, longest, d_v)))  # fmt: skip
    kv_len = [longest, *(min(rng.choice((0, 1, 64, 129, 299)), longest) for _ in range(b - 1))]
    offset = [rng.choice((0, rng.randint(0, LONGEST - len_q), LONGEST - len_q)) for _ in range(b)]
    cache, places = (k, v), {"kv_len": int32(kv_len), "q_offset": int32(offset)}
    if pages:
        *cache, table = in_pages(rng, k, v, kv_len, pages)
        places["block_table"] = table.cuda()
    for x in (k, v):
        for b_idx, num in enumerate(kv_len):
            x[b_idx, :, num:] = 0 if pages else NAN  # no key is there
    tensors = {key: x.cuda() for key, x in captured(generator).items()}
    score_mod, mask_mod = (make and make(tensors) for make in MODS[name])
    args = (q.cuda(), *(x.cuda() for x in cache), score_mod)
    asked = {"mask_mod": mask_mod, "scale": rng.choice((0.2, 0.05)), "enable_gqa": True, **places}
    k, v = (x.cuda().nan_to_num() for x in (k, v))
    want = all_pairs(q.cuda(), k, v, places["kv_len"], places["q_offset"], score_mod, mask_mod, asked["scale"])
    with only("attn_fwd_sm90"):
        assert "_flex_" in compare(args, asked, *want).kernel


@pytest.mark.parametrize("name", ["q_offset", "kv_len", "block_table"])
def test_each_place_works_alone(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 128, device="cuda").half() for h, n in ((8, 300), (2, 640), (2, 640)))
    slopes = torch.rand(8, device="cuda")
    mods = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs() / 9, lambda b, h, i, j: (i + j) % 5 != 1
    places = {"q_offset": int32([0, 333]), "kv_len": int32([640, 77])}
    offset, kv_len = places["q_offset"] * (name == "q_offset"), int32([640, 640])
    cache = k, v
    if name == "kv_len":
        kv_len = places["kv_len"]
    if name == "block_table":
        table = torch.randperm(20, device="cuda", dtype=torch.int32).view(2, 10)
        places["block_table"], cache = table, [torch.empty(20, 2, 64, 128, device="cuda").half() for _ in range(2)]
        for to, x in zip(cache, (k, v)):
            to[table.flatten().long()] = x.unflatten(2, (10, 64)).transpose(1, 2).flatten(0, 1)
    want = all_pairs(q, k, v, kv_len, offset, *mods, 128**-0.5)
    asked = {"mask_mod": mods[1], "enable_gqa": True, name: places[name]}
    with only("attn_fwd_sm90"):
        compare((q, *cache, mods[0]), asked, *want)


@pytest.mark.parametrize("len_q, heads", [(17, (8, 1)), (64, (2, 2)), (130, (4, 1)), (300, (2, 1))])
@pytest.mark.parametrize("has_places", [False, True])
def test_few_tiles_are_cut_into_parts(has_places, len_q, heads):
    """In some parts a row sees nothing, and in the last rows no part sees a key."""
    torch.manual_seed(len_q)
    q, k, v = (torch.randn(2, h, n, 128, device="cuda").bfloat16() for h, n in zip((heads[0], heads[1], heads[1]),
                                                                                   (len_q, 5000, 5000)))  # fmt: skip
    table = torch.randn(heads[0], 5000, device="cuda")
    kv_len, offset = int32([5000, 2222 if has_places else 5000]), int32([4000, 7] if has_places else [0, 0])
    first = offset.clone()

    def score_mod(s, b, h, i, j):
        far = (j - (i - first[b]) * 30).abs() > 900
        return torch.where(far | (i - first[b] > len_q - 4), -float("inf"), s + table[h, j])

    want, want_lse = all_pairs(q, k, v, kv_len, offset, score_mod, None, 0.1)
    assert want_lse[:, :, -3:].eq(-float("inf")).all() and want_lse[:, :, :3].isfinite().all()
    asked = {"scale": 0.1, "enable_gqa": True} | ({"kv_len": kv_len, "q_offset": offset} if has_places else {})
    with only("attn_fwd_sm90"):
        assert compare((q, k, v, score_mod), asked, want, want_lse).num_splits > 1


def test_sinks_and_a_bias_in_parts():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 128, device="cuda").bfloat16() for n, h in ((100, 8), (4000, 2), (4000, 2)))
    bias, sinks = torch.randn(1, 8, 100, 4000, device="cuda").bfloat16(), torch.randn(8, device="cuda")
    asked = {"attn_bias": bias, "sinks": sinks}
    with only("attn_fwd"):
        plan = explain(flash_attn_func, q, k, v, **asked)
        out, lse = flash_attn_func(q, k, v, return_lse=True, **asked)
    assert plan.num_splits > 1 and "_cache_flex" in plan.kernel
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(4, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * 128**-0.5 + bias.double()
    total = torch.logaddexp(scores.logsumexp(-1), sinks.double()[:, None])
    want = torch.exp(scores - total[..., None]) @ v
    torch.testing.assert_close(out.double(), want.transpose(1, 2), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double().view_as(total), total, atol=2e-3, rtol=2e-3)


def test_gradients_where_the_forward_is_cut():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, 128, device="cuda").bfloat16().requires_grad_() for n in (100, 3000, 3000))
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    mod = lambda s, b, h, i, j: s - slopes[h] * (j - 30 * i).abs() / 100  # noqa: E731
    with only("sm90"):
        assert explain(flex_attention, q, k, v, mod).num_splits > 1
        out = flex_attention(q, k, v, mod)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v, slopes), dout)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, slopes)]
    at = torch.arange(3000, device="cuda") - 30 * torch.arange(100, device="cuda")[:, None]
    scores = wide[0] @ wide[1].transpose(2, 3) * 128**-0.5 - wide[3][:, None, None] * at.abs() / 100
    want = torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, dout.double())
    for x, y in zip(found, want):
        torch.testing.assert_close(x.double(), y, atol=2e-2 * y.abs().max().item(), rtol=0)


@pytest.mark.parametrize("parts", [False, True])
def test_values_that_are_no_numbers_reach_only_rows_that_see_them(parts):
    """Also those behind the keys in use, in K and V."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 64, device="cuda").half() for h, n in ((4, 200), (2, 4000), (2, 4000)))
    seen, offset, kv_len = 1500, int32([1400]), int32([3000])
    v[:, :, seen] = NAN
    k[:, :, 3000:] = v[:, :, 3000:] = NAN
    q, heads = (q, 4) if parts else (q.repeat(1, 40, 1, 1), 160)
    k, v = (k, v) if parts else (k.repeat(1, 40, 1, 1), v.repeat(1, 40, 1, 1))
    causal, slopes = lambda b, h, i, j: i >= j, torch.rand(heads, device="cuda")
    mod = lambda s, b, h, i, j: s - slopes[h] * (i - j) / 50  # noqa: E731
    asked = {"mask_mod": causal, "q_offset": offset, "kv_len": kv_len, "enable_gqa": True}
    with only("attn_fwd_sm90"):
        assert (explain(flex_attention, q, k, v, mod, **asked).num_splits > 1) == parts
        out = flex_attention(q, k, v, mod, **asked)
    rows_before = seen - 1400
    assert out[:, :, rows_before:].isnan().all()
    zeros = [x.nan_to_num() for x in (k, v)]
    want, _ = all_pairs(q, *zeros, kv_len, offset, mod, causal, 64**-0.5)
    torch.testing.assert_close(out[:, :, :rows_before].double(), want[:, :, :rows_before], atol=1e-2, rtol=1e-2)


def test_scores_of_any_size():
    """Work tiles that fail are repeated, with the functions of the strip's head and the offset of its batch."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 128, device="cuda").bfloat16() for h, n in ((8, 150), (2, 900), (2, 900)))
    offset, kv_len, rise = int32([700, 0]), int32([900, 512]), torch.rand(8, device="cuda")
    mod = lambda s, b, h, i, j: s + (1 + rise[h]) * ((i + j) % 97 == 3) * 300 - j  # noqa: E731
    causal = lambda b, h, i, j: i >= j  # noqa: E731
    want = all_pairs(q, k, v, kv_len, offset, mod, causal, 2.0)
    asked = {"mask_mod": causal, "q_offset": offset, "kv_len": kv_len, "enable_gqa": True, "scale": 2.0}
    with only("attn_fwd_sm90"):
        compare((q, k, v, mod), asked, *want)


def test_lengths_and_offsets_are_clamped():
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 2, n, 64, device="cuda").half() for n in (200, 500, 500))
    mod = lambda s, b, h, i, j: s + (i - j) / 100  # noqa: E731
    given = {"kv_len": int32([501, 1 << 30, -1, 500]), "q_offset": int32([-1, -(1 << 31), 3, 0])}
    meant = {"kv_len": int32([500, 500, 0, 500]), "q_offset": int32([0, 0, 3, 0])}
    with only("attn_fwd_sm90"):
        compare((q, k, v, mod), given, *all_pairs(q, k, v, *meant.values(), mod, None, 64**-0.5))
    far = 1 << 29
    offset, lengths = int32([far, far - 1, far + 7, 0]), int32([500] * 4)
    causal = lambda b, h, i, j: i - far >= j  # noqa: E731
    want = all_pairs(q, k, v, lengths, offset, None, causal, 64**-0.5)
    with only("attn_fwd_sm90"):
        compare((q, k, v), {"mask_mod": causal, "q_offset": offset}, *want)


def test_a_graph_replays_with_other_places():
    torch.manual_seed(0)
    q, cache = torch.randn(2, 8, 150, 64, device="cuda").half(), torch.randn(2, 2, 2, 1000, 64, device="cuda").half()
    length, offset = int32([150, 150]), int32([0, 0])
    window = lambda b, h, i, j: (i >= j) & (i - j < 90)  # noqa: E731
    asked = {"mask_mod": window, "q_offset": offset, "kv_len": length, "enable_gqa": True}
    with only("attn_fwd_sm90"):
        assert "_cache_flex" in explain(flex_attention, q, *cache, **asked).kernel
        call = lambda: flex_attention(q, *cache, **asked)  # noqa: E731
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for now in ([150, 151], [1000, 0], [333, 999]):
            length.copy_(int32(now)), offset.copy_((int32(now) - 150).clamp(min=0))
            graph.replay()
            want, _ = all_pairs(q, *cache, length, offset, None, window, 0.125)
            torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("len_q, kernel", [(1, "attn_decode_sm90"), (256, "attn_fwd_sm90"), (2048, "attn_fwd_sm90")])
def test_many_queries_have_the_forward(len_q, kernel):
    q, k = (torch.randn(1, h, n, 128, device="cuda").half() for h, n in ((32, len_q), (8, 16384)))
    causal, offset = lambda b, h, i, j: i >= j, int32([3000])
    plan = explain(flex_attention, q, k, k, mask_mod=causal, q_offset=offset, enable_gqa=True)
    assert plan.kernel.startswith(kernel)
