"""explain() plans a given call, describes the plan in words, and changes nothing."""

import os
import threading

import flash_attn_2_cuda
import fresh_python
import pytest
import torch
from harness import randn
from torch._subclasses import FakeTensorMode

from flash_attn import (
    explain,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_attention,
)
from flash_attn.explain import Plan
from flash_attn.flash_attn_interface import _flash_attn_forward
from flash_attn.flex_attention import flex_attention
from flash_attn.modules.mha import MHA


def test_forward_only(isa):
    q = randn(1, 70, 2, 64).bfloat16()  # every instruction set has kernels for bf16
    plan = explain(flash_attn_func, q, q, q, causal=True)
    assert plan.direction == "forward" and plan.device == "cpu" and plan.backward is None and not plan.refusal
    assert plan.isa == isa and isa in plan.kernel
    assert 1 <= plan.threads <= torch.get_num_threads()
    for kernel, reason in plan.ruled_out:
        assert kernel and reason


def test_both_passes(isa):
    qkv = randn(1, 70, 3, 2, 64).bfloat16().requires_grad_()
    plan = explain(flash_attn_qkvpacked_func, qkv, 0.1, return_attn_probs=True)
    assert plan.backward.direction == "backward" and "bwd" in plan.backward.kernel and "fwd" in plan.kernel
    assert plan.isa == plan.backward.isa == isa
    with torch.no_grad():
        assert explain(flash_attn_qkvpacked_func, qkv).backward is None


def test_programmable_attention():
    q = randn(1, 2, 70, 16).requires_grad_()
    plan = explain(flex_attention, q, q, q, lambda score, b, h, i, j: score * 2.0 + i)
    assert plan.kernel.endswith("_flex") and plan.backward.kernel.endswith("_flex")
    plan = explain(flex_attention, q, q, q, mask_mod=lambda b, h, i, j: i >= j)
    assert "flex" not in plan.kernel + plan.backward.kernel


def test_an_intermediate_result_keeps_its_graph():
    x = randn(1, 5, 3, 2, 16).requires_grad_()
    qkv = x.sin()
    assert explain(flash_attn_qkvpacked_func, qkv).backward is not None
    assert x.grad is None
    flash_attn_qkvpacked_func(qkv).sum().backward()  # the graph is still alive
    assert x.grad is not None


