"""Blocks that a call finds for itself: of a dense attn_mask and of a bare mask_mod, and when it looks for them."""

import gc
import os
import random
import re
import signal
import threading
import weakref

import pytest
import torch
from oracle_attention import TOLERANCES, attention, close

import flash_attn
from flash_attn import _imagined, flash_attn_func
from flash_attn.flex import ops
from flash_attn.flex_attention import create_block_mask, flex_attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Small calls look for blocks, too."""
    monkeypatch.setattr(ops, "FEW_PAIRS", 0)
    monkeypatch.setattr(ops, "FEW_ROWS", 0)


def draw(b, h, h_kv, len_q, len_kv, d, dtype, device):
    generator = torch.Generator().manual_seed(d + len_q)
    sizes = (h, len_q), (h_kv, len_kv), (h_kv, len_kv)
    return [torch.randn(b, *size, d, generator=generator).to(device, dtype).requires_grad_() for size in sizes]


def verify(out, tensors, mask, bias=None):
    """out and the gradients of the tensors, ``[b, h, len, d]``, against arithmetic in fp64."""
    exact = [x.detach().cpu().double().requires_grad_() for x in tensors]
    add = None if bias is None else lambda s, b, h, i, j: s + bias[b, h, i, j]
    want = attention(*exact, add, mask.cpu())[0]
    tolerance = TOLERANCES[out.dtype]
    close(out.detach().cpu(), want, tolerance)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    wants = torch.autograd.grad(want, exact, dout.cpu().double())
    for has, wanted in zip(torch.autograd.grad(out, tensors, dout), wants, strict=True):
        assert (has.cpu().double() - wanted).abs().max() <= max(tolerance * wanted.abs().max(), 1e-6)


def masks(b, h, len_q, len_kv):
    generator = torch.Generator().manual_seed(len_kv)
    ids = torch.arange(max(len_q, len_kv)) // 150
    random = torch.rand(b, h, len_q, len_kv, generator=generator) < 0.5
    random[:, :, : len_q // 3, len_kv // 2 :] = False
    return {
        "padding": (torch.arange(len_kv) < torch.tensor([len_kv - 3, len_kv // 3])[:b, None])[:, None, None],
        "documents": (ids[:len_q, None] == ids[None, :len_kv])[None, None],
        "pairs": random,
        "heads": random[:1],
        "nothing": torch.zeros(1, 1, len_q, len_kv, dtype=torch.bool),
        "everything": torch.ones(len_q, len_kv, dtype=torch.bool),
        "rows": random[:, :1, :, :1],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", list(masks(1, 1, 9, 9)))
def test_dense_masks(name, dtype, d, device):
    b, h, h_kv, len_q, len_kv = 2, 4, 2, 300, 421
    q, k, v = draw(b, h, h_kv, len_q, len_kv, d, dtype, device)
    mask = masks(b, h, len_q, len_kv)[name].to(device)
    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    verify(out.transpose(1, 2), (q, k, v), mask)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_dense_masks_beside_windows_and_biases(is_compiled, device):
    b, h, len_q, len_kv = 1, 2, 280, 400
    q, k, v = draw(b, h, h, len_q, len_kv, 64, torch.bfloat16, device)
    mask = masks(b, h, len_q, len_kv)["pairs"].to(device)
    bias = torch.randn(b, h, len_q, len_kv, generator=torch.Generator().manual_seed(0))
    row, key = torch.arange(len_q)[:, None] + len_kv - len_q, torch.arange(len_kv)

    def call(q, k, v, mask, bias):
        tensors = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(*tensors, attn_mask=mask, attn_bias=bias, window_size=(70, 20)).transpose(1, 2)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if is_compiled else call
    seen = mask.cpu() & (key >= row - 70) & (key <= row + 20)
    verify(call(q, k, v, mask, bias.to(device)), (q, k, v), seen, bias)


def mods(length, device):
    ids = (torch.arange(length, device=device) // 130).int()
    return {
        "window": lambda b, h, i, j: (i >= j) & (i - j < 90) & (j != 3),
        "documents": lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j),
        "heads": lambda b, h, i, j: (i + h * 100 >= j) & (j != i - 5),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", list(mods(9, "cpu")))
def test_bare_mods(name, is_compiled, device):
    """Twice, because the lists of a mask without tensors are kept."""
    length = 300
    mod, on_cpu = mods(length, device)[name], mods(length, "cpu")[name]
    tensors = draw(2, 2, 2, length, length, 64, torch.bfloat16, device)
    call = torch.compile(flex_attention, fullgraph=True, backend="aot_eager") if is_compiled else flex_attention
    seen = flash_attn.flex_attention.create_mask(on_cpu, 2, 2, length, length, "cpu")
    for _ in range(2):
        verify(call(*tensors, mask_mod=mod), tensors, seen)


def test_inference_mode_leaves_lists_for_training():
    def mod(b, h, i, j):
        return (i >= j) & (j != 77)

    tensors = draw(1, 2, 2, 290, 290, 16, torch.float32, "cpu")
    ops._kept_blocks.clear()
    with torch.inference_mode():
        flex_attention(*(x.detach() for x in tensors), mask_mod=mod)
    assert len(ops._kept_blocks) == 1
    i, j = torch.arange(290)[:, None], torch.arange(290)
    verify(flex_attention(*tensors, mask_mod=mod), tensors, (i >= j) & (j != 77))


def test_lists_are_kept_up_to_a_number():
    def mod_of(n):
        return lambda b, h, i, j: (i >= j) & (j != n)

    tensors = draw(1, 1, 1, 140, 140, 8, torch.float32, "cpu")
    for n in range(ops.MOST_KEPT + 3):
        flex_attention(*tensors, mask_mod=mod_of(n))
    assert len(ops._kept_blocks) == ops.MOST_KEPT


def test_numbers_that_python_calls_equal_have_lists_of_their_own():
    def mod_of(number):
        return lambda b, h, i, j: ((i * 1.0 + 1) / number > 0) & (i >= j)

    tensors = draw(1, 2, 2, 300, 300, 16, torch.float32, "cpu")
    assert flex_attention(*tensors, mask_mod=mod_of(0.0)).abs().sum() > 0
    assert flex_attention(*tensors, mask_mod=mod_of(-0.0)).abs().sum() == 0


def test_threads_keep_lists_together():
    tensors = [x.detach() for x in draw(1, 1, 1, 140, 140, 8, torch.float32, "cpu")]
    mods = [lambda b, h, i, j, n=n: (i >= j) & (j != n) for n in range(40)]
    want, failures = [flex_attention(*tensors, mask_mod=mod) for mod in mods], []

    def call(seed):
        order = random.Random(seed)
        for _ in range(200):
            n = order.randrange(len(mods))
            try:
                if not torch.equal(flex_attention(*tensors, mask_mod=mods[n]), want[n]):
                    failures.append(n)
            except KeyError as error:
                failures.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(list(ops._kept_blocks)) == ops.MOST_KEPT


def test_a_forked_child_finds_blocks_while_threads_do():
    tensors = [x.detach() for x in draw(1, 1, 1, 140, 140, 8, torch.float32, "cpu")]
    mods, is_over = [lambda b, h, i, j, n=n: (i >= j) & (j != n) for n in range(40)], threading.Event()

    def call(first=0):
        for n in range(first, 40):
            flex_attention(*tensors, mask_mod=mods[n])

    def work():
        while not is_over.is_set():
            call()

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends a child that waits
                call(30)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("way", ["mask_mod", "attn_mask"])
def test_an_exception_while_blocks_are_found_goes_on(monkeypatch, way):
    """Such as that of a signal's handler. Nothing of the call outlives it."""

    def find(*_):
        raise KeyboardInterrupt

    def call():
        tensors = [x.detach() for x in draw(1, 2, 2, 290, 290, 16, torch.float32, "cpu")]
        refs.extend(map(weakref.ref, tensors))
        if way == "mask_mod":
            return flex_attention(*tensors, mask_mod=lambda b, h, i, j: (i >= j) & (j != 11))
        tensors = (x.transpose(1, 2) for x in tensors)
        return flash_attn_func(*tensors, attn_mask=torch.rand(290, 290) < 0.5)

    refs = []
    call()
    monkeypatch.setattr(ops, "find_lists", find)
    ops._kept_blocks.clear()
    refs.clear()
    with pytest.raises(KeyboardInterrupt):
        call()
    gc.collect()
    assert len(refs) == 3 and all(ref() is None for ref in refs)


