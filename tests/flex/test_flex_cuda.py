"""flex_attention on a GPU against its specification, which runs on the CPU in fp64."""

import os
import random
import subprocess
import sys
from pathlib import Path

import flash_attn_2_cuda
import pytest
import torch
from catalogue import CATALOGUE
from harness_flex import DEVICE, block_mask_on_gpu
from oracle_attention import INF, TOLERANCES, attention, close, gradients, moved
from oracle_decode import LENGTH, MASKS, alibi, causal, draw, in_pages, int32, tensors, want_of, window
from score_catalogue import SCORES

from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def compare(tensors, score_mod=None, leaves=(), mask_mod=None, block=None):
    """Compares out, lse, max_scores and all gradients. block: the size of blocks; None: a bare mask_mod."""
    shape, kwargs, mask, seen = (*tensors[0].shape[:3], tensors[1].shape[2]), {}, None, {}
    if mask_mod is not None:
        mask = create_mask(mask_mod, *shape, device="cpu")
        kwargs["mask_mod"] = moved(mask_mod, DEVICE, seen)
    if block is not None:
        made = create_block_mask(mask_mod, *shape, device="cpu", BLOCK_SIZE=block)
        kwargs = {"block_mask": block_mask_on_gpu(made, kwargs["mask_mod"])}
    ours = [x.detach().to(DEVICE).requires_grad_() for x in tensors]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    mod = None if score_mod is None else moved(score_mod, DEVICE, seen)
    out, aux = flex_attention(*ours, mod, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True), **kwargs)
    want = attention(*wide, score_mod, mask)
    tolerance = max(TOLERANCES[out.dtype], 1e-4)
    for has, wants in zip((out, aux.lse, aux.max_scores), want, strict=True):
        close(has.cpu(), wants, tolerance)
    dout, dlse = (torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype) for x in (out, aux.lse))
    dlse = torch.where(want[1] == -INF, 0.0, dlse).float()
    got = gradients((out, aux.lse), [*ours, *(seen[id(x)] for x in leaves)], (dout.to(DEVICE), dlse.to(DEVICE)))
    wants = gradients(want[:2], [*wide, *leaves], (dout.double(), dlse.double()))
    for has, want in zip(got, wants, strict=True):
        close(has.cpu(), want, 4 * max(tolerance, TOLERANCES[has.dtype] if has.dtype == torch.bfloat16 else 0))


def tensors_of(rng, shape):
    """Random q, k, v of random dtype and head dimensions, with grouped heads if the number of heads is even."""
    b, h, len_q, len_kv = shape
    h_kv, d = h // 2 if h % 2 == 0 else h, rng.choice([8, 16, 40, 64, 128])
    dtype, generator = rng.choice([torch.float32, torch.bfloat16, torch.float16]), torch.Generator().manual_seed(h)
    sizes = [(b, h, len_q, d), (b, h_kv, len_kv, d), (b, h_kv, len_kv, rng.choice([d, 8, 64, 128]))]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def shape_of(rng, h):
    return rng.randint(1, 2), h, *(rng.choice([1, 17, 127, 128, 129, rng.randint(1, 300)]) for _ in range(2))


@pytest.mark.parametrize("make", CATALOGUE, ids=lambda make: make.__name__)
def test_every_mask(make):
    rng = random.Random(CATALOGUE.index(make))
    shape = rng.randint(1, 2), rng.randint(1, 4), rng.randint(2, 300), rng.randint(2, 300)
    compare(tensors_of(rng, shape), mask_mod=make(rng, shape), block=rng.choice([None, 128, 64, (256, 128), (16, 24)]))


@pytest.mark.parametrize("make", SCORES, ids=lambda make: make.__name__)
def test_every_score_mod(make):
    rng = random.Random(SCORES.index(make))
    shape = shape_of(rng, rng.randint(1, 4))
    score_mod, leaves = make(rng, shape)
    tensors = [x.float() for x in tensors_of(rng, shape)]
    compare(tensors, score_mod, leaves, mask_mod=rng.choice([None, lambda b, h, i, j: i >= j]))


