"""FLOP counters, Inductor and profilers know the ops."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from flash_attn import (
    _flops,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn.flash_attn_interface import flash_attn_gpu
from flash_attn.flex_attention import flex_attention

B, LEN_Q, LEN_K, H, D = 2, 48, 80, 4, 16


def count(call):
    with FlopCounterMode(display=False) as mode:
        call()
    return mode.get_flop_counts()["Global"]


def only(call, name):
    counts = {op.__name__: flops for op, flops in count(call).items()}
    assert set(counts) == {name}
    return counts[name]


def randn(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
def test_as_torch_counts_its_own(causal):
    q, k = randn(B, LEN_Q, H, D), randn(B, LEN_K, H, D)
    shapes = [x.transpose(1, 2).shape for x in (q, k, k)]
    want = [sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[0], *shapes)]
    counts = count(lambda: flash_attn_func(q, k, k, causal=causal).sum().backward())
    assert sorted(counts.values()) == want == [4 * B * H * LEN_Q * LEN_K * D, 10 * B * H * LEN_Q * LEN_K * D]


def test_grouped_heads_and_packed_forms():
    q, k, v, kv = randn(B, LEN_Q, H, D), randn(B, LEN_K, 2, D), randn(B, LEN_K, 2, D), randn(B, LEN_K, 2, 2, D)
    want = 4 * B * H * LEN_Q * LEN_K * D
    assert only(lambda: flash_attn_func(q, k, v), "_flash_attn_forward") == want
    assert only(lambda: flash_attn_kvpacked_func(q, kv, 0.1), "_flash_attn_forward") == want
    counts = count(lambda: flash_attn_kvpacked_func(q, kv).sum().backward())
    assert sorted(counts.values()) == [want, want * 5 // 2]
    qkv = randn(B, LEN_Q, 3, H, D)
    assert only(lambda: flash_attn_qkvpacked_func(qkv), "_flash_attn_forward") == 4 * B * H * LEN_Q**2 * D


def test_packed_sequences():
    cu_q = torch.tensor([0, 5, 5, 30], dtype=torch.int32)
    cu_k = torch.tensor([0, 7, 9, 40], dtype=torch.int32)
    q, k = randn(30, H, D), randn(40, 2, D)
    counts = count(lambda: flash_attn_varlen_func(q, k, k, cu_q, cu_k, 25, 31).sum().backward())
    want = 4 * H * D * (5 * 7 + 25 * 31)
    assert sorted(counts.values()) == [want, want * 5 // 2]
    meta = [x.detach().to("meta") for x in (q, k, k, cu_q, cu_k)]
    want = 4 * H * D * 3 * 25 * 31  # as if all sequences had the greatest length
    assert only(lambda: flash_attn_varlen_func(*meta, 25, 31), "_flash_attn_varlen_forward") == want


def test_decoding():
    q, new, cache = randn(B, 1, H, D).detach(), randn(B, 1, 2, D).detach(), randn(B, LEN_K, 2, D).detach()
    used = torch.tensor([9, 30], dtype=torch.int32)
    name, key = "fwd_kvcache", 4 * H * D
    assert only(lambda: flash_attn_with_kvcache(q, cache, cache), name) == key * B * LEN_K
    assert only(lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=used), name) == key * 39
    call = lambda: flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=used)  # noqa: E731
    assert only(call, name) == key * 41
    first = torch.tensor([2, 30], dtype=torch.int32)
    call = lambda: flash_attn_with_kvcache(q, cache, cache, cache_leftpad=first, cache_seqlens=used)  # noqa: E731
    assert only(call, name) == key * 7
    assert only(lambda: flash_attn_with_kvcache(q, cache, cache, cache_leftpad=first), name) == key * (2 * LEN_K - 32)
    pages, table = torch.randn(8, 5, 2, D), torch.arange(8, dtype=torch.int32).view(2, 4)
    assert only(lambda: flash_attn_with_kvcache(q, pages, pages, block_table=table), name) == key * B * 20


def test_functions_of_the_extension():
    q = torch.randn(B, LEN_Q, H, D)
    call = lambda: flash_attn_gpu.fwd(q, q, q, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)  # noqa: E731
    assert only(call, "fwd") == 4 * B * H * LEN_Q**2 * D


@pytest.mark.parametrize("option", ["attn_bias", "attn_mask", "sinks", "return_lse", "return_max_logits"])
def test_options(option):
    q, k, v = randn(B, LEN_Q, H, D), randn(B, LEN_K, 2, D), randn(B, LEN_K, 2, D)
    tensors = {"attn_bias": randn(LEN_Q, LEN_K), "attn_mask": torch.rand(LEN_Q, LEN_K) < 0.5, "sinks": randn(H)}

    def call():
        found = flash_attn_func(q, k, v, **{option: tensors.get(option, True)})
        (found[0] if isinstance(found, tuple) else found).sum().backward()

    want = 4 * B * H * LEN_Q * LEN_K * D
    assert sorted(n for n in count(call).values() if n) == [want, want * 5 // 2]


def test_flex_attention():
    """All pairs count, whatever the mods say, as torch counts its own. Keys that are not in use do not count."""
    q, k, v = randn(B, H, LEN_Q, D), randn(B, 2, LEN_K, D), randn(B, 2, LEN_K, 24)
    pair = H * LEN_Q * (2 * D + 2 * 24)
    mods = {"score_mod": lambda s, b, h, i, j: s + i, "mask_mod": lambda b, h, i, j: i >= j}
    for names in ((), ("score_mod",), ("mask_mod",), ("score_mod", "mask_mod")):
        options = {name: mods[name] for name in names}
        counts = count(lambda: flex_attention(q, k, v, enable_gqa=True, **options).sum().backward())  # noqa: B023
        backward = B * LEN_K * H * LEN_Q * (6 * D + 4 * 24)
        assert sorted(counts.values()) == sorted([B * LEN_K * pair, backward])
    name, q, k, v = "flex_forward", q.detach(), k.detach(), v.detach()
    lengths = torch.tensor([7, 60])
    assert only(lambda: flex_attention(q, k, v, enable_gqa=True, kv_len=lengths), name) == 67 * pair
    pages = [x.transpose(0, 1).unflatten(2, (5, 16)).flatten(1, 2).transpose(0, 1) for x in (k, v)]
    table = torch.arange(8).view(2, 4)
    assert only(lambda: flex_attention(q, *pages, enable_gqa=True, block_table=table), name) == B * 4 * 16 * pair


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_that_run_before_they_are_counted(backend):
    torch._dynamo.reset()
    q, bias = randn(B, LEN_Q, H, D), randn(LEN_Q, LEN_Q)
    function = torch.compile(lambda q, bias: flash_attn_func(q, q, q, attn_bias=bias), backend=backend)
    function(q, bias)
    want = 4 * B * H * LEN_Q**2 * D
    counts = count(lambda: function(q, bias).sum().backward())
    assert sorted(n for n in counts.values() if n) == [want, want * 5 // 2]


def test_every_op_has_a_formula():
    formulas = {**_flops.FORMULAS, **_flops.FORMULAS_OF_FLEX}
    assert all(getattr(torch.ops.flash_attn, name) in flop_registry for name in formulas)


def test_inductor_counts_too():
    from torch._inductor.fx_utils import count_flops_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q = torch.randn(B, LEN_Q, H, D)
    graph = make_fx(lambda q: flash_attn_func(q, q, q), tracing_mode="fake")(q).graph
    nodes = [node for node in graph.nodes if "flash_attn" in str(node.target) and node.op == "call_function"]
    with FakeTensorMode():
        assert count_flops_fx(nodes[0]) == 4 * B * H * LEN_Q**2 * D


def test_profiler_tables_have_shapes():
    q, k = randn(B, LEN_Q, H, D), randn(B, LEN_K, 2, D)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        flash_attn_func(q, k, k).sum().backward()
    rows = {row.key: row.input_shapes for row in profile.key_averages(group_by_input_shape=True)}
    shapes = [list(q.shape), list(k.shape), list(k.shape)]
    assert rows["flash_attn::_flash_attn_forward"][:3] == shapes
    assert rows["flash_attn::_flash_attn_backward"][1:4] == shapes
    assert "flash_attn::_flash_attn_forward" in profile.key_averages(group_by_input_shape=True).table()
