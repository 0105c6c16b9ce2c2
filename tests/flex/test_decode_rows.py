"""The CPU's kernel for few rows, with mods, beside the reference: several splits, values that only some rows see."""

import random

import flash_attn_2_cuda
import pytest
import torch
from oracle_attention import INF, TOLERANCES, close
from oracle_decode import in_pages, int32

from flash_attn import explain, flash_attn_func
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention

LONGEST = 1100
SLOPES, DOCUMENT = torch.rand(16), torch.arange(LONGEST + 50) // 90
BIAS = torch.randn(16, LONGEST)
MODS = {
    "alibi": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j) / 50, None),
    "documents": (None, lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) | (j < 3)),
    "a window of each head": (None, lambda b, h, i, j: (i >= j) & (i - j <= 40 * h + b)),
    "bias, causal": (lambda s, b, h, i, j: s + BIAS[h, j], lambda b, h, i, j: i >= j),
    "hidden by a score": (lambda s, b, h, i, j: torch.where((h + j) % 3 == 0, -INF, s), None),
    "nothing is seen": (None, lambda b, h, i, j: j < -1),
    "gaps": (None, lambda b, h, i, j: (j * 7 + i) % 5 < 2),
}


def draw(name, dtype, len_q, heads, seed):
    rng = random.Random(f"{name} {dtype} {len_q} {seed}")
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    b, longest, d, d_v = (
        rng.choice((1, 3)),
        rng.choice((70, 600, LONGEST)),
        rng.choice((8, 40, 128)),
        rng.choice((24, 64)),
    )
    shapes = (b, heads[0], len_q, d), (b, heads[1], longest, d), (b, heads[1], longest, d_v)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    kv_len = [longest, *(rng.choice((0, 1, 64, 65, longest)) for _ in range(b - 1))]
    offset = [rng.randint(0, 40) + max(n - 60, 0) * rng.randint(0, 1) for n in kv_len]
    for _ in range(rng.choice((0, 0, 4))):
        v[rng.randrange(b), rng.randrange(heads[1]), rng.randrange(longest), rng.randrange(d_v)] = rng.choice(
            (INF, float("nan"))
        )
    return rng, (q, k, v), kv_len, offset


def results(tensors, score_mod, mask_mod, places, **asked):
    out, aux = flex_attention(
        *tensors, score_mod, mask_mod=mask_mod, enable_gqa=True, return_aux=AuxRequest(lse=True, **asked), **places
    )
    return out, aux.lse