def test_a_graph_is_replayed_with_other_lists():
    generator = torch.Generator().manual_seed(0)
    mod = lambda b, h, i, j: (i + j) % 3 != 0  # noqa: E731
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator) for n in (150, 120, 120))
    block_mask = block_mask_on_gpu(create_block_mask(mod, 2, 3, 150, 120, device="cpu", BLOCK_SIZE=32), mod)
    on_gpu = [x.to(DEVICE) for x in (q, k, v)]
    flex_attention(*on_gpu, block_mask=block_mask)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flex_attention(*on_gpu, block_mask=block_mask)
    for _ in range(3):
        kinds = torch.randint(0, 3, (2, 3, 5, 4), generator=generator)
        for kind, prefix in ((1, ""), (2, "full_")):
            is_listed = (kinds == kind).to(torch.int32)
            getattr(block_mask, prefix + "kv_num_blocks").copy_(is_listed.sum(-1))
            order = torch.argsort(is_listed, dim=-1, descending=True, stable=True)
            getattr(block_mask, prefix + "kv_indices").copy_(order)
        graph.replay()
        blocks = kinds.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :150, :120]
        mask = (blocks == 2) | ((blocks == 1) & create_mask(mod, 2, 3, 150, 120, device="cpu"))
        close(out.cpu(), attention(q.double(), k.double(), v.double(), None, mask)[0], 1e-4)


@pytest.mark.parametrize("len_q, len_kv", [(0, 7), (5, 0), (0, 0)])
def test_without_queries_or_keys_the_gradients_are_zero(len_q, len_kv):
    leaves = [torch.randn(1, 2, n, 16, device=DEVICE, requires_grad=True) for n in (len_q, len_kv, len_kv)]
    bias = torch.randn(len_q, device=DEVICE, requires_grad=True)
    out, lse = flex_attention(*leaves, lambda score, b, h, i, j: score + bias[i], return_lse=True)
    assert not out.any() and (lse == -INF).all()
    for gradient in torch.autograd.grad([out.sum()], [*leaves, bias]):
        assert not gradient.any()


