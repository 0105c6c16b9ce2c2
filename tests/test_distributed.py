"""Distributed tensors: results and gradients on two ranks are those of one, for every placement of the tensors.

All checks of a test run in one group of processes, because a process takes seconds to start. On two GPUs:

    FLASH_ATTN_TEST_NCCL=1 python -m pytest tests/test_distributed.py
"""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness_distributed import (
    BACKEND,
    DEVICE,
    DTYPE,
    NCCL,
    P,
    R,
    check,
    close,
    everywhere,
    int32,
    needs_two_gpus,
    placed,
    qkv_of,
    randn,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, init_device_mesh
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flash_attn import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    merge_attention,
)
from flash_attn.flash_attn_interface import FlashAttnFunc, _flash_attn_backward, _flash_attn_forward
from flash_attn.flex_attention import flex_attention
from flash_attn.modules.mha import MHA

# ---- dense ---------------------------------------------------------------------------------------------------------


def dense(mesh):
    """Heads of k may be too few for the mesh, or not divide evenly. Lengths and head dimensions are redistributed."""
    attend = partial(flash_attn_func, causal=True, window_size=(5, 0))
    for h, g in ((4, 4), (4, 2), (4, 1), (3, 3), (6, 3), (1, 1)):
        tensors = qkv_of(3, 5, 7, h, g)
        for of_q in (R, Shard(0), Shard(1), Shard(2)) if h == 4 else (Shard(2),):
            for of_k in (R, of_q):
                check(f"{h} heads, {g} of k, {of_q} {of_k}", mesh, attend, tensors, {
                    "q": [of_q], "k": [of_k], "v": [of_k],
                }, [of_q] if of_q in (Shard(0), Shard(2)) else None)  # fmt: skip
    tensors = qkv_of(2, 5, 5, 4, 2)
    for places in ((Shard(3), R, R), (P, R, P), (Shard(2), P, P), (R, Shard(2), R), (R, R, R)):
        check(f"{places}", mesh, attend, tensors, {name: [place] for name, place in zip("qkv", places)})
    with torch.autocast(DEVICE, torch.bfloat16):
        floats = [x.float() for x in tensors.values()]
        out = flash_attn_func(*(placed(x, mesh, [Shard(2)]) for x in floats))
        assert out.dtype == torch.bfloat16
        close(out, flash_attn_func(*floats), "autocast")
    check("class", mesh, lambda q, k, v: FlashAttnFunc.apply(
        q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, False, True
    ), tensors, everywhere("qkv", [Shard(2)]), [Shard(2)])  # fmt: skip


def of_heads(mesh):
    """ALiBi slopes follow the heads, whether they are distributed or the same on each rank."""
    tensors = qkv_of(2, 5, 7, 4, 2)
    attend = partial(flash_attn_func, softcap=3.0, return_attn_probs=True)
    for shape in ((4,), (2, 4)):
        slopes = torch.rand(*shape).to(DEVICE)
        for places in (None, [R], [Shard(len(shape) - 1)]):
            for place in (Shard(0), Shard(2)):
                placements = {**everywhere("qkv", [place]), **({"alibi_slopes": places} if places else {})}
                given = {**tensors, "alibi_slopes": slopes}
                check(f"slopes {shape} {places}", mesh, attend, given, placements, [place])


def packed_in_one(mesh):
    torch.manual_seed(0)
    qkv, q, kv = randn(2, 6, 3, 4, 16), randn(2, 5, 4, 16), randn(2, 6, 2, 2, 16)
    for place in (R, Shard(0), Shard(1), Shard(2), Shard(3)):
        check(f"qkv {place}", mesh, partial(flash_attn_qkvpacked_func, causal=True), {"qkv": qkv}, {"qkv": [place]})
    one_head = qkv[:, :, :, :1].contiguous()  # another rank has none
    check("qkv of one head", mesh, flash_attn_qkvpacked_func, {"qkv": one_head}, {"qkv": [Shard(3)]})
    attend = partial(flash_attn_varlen_qkvpacked_func, cu_seqlens=int32(0, 4, 12), max_seqlen=8)
    check("packed qkv of one head", mesh, attend, {"qkv": one_head.flatten(0, 1)}, {"qkv": [Shard(2)]})
    for place in (R, Shard(2), Shard(3)):  # Shard(2): keys on one rank, values on the other
        check(f"kv {place}", mesh, flash_attn_kvpacked_func, {"q": q, "kv": kv}, {"q": [Shard(2)], "kv": [place]})


