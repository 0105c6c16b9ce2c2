"""The decode kernel with mods: few queries, offsets, lengths and pages on a GPU, beside all pairs in fp64."""

import random

import flash_attn_2_cuda
import pytest
import torch
from harness_cuda import no_gpu
from oracle_decode import in_pages
from oracle_pairs import MODS, all_pairs, captured

from flash_attn import explain
from flash_attn.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")


@pytest.mark.parametrize("kernels", ["any,sm80", None], ids=["before Hopper", "all"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize(
    "d, len_q, heads", [(64, 1, (4, 4)), (128, 1, (8, 2)), (72, 9, (6, 2)), (256, 5, (8, 1)), (128, 70, (4, 1))]
)
@pytest.mark.parametrize("name", MODS)
def test_equals_all_pairs(name, d, len_q, heads, is_paged, kernels):
    rng = random.Random(f"{name} {d} {is_paged}")
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    b, (h, h_kv), longest = rng.choice((1, 3)), heads, rng.choice((300, 1111))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype)
               for shape in ((b, h, len_q, d), (b, h_kv, longest, d), (b, h_kv, longest, d)))  # fmt: skip
    kv_len = [longest, *(rng.choice((0, 1, 64, 299)) for _ in range(b - 1))]
    offset = [rng.randint(0, 100) for _ in range(b)]
    cache, places = (k, v), {"kv_len": kv_len, "q_offset": offset}
    places = {key: torch.tensor(x, dtype=torch.int32, device="cuda") for key, x in places.items()}
    if is_paged:
        *cache, table = in_pages(rng, k, v, kv_len, rng.choice((1, 16, 48, 64)))
        places["block_table"] = table.cuda()
    for x in (k, v):
        for b_idx, num in enumerate(kv_len):
            x[b_idx, :, num:] = 0 if is_paged else float("nan")  # no key is there
    tensors = {key: x.cuda() for key, x in captured(generator).items()}
    score_mod, mask_mod = (make and make(tensors) for make in MODS[name])
    args = (q.cuda(), *(x.cuda() for x in cache), score_mod)
    asked = {"mask_mod": mask_mod, "scale": rng.choice((0.2, -0.1)), "enable_gqa": True, **places}
    flash_attn_2_cuda.set_cuda_kernels(kernels)
    try:
        kernel = explain(flex_attention, *args, **asked).kernel
        is_few = len_q * h // h_kv <= 16 or kernels
        assert kernel.startswith("attn_decode_sm") or (not is_few and "_cache_flex" in kernel)
        out, lse = flex_attention(*args, return_lse=True, **asked)
        again = flex_attention(*args, **asked)
    finally:
        flash_attn_2_cuda.set_cuda_kernels(None)
    k, v = (x.cuda().nan_to_num() for x in (k, v))
    want, want_lse = all_pairs(
        q.cuda(), k, v, places["kv_len"], places["q_offset"], score_mod, mask_mod, asked["scale"]
    )
    assert torch.equal(out, again)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-3, rtol=2e-3)


def test_few_queries_without_a_cache():
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (3, 900, 900)
    )
    slopes = torch.rand(4, device="cuda", requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * kv_idx / 100

    assert explain(flex_attention, q, k, v, mod).kernel.startswith("attn_decode_sm")
    out = flex_attention(q, k, v, mod)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, slopes), dout)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, slopes)]
    scores = (
        wide[0] @ wide[1].transpose(2, 3) * 128**-0.5 - wide[3][:, None, None] * torch.arange(900, device="cuda") / 100
    )
    want = torch.autograd.grad(scores.softmax(-1) @ wide[2], wide, dout.double())
    for x, y in zip(found, want):
        torch.testing.assert_close(x.double(), y, atol=2e-2 * y.abs().max().item(), rtol=0)


def test_a_graph_replays_with_growing_lengths():
    torch.manual_seed(0)
    q, cache = torch.randn(2, 8, 1, 64, device="cuda").half(), torch.randn(2, 2, 2, 700, 64, device="cuda").half()
    length = torch.ones(2, dtype=torch.int32, device="cuda")
    window = lambda b, h, i, j: (i >= j) & (i - j < 90)  # noqa: E731
    call = lambda: flex_attention(  # noqa: E731
        q, *cache, mask_mod=window, q_offset=length - 1, kv_len=length, enable_gqa=True
    )
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for now in (1, 90, 333, 700):
        length.fill_(now)
        graph.replay()
        seen = slice(max(0, now - 90), now)
        want = flex_attention(q, *(x[:, :, seen] for x in cache), enable_gqa=True)
        torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-2)


def test_a_block_mask_has_generic_kernels():
    q, k = torch.randn(1, 2, 1, 64, device="cuda").half(), torch.randn(1, 2, 512, 64, device="cuda").half()
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cuda")
    offset = torch.tensor([511], dtype=torch.int32, device="cuda")
    plan = explain(flex_attention, q, k, k, block_mask=mask, q_offset=offset)
    assert plan.kernel.startswith("attn_fwd_any")
    assert any("block mask" in reason for kernel, reason in plan.ruled_out if kernel.startswith("attn_decode"))