def test_what_is_masked_may_be_anything():
    tensors = [torch.randn(1, 2, 200, 64, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    tensors[2][:, :, 150:], tensors[1][:, :, 170] = float("nan"), INF
    score_mod = lambda s, b, h, i, j: torch.where(j <= i, s, -INF)  # noqa: E731
    mask_mod = lambda b, h, i, j: (j <= i) & (h >= 0)  # noqa: E731
    for kwargs in ({"score_mod": score_mod}, {"mask_mod": mask_mod}):
        out = flex_attention(*(x.to(DEVICE) for x in tensors), **kwargs).cpu()
        assert out[:, :, :150].isfinite().all() and not out[:, :, 150:].isfinite().any()


@pytest.fixture
def fixed_order():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


DETERMINISTIC = {
    "slopes": ((4,), lambda x: lambda s, b, h, i, j: s + x[h] * (j - i)),
    "one number": ((), lambda x: lambda s, b, h, i, j: s * x),
    "a table": ((4, 999), lambda x: lambda s, b, h, i, j: s + x[h, i - j + 500]),
    "pairs": ((500, 400), lambda x: lambda s, b, h, i, j: s + x[i, j]),
    "buckets": ((3,), lambda x: lambda s, b, h, i, j: s + x[(i - j) % 3]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_captures", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_sums_of_captures(name, of_captures, dtype):
    """The bits of gradients are the same in each run, and the numbers are those of sums in any order."""
    shape, mod = DETERMINISTIC[name]
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, n, 32, generator=random).to(dtype) for n in (500, 400, 400)]
    capture = torch.randn(shape, generator=random).to(of_captures)
    dout = torch.randn(2, 4, 500, 32, generator=random)

    def run():
        leaves = [x.to(DEVICE).requires_grad_() for x in (*tensors, capture)]
        out = flex_attention(*leaves[:3], mod(leaves[3]))
        return torch.autograd.grad(out, leaves, dout.to(DEVICE, out.dtype))

    flash_attn_2_cuda.set_cuda_kernels("any")
    want = run()
    torch.use_deterministic_algorithms(True)
    try:
        found = [run() for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
        flash_attn_2_cuda.set_cuda_kernels(None)
    for again in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(again, found[0]))
    error = (found[0][3].double() - want[3].double()).norm() / want[3].double().norm()
    assert error < (2**-8 if of_captures == torch.bfloat16 else 1e-4), error


def test_deterministic_sums_of_infinite_parts(fixed_order):
    """One key's values are infinite, so its parts are, too. Only the element that they reach is not finite."""
    q, k, v = (torch.randn(1, 1, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        v[0, 0, 7] = INF
    table = torch.zeros(40, device=DEVICE, requires_grad=True)
    out = flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(j < 8, s + table[i], -INF) * 1.0)
    gradient = torch.autograd.grad(out, table, torch.ones_like(out))[0]
    assert not gradient.isfinite().any()
    out = flex_attention(q, k, v, lambda s, b, h, i, j: torch.where((j == 7) & (i != 5), -INF, s + table[i]))
    gradient = torch.autograd.grad(out, table, torch.ones_like(out))[0]
    assert (~gradient.isfinite()).nonzero().tolist() == [[5]]


def test_deterministic_sums_in_a_graph(fixed_order):
    q = torch.randn(1, 2, 100, 16, device=DEVICE, requires_grad=True)
    slopes = torch.zeros(2, device=DEVICE, requires_grad=True)

    def step():
        out = flex_attention(q, q, q, lambda s, b, h, i, j: s + slopes[h] * (j - i))
        return torch.autograd.grad(out.square().sum(), slopes)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        found.fill_(7)
        graph.replay()
        assert torch.equal(found, want)


# ---- decoding -------------------------------------------------------------------------------------------------------


def on_gpu(*values):
    return [None if x is None else x.to(DEVICE) for x in values]


@pytest.mark.parametrize("form", ["dense", "paged", "block mask"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("len_q", [1, 2, 5, 8])
def test_decoding_with_mods(len_q, name, form):
    rng = random.Random(f"{len_q} {name} {form}")
    for dtype in (torch.float32, torch.bfloat16):
        (q, k, v), kv_len, q_offset = draw(rng, len_q, dtype)
        score_mod, mask_mod, table = rng.choice([None, alibi(rng)]), MASKS[name](rng), None
        want = want_of(q, k, v, kv_len, q_offset, score_mod, mask_mod)
        mods = [None if x is None else moved(x, DEVICE, {}) for x in (score_mod, mask_mod)]
        mask = {"mask_mod": mods[1]}
        if form == "block mask" and mask_mod is not None:
            made = create_block_mask(mask_mod, q.size(0), None, LENGTH, k.size(2), device="cpu", BLOCK_SIZE=16)
            mask = {"block_mask": block_mask_on_gpu(made, mods[1])}
        if form == "paged":
            k, v, table = in_pages(rng, k, v, kv_len, rng.choice([1, 3, 16, 64]))
        q, k, v, table, q_offset, kv_len = on_gpu(q, k, v, table, int32(q_offset), int32(kv_len))
        out, aux = flex_attention(
            q, k, v, mods[0], enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True), **mask,
            q_offset=q_offset, kv_len=kv_len, block_table=table,
        )  # fmt: skip
        for has, wants in zip((out, aux.lse, aux.max_scores), want, strict=True):
            close(has.cpu(), wants, max(TOLERANCES[dtype], 1e-4))


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("mask_mod", [None, causal, window])
def test_decoding_on_plain_kernels(mask_mod, is_paged):
    """Numbers tell the host where the queries lie."""
    rng = random.Random(0)
    for length in (1, 64, 129, 1000):
        q, k, v = tensors(rng, 2, 8, 2, 1, 1024, 64, 64, torch.bfloat16)
        want = want_of(q, k, v, [length] * 2, [length - 1] * 2, None, mask_mod)[0]
        k, v, table = in_pages(rng, k, v, [length] * 2, 64) if is_paged else (k, v, None)
        q, k, v, table = on_gpu(q, k, v, table)
        places = {"q_offset": length - 1, "kv_len": length, "block_table": table}
        out = flex_attention(q, k, v, mask_mod=mask_mod, enable_gqa=True, **places)
        close(out.cpu(), want, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("mask_mod", [None, window])
def test_a_graph_is_replayed_with_other_lengths(mask_mod):
    rng = random.Random(1)
    q, k, v = tensors(rng, 2, 4, 2, 3, 150, 64, 64, torch.float32)
    pages, values, table = in_pages(rng, k, v, [150, 150], 16)
    moved_q, pages, values, table, q_offset, kv_len = on_gpu(q, pages, values, table, int32([0, 0]), int32([3, 3]))
    places = {"q_offset": q_offset, "kv_len": kv_len, "block_table": table}
    call = lambda: flex_attention(moved_q, pages, values, mask_mod=mask_mod, enable_gqa=True, **places)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([3, 150], [0, 77], [64, 65]):
        offsets = [max(n - 3, 0) for n in lengths]
        kv_len.copy_(int32(lengths))
        q_offset.copy_(int32(offsets))
        graph.replay()
        close(out.cpu(), want_of(q, k, v, lengths, offsets, None, mask_mod)[0], 1e-4)


def test_gradients_of_queries_with_an_offset():
    rng = random.Random(2)
    q, k, v = tensors(rng, 2, 4, 2, 9, 60, 40, 40, torch.float32)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.to(DEVICE).requires_grad_() for x in (q, k, v))
    mask = create_block_mask(window, None, None, LENGTH, 60, device="cpu", BLOCK_SIZE=16)
    out = flex_attention(
        q, k, v, moved(alibi(rng), DEVICE, {}), block_mask_on_gpu(mask, window), enable_gqa=True,
        q_offset=int32([30, 11]).to(DEVICE),
    )  # fmt: skip
    want = want_of(*wide, [60, 60], [30, 11], alibi(rng), window)[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    has = torch.autograd.grad(out, (q, k, v), dout.to(DEVICE))
    for x, wants in zip(has, torch.autograd.grad(want, wide, dout.double()), strict=True):
        close(x.cpu(), wants, 4e-4)


PREBUILT = """
import sys, torch, flash_attn
from flash_attn.flex_attention import create_block_mask, flex_attention

device = sys.argv[1]
dtype = getattr(torch, sys.argv[2])
slopes = torch.ones(4, device=device, requires_grad=True)


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def step(query, key, value):
    def near(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < 100

    block_mask = create_block_mask(near, None, None, 200, 200, device="cuda")
    return flex_attention(query, key, value, alibi, block_mask)


tensors = [torch.zeros(1, 4, 200, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
if device == "meta":
    flash_attn.prebuild_call(step, *tensors, archs="sm_%d%d" % torch.cuda.get_device_capability())
else:
    step(*tensors).sum().backward()
"""


OPTIONS = """
import sys, torch, flash_attn

device = sys.argv[1]
dtype = torch.bfloat16
q, k, v = (torch.zeros(2, 200, 4, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
bias = torch.zeros(4, 200, 200, device=device, requires_grad=True)
sinks = torch.zeros(4, device=device, requires_grad=True)
mask = torch.ones(200, 200, dtype=torch.bool, device=device)
cu = torch.tensor([0, 90, 200, 400], dtype=torch.int32, device=device)


def all_of(q, k, v, bias, sinks, mask, cu):
    found = []
    for options in (
        {"sinks": sinks}, {"attn_bias": bias, "sinks": sinks, "causal": True},
        {"attn_mask": mask, "window_size": (60, 5), "return_lse": True}, {"return_max_logits": True},
    ):
        found.append(flash_attn.flash_attn_func(q, k, v, **options))
        packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        found.append(flash_attn.flash_attn_varlen_func(*packed, cu, cu, 200, 200, **options))
    return found


if sys.argv[2] == "compiled":
    all_of = torch.compile(all_of, backend="aot_eager", fullgraph=True)
if device == "meta":
    arch = "sm_%d%d" % torch.cuda.get_device_capability()
    flash_attn.prebuild_call(all_of, q, k, v, bias, sinks, mask, cu, archs=arch)
else:
    found = [x if isinstance(x, tuple) else (x,) for x in all_of(q, k, v, bias, sinks, mask, cu)]
    sum(x.float().sum() for results in found for x in results if x.requires_grad).backward()
"""


def files_after(program, *arguments, folder):
    """The kernels in a folder after a program ran, and their places on the disk."""
    environment = {**os.environ, "FLASH_ATTN_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    subprocess.run([sys.executable, "-c", program, *arguments], env=environment, check=True)
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_call_with_options_finds_its_prebuilt_kernels(way, tmp_path):
    prebuilt = files_after(OPTIONS, "meta", way, folder=tmp_path)
    assert len(prebuilt) >= 12 and files_after(OPTIONS, "cuda", way, folder=tmp_path) == prebuilt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_call_finds_its_prebuilt_kernels(dtype, tmp_path):
    """The call finds all of its kernels in the folder, and loads all that are there. A wheel may bring plain ones."""
    prebuilt = files_after(PREBUILT, "meta", dtype, folder=tmp_path / "ahead")
    of_mods = [name for name in prebuilt if "_flex_" in name]
    assert len(of_mods) >= 4 and files_after(PREBUILT, "cuda", dtype, folder=tmp_path / "ahead") == prebuilt
    assert files_after(PREBUILT, "cuda", dtype, folder=tmp_path / "at first use").keys() == prebuilt.keys()