def options(mesh):
    """attn_bias, attn_mask, sinks and lse. A plain sink is a parameter that every rank has."""
    tensors = qkv_of(2, 5, 7, 4, 2)
    sinks, mask = randn(4, dtype=torch.float32), torch.rand(2, 1, 5, 7).to(DEVICE) < 0.7
    attend = partial(flash_attn_func, return_lse=True, return_max_logits=True)
    for place in (Shard(0), Shard(2)):
        for of_sinks in ({}, {"sinks": [R]}, {"sinks": [Shard(0)]}):
            check(f"sinks {place} {of_sinks}", mesh, partial(flash_attn_func, return_lse=True, causal=True), {
                **tensors, "sinks": sinks,
            }, {**everywhere("qkv", [place]), **of_sinks}, [place])  # fmt: skip
        for shape in ((2, 4, 5, 7), (4, 5, 7), (2, 1, 5, 7), (1, 1, 1, 7)):
            more = {"attn_bias": randn(*shape, dtype=torch.float32), "attn_mask": mask}
            placements = {} if len(shape) == 3 else {"attn_bias": [R], "attn_mask": [R]}
            check(f"bias {shape} {place}", mesh, attend, {**tensors, **more}, {
                **everywhere("qkv", [place]), **placements,
            }, [place])  # fmt: skip


def sizes_of_one(mesh):
    """The strides of a whole tensor, of which a rank has one head, one batch entry, one row or none."""
    tensors = {**qkv_of(1, 5, 7, 2, 2), "attn_bias": randn(1, 2, 1, 7, dtype=torch.float32)}
    check("one head", mesh, flash_attn_func, tensors, everywhere("qkv", [Shard(2)]))
    for len_q in (1, 0):
        tensors = {**qkv_of(2, len_q, 7, 3, 1), "sinks": randn(3, dtype=torch.float32)}
        for given in (tensors, {name: tensors[name] for name in "qkv"}):
            check(f"{len_q} rows", mesh, flash_attn_func, given, everywhere("qkv", [Shard(0)]))


def slopes_without_gradient(mesh):
    """Slopes that are redistributed have no gradient, whatever else has one."""
    tensors = {**qkv_of(2, 5, 7, 4, 2), "alibi_slopes": torch.rand(2, 4).to(DEVICE)}
    for name, more in (("sinks", randn(4, dtype=torch.float32)), ("attn_bias", randn(5, 7, dtype=torch.float32))):
        for place in (Shard(0), Shard(2)):
            check(f"slopes and {name}", mesh, flash_attn_func, {**tensors, name: more}, everywhere("qkv", [place]))


def merged(mesh):
    torch.manual_seed(0)
    tensors = {"a": randn(2, 5, 4, 16), "b": randn(2, 5, 4, 16)}
    lses = {"c": randn(2, 4, 5, dtype=torch.float32), "d": randn(2, 4, 5, dtype=torch.float32)}
    placements = {"a": [Shard(2)], "b": [Shard(0)], "c": [Shard(1)], "d": [R]}
    check("merge", mesh, lambda a, b, c, d: merge_attention([a, b], [c, d]), {**tensors, **lses}, placements)


# ---- packed sequences ----------------------------------------------------------------------------------------------