def test_private_functions_and_varlen():
    q = randn(1, 5, 2, 16).requires_grad_()
    plan = explain(_flash_attn_forward, q, q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    assert plan.backward is not None
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert explain(flash_attn_varlen_func, q[0], q[0], q[0], cu, cu, 3, 3).backward is not None


def test_print():
    q = randn(1, 5, 2, 16).requires_grad_()
    plan = explain(flash_attn_func, q, q, q)
    lines = str(plan).splitlines()
    assert lines[0] == f"forward on cpu: {plan.kernel}"
    assert f"    tile             {plan.block_q} rows x {plan.block_kv} keys, 1 tile a task" in lines
    assert f"    workspace        {plan.workspace_bytes:,} bytes" in lines
    assert f"backward on cpu: {plan.backward.kernel}" in lines
    assert str(Plan("forward", "cpu", "name", ruled_out=[("other", "too old")])).endswith("other: too old")
    decode = str(Plan("forward", "cuda:0", "name", lanes=8, groups=16, has_low_launch=True))
    assert "    CTAs             16 groups of 8\n    launches         2, the first" in decode
    assert "CTAs  " not in str(Plan("forward", "cuda:0", "name", lanes=8, groups=16, cluster=4))
    backward = str(Plan("backward", "cuda:0", "name", short_rows=64))
    assert "    launches         attn_bwd_short before it, for sequences of up to 64 tokens\n" in backward
    forward = str(Plan("forward", "cuda:0", "name", group_heads=32, is_dynamic=True))
    assert "    walked together  32 heads\n    work tiles       from a counter" in forward
    over_a_cache = str(Plan("forward", "cuda:0", "name", group_heads=32, tile_heads=4))
    assert "    walked together  32 heads\n    in a work tile   4 heads" in over_a_cache
    assert "in a work tile" not in str(Plan("forward", "cuda:0", "name", tile_heads=1))
    in_any_order = "    dq               added in any order"
    assert str(Plan("backward", "cuda:0", "name", any_order=True)).endswith(in_any_order)
    assert in_any_order not in str(Plan("backward", "cuda:0", "name"))


def test_nothing_is_written():
    q, k, v = randn(1, 1, 2, 16), randn(1, 1, 2, 16), randn(1, 1, 2, 16)
    k_cache, v_cache = randn(2, 1, 8, 2, 16)
    before = k_cache.clone(), v_cache.clone(), torch.get_rng_state()
    explain(flash_attn_with_kvcache, q, k_cache, v_cache, k, v, cache_seqlens=3)
    explain(flash_attn_func, q, q, q, 0.5)
    assert all(map(torch.equal, before, (k_cache, v_cache, torch.get_rng_state())))


def test_calls_run_again_afterwards():
    q = randn(1, 5, 2, 16)
    want = flash_attn_func(q, q, q)
    explain(flash_attn_func, q, q, q)
    assert torch.equal(flash_attn_func(q, q, q), want)
    with pytest.raises(RuntimeError, match="q must have 4 dimensions"):
        explain(flash_attn_func, q[0], q, q)
    assert torch.equal(flash_attn_func(q, q, q), want)
    assert flash_attn_2_cuda.take_plans() == []


def test_other_threads_run_meanwhile():
    q = randn(1, 5, 2, 16)
    want = flash_attn_func(q, q, q)
    got = []

    def call(*args):
        thread = threading.Thread(target=lambda: got.append(flash_attn_func(q, q, q)))
        thread.start()
        thread.join()
        return flash_attn_func(*args)

    assert explain(call, q, q, q).kernel
    assert torch.equal(got[0], want)


def test_gradients_of_torch_func_are_not_planned():
    q = torch.randn(1, 5, 2, 16)
    with pytest.raises(TypeError, match="^explain plans no grad, vjp or jacrev of torch.func: pass the function"):
        explain(torch.func.grad(lambda q: flash_attn_func(q, q, q).sum()), q)
    plan = explain(torch.vmap(lambda q: flash_attn_func(q, q, q)), q[None])
    assert plan.direction == "forward"


def test_attention_without_memory_is_none():
    q = torch.empty(1, 5, 2, 16, device="meta")
    with pytest.raises(TypeError, match="plans no attention .that of tensors that are fake or on device meta does not"):
        explain(lambda: flash_attn_func(q, q, q))


def test_what_plans_nothing():
    with pytest.raises(TypeError, match="explain: 'sin' plans no attention"):
        explain(torch.sin, torch.zeros(2))
    with pytest.raises(TypeError, match="counts after flash_attn.register"):
        explain(torch.nn.functional.scaled_dot_product_attention, *torch.ones(3, 1, 1, 4, 8))
    with pytest.raises(TypeError, match="explain takes the function and its arguments"):
        explain(torch.ones(3))


def test_a_device_that_cannot_run_the_call():
    def refuse(q):
        raise RuntimeError("flash_attn has no kernels for this device")

    with FakeTensorMode():
        q = torch.empty(1, device="cuda")
    plan = explain(refuse, q)
    assert plan.device == "cuda:0" and plan.kernel == "" and plan.backward is None
    assert str(plan) == "forward on cuda:0: flash_attn has no kernels for this device"


# ---- anything that calls attention ---------------------------------------------------------------------------------


def test_lambdas_and_modules():
    x = randn(1, 9, 64).requires_grad_()
    mha = MHA(64, 4, causal=True, use_flash_attn=True)
    for function in (mha, lambda x: mha(x).relu().sum(), torch.nn.Sequential(mha, torch.nn.Linear(64, 1))):
        plan = explain(function, x)
        assert isinstance(plan, Plan) and "fwd" in plan.kernel and "bwd" in plan.backward.kernel
    assert x.grad is None and all(p.grad is None for p in mha.parameters())
    with torch.no_grad():
        assert explain(mha, x).backward is None


def test_several_attentions():
    q, other = randn(1, 9, 2, 16).requires_grad_(), randn(1, 9, 2, 32)
    cache = randn(1, 8, 2, 16)

    def function(q):
        first = flash_attn_func(q, q, q) + 1
        second = flash_attn_func(other, other, other)  # needs no gradient
        third = flash_attn_func(first, first, first, 0.1, attn_bias=None, causal=True)
        fourth = flash_attn_with_kvcache(q.detach()[:, :1], cache, cache)
        fifth = flash_attn_func(third, third, third, attn_bias=torch.zeros(9, 9))
        return {"sums": [fifth.sum(), second.sum(), fourth.sum()]}

    plans = explain(function, q)
    assert len(plans) == 5
    assert [plan.backward is not None for plan in plans] == [True, False, True, False, True]
    assert "_d32_" in plans[1].kernel and plans[4].kernel.endswith("_flex") == plans[4].backward.kernel.endswith(
        "_flex"
    )
    many = explain(lambda q: [flash_attn_func(q, q, q) for _ in range(40)], q)
    assert len(many) == 40 and all("bwd" in plan.backward.kernel for plan in many)


def test_tensors_without_memory():
    q = torch.empty(1, 5, 2, 16, device="meta")
    with pytest.raises(TypeError, match=r"a tensor of shape \(1, 5, 2, 16\) is on device meta .*prebuild_call"):
        explain(flash_attn_func, q, q, q)
    with FakeTensorMode():
        q = torch.empty(1, 5, 2, 16)
    with pytest.raises(TypeError, match=r"a tensor of shape \(1, 5, 2, 16\) is a fake tensor"):
        explain(flash_attn_func, q, q, q)
    module = torch.nn.Linear(3, 3, device="meta")
    with pytest.raises(TypeError, match="is on device meta"):
        explain(module, torch.ones(3))


def run_with_log(value, code):
    code = "import torch; from flash_attn import explain, flash_attn_func as f; q = torch.ones(1, 5, 2, 16);" + code
    return fresh_python.python(code, env={**os.environ, "FLASH_ATTN_LOG": value})


def test_it_does_not_log_itself():
    done = run_with_log("plan", "print(explain(f, q, q, q))")
    assert done.returncode == 0 and "forward on cpu" in done.stdout and "flash_attn:" not in done.stderr
    assert run_with_log("plan", "f(q, q, q)").stderr.count("flash_attn:") == 1


def test_a_wrong_log_says_so():
    done = run_with_log("plans", "")
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: FLASH_ATTN_LOG is 'plans'; allowed are plan, and 0 or nothing"
    )
    for value in ("", "0"):
        assert run_with_log(value, "f(q, q, q)").stderr == ""


