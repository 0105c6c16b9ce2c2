"""The forward and the backward with the instructions of Ampere, on any GPU: the cases of the CPU kernels, the same
oracle, the same tolerances. The generic kernels take the cases that they do not take."""

import random
from dataclasses import replace

import flash_attn_2_cuda
import pytest
import torch
from cases import BOTH, DENSE, PACKED, SQUARE, TILES, TINY, VALUES, WINDOWS, Case, each, in_dtypes, in_turns
from harness_cuda import HALF, no_gpu, verify
from harness_kvcache import random_prompt, run

from flash_attn import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_backward

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")


@pytest.fixture(autouse=True)
def kernels_before_hopper():
    flash_attn_2_cuda.set_cuda_kernels("any,sm80")
    yield
    flash_attn_2_cuda.set_cuda_kernels(None)


CALM = [case for case in DENSE + PACKED if case.values != "huge"]
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)  # columns that tiles multiply
MANY_TILES = each(Case(300, 517, b=1, h=3, h_kv=1), d=WIDTHS, dtype=HALF, causal=BOTH)


@pytest.mark.parametrize("case", in_dtypes(DENSE + PACKED, HALF) + in_turns(TILES + WINDOWS, HALF), ids=repr)
def test_forward(case):
    verify(case)


@pytest.mark.parametrize("case", in_dtypes(CALM, HALF) + in_turns(TILES + WINDOWS) + MANY_TILES, ids=repr)
def test_backward(case):
    verify(case, backward=True)


@pytest.mark.parametrize("case", in_dtypes(TINY, HALF), ids=repr)
def test_short_and_large(case):
    verify(case, backward=True, m_grad=5.0)


@pytest.mark.parametrize("case", in_dtypes(SQUARE, HALF), ids=repr)
def test_short_and_large_by_upstreams_rule(case):
    verify(case, backward=True, m_grad=5.0, a_grad=1e-3)


@pytest.mark.parametrize("case", in_dtypes([case for case in VALUES if case.values == "huge"], HALF), ids=repr)
def test_huge_scores_give_finite_gradients(case):
    verify(case, backward=True, m_grad=5.0)


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("d", (8, 40, 72, 104, *WIDTHS))
def test_the_kernel_takes_plain_calls(d):
    q = randn(1, 70, 2, d)
    plan = explain(flash_attn_func, q, q, q)
    assert plan.kernel.startswith("attn_fwd_sm80_bf16_d") and plan.backward.kernel.startswith("attn_bwd_sm80_bf16_d")


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("packed", BOTH)
def test_repeats_of_a_fixed_order_are_bitwise_equal(d, causal, packed):
    """dk and dv repeat without a fixed order, too. Several key tiles add to each row of dq."""
    torch.manual_seed(0)
    if packed:
        cu = torch.tensor([0, 700, 700, 1000, 2300], dtype=torch.int32, device="cuda")
        leaves = [randn(2300, h, d) for h in (4, 2, 2)]
        outs = [
            flash_attn_varlen_func(*leaves, cu, cu, 1300, 1300, causal=causal, deterministic=fixed) for fixed in BOTH
        ]
    else:
        leaves = [randn(2, n, h, d) for n, h in ((1300, 4), (1500, 2), (1500, 2))]
        outs = [flash_attn_func(*leaves, causal=causal, deterministic=fixed) for fixed in BOTH]
    dout = torch.randn_like(outs[0])
    for out, fixed in zip(outs, BOTH, strict=True):
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
            assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
            assert not fixed or torch.equal(first[0], again[0])
    flash_attn_2_cuda.set_cuda_kernels("any")
    for mine, generic in zip(first, torch.autograd.grad(outs[0], leaves, dout), strict=True):
        torch.testing.assert_close(mine, generic, rtol=0, atol=0.01 * generic.abs().max().item())