def sequences(mesh):
    torch.manual_seed(0)
    sums = int32(0, 3, 3, 9)
    lengths = sums, sums, 6, 6
    attend = partial(flash_attn_varlen_func, max_seqlen_q=6, max_seqlen_k=6, causal=True, return_attn_probs=True)
    for g in (4, 2, 1):
        tensors = {"q": randn(9, 4, 16), "k": randn(9, g, 16), "v": randn(9, g, 16)}
        given = {**tensors, "cu_seqlens_q": sums, "cu_seqlens_k": sums}
        for place in (R, Shard(0), Shard(1), Shard(2)):
            placements = everywhere("qkv", [place])
            if place == Shard(1):
                placements.update(cu_seqlens_q=[R], cu_seqlens_k=[R])
            check(f"varlen {g} {place}", mesh, attend, given, placements)
    sinks = randn(4, dtype=torch.float32)
    check("varlen sinks", mesh, lambda q, k, v, sinks: flash_attn_varlen_func(
        q, k, v, *lengths, sinks=sinks, return_lse=True
    ), {**tensors, "sinks": sinks}, everywhere("qkv", [Shard(1)]), [Shard(1)])  # fmt: skip
    kv, qkv = randn(9, 2, 4, 16), randn(9, 3, 4, 16)
    check("varlen kv", mesh, lambda q, kv: flash_attn_varlen_kvpacked_func(q, kv, *lengths), {
        "q": tensors["q"], "kv": kv,
    }, {"q": [Shard(1)], "kv": [Shard(2)]}, [Shard(1)])  # fmt: skip
    check("varlen qkv", mesh, lambda qkv: flash_attn_varlen_qkvpacked_func(qkv, sums, 6), {"qkv": qkv}, {
        "qkv": [Shard(2)],
    }, [Shard(1)])  # fmt: skip


# ---- decoding ------------------------------------------------------------------------------------------------------


def step(mesh, what, h, g, places, expected_out=None, rows=2, **more):
    """Appends to a cache. All ranks must have the cache that one process has."""
    torch.manual_seed(0)
    q, caches = randn(2, 2, h, 16), [randn(rows, 8, g, 16) for _ in range(2)]
    new = [randn(2, 2, g, 16) for _ in range(2)]
    plain_caches = [x.clone() for x in caches]
    given = {"cache_seqlens": int32(3, 5), "causal": True, "return_softmax_lse": True, **more}
    expected = flash_attn_with_kvcache(q, *plain_caches, *new, **given)
    of_q, of_cache, of_new = places
    ours = [placed(x, mesh, [of_cache]) for x in caches]
    new = [placed(x, mesh, [of_new]) for x in new]
    found = flash_attn_with_kvcache(placed(q, mesh, [of_q]), *ours, *new, **given)
    for i, (x, plain) in enumerate(zip((*found, *ours), (*expected, *plain_caches))):
        close(x, plain, f"{what}, {i}")
    if expected_out is not None:
        assert found[0].placements == (expected_out,), (what, found[0].placements)


def decoding(mesh):
    torch.manual_seed(0)
    heads, batch = Shard(2), Shard(0)
    cos = torch.rand(8, 8).to(DEVICE, DTYPE)
    with torch.no_grad():
        for h, g in ((4, 2), (4, 1), (3, 3)):
            for place in (R, batch, heads):
                cache = R if g == 1 and place == heads else place
                step(mesh, f"{h} {g} {place}", h, g, (place, cache, cache), place)
        step(mesh, "of cache", 4, 2, (R, heads, R), heads)
        step(mesh, "replicated cache", 4, 2, (heads, R, heads), R)
        step(mesh, "batch, replicated cache", 4, 1, (batch, R, batch), R)
        step(mesh, "rotary", 4, 2, (heads, heads, heads), heads, rotary_cos=cos, rotary_sin=cos)
        slopes, sinks = torch.rand(4).to(DEVICE), torch.randn(4).to(DEVICE)
        step(mesh, "slopes", 4, 2, (heads, heads, heads), heads, alibi_slopes=slopes)
        step(mesh, "sinks", 4, 2, (heads, heads, heads), heads, sinks=sinks)
        step(mesh, "rows", 4, 2, (heads, heads, heads), heads, rows=3, cache_batch_idx=int32(2, 0))
        step(mesh, "more rows", 4, 2, (heads, heads, heads), heads, rows=3)
        pages = torch.tensor([[1], [2]], dtype=torch.int32, device=DEVICE)
        if not NCCL:  # pages of a GPU are larger
            step(mesh, "pages", 4, 2, (heads, heads, heads), heads, rows=3, block_table=pages)
            step(mesh, "pages and batch", 4, 2, (batch, R, batch), R, rows=3, block_table=pages)
        with pytest.raises(RuntimeError, match="k_cache is written, so it must have the placements"):
            step(mesh, "rows of ranks", 4, 2, (batch, batch, batch), rows=2, cache_batch_idx=int32(1, 0))
        with pytest.raises(RuntimeError, match="k_cache is written, so it must have the placements"):
            step(mesh, "rooms of ranks", 4, 2, (heads, Shard(1), heads))
    cache = placed(randn(2, 8, 2, 16), mesh, [heads]).requires_grad_()
    with pytest.raises(RuntimeError, match="k_cache is written"):
        flash_attn_with_kvcache(placed(randn(2, 1, 4, 16), mesh, [heads]), cache, cache, cache[:, :1], cache[:, :1])


