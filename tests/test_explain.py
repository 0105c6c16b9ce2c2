"""explain() plans a given call, describes the plan in words, and changes nothing."""

import threading

import flash_attn_2_cuda
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
)
from flash_attn.explain import Plan
from flash_attn.flash_attn_interface import _flash_attn_forward
from flash_attn.flex_attention import flex_attention


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
    assert (
        f"    tile             {plan.block_q} rows x {plan.block_kv} keys, {plan.tiles_per_task} tiles a task" in lines
    )
    assert f"    workspace        {plan.workspace_bytes:,} bytes" in lines
    assert f"backward on cpu: {plan.backward.kernel}" in lines
    assert str(Plan("forward", "cpu", "name", ruled_out=[("other", "too old")])).endswith("other: too old")
    decode = str(Plan("forward", "cuda:0", "name", lanes=8, groups=16, has_low_launch=True))
    assert "    CTAs             16 groups of 8\n    launches         2, the first" in decode
    assert "CTAs  " not in str(Plan("forward", "cuda:0", "name", lanes=8, groups=16, cluster=4))
    forward = str(Plan("forward", "cuda:0", "name", group_heads=32, is_dynamic=True))
    assert "    walked together  32 heads\n    work tiles       from a counter" in forward
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


def test_what_plans_nothing():
    with pytest.raises(TypeError, match="explain: 'sin' plans no attention"):
        explain(torch.sin, torch.zeros(2))


def test_a_device_that_cannot_run_the_call():
    def refuse(q):
        raise RuntimeError("flash_attn has no kernels for this device")

    with FakeTensorMode():
        q = torch.empty(1, device="cuda")
    plan = explain(refuse, q)
    assert plan.device == "cuda:0" and plan.kernel == "" and plan.backward is None
    assert str(plan) == "forward on cuda:0: flash_attn has no kernels for this device"