@needs_gpu
def test_a_graph_reads_a_mask_that_changes():
    length, mask = 300, masks(1, 2, 300, 300)
    q, k, v = (x.detach() for x in draw(1, 2, 2, length, length, 64, torch.bfloat16, "cuda"))
    given = mask["documents"].expand(1, 2, length, length).contiguous().cuda()

    def call():
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=given).transpose(1, 2)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for name in ("documents", "pairs", "padding", "nothing"):
        given.copy_(mask[name].expand_as(given))
        graph.replay()
        want = attention(*(x.cpu().double() for x in (q, k, v)), None, given.cpu())[0]
        close(out.cpu(), want, TOLERANCES[torch.bfloat16])


@needs_gpu
@pytest.mark.parametrize("dims", ["batch", "heads", "both"])
def test_expanded_tensors_are_their_copies(dims):
    """The bits are the same: the same kernels compute both."""
    sizes = 1 if dims != "heads" else 3, 1 if dims != "batch" else 4
    generator = torch.Generator().manual_seed(0)
    base = [torch.randn(*sizes, 300, 64, generator=generator).to("cuda", torch.bfloat16) for _ in range(3)]
    mask = create_block_mask(mods(300, "cuda")["documents"], None, None, 300, 300, "cuda")
    leaves = [x.clone().requires_grad_() for x in base]
    wide = [x.expand(3, 4, 300, 64) for x in leaves]
    out = flex_attention(*wide, None, mask)
    assert torch.equal(out, flex_attention(*(x.detach().contiguous() for x in wide), None, mask))
    seen = flash_attn.flex_attention.create_mask(mods(300, "cpu")["documents"], None, None, 300, 300, "cpu")
    exact = [x.cpu().double().requires_grad_() for x in base]
    want = attention(*(x.expand(3, 4, 300, 64) for x in exact), None, seen)[0]
    dout = torch.randn(out.shape, generator=generator).to(out)
    wants = torch.autograd.grad(want, exact, dout.cpu().double())
    for has, wanted in zip(torch.autograd.grad(out, leaves, dout), wants, strict=True):
        assert (has.cpu().double() - wanted).abs().max() <= 0.02 * wanted.abs().max()