@torch.no_grad()
def lengths_of_all_ranks(mesh):
    """A wrong length that every rank knows raises on every rank, in the numbers of the whole call."""
    q, cache, new = (placed(randn(2, n, 2, 16), mesh, [Shard(0)]) for n in (1, 8, 1))
    for lengths in (int32(3, 8), placed(int32(3, 8), mesh, [R])):
        with pytest.raises(RuntimeError, match="no room to append: sequence 1 holds 8 keys and gets 1 new"):
            flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths)
    for name in ("cache_seqlens", "cache_leftpad", "cache_batch_idx"):
        with pytest.raises(RuntimeError, match=f"{name} must be .*; element 1 is 9"):
            flash_attn_with_kvcache(q, cache, cache, **{name: int32(0, 9)})
    of_its_rank = pytest.raises(RuntimeError, match="sequence 0 holds 8 keys") if dist.get_rank() else nullcontext()
    with of_its_rank:
        lengths = placed(int32(3, 8), mesh, [Shard(0)])
        flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths)


def planning_draws_no_number(mesh):
    tensors = [placed(x, mesh, [Shard(2)]) for x in qkv_of(2, 5, 5, 4, 4).values()]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    explain(flash_attn_func, *tensors, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def a_written_cache_has_changed(mesh):
    """The backward of another function that has saved the cache would use the new numbers."""
    q, k, cache, x = (placed(randn(2, n, h, 16), mesh, [Shard(2)]) for n, h in ((1, 4), (1, 2), (8, 2), (8, 2)))
    y = cache * x.requires_grad_()
    with torch.no_grad():
        flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=3)  # writes nothing
        explain(flash_attn_with_kvcache, q, cache, cache.clone(), k, k, cache_seqlens=3)  # nor does this
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=3)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        y.sum().backward()


# ---- ops -----------------------------------------------------------------------------------------------------------


