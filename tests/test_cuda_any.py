"""The generic kernels on a GPU: every case of the CPU kernels, the same oracle, the same tolerances."""

import dataclasses

import flash_attn_2_cuda
import harness_kvcache
import pytest
import torch
from cases import BOTH, DENSE, PACKED, SQUARE, TILES, TINY, VALUES, WINDOWS, Case, each, in_dtypes, in_turns
from harness import join
from harness_cuda import no_gpu, run, skip_without_memory, verify
from oracle import dropout_keep

from flash_attn import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import (
    _flash_attn_forward,
)

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")


@pytest.fixture(autouse=True)
def generic_kernels():
    flash_attn_2_cuda.set_cuda_kernels("any")
    yield
    flash_attn_2_cuda.set_cuda_kernels(None)


# ---- the cases of the CPU kernels ------------------------------------------------------------------------------------

FORWARD = in_dtypes(DENSE + PACKED) + in_turns(TILES + WINDOWS)
CALM = [case for case in DENSE + PACKED if case.values != "huge"]
BACKWARD = in_dtypes(CALM) + in_turns(TILES + WINDOWS)


@pytest.mark.parametrize("case", FORWARD, ids=repr)
def test_forward(case):
    verify(case)


@pytest.mark.parametrize("case", BACKWARD, ids=repr)
def test_backward(case):
    verify(case, backward=True)


@pytest.mark.parametrize("case", in_dtypes(TINY), ids=repr)
def test_short_and_large(case):
    verify(case, backward=True, m_grad=5.0, a_grad=2e-4 if case.dtype == "fp32" else None)


@pytest.mark.parametrize("case", in_dtypes(SQUARE, ("bf16", "fp16")), ids=repr)
def test_short_and_large_by_upstreams_rule(case):
    verify(case, backward=True, m_grad=5.0, a_grad=1e-3)


@pytest.mark.parametrize("case", in_dtypes([case for case in VALUES if case.values == "huge"]), ids=repr)
def test_huge_scores_give_finite_gradients(case):
    verify(case, backward=True, m_grad=5.0)


MANY_TILES = each(Case(300, 517, b=1, h=3, h_kv=1), d=(64, 128, 256), dtype=("fp16", "bf16", "fp32"), causal=BOTH)


@pytest.mark.parametrize("case", MANY_TILES, ids=repr)
def test_many_tiles(case):
    verify(case, backward=True)


@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("case", harness_kvcache.CASES, ids=repr)
def test_cache(case, dtype):
    harness_kvcache.run(dataclasses.replace(case, dtype=dtype), "cuda")


# ---- what a GPU adds -------------------------------------------------------------------------------------------------


def test_explain_names_the_kernel_and_says_why():
    q = torch.randn(1, 70, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plan = explain(flash_attn_func, q, q, q)
    assert plan.kernel == "attn_fwd_any_bf16_d64_q128kv64" and plan.backward.kernel.startswith("attn_bwd_any_")
    reasons = dict(plan.ruled_out)
    assert reasons.get("attn_fwd_sm90") == "FLASH_ATTN_CUDA_KERNEL rules it out"


@pytest.mark.parametrize("causal", BOTH)
def test_rows_that_belong_to_nobody(causal):
    """Rows behind the last sequence are zero, with an lse of -inf. Rows without keys are zero, with an lse of +inf."""
    q = torch.full((70, 2, 40), float("nan"), device="cuda")
    k = torch.randn(90, 2, 40, device="cuda")
    q[:50] = torch.randn(50, 2, 40)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 20, 30, 50], [0, 40, 40, 80]))
    out, lse, _ = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 20, 40, causal=causal, return_attn_probs=True)
    assert not out[50:].any() and (lse[:, 50:] == -torch.inf).all()
    assert not out[20:30].any() and (lse[:, 20:30] == torch.inf).all()
    assert out[:20].isfinite().all() and out[30:50].isfinite().all() and out[:20].any()


@pytest.mark.parametrize("case", in_turns([case for case in VALUES + PACKED if case.values != "huge"]), ids=repr)
def test_repeats_are_bitwise_equal(case):
    if case.dropout:
        pytest.skip("every call draws anew")
    first = run(case, True)[0]
    for _ in range(20):
        again = run(case, True)[0]
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(join(getattr(first, name)), join(getattr(again, name)))


