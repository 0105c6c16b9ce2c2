"""Distributed tensors with the functions of FlashAttention-3, on two ranks: see tests/test_distributed.py."""

import importlib
import sys
from functools import partial

import pytest
import torch
from harness_distributed import (
    BACKEND,
    DEVICE,
    NCCL,
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
from torch.distributed.tensor import Shard, init_device_mesh

BATCH, HEADS = Shard(0), Shard(2)


def dense(mesh):
    from flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func

    attend = partial(flash_attn_func, causal=True, softcap=3.0, return_attn_probs=True)
    for h, g in ((4, 2), (4, 1), (6, 3)):
        for place in (R, BATCH, HEADS, Shard(1)):
            check(f"{h} {g} {place}", mesh, attend, qkv_of(3, 5, 7, h, g), everywhere("qkv", [place]))
    qkv, by_heads = randn(2, 6, 3, 4, 16), randn(2, 6, 8, 16)
    for place in (BATCH, Shard(2), Shard(3)):
        check(f"qkv {place}", mesh, flash_attn_qkvpacked_func, {"qkv": qkv}, {"qkv": [place]})
    for place in (BATCH, HEADS):  # heads of q, k and v in one dimension
        check(f"{place}", mesh, partial(flash_attn_qkvpacked_func, num_heads_q=4), {"qkv": by_heads}, {"qkv": [place]})


def sequences(mesh):
    from flash_attn_interface import flash_attn_varlen_func

    sums = int32(0, 3, 9)
    tensors = {"q": randn(9, 4, 16), "k": randn(9, 2, 16), "v": randn(9, 2, 16)}
    for place in (R, Shard(0), Shard(1)):
        check(f"varlen {place}", mesh, lambda q, k, v: flash_attn_varlen_func(
            q, k, v, sums, sums, 6, 6, causal=True
        ), tensors, everywhere("qkv", [place]))  # fmt: skip
    padded = {**qkv_of(2, 6, 6, 4, 2), "q": randn(9, 4, 16)}
    check("dense keys", mesh, lambda q, k, v: flash_attn_varlen_func(q, k, v, sums, None, 6, None), padded, {
        "q": [Shard(1)], "k": [BATCH], "v": [HEADS],
    })  # fmt: skip


def scales(mesh):
    """Factors of FP8 tensors are per batch entry and head of k."""
    from flash_attn_interface import flash_attn_func

    q, k, v = (x.to(torch.float8_e4m3fn) for x in qkv_of(2, 5, 7, 4, 2).values())
    factors = {f"{name}_descale": torch.rand(2, 2).to(DEVICE) + 0.5 for name in "qkv"}
    expected = flash_attn_func(q, k, v, **factors)
    for place in (BATCH, HEADS):
        parts = [placed(x.view(torch.uint8), mesh, [place]).view(torch.float8_e4m3fn) for x in (q, k, v)]
        close(flash_attn_func(*parts, **factors), expected, f"scales {place}")


def decoding(mesh):
    from flash_attn_interface import flash_attn_combine, flash_attn_with_kvcache

    for place in (R, BATCH, HEADS):
        torch.manual_seed(0)
        q, cache, new = randn(2, 2, 4, 16), randn(2, 8, 2, 16), randn(2, 2, 2, 16)
        options = {"cache_seqlens": int32(3, 5), "causal": True, "return_softmax_lse": True}
        ours = [placed(x, mesh, [place]) for x in (q, cache, cache.clone(), new, new)]
        plain = cache.clone()
        expected = flash_attn_with_kvcache(q, cache, plain, new, new, **options)
        found = flash_attn_with_kvcache(*ours, **options)
        for x, y in zip((*found, *ours[1:3]), (*expected, cache, plain)):
            close(x, y, f"step {place}")
        assert found[0].placements == (place,)
    if not NCCL:
        parts = [placed(x, mesh, [BATCH]) for x in (q, cache, cache.clone(), new, new)]
        with pytest.raises(RuntimeError, match="no room to append: sequence 1 holds 7 keys and gets 2 new"):
            flash_attn_with_kvcache(*parts, cache_seqlens=int32(0, 7))  # on every rank
    cache = placed(cache, mesh, [HEADS]).requires_grad_()
    new = placed(new, mesh, [HEADS])
    with pytest.raises(RuntimeError, match="k_cache is written"):
        flash_attn_with_kvcache(placed(q, mesh, [HEADS]), cache, cache, new, new, cache_seqlens=3)
    parts = {"parts": torch.randn(3, 2, 5, 4, 16).to(DEVICE), "lse": torch.randn(3, 2, 4, 5).to(DEVICE)}
    check("combine", mesh, lambda parts, lse: flash_attn_combine(parts, lse.transpose(2, 3)), parts, {
        "parts": [Shard(3)], "lse": [Shard(1)],
    })  # fmt: skip


def everything(rank, group):
    mesh = init_device_mesh(DEVICE, (2,))
    for function in (dense, sequences, scales, decoding):
        function(mesh)


def test_without_flash_attn(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn._distributed", None)
    monkeypatch.delitem(sys.modules, "flash_attn_3._distributed", raising=False)
    with pytest.raises(ImportError, match="flash_attn_3 takes DTensors with the help of the package flash_attn"):
        importlib.import_module("flash_attn_3._distributed")


@needs_two_gpus
def test_distributed(tmp_path):
    on_ranks(everything, tmp_path, backend=BACKEND)