def ops(mesh):
    """Ops and private functions, with the gradients of the ops. A written gradient cannot be a part of a sum."""
    options = 0.0, 0.25, True, -1, -1, 0.0, None

    def attend(q, k, v):
        return torch.ops.flash_attn._flash_attn_forward(q, k, v, *options, False)[:2]

    def attend_packed(q, k, v):
        sums = int32(0, 3, 9)
        return torch.ops.flash_attn._flash_attn_varlen_forward(q, k, v, sums, sums, 6, 6, *options)[0]

    for place in (R, Shard(0), Shard(2)):
        check(f"op {place}", mesh, attend, qkv_of(2, 5, 7, 4, 2), everywhere("qkv", [place]), [place])
    tensors = {"q": randn(9, 4, 16), "k": randn(9, 2, 16), "v": randn(9, 2, 16)}
    for place in (R, Shard(0), Shard(1)):
        check(f"packed op {place}", mesh, attend_packed, tensors, everywhere("qkv", [place]))
    q, k, v = qkv_of(2, 5, 7, 4, 1).values()
    given = [placed(x, mesh, [place]) for x, place in ((q, Shard(2)), (k, R), (v, R))]
    for x, plain in zip(_flash_attn_forward(*given, *options, False)[:2], attend(q, k, v)):
        close(x, plain, "private forward")
    out, lse = attend(*(x.requires_grad_() for x in given))
    with pytest.raises(RuntimeError, match="dk would get an addend of a sum on each rank, because k has 1 heads"):
        out.sum().backward()
    with torch.no_grad():
        grads = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(q, q, k, v, *attend(q, k, v), *grads, *options, False)
        parts = [placed(x, mesh, [Shard(0)]) for x in (q, q, k, v, *attend(q, k, v))]
        ours = [placed(torch.zeros_like(x), mesh, [Shard(0)]) for x in (q, k, v)]
        _flash_attn_backward(*parts, *ours, *options, False)
        for x, plain in zip(ours, grads):
            close(x, plain, "private backward")
        ours[1] = placed(torch.zeros_like(k), mesh, [R])
        _flash_attn_backward(*parts, *ours, *options, False)
        close(ours[1], grads[1], "private backward, gradient of k on every rank")


# ---- random numbers ------------------------------------------------------------------------------------------------


def dropout(mesh):
    """Forward and backward draw one mask: <dout, out> = <dv, v>, because out is linear in v. Parts draw different
    masks, copies the same one, and the generators of all ranks stay in one state."""
    torch.manual_seed(3)
    get_state = torch.cuda.get_rng_state if NCCL else torch.get_rng_state
    one = randn(2, 1, 1, 16).expand(2, 40, 4, 16).contiguous()
    for place in (R, Shard(0), Shard(2)):
        q, k, v = (placed(one, mesh, [place]).requires_grad_() for _ in range(3))
        out = flash_attn_func(q, k, v, dropout_p=0.5)
        dout = placed(one.sin(), mesh, [place])
        (dv,) = torch.autograd.grad(out, v, dout)
        sides = [(x.full_tensor().double() * y.full_tensor().double()).sum() for x, y in ((dout, out), (dv, v))]
        assert torch.allclose(*sides, rtol=1e-2 if NCCL else 1e-5), (place, sides)
        states = [torch.empty_like(get_state()) for _ in range(2)]
        if not NCCL:
            dist.all_gather(states, get_state())
            assert torch.equal(*states), place
        halves = out.full_tensor().chunk(2, 0 if place == Shard(0) else 2)
        assert not torch.equal(*halves), place
        if place == R:
            locals_ = [torch.empty_like(out.to_local()) for _ in range(2)]
            dist.all_gather(locals_, out.to_local().detach().contiguous())
            assert torch.equal(*locals_)


# ---- errors --------------------------------------------------------------------------------------------------------