@pytest.mark.parametrize("len_q, heads", [(1, (4, 4)), (1, (8, 1)), (3, (6, 2)), (5, (6, 2)), (16, (2, 2))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_equals_the_reference(name, dtype, len_q, heads, isa):
    for seed in range(2):
        rng, (q, k, v), kv_len, offset = draw(name, dtype, len_q, heads, seed)
        places = {"q_offset": int32(offset), "kv_len": int32(kv_len)}
        mods = MODS[name]
        flash_attn_2_cuda.set_cpu_isa("reference")
        want = results((q, k, v), *mods, places)
        flash_attn_2_cuda.set_cpu_isa(isa)
        cache = k, v
        if seed == 1:
            *cache, places["block_table"] = in_pages(rng, k, v, kv_len, rng.choice((1, 16, 64)))
        for x, wants in zip(results((q, *cache), *mods, places), want, strict=True):
            close(x, wants, TOLERANCES[dtype])


@pytest.mark.parametrize("group, len_q, d", [(8, 8, 96), (8, 8, 256), (64, 1, 256), (9, 7, 128), (5, 4, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_most_rows_of_the_widest_heads(dtype, group, len_q, d, isa):
    generator = torch.Generator().manual_seed(group)
    q, k, v = (torch.randn(2, n, h, d, generator=generator).to(dtype) for n, h in ((len_q, 2 * group), *[(200, 2)] * 2))
    bias = torch.randn(1, 2 * group, len_q, 200, generator=generator)
    flash_attn_2_cuda.set_cpu_isa("reference")
    want = flash_attn_func(q, k, v, attn_bias=bias)
    flash_attn_2_cuda.set_cpu_isa(isa)
    close(flash_attn_func(q, k, v, attn_bias=bias), want, TOLERANCES[dtype])
    if isa != "reference":
        assert explain(flash_attn_func, q, k, v, attn_bias=bias).kernel.startswith("attn_decode_")


def test_which_calls_it_takes():
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 2, 300, 16)

    def kernel(**kwargs):
        return explain(flex_attention, kwargs.pop("q", q), k, k, enable_gqa=True, **kwargs).kernel

    mods = {"score_mod": MODS["alibi"][0], "mask_mod": MODS["bias, causal"][1]}
    offset = torch.tensor([298], dtype=torch.int32)
    if flash_attn_2_cuda.cpu_isas() == ["reference"]:
        pytest.skip("there is the reference alone")
    assert kernel(**mods).startswith("attn_decode_") and kernel(q_offset=offset, **mods).startswith("attn_decode_")
    assert kernel(q=torch.randn(1, 4, 8, 16), **mods).startswith("attn_decode_")
    assert kernel(q=torch.randn(1, 4, 9, 16), **mods).startswith("attn_fwd_")
    mask = create_block_mask(mods["mask_mod"], None, None, 2, 300, "cpu")
    assert kernel(score_mod=mods["score_mod"], block_mask=mask).startswith("attn_fwd_")
    assert kernel(return_aux=AuxRequest(max_scores=True), **mods).startswith("attn_fwd_")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mask_of_few_rows(dtype, isa):
    """The attn_mask of a step of generation: keys of padding, which hold NaN. Many rows have tiles."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 64, dtype=dtype) for n, h in ((8, 16), (700, 2), (700, 2)))
    mask = (torch.arange(700) < torch.tensor([[700], [411]]))[:, None, None]
    v[1, 411:] = float("nan")
    flash_attn_2_cuda.set_cpu_isa("reference")
    want = flash_attn_func(q, k, v, attn_mask=mask)
    flash_attn_2_cuda.set_cpu_isa(isa)
    for num in (1, 5, 8):
        close(flash_attn_func(q[:, -num:], k, v, attn_mask=mask), want[:, -num:], TOLERANCES[dtype])
        if isa != "reference":
            plan = explain(flash_attn_func, q[:, -num:], k, v, attn_mask=mask)
            assert plan.kernel.startswith("attn_decode_")
    if isa != "reference":
        many = q.repeat(1, 2, 1, 1)
        assert explain(flash_attn_func, many, k, v, attn_mask=mask).kernel.startswith("attn_fwd_")


def test_threads_and_the_batch_change_no_bit():
    """Also beside a head with values that only some rows may see. Threads and batch decide which heads share a task."""
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 32, 1, 64), torch.randn(8, 8, 1000, 64), torch.randn(8, 8, 1000, 64)
    v[:, 0, 5, 0], v[:, 3, 600, 1] = INF, float("nan")
    mods = None, lambda b, h, i, j: (j % 595 != 5) | (h % 3 == 1)
    places, found, threads = {"kv_len": int32([1000] * 8)}, [], torch.get_num_threads()
    for num in (1, 2, 5):
        torch.set_num_threads(num)
        found.append(results((q, k, v), *mods, places))
    torch.set_num_threads(threads)
    alone = results([x[:1] for x in (q, k, v)], *mods, {"kv_len": int32([1000])})
    for other in found[1:]:
        assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(found[0], other, strict=True))
    assert all(torch.equal(x[:1].nan_to_num(7), y.nan_to_num(7)) for x, y in zip(found[0], alone, strict=True))
    seen = [h for h in range(32) if h % 3 == 1]
    assert found[0][0].isfinite().all(-1).all(0).squeeze()[[h for h in range(32) if h not in seen]].all()


@pytest.mark.parametrize("name", ["q_offset", "kv_len"])
@pytest.mark.parametrize(
    "mask_mod", [lambda b, h, i, j: (i >= j) & (i - j < 9), MODS["gaps"][1]], ids=["window", "gaps"]
)
def test_places_that_cannot_be_read_are_named(name, mask_mod):
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 300, 16)
    for _ in range(2):  # the mods are traced, then known
        freed = int32([8, 9])
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=f"{name} has shape .* its storage must hold 8 bytes"):
            flex_attention(q, k, k, mask_mod=mask_mod, **{name: freed})
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor"):
            flex_attention(q, k, k, mask_mod=mask_mod, **{name: int32([8, 9]).to_sparse()})
        flex_attention(q, k, k, mask_mod=mask_mod, **{name: int32([8, 9])})


def test_gradients_behind_it():
    """The forward of few rows, and the backward of all others."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, 16, dtype=torch.float64) for n in (2, 300, 300))
    table = torch.randn(4, 300, dtype=torch.float64)

    def gradients(dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, table)]
        bias = leaves[3]
        out = flex_attention(*leaves[:3], lambda s, b, h, i, j: s + bias[h, j], mask_mod=lambda b, h, i, j: j % 3 != i)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    for x, wants in zip(gradients(torch.float32), gradients(torch.float64)):
        close(x, wants, 1e-4)