# ---- plans, which need no GPU ----------------------------------------------------------------------------------------


def names_of(function, *args, **kwargs):
    kernels = flash_attn.prebuild_call(function, *args, archs="sm_90a", compiles=False, **kwargs)
    return [re.sub(r"_[0-9a-f]{16}$", "_#", kernel.name) for kernel in kernels]


FOUND = ["flex_classify_flex_#", "flex_lists", "flex_walks", "flex_hidden_flex_#"]
HOPPER = "attn_fwd_sm90_bf16_d128_q128kv128_flex_#"


def absent(*sizes):
    return torch.empty(*sizes, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("length, has_lists", [(512, False), (4096, True)])
def test_few_pairs_need_no_lists(monkeypatch, length, has_lists):
    monkeypatch.undo()
    q = absent(1, length, 8, 128)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")
    want = [*FOUND, HOPPER] if has_lists else [HOPPER]
    assert names_of(flash_attn_func, q, q, q, attn_mask=mask) == want
    ids = torch.zeros(length, dtype=torch.int32, device="meta")
    heads_first = absent(1, 8, length, 128)
    assert names_of(flex_attention, *[heads_first] * 3, mask_mod=lambda b, h, i, j: ids[i] == ids[j]) == want


def test_a_window_beside_a_mask_has_lists(monkeypatch):
    monkeypatch.undo()
    q, k = absent(1, 64, 8, 128), absent(1, 131072, 8, 128)
    mask = torch.ones(1, 1, 1, 131072, dtype=torch.bool, device="meta")
    names = names_of(flash_attn_func, q, k, k, attn_mask=mask, window_size=(255, 0))
    assert names[:3] == ["flex_classify_flex_#", "flex_lists", "flex_blocks"]


def test_few_rows_need_no_lists(monkeypatch):
    monkeypatch.undo()
    q, k = absent(64, 1, 32, 128), absent(64, 8192, 32, 128)
    mask = torch.ones(64, 1, 1, 8192, dtype=torch.bool, device="meta")
    assert "flex_lists" not in names_of(flash_attn_func, q, k, k, attn_mask=mask)


def test_a_mask_without_tensors_always_has_lists(monkeypatch):
    monkeypatch.undo()
    q = absent(1, 2, 300, 128)
    assert names_of(flex_attention, q, q, q, mask_mod=lambda b, h, i, j: (i >= j) & (j != 3)) == [*FOUND, HOPPER]
    q = absent(1, 2, 128, 128)  # one block
    assert names_of(flex_attention, q, q, q, mask_mod=lambda b, h, i, j: (i >= j) & (j != 3)) == [HOPPER]


def test_expanded_tensors_have_hoppers_kernel():
    q = absent(4, 8, 512, 128)
    k = absent(1, 1, 512, 128).expand(4, 8, 512, 128)
    assert names_of(flex_attention, q, k, k, lambda s, b, h, i, j: s + (j - i)) == [HOPPER]


def kinds_of_blocks(lists, rows, columns):
    """``[heads, rows, columns]``: 0 empty, 1 partial, 2 full."""
    _, _, num, places, full_num, full_places = lists[:6]
    kinds = torch.zeros(num.shape[1], rows, columns, dtype=torch.int64)
    for kind, (n, at) in enumerate(((num, places), (full_num, full_places)), 1):
        for head in range(kinds.shape[0]):
            for row in range(rows):
                kinds[head, row, at[0, head, row, : n[0, head, row]].long()] = kind
    return kinds


@pytest.mark.parametrize("is_given_lists", [False, True])
def test_blocks_of_packed_masks(is_given_lists, monkeypatch):
    """On a GPU too, a packed call leaves out blocks that its attn_mask hides, and those of two sequences."""
    if is_given_lists:
        monkeypatch.setattr(ops, "MOST_BLOCKS", 0)
    h, lengths = 2, [0, 256, 640, 700]
    q = torch.randn(700, h, 64, dtype=torch.bfloat16)
    cu = torch.tensor(lengths, dtype=torch.int32)
    mask = torch.ones(1, 1, 384, 384, dtype=torch.bool).tril().expand(1, h, -1, -1).clone()
    mask[:, 1, :, 200:] = False
    asked, calls, find_lists, prepare = [], [], ops.find_lists, flash_attn.flex.attention.prepare

    def spy(*args, **kwargs):
        calls.append(prepare(*args, **kwargs)[0])
        return prepare(*args, **kwargs)

    monkeypatch.setattr(flash_attn.flex.attention, "prepare", spy)
    monkeypatch.setattr(ops, "find_lists", lambda *args: asked.append(args) or find_lists(*args))
    with _imagined.imagined_gpu(90, _imagined.NOTED):
        flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 384, 384, attn_mask=mask)
    lists = calls[0].blocks
    assert (len(asked) == 0) == is_given_lists
    if asked:  # an imagined GPU fills no lists
        lists = 128, 128, *find_lists(*asked[0])
    kinds = kinds_of_blocks(lists, 6, 6)
    dense = torch.zeros(h, 700, 700, dtype=torch.bool)
    for begin, end in zip(lengths, lengths[1:]):
        dense[:, begin:end, begin:end] = True if is_given_lists else mask[0, :, : end - begin, : end - begin]
    blocks = torch.nn.functional.pad(dense, (0, 68, 0, 68)).view(h, 6, 128, 6, 128)
    want = blocks.any(4).any(2).long()
    if not is_given_lists:
        want += blocks.all(4).all(2).long()
        assert (want[0] == 2).sum() == 4 and want[1, 3, 3] == 1
    assert torch.equal(kinds, want if not is_given_lists else want[:1])


@needs_gpu
@pytest.mark.parametrize("dims", [(1, 1), (3, 4)])
def test_packed_masks(dims):
    """A causal mask as attn_mask, and one with holes, for each sequence and head."""
    lengths, h, h_kv, d = [0, 300, 301, 700], 4, 2, 64
    q, k, v = draw(1, h, h_kv, 700, 700, d, torch.bfloat16, "cuda")
    cu = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    mask = torch.ones(399, 399, dtype=torch.bool).tril() & (torch.rand(*dims, 399, 399) < 0.9)
    seen = torch.zeros(1, h, 700, 700, dtype=torch.bool)
    for n, (begin, end) in enumerate(zip(lengths, lengths[1:])):
        seen[:, :, begin:end, begin:end] = mask[min(n, dims[0] - 1), :, : end - begin, : end - begin]
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    out = flash_attn.flash_attn_varlen_func(*rows, cu, cu, 399, 399, attn_mask=mask.cuda())
    verify(out.transpose(0, 1)[None], (q, k, v), seen)