def errors(mesh):
    q, k, v = (placed(x, mesh, [Shard(2)]) for x in qkv_of(2, 5, 7, 4, 2).values())
    with pytest.raises(TypeError, match="k must be a DTensor, because q is one; it is a plain tensor"):
        flash_attn_func(q, k.to_local(), v.to_local())
    with pytest.raises(TypeError, match="q must be a DTensor, because sinks is one"):
        flash_attn_func(q.to_local(), k.to_local(), v.to_local(), sinks=placed(randn(4), mesh, [R]))
    with pytest.raises(RuntimeError, match="alibi_slopes must have 4 in dimension 0, like q; it has shape"):
        flash_attn_func(q, k, v, alibi_slopes=torch.ones(2, device=DEVICE))
    with pytest.raises(RuntimeError, match="k must have 2 in dimension 0"):
        flash_attn_func(q, placed(randn(3, 7, 2, 16), mesh, [Shard(2)]), v)
    with pytest.raises(RuntimeError, match="q must have 4 dimensions; it has 3"):
        flash_attn_func(placed(randn(2, 5, 16), mesh, [R]), k, v)
    with pytest.raises(RuntimeError, match="Number of heads in key/value must divide"):
        flash_attn_func(placed(randn(2, 5, 3, 16), mesh, [Shard(2)]), k, v)
    with pytest.raises(RuntimeError, match=f"alibi_slopes must be on {DEVICE}, where q is; it is on meta"):
        flash_attn_func(q, k, v, alibi_slopes=torch.ones(4, device="meta"))
    of_one_rank = DeviceMesh(DEVICE, [0])
    x = DTensor.from_local(randn(2, 5, 2, 16), of_one_rank, [R], run_check=False)
    lacks = pytest.raises(RuntimeError, match="q is distributed over a mesh that lacks this rank")
    with lacks if dist.get_rank() else nullcontext():
        flash_attn_func(x, x, x)
    other = init_device_mesh(DEVICE, (1, 2))
    with pytest.raises(RuntimeError, match="v must be distributed over the mesh of q"):
        flash_attn_func(q, k, placed(randn(2, 7, 2, 16), other, [R, R]))
    with pytest.raises(NotImplementedError, match="flex_attention takes no DTensors"):
        flex_attention(q, q, q)


# ---- compiled ------------------------------------------------------------------------------------------------------


def compiled(mesh):
    compiles = partial(torch.compile, fullgraph=True, backend="aot_eager")
    tensors = {**qkv_of(2, 5, 7, 4, 1), "sinks": randn(4, dtype=torch.float32)}
    slopes = torch.rand(4).to(DEVICE)

    def attend(q, k, v, sinks):
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, sinks=sinks, return_lse=True)

    function = compiles(attend)
    function.plain = attend
    check("compiled", mesh, function, tensors, everywhere(tensors, [Shard(2)]) | {
        "k": [R], "v": [Shard(0)], "sinks": [R],
    }, [Shard(2)])  # fmt: skip
    sums = int32(0, 3, 9)
    tensors = {"q": randn(9, 3, 16), "k": randn(9, 3, 16), "v": randn(9, 3, 16)}  # parts of unequal size

    def attend_packed(q, k, v):
        return flash_attn_varlen_func(q, k, v, sums, sums, 6, 6)

    function = compiles(attend_packed)
    function.plain = attend_packed
    check("compiled varlen", mesh, function, tensors, everywhere("qkv", [Shard(1)]), [Shard(1)])
    with torch.no_grad():
        caches = [randn(2, 8, 2, 16) for _ in range(2)]
        given = randn(2, 1, 4, 16), *caches, randn(2, 1, 2, 16), randn(2, 1, 2, 16)
        q, *ours = (placed(x, mesh, [Shard(2)]) for x in given)
        expected = flash_attn_with_kvcache(*given, cache_seqlens=4)
        close(compiles(flash_attn_with_kvcache)(q, *ours, cache_seqlens=4), expected, "compiled step")
        for x, plain in zip(ours, caches):
            close(x, plain, "cache of a compiled step")


# ---- models --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, h, g, d=16):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, n * d, bias=False) for n in (h, g, g))
        self.out = nn.Linear(h * d, 32, bias=False)
        self.d = d

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, self.d)) for linear in (self.q, self.k, self.v))
        return self.out(flash_attn_func(q, k, v, causal=True).flatten(-2))


def of_same_numbers(make):
    torch.manual_seed(5)
    return make().to(DEVICE, DTYPE)


def gradients_of(model, x):
    model(x).float().square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def model(make, parallel, x, share):
    """Compares the gradients of a model with those of its parallel twin, whose ranks get ``share`` of the batch."""
    expected = gradients_of(of_same_numbers(make), x)
    twin = parallel(of_same_numbers(make))
    for name, grad in gradients_of(twin, share(x)).items():
        close(grad, expected[name.removeprefix("module.")], name)