def test_a_function_that_runs_a_backward_is_refused():
    """Its gradients would be those of results that mean nothing."""
    q, weight = torch.randn(1, 5, 2, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    with pytest.raises(TypeError, match="explain plans the backward itself"):
        explain(lambda: (flash_attn_func(q, q, q) * weight).sum().backward())
    assert q.grad is None and weight.grad is None
    flash_attn_func(q, q, q).sum().backward()
    assert q.grad is not None


def test_merged_parts_have_plans():
    """merge_attention is no attention, and its node no node of one."""
    q = randn(1, 9, 2, 16).requires_grad_()

    def merged(q):
        parts = [flash_attn_func(q, q[:, part], q[:, part], return_lse=True) for part in (slice(0, 4), slice(4, 9))]
        return merge_attention(*zip(*parts))

    assert [plan.backward.direction for plan in explain(merged, q)] == ["backward"] * 2


def test_a_function_that_explains_is_refused():
    """The inner call would let attention run in the outer one, and write the cache."""
    q, cache = randn(1, 1, 2, 16), torch.zeros(1, 8, 2, 16)

    def step(q):
        explain(flash_attn_func, q, q, q)
        return flash_attn_with_kvcache(q, cache, cache.clone(), q, q, cache_seqlens=3)

    with pytest.raises(TypeError, match="explain is at work already"):
        explain(step, q)
    assert not cache.any() and explain(flash_attn_func, q, q, q).kernel