@pytest.mark.parametrize("dropout_p", (0.17, 0.9))
@pytest.mark.parametrize("len_q, len_kv, d", [(1, 1, 16), (15, 33, 100), (129, 200, 128), (200, 129, 250)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_s_dmask(len_q, len_kv, d, dropout_p, dtype):
    """Signs are the mask, bit for bit. Magnitudes are exp(s - row max), and all other values are zero."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, h, d).to("cuda", dtype) for n, h in ((len_q, 4), (len_kv, 2), (len_kv, 2)))
    scale = d**-0.5
    _, _, s_dmask, rng = _flash_attn_forward(q, k, v, dropout_p, scale, False, -1, -1, 0.0, None, True)
    seed, offset = (int(x) for x in rng.tolist())
    s_dmask, whole = s_dmask[:, :, :len_q, :len_kv].cpu(), s_dmask
    assert whole.count_nonzero() <= s_dmask.numel()
    for n in range(2):
        keep = dropout_keep(seed, offset, n, 4, len_q, len_kv, dropout_p)
        assert torch.equal(~torch.signbit(s_dmask[n]), keep)
        kd = k[n].double().repeat_interleave(2, dim=1)
        s = scale * torch.einsum("ihd,jhd->hij", q[n].double(), kd)
        want = (s - s.amax(-1, keepdim=True)).exp().cpu()
        torch.testing.assert_close(
            s_dmask[n].abs().double(), want, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-3
        )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_masked_keys_may_hold_nan(dtype):
    """A key reaches only the rows that see the key, forward and backward."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 150, 2, 40).to("cuda", dtype) for _ in range(4))
    results = []
    for bad in (0.0, float("nan"), float("inf")):
        k[:, 100], v[:, 100] = bad, bad
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, causal=True)
        results.append((out.detach()[:, :100], torch.autograd.grad(out, leaves[0], dout)[0][:, :100]))
        if bad != 0:
            assert out[:, 100:].isnan().all()
    for out, dq in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(dq, results[0][1], rtol=2e-2, atol=2e-2)


def test_bad_indices_stay_inside_the_tensors():
    """Index tensors may hold any values. Memory outside the tensors is neither read nor written."""
    q, k, v = (torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for bad in ([0, 1000, -5, 2**31 - 1], [-(2**31), 50, 40, 7], [99, 100, 2**30, 0]):
        cu = torch.tensor(bad, dtype=torch.int32, device="cuda")
        flash_attn_varlen_func(q, k, v, cu, cu, 100, 100, causal=True).sum().backward()
    q, k_new = torch.randn(3, 2, 4, 64, device="cuda"), torch.randn(3, 2, 2, 64, device="cuda")
    cos = torch.randn(64, 16, device="cuda")
    cache = torch.randn(2, 4, 16, 2, 64, device="cuda")
    for n in (-(2**31), -1, 63, 64, 2**31 - 1):
        ints = torch.full((3,), n, dtype=torch.int32, device="cuda")
        table = torch.full((3, 4), n, dtype=torch.int32, device="cuda")
        options = {"cache_seqlens": ints, "cache_leftpad": ints, "causal": True}
        flash_attn_with_kvcache(q, *cache, k_new, k_new, cos, cos, block_table=table, **options)
        flash_attn_with_kvcache(q, *cache, k_new, k_new, cache_batch_idx=ints, **options)
    torch.cuda.synchronize()


def test_graph_replay_of_a_growing_cache():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    k_cache, v_cache = torch.randn(2, 2, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor([5, 9], dtype=torch.int32, device="cuda")

    def call(*caches):
        return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=used, causal=True)

    call(k_cache.clone(), v_cache.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(k_cache, v_cache)
    for lengths in ([5, 9], [6, 10], [0, 63], [30, 1]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        k.normal_()
        want = call(k_cache.clone(), v_cache.clone())
        graph.replay()
        assert torch.equal(out, want)


def test_beyond_2_to_the_31_elements():
    """The last sequence of a batch whose tensors have more than 2^31 elements."""
    skip_without_memory(30)
    b, n, h, d = 17, 8192, 128, 128
    q = torch.empty(b, n, h, d, device="cuda", dtype=torch.bfloat16)
    q[-1].normal_()
    out = flash_attn_func(q, q[:, :64], q[:, :64])
    alone = flash_attn_func(q[-1:], q[-1:, :64], q[-1:, :64])
    assert torch.equal(out[-1:], alone)