@pytest.mark.parametrize("d", WIDTHS)
def test_heads_that_are_walked_together_do_not_change_results(d):
    """With a causal mask so many heads are several groups. A sequence alone has one, and packed heads have others."""
    torch.manual_seed(0)
    b, length = 18, 300
    leaves = [randn(b, length, h, d) for h in (32, 16, 16)]
    dout = torch.randn(b, length, 32, d, device="cuda", dtype=torch.bfloat16)
    plan = explain(flash_attn_func, *leaves, causal=True)
    if torch.cuda.get_device_properties().multi_processor_count == 132:
        assert 1 < plan.group_heads <= 576 // 4 and 1 < plan.backward.group_heads <= 288 // 2
    out = flash_attn_func(*leaves, causal=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    for i in (0, 7, b - 1):
        alone = [x[i : i + 1].detach().requires_grad_() for x in leaves]
        own = flash_attn_func(*alone, causal=True)
        assert torch.equal(own[0], out[i])
        own_gradients = torch.autograd.grad(own, alone, dout[i : i + 1])
        assert torch.equal(own_gradients[1][0], gradients[1][i]) and torch.equal(own_gradients[2][0], gradients[2][i])
        torch.testing.assert_close(own_gradients[0][0], gradients[0][i], rtol=0.02, atol=1e-3)
    cu = torch.arange(0, b * length + 1, length, dtype=torch.int32, device="cuda")
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in leaves]
    packed = flash_attn_varlen_func(*flat, cu, cu, length, length, causal=True)
    assert torch.equal(packed.view_as(out), out)
    packed_gradients = torch.autograd.grad(packed, flat, dout.flatten(0, 1))
    assert all(torch.equal(x.view_as(y), y) for x, y in zip(packed_gradients[1:], gradients[1:], strict=True))


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("causal", BOTH)
def test_scores_that_rise_or_are_huge(d, causal):
    """Each key has a larger score than the keys after it, by more than the maximum may lag behind. In the second half
    of the rows scores are so large that products are not fused."""
    q = torch.ones(1, 600, 2, d, device="cuda", dtype=torch.bfloat16)
    q[:, 300:] *= 2.0**20
    k = torch.linspace(4, 1, 600, device="cuda", dtype=torch.bfloat16)[None, :, None, None].expand(1, 600, 2, d)
    v = torch.randn(1, 600, 2, d, device="cuda", dtype=torch.bfloat16)
    found = flash_attn_func(q, k.contiguous(), v, causal=causal, softmax_scale=1.0, return_attn_probs=True)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    if causal:
        scores += torch.full((600, 600), -torch.inf, device="cuda").triu(1)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double())
    torch.testing.assert_close(found[0].double(), out, rtol=0.01, atol=0.01)
    torch.testing.assert_close(found[1].double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("causal", BOTH)
def test_nan_in_v_stays_where_it_is_seen(d, causal):
    """The last keys of v hold NaN and infinities. Rows that do not see these keys keep their output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 333, h, d, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    options = {"causal": True} if causal else {"window_size": (70, 20)}
    before = flash_attn_func(q, k, v, **options)
    v[:, 300:] = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cuda").repeat(11)[None, :, None, None]
    after = flash_attn_func(q, k, v, **options)
    end = 300 if causal else 280
    torch.testing.assert_close(after[:, :end], before[:, :end], rtol=0.01, atol=0.01)
    assert not after[:, end:].isfinite().any()


@pytest.mark.parametrize("causal", BOTH)
def test_rows_that_belong_to_nobody(causal):
    """Rows behind the last sequence are zero, with an lse of -inf. Rows without keys are zero, with an lse of +inf."""
    q = torch.full((70, 2, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    k = torch.randn(90, 2, 64, device="cuda", dtype=torch.bfloat16)
    q[:50] = torch.randn(50, 2, 64)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 20, 30, 50], [0, 40, 40, 80]))
    out, lse, _ = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 20, 40, causal=causal, return_attn_probs=True)
    assert not out[50:].any() and (lse[:, 50:] == -torch.inf).all()
    assert not out[20:30].any() and (lse[:, 20:30] == torch.inf).all()
    assert out[:20].isfinite().all() and out[30:50].isfinite().all() and out[:20].any()


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("what", ("keys", "rows"))
def test_nan_stays_where_it_is_seen(d, what):
    """The last key, or the first row, holds NaN. With a causal mask the others have the gradients of a call without."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 200, h, d, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))
    clean = [x.clone() for x in (q, k, v)]
    out, lse, _ = flash_attn_func(*clean, causal=True, return_attn_probs=True)
    spoiled, reached = ((k, v), slice(199, 200)) if what == "keys" else ((q, dout), slice(0, 1))
    grads = []
    for _ in range(2):
        found = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *found, 0.0, d**-0.5, True, -1, 0, 0.0, None, True)
        grads.append(found)
        for x in spoiled:
            x[:, reached] = torch.nan
    others = slice(0, 199) if what == "keys" else slice(1, 200)
    assert all(grad[:, reached].isnan().any() for grad in grads[1])
    for before, after in zip(*grads, strict=True):
        torch.testing.assert_close(after[:, others], before[:, others], rtol=0.02, atol=0.02)


@pytest.fixture
def only_the_forward():
    flash_attn_2_cuda.set_cuda_kernels("any,fwd_sm80")


@pytest.mark.usefixtures("only_the_forward")
@pytest.mark.parametrize("seed", range(100))
def test_random_prompts_over_caches(seed):
    """Tiles of all widths, also with few queries."""
    r = random.Random(seed)
    case = replace(random_prompt(seed), d=r.choice((*WIDTHS, 72)))
    run(replace(case, len_q=r.choice((1, 5, 33))) if case.len_new == 0 and seed % 4 == 0 else case, "cuda")


@pytest.mark.usefixtures("only_the_forward")
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("page", (1, 7, 16, 64, 300))
def test_pages_give_the_bits_of_a_cache_without(d, page):
    """So do rows of a cache in another order. Unused entries of the table name no page, and unused keys are NaN."""
    torch.manual_seed(0)
    b, capacity, used = 3, 600 // page * page, [333, 0, 600 // page * page]
    q = torch.randn(b, 140, 4, d, device="cuda", dtype=torch.bfloat16)
    dense = [torch.full((b, capacity, 2, d), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    pages = [torch.full((b * capacity // page, page, 2, d), float("nan"), device="cuda").bfloat16() for _ in range(2)]
    table = torch.randperm(len(pages[0]), device="cuda").view(b, -1).to(torch.int32)
    for x, y in zip(dense, pages, strict=True):
        for i, n in enumerate(used):
            x[i, :n] = torch.randn(n, 2, d)
        y[table.flatten().long()] = x.view(-1, page, 2, d)
    for i, n in enumerate(used):
        table[i, -(-n // page) :] = 10**9
    lengths = torch.tensor(used, dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    assert "_cache" in explain(flash_attn_with_kvcache, q, *pages, block_table=table, **options).kernel
    of_pages = flash_attn_with_kvcache(q, *pages, block_table=table, **options)
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device="cuda")
    moved = [torch.empty_like(x).index_copy_(0, rows.long(), x) for x in dense]
    of_rows = flash_attn_with_kvcache(q, *moved, cache_batch_idx=rows, **options)
    assert of_pages[0].isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip(of_pages, of_rows, strict=True))
