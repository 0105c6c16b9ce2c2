"""PyTorch's scaled_dot_product_attention and varlen_attn on the kernels of this package, on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from harness_cuda import no_gpu
from torch.nn import attention as torchs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flash_attn
from flash_attn import explain, flash_attn_varlen_func

pytestmark = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu() or "a GPU is here")

SDPA = F.scaled_dot_product_attention


def inputs(b, h, h_kv, len_q, len_kv, d, dtype=torch.bfloat16):
    torch.manual_seed(0)
    k, v = torch.randn(2, b, h_kv, len_kv, d, device="cuda", dtype=dtype)
    return torch.randn(b, h, len_q, d, device="cuda", dtype=dtype), k, v


def all_results(q, k, v, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = SDPA(*leaves, **options)
    torch.manual_seed(1)
    return out, *torch.autograd.grad(out, leaves, torch.randn_like(out))


def exact(q, k, v, **options):
    torch.backends.cuda.matmul.allow_tf32 = False
    with sdpa_kernel(SDPBackend.MATH):
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        out = SDPA(*leaves, **options)
        torch.manual_seed(1)
        return out, *torch.autograd.grad(out, leaves, torch.randn_like(out, dtype=q.dtype).float())


SHAPES = [(2, 4, 4, 100, 100, 64), (1, 8, 2, 300, 300, 128), (1, 4, 4, 70, 513, 40), (2, 2, 2, 128, 256, 256)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, is_causal):
    q, k, v = inputs(*shape, dtype)
    options = {"is_causal": is_causal and shape[3] == shape[4], "enable_gqa": shape[1] != shape[2]}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch_s = all_results(q, k, v, **options)
    with flash_attn.sdpa():
        plan = explain(SDPA, q.detach().requires_grad_(), k, v, **options)
        assert plan.kernel.startswith("attn_") and plan.backward.kernel.startswith("attn_"), plan
        ours = all_results(q, k, v, **options)
    for mine, theirs, true in zip(ours, torch_s, exact(q, k, v, **options)):
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max() + 1e-5
        assert mine.stride() == theirs.stride() and mine.dtype == theirs.dtype


def test_profiler_sees_our_kernel():
    q, k, v = inputs(1, 2, 2, 256, 256, 64)
    with flash_attn.sdpa(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        SDPA(q, k, v)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("attn_fwd" in name for name in names) and not any("cudnn" in name for name in names), names


def test_priority_comes_back():
    q, k, v = inputs(1, 2, 2, 256, 256, 64)
    before = torch._fused_sdp_choice(q, k, v), torch._C._get_sdp_priority_order()
    with flash_attn.sdpa():
        assert torch._fused_sdp_choice(q, k, v) == int(SDPBackend.FLASH_ATTENTION.value)
        with flash_attn.sdpa(before_cudnn=False):
            assert (torch._fused_sdp_choice(q, k, v), torch._C._get_sdp_priority_order()) == before
        assert torch._fused_sdp_choice(q, k, v) == int(SDPBackend.FLASH_ATTENTION.value)
    assert (torch._fused_sdp_choice(q, k, v), torch._C._get_sdp_priority_order()) == before
    with flash_attn.sdpa(before_cudnn=False):
        assert torch._fused_sdp_choice(q, k, v) == before[0]
    assert torchs.current_flash_attention_impl() is None


def test_dropout():
    """The backward drops what the forward dropped: the sums of dv are those of the kept probabilities."""
    q, k, v = inputs(1, 2, 2, 256, 256, 64)
    v = torch.ones_like(v).requires_grad_()
    with flash_attn.sdpa():
        torch.manual_seed(3)
        out = SDPA(q, k, v, dropout_p=0.3)
        torch.manual_seed(3)
        assert torch.equal(out, SDPA(q, k, v, dropout_p=0.3))
        out.backward(torch.ones_like(out))
    kept, sums = out[..., 0].float(), v.grad[..., 0].float()
    assert abs(kept.mean().item() - 1) < 0.05 and kept.std() > 0.01
    assert torch.allclose(kept.sum(-1), sums.sum(-1), rtol=1e-2)


def test_mask_goes_to_torch():
    q, k, v = inputs(1, 2, 2, 64, 64, 64)
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda").tril()
    with flash_attn.sdpa():
        plan = explain(SDPA, q, k, v, attn_mask=mask)
        assert "because there is attn_mask" in plan.refusal, plan
        out = SDPA(q, k, v, attn_mask=mask)
    assert torch.allclose(out.float(), exact(q, k, v, attn_mask=mask)[0], atol=3e-2)


def test_debug_mask_is_refused():
    """torch's own kernel would call the op that is ours."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    with flash_attn.sdpa(), pytest.raises(RuntimeError, match="return_debug_mask must be false|printed why"):
        op(*inputs(1, 2, 2, 128, 128, 64), 0.2, True, True)


def test_compile_and_graph():
    q, k, v = (x.requires_grad_() for x in inputs(2, 4, 4, 128, 128, 64))
    compiled = torch.compile(lambda q, k, v: SDPA(q, k, v, is_causal=True) * 2, fullgraph=True)
    with flash_attn.sdpa():
        got, want = compiled(q, k, v), SDPA(q, k, v, is_causal=True) * 2
        grads = [torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (got, want)]
        assert torch.equal(got, want)
        assert all(torch.allclose(x, y, atol=1e-2) for x, y in zip(*grads))
        graph, q, k, v = torch.cuda.CUDAGraph(), q.detach(), k.detach(), v.detach()
        want = SDPA(q, k, v)
        with torch.cuda.graph(graph):
            out = SDPA(q, k, v)
        graph.replay()
        assert torch.equal(out, want)


def test_nested_tensors():
    lengths = (30, 100, 7)
    parts = [[torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in lengths] for _ in range(3)]
    with flash_attn.sdpa():
        q, k, v = (torch.nested.nested_tensor(part, layout=torch.jagged).transpose(1, 2) for part in parts)
        out = SDPA(q, k, v).transpose(1, 2).values()
        flat = [torch.cat(part) for part in parts]
    cu = torch.tensor([0, 30, 130, 137], dtype=torch.int32, device="cuda")
    assert torch.allclose(out, flash_attn_varlen_func(*flat, cu, cu, 100, 100), atol=1e-2)


def test_varlen_attn():
    cu = torch.tensor([0, 30, 130, 137], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    q, k, v = (torch.randn(137, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    theirs = varlen_attn(q, k, v, cu, cu, 100, 100)
    with flash_attn.sdpa():
        out = varlen_attn(q, k, v, cu, cu, 100, 100)
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    want = flash_attn_varlen_func(q, k, v, cu, cu, 100, 100)
    assert torch.equal(out, want) and torch.allclose(out, theirs, atol=2e-2)
    wanted = torch.autograd.grad(want.float().square().sum(), (q, k, v))
    assert all(torch.allclose(x, y, atol=2e-2) for x, y in zip(grads, wanted))