def tensor_parallel(mesh):
    """``use_local_output=False`` hands DTensors to attention, and True the heads of the rank."""
    torch.manual_seed(0)
    x = randn(2, 6, 32)
    for g, is_local in ((4, True), (2, True), (2, False), (1, False)):
        column = partial(ColwiseParallel, use_local_output=is_local)
        plan = {"q": column(), "k": column(), "v": column(), "out": RowwiseParallel()}
        if g == 1:  # every rank has the one head of the keys
            keys = partial(ColwiseParallel, output_layouts=R, use_local_output=False)
            plan.update(k=keys(), v=keys())
        model(
            partial(Block, 4, g), partial(parallelize_module, device_mesh=mesh, parallelize_plan=plan), x, lambda x: x
        )
    plan = {"Wqkv": ColwiseParallel(output_layouts=R, use_local_output=False), "out_proj": RowwiseParallel()}
    make = partial(MHA, 32, 2, causal=True, use_flash_attn=True)
    model(make, lambda mha: parallelize_module(mha, mesh, plan), x, lambda x: x)


def data_parallel(mesh):
    """Each rank has half of the batch. DDP and FSDP give the mean of the ranks' gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    x = randn(4, 6, 32)

    def share(x):
        return x.chunk(2)[dist.get_rank()] * 2**0.5  # the loss is a square, and the mean of two ranks halves it

    class Scaled(Block):  # the same numbers in attention, whatever the scale of the loss
        def forward(self, x):
            scale = 2**0.5 if len(x) == 2 else 1
            return super().forward(x / scale) * scale

    model(partial(Scaled, 4, 2), DistributedDataParallel, x, share)
    model(partial(Scaled, 4, 2), lambda block: fully_shard(block, mesh=mesh), x, share)


def mapped(mesh):
    heads = (Shard(2),)
    attend = local_map(partial(flash_attn_func, causal=True), list(heads), (heads,) * 3, device_mesh=mesh)
    attend_plain = partial(flash_attn_func, causal=True)

    def either(q, k, v):
        return (attend if isinstance(q, DTensor) else attend_plain)(q, k, v)

    check("local_map", mesh, either, qkv_of(2, 5, 7, 4, 2), everywhere("qkv", heads), heads)


def the_document(mesh):
    """The example of docs/distributed.md runs."""
    path = Path(__file__).parents[1] / "docs" / "distributed.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names = {}
    exec(example.replace('"cpu"', f'"{DEVICE}"'), names)
    assert all(p.grad.full_tensor().isfinite().all() for p in names["model"].parameters())


# ---- groups --------------------------------------------------------------------------------------------------------

CHECKS = dense, of_heads, packed_in_one, options, sizes_of_one, slopes_without_gradient, merged, sequences, decoding
CHECKS += a_written_cache_has_changed, ops, dropout, errors, compiled, tensor_parallel, data_parallel, mapped
CHECKS += the_document, planning_draws_no_number


def on_one_dimension(rank, group):
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for function in CHECKS if NCCL else (*CHECKS, lengths_of_all_ranks):
        function(mesh)


def on_two_dimensions(rank, group):
    """Batch and heads together, heads over both dimensions, and two heads of k over four ranks."""
    mesh = init_device_mesh(DEVICE, (2, 2))
    tensors = qkv_of(3, 5, 7, 12, 2)
    for places in ([Shard(0), Shard(2)], [Shard(2), Shard(0)], [Shard(2), Shard(2)], [R, Shard(2)], [Shard(1), P]):
        check(f"{places}", mesh, partial(flash_attn_func, causal=True), tensors, everywhere("qkv", places))
    check("keys of two ranks", mesh, flash_attn_func, tensors, {
        "q": [Shard(2), Shard(2)], "k": [Shard(2), R], "v": [R, Shard(2)],
    }, [Shard(2), Shard(2)])  # fmt: skip


@needs_two_gpus
def test_one_dimension(tmp_path):
    on_ranks(on_one_dimension, tmp_path, backend=BACKEND)


@pytest.mark.skipif(NCCL and torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_two_dimensions(tmp_path):
    on_ranks(on_two_dimensions, tmp_path, world_size=4, backend=BACKEND)
