"""What PyTorch's own tests of FlexAttention check, on the CPU and on a GPU (torchs_tests.py says which test is where).

The values of a call are those of PyTorch's function, which runs in fp64 on the CPU. Its gradients are those of plain
arithmetic in fp64 (oracle_attention.py), because PyTorch has none on the CPU.
"""

import pytest
import torch
from oracle_attention import INF, attention, close, moved
from torch.nn import functional
from torchs_harness import ALL, DEVICES, compare, in_pages_of_torch, tensors, tolerance_of
from torchs_mods import BUILTIN, CAPTURES, DERIVED, LEARNED, MASKS, PLAIN, B, H, S, alibi, hidden, is_before, random

import flash_attn.flex.attention
from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention, noop_mask


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


# ---- mods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_scores(device, name):
    compare(device, tensors(), PLAIN[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BUILTIN)
def test_scores_in_16_bits(device, name, dtype):
    compare(device, tensors(dtype=dtype), BUILTIN[name], mask_mod=is_before, beside_torch=False)


@pytest.mark.parametrize("name", CAPTURES)
def test_scores_with_captures(device, name):
    compare(device, tensors(), CAPTURES[name]())


@pytest.mark.parametrize("name", LEARNED)
def test_learned_scores(device, name):
    compare(device, tensors(), *LEARNED[name]())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DERIVED)
def test_derived_tables(device, name, dtype):
    derived, leaves = DERIVED[name]
    compare(device, tensors(dtype=dtype), leaves=leaves(), derived=derived)


@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name):
    compare(device, tensors(), mask_mod=MASKS[name]())


def test_only_a_table_is_learned(device):
    mod, (bias,) = LEARNED["distances"]()
    qkv, leaf = tensors(), bias.detach().to(device).requires_grad_()
    out = flex_attention(*(x.to(device) for x in qkv), lambda s, b, h, i, j: s + leaf[torch.abs(i - j)])
    want = attention(*(x.double() for x in qkv), mod)[0]
    close(*(torch.autograd.grad(x.sum(), y)[0].cpu() for x, y in ((out, leaf), (want, bias))), 4e-4)


def test_a_mod_that_turns(device):
    """A number of the closure changes between calls."""
    scale, adds = torch.ones((), dtype=torch.int32, device=device), True

    def mod(s, b, h, i, j):
        return s + scale if adds else s * scale * 3

    q, k, v = (x.to(device) for x in tensors(b=1))
    first = flex_attention(q, k, v, mod)
    adds = False
    close(flex_attention(q, k, v, mod), flex_attention(q, k, v, scale=3 / 4), 1e-5)
    close(first, flex_attention(q, k, v), 1e-5)


def test_calls_of_calls(device):
    """The result of a call is the query of the next."""
    qkv = tensors(b=1, len_q=40)
    mods = BUILTIN["distance"], BUILTIN["causal"], BUILTIN["distance"]
    ours, wide = [x.to(device) for x in qkv], [x.double() for x in qkv]
    out, want = ours[0], wide[0]
    for mod in mods:
        out, want = flex_attention(out, *ours[1:], mod), attention(want, *wide[1:], mod)[0]
    close(out.cpu(), want, tolerance_of(device, out.dtype) * 10)


# ---- shapes ---------------------------------------------------------------------------------------------------------


SHAPES = {
    "half as many queries": ({"len_q": 65}, {}),
    "below a block": ({"len_q": 64, "len_kv": 64}, {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}),
    "below a wide block": ({"len_q": 64, "len_kv": 64}, {"block": 256, "mask_mod": is_before}),
    "four heads a key": ({"h": 16, "len_q": 16}, {}),
    "four heads a key, causal": ({"h": 16, "len_q": 16, "len_kv": 16}, {"mask_mod": is_before}),
    "six heads a key": ({"b": 1, "h": 12, "h_kv": 2, "len_q": 1, "len_kv": 128}, {}),
    "keys for three batches": ({"b": 3, "h_kv": 2, "b_kv": 1}, {"mask_mod": MASKS["everything"]()}),
    "keys for five batches": ({"b": 5, "h_kv": 1, "b_kv": 1}, {"mask_mod": is_before}),
    "narrow values": ({"d": 64, "d_v": 32}, {}),
    "wide values": ({"d": 32, "d_v": 64}, {}),
    "17 columns": ({"d": 17}, {}),
    "24 columns": ({"d": 24}, {}),
    "94 columns": ({"d": 94}, {}),
    "121 columns": ({"d": 121}, {}),
    "8 columns": ({"d": 8}, {}),
    "128 columns": ({"b": 1, "len_q": 128, "len_kv": 128, "d": 128}, {}),
    "one of each": ({"b": 1, "h": 1, "h_kv": 1, "len_q": 1, "len_kv": 1}, {}),
    "two of each": ({"h": 1, "h_kv": 1, "len_q": 2, "len_kv": 2}, {"mask_mod": is_before}),
    "three queries of an offset": ({"len_q": 3}, {"mask_mod": MASKS["an offset"]()}),
    "a query behind 65 keys": (
        {"b": 1, "h": 1, "h_kv": 1, "len_q": 1, "len_kv": 65},
        {"mask_mod": lambda b, h, i, j: i + 192 >= j},
    ),
    "longer than a block": ({"b": 1, "h": 2, "h_kv": 1, "len_q": 259, "len_kv": 387}, {"mask_mod": is_before}),
}
SHAPES |= {
    f"{n} queries of 32 heads": ({"b": 1, "h": 32, "h_kv": 8, "len_q": n, "len_kv": 128, "d": 128}, options)
    for n in (4, 8, 16, 23, 64)
    for options in [{"mask_mod": is_before, "block": 16, "kernel_options": {"BLOCK_M": 16, "BLOCK_N": 16}}]
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(device, name):
    sizes, options = SHAPES[name]
    compare(device, tensors(**sizes), alibi, **options)


@pytest.mark.parametrize("name", [*PLAIN, *CAPTURES])
def test_one_query(device, name):
    """As a decoder calls, with grouped heads."""
    mod = PLAIN[name] if name in PLAIN else CAPTURES[name]()
    compare(device, tensors(h_kv=2, len_q=1), mod, beside_torch=False, trains=False)


@pytest.mark.parametrize("name", ["each dimension", "pairs of a batch"])
@pytest.mark.parametrize("len_q, mask", [(1, "an offset"), (3, "an offset"), (S, "causal")])
def test_captures_beside_a_mask(device, len_q, mask, name):
    """With lengths that no block divides, a captured table has no element behind the last key."""
    qkv = tensors(h_kv=2, len_q=len_q, dtype=torch.bfloat16)
    compare(device, qkv, CAPTURES[name](), mask_mod=MASKS[mask](), beside_torch=False)


@pytest.mark.parametrize("name", ["identity", "squared", "distance, causal", "alibi"])
@pytest.mark.parametrize("block", [128, 256, (128, 256), (256, 128), 64, (1, 64), (128, 64), 96], ids=str)
def test_sizes_of_blocks(device, name, block):
    qkv = tensors(b=1, h=2, h_kv=2, len_q=300, len_kv=300)
    compare(device, qkv, BUILTIN[name], mask_mod=is_before, block=block, beside_torch=False)


def test_more_heads_than_a_grid_has(device):
    b = 22720 if device == "cuda" else 50
    qkv = [x.to(device).requires_grad_() for x in tensors(b, 3, 3, 64, 64, 32, dtype=torch.float16)]
    out = flex_attention(*qkv)
    want = functional.scaled_dot_product_attention(*qkv)
    close(out, want, 3e-3)
    dout = torch.randn_like(out)
    for has, wants in zip(torch.autograd.grad(out, qkv, dout), torch.autograd.grad(want, qkv, dout)):
        close(has, wants, 1e-2)


# ---- strides --------------------------------------------------------------------------------------------------------


def order_of(tensor):
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (1, 0, 3, 2)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 128, 16), (4, 2, 64, 16)], ids=str)
def test_results_have_the_order_of_inputs(device, shape, order):
    leaves = [random(*shape, seed=n).to(device).permute(order).requires_grad_() for n in range(3)]
    out = flex_attention(*leaves)
    want = attention(*(x.detach().cpu().double() for x in leaves))[0]
    close(out.cpu(), want, tolerance_of(device, out.dtype))
    assert out.stride(-1) == 1
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    if leaves[0].stride(-1) == 1:
        assert order_of(out) == order_of(leaves[0])
        for leaf, grad in zip(leaves, grads):
            assert order_of(grad) == order_of(leaf)


def layout(kind, b, h, n, d):
    """Strides and an offset of a tensor ``[b, h, n, d]`` in a longer memory."""
    return {
        "offset": ((h * n * d, n * d, d, 1), 997),
        "transposed": ((h * d, d, b * h * d, 1), 499),
        "heads last": ((h * n * d, d, h * d, 1), 0),
        "wider rows": ((n * (d + 1), b * n * (d + 1), d + 1, 1), 293),
        "overlapping": ((1, d, (b + 1) * (h + 1) * d, 1), 97),
    }[kind]


@pytest.mark.parametrize("of_dout", ["offset", "transposed", "heads last"])
@pytest.mark.parametrize("of_keys", [
    ("offset", "offset"), ("offset", "transposed"), ("heads last", "wider rows"), ("wider rows", "transposed"),
    ("overlapping", "overlapping"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("of_query", ["offset", "transposed"])
def test_strides(device, of_query, of_keys, of_dout):
    kinds, lengths, cpu, ours = (of_query, *of_keys, of_dout), (33, 66, 66, 33), [], []
    for seed, (kind, n) in enumerate(zip(kinds, lengths)):
        memory, (strides, offset) = random(4 * B * H * 66 * 16, seed=seed), layout(kind, B, H, n, 16)
        for where, found in (("cpu", cpu), (device, ours)):
            found.append(torch.as_strided(memory.to(where), (B, H, n, 16), strides, offset))
    leaves, wide = [x.requires_grad_() for x in ours[:3]], [x.double().requires_grad_() for x in cpu[:3]]
    out, want = flex_attention(*leaves, alibi), attention(*wide, alibi)[0]
    close(out.cpu(), want, tolerance_of(device, out.dtype))
    for has, wants in zip(torch.autograd.grad(out, leaves, ours[3]), torch.autograd.grad(want, wide, cpu[3].double())):
        close(has.cpu(), wants, 4 * tolerance_of(device, out.dtype))


def test_gradients_of_slices(device):
    """Keys that are left out get none."""
    leaves = [x.to(device).requires_grad_() for x in tensors(b=1, h=2, h_kv=2, len_q=200, len_kv=200)]
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    found = []
    for function, (q, k, v) in ((flex_attention, leaves), (lambda *x: attention(*x)[0], wide)):
        out = function(q, k[:, :, :-128], v[:, :, :-128])
        found.append(torch.autograd.grad(out.sin().sum(), (q, k, v)))
    for has, wants in zip(*found):
        close(has.cpu(), wants, 4 * tolerance_of(device, torch.float32))


# ---- lse and max_scores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [96, 196])
def test_parts_of_a_causal_mask_are_put_together(device, length):
    """By their lse, whose gradient counts."""
    leaves = [x.to(device).requires_grad_() for x in tensors(2, 2, 2, length, length, 64)]
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    outs, lses = [], []
    for mod in (MASKS["causal window"](), MASKS["far"]()):
        block_mask = create_block_mask(mod, None, None, length, length, device=device)
        out, aux = flex_attention(*leaves, block_mask=block_mask, return_aux=AuxRequest(lse=True))
        outs.append(out)
        lses.append(aux.lse)
    weights = (torch.stack(lses) - torch.maximum(*lses)).exp()[..., None]
    out = (torch.stack(outs) * weights).sum(0) / weights.sum(0)
    want = attention(*wide, hidden(is_before))[0]
    close(out.cpu(), want, tolerance_of(device, out.dtype))
    dout = random(*out.shape)
    for has, wants in zip(*(torch.autograd.grad(x, y, dout.to(x)) for x, y in ((out, leaves), (want, wide)))):
        close(has.cpu(), wants, 4 * tolerance_of(device, out.dtype))


def test_rows_that_see_nothing_get_no_gradient(device):
    """The gradient of their lse is not 0 here."""
    q, k, v = leaves = [x.to(device).requires_grad_() for x in tensors(h_kv=2)]
    block_mask = create_block_mask(MASKS["first rows"](), B, 1, S, S, device=device)
    out, aux = flex_attention(*leaves, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert not out[:, :, S // 2 :].any() and (aux.lse[:, :, S // 2 :] == -INF).all()
    (out.sum() + aux.lse.sum()).backward()
    assert not q.grad[:, :, S // 2 :].any() and q.grad[:, :, : S // 2].any()
    assert k.grad.isfinite().all() and v.grad.isfinite().all()


@pytest.mark.parametrize("name", ["identity", "causal", "times two", "squared", "sine of cosine", "sines"])
def test_gradients_by_differences(name):
    """In fp64, which the CPU has. lse is fp32 there, too: a difference to PyTorch."""
    leaves = [x.double().requires_grad_() for x in tensors(2, 2, 2, 11, 11, 4)]
    assert torch.autograd.gradcheck(lambda *x: flex_attention(*x, PLAIN[name]), leaves)


def test_gradients_of_a_captured_factor_by_differences():
    leaves = [x.double().requires_grad_() for x in (*tensors(2, 2, 2, 11, 11, 4), random(2))]
    assert torch.autograd.gradcheck(
        lambda q, k, v, factor: flex_attention(q, k, v, lambda s, b, h, i, j: s * factor[h]), leaves
    )


@pytest.mark.parametrize("name", ["identity", "squared", "alibi"])
def test_what_is_asked_for_changes_nothing(device, name, monkeypatch):
    monkeypatch.setattr(flash_attn.flex.attention, "_said", set())
    q, k, v = (x.to(device) for x in tensors(2, 2, 2, 243, 243))
    out = flex_attention(q, k, v, BUILTIN[name])
    both, aux = flex_attention(q, k, v, BUILTIN[name], return_aux=ALL)
    close(both, out, 1e-5)
    for names in (("lse",), ("max_scores",), ()):
        found, some = flex_attention(q, k, v, BUILTIN[name], return_aux=AuxRequest(**dict.fromkeys(names, True)))
        close(found, out, 1e-5)
        for each in ("lse", "max_scores"):
            x = getattr(some, each)
            assert x is None if each not in names else x.shape == (2, 2, 243)
            if each in names:
                close(x, getattr(aux, each), 1e-6)
    with pytest.warns(FutureWarning, match="return_lse is deprecated"):
        _, lse = flex_attention(q, k, v, BUILTIN[name], return_lse=True)
    close(lse, aux.lse, 1e-6)


# ---- what is hidden may be anything ---------------------------------------------------------------------------------


def poisoned(device):
    bias = torch.full((2 * B, H, S, S), float("nan"), device=device)
    bias[:B] = random(B, H, S, S).to(device)
    return lambda s, b, h, i, j: s + bias[b, h, i, j]


POISONS = {
    "NaN behind a table": poisoned,
    "a quotient by the score": lambda device: lambda s, b, h, i, j: 1 / s,
    "a logarithm of the score": lambda device: lambda s, b, h, i, j: torch.where(s > 0, torch.log(s), s),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", POISONS)
def test_poison_in_tails_of_tiles(device, name, dtype):
    """A length one above a tile: what lies behind the end has score 0."""
    leaves = [x.to(device).requires_grad_() for x in tensors(1, 1, 1, S, S, dtype=dtype)]
    block_mask = create_block_mask(is_before, 1, 1, S, S, device=device)
    out = flex_attention(*leaves, POISONS[name](device), block_mask)
    out.sum().backward()
    for x in (out, *(leaf.grad for leaf in leaves)):
        assert x.isfinite().all()


# ---- beside scaled_dot_product_attention ----------------------------------------------------------------------------


def rms(has, wants):
    return (has.double().cpu() - wants.double().cpu()).square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["score_mod", "both", "block mask"])
def test_digits_of_a_causal_call(device, way, dtype):
    """As many as those of PyTorch's attention, up to a fifth."""
    leaves = [x.to(device).requires_grad_() for x in tensors(2, 2, 2, 300, 300, 64, dtype=dtype)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    block_mask = create_block_mask(is_before, None, None, 300, 300, device=device)
    score_mod = None if way == "block mask" else hidden(is_before)
    out = flex_attention(*leaves, score_mod, None if way == "score_mod" else block_mask)
    theirs_out, want = (functional.scaled_dot_product_attention(*x, is_causal=True) for x in (leaves, wide))
    dout = torch.randn_like(want)
    found = [(x, *torch.autograd.grad(x, y, dout.to(x.dtype))) for x, y in ((out, leaves), (theirs_out, leaves))]
    wants = want, *torch.autograd.grad(want, wide, dout)
    for ours, torchs, exact in zip(*found, wants, strict=True):
        assert rms(ours, exact) <= 1.2 * rms(torchs, exact)


BIASES = {
    "of heads": ((4,), lambda x: lambda s, b, h, i, j: s + x[h], lambda x: x[:, None, None].expand(-1, 100, 100)),
    "pairs": ((100, 100), lambda x: lambda s, b, h, i, j: s + x[i, j], lambda x: x),
    "one by one": ((100, 100), lambda x: lambda s, b, h, i, j: s + x[i][j], lambda x: x),
    "flipped": ((100, 100), lambda x: lambda s, b, h, i, j: s + x[j, i], lambda x: x.mT),
    "flipped, of a head": ((4, 100, 100), lambda x: lambda s, b, h, i, j: s + x[h, j, i], lambda x: x.mT),
    "sums of indices": (
        (200,),
        lambda x: lambda s, b, h, i, j: s + x[i + j],
        lambda x: x[torch.arange(100, device=x.device)[:, None] + torch.arange(100, device=x.device)],
    ),
}


@pytest.mark.parametrize("name", BIASES)
def test_digits_of_a_bias(device, name):
    """Those of the bias's gradient, too. All queries and keys are equal, and so all digits are the bias's."""
    shape, mod, dense = BIASES[name]
    made = [*(torch.ones(1, 4, 100, 64) for _ in range(3)), random(*shape)]
    leaves = [[x.half().to(device).requires_grad_() for x in made] for _ in range(2)]
    wide = [x.detach().double().requires_grad_() for x in leaves[0]]
    attend = functional.scaled_dot_product_attention
    outs = flex_attention(*leaves[0][:3], mod(leaves[0][3])), attend(*leaves[1][:3], attn_mask=dense(leaves[1][3]))
    want = attend(*wide[:3], attn_mask=dense(wide[3]))
    found = [(x, *torch.autograd.grad(x.sum(), y)) for x, y in zip((*outs, want), (*leaves, wide))]
    for ours, torchs, exact in zip(*found, strict=True):
        assert rms(ours, exact) <= 1.2 * rms(torchs, exact) + 1e-6


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("name", [*BUILTIN, "each dimension", "nested"])
@pytest.mark.parametrize("len_q", [1, S])
def test_pages_of_torch(device, len_q, name, page):
    """Its class makes block masks and mods of physical keys. The same pages are our block_table."""
    q, k, v = tensors(h_kv=2, len_q=len_q)
    mod, mask_mod, kv_len = PLAIN[name] if name in PLAIN else CAPTURES[name](), lambda b, h, i, j: i + 60 >= j, [S] * B
    paged, caches = in_pages_of_torch(device, k, v, kv_len, page)
    lengths = torch.tensor(kv_len, device=device)
    block_mask = create_block_mask(mask_mod, B, 1, len_q, S, device=device, BLOCK_SIZE=page)
    ours = moved(mod, device)
    out, aux = flex_attention(
        q.to(device), *caches, paged.get_score_mod(ours, kv_len=lengths),
        paged.convert_logical_block_mask(block_mask, kv_len=lengths), enable_gqa=True, return_aux=ALL,
    )  # fmt: skip
    pages = [x[0].unflatten(1, (-1, page)).transpose(0, 1) for x in caches]
    table = paged.page_table[:B, : -(-S // page)].to(torch.int32)
    again, _ = flex_attention(
        q.to(device), *pages, ours, block_mask, enable_gqa=True, return_aux=ALL, kv_len=lengths, block_table=table
    )
    want = attention(*(x.double() for x in (q, k, v)), mod, create_mask(mask_mod, 1, 1, len_q, S, device="cpu"))
    for has, wants in zip((out, aux.lse, aux.max_scores), want, strict=True):
        close(has.cpu(), wants, tolerance_of(device, out.dtype))
    close(again.cpu(), want[0], tolerance_of(device, out.dtype))


@pytest.mark.parametrize("name", BUILTIN)
def test_decoding_at_different_places(device, name):
    """Each sequence has another length, and its query the place behind its keys."""
    lengths, page = [5, 98, 47, 131], 64
    q, k, v = tensors(4, 4, 4, 1)
    paged, caches = in_pages_of_torch(device, k, v, lengths, page)
    kv_len = torch.tensor(lengths, device=device)
    block_mask = create_block_mask(noop_mask, 4, 1, 1, S, device=device, BLOCK_SIZE=page)
    block_mask = paged.convert_logical_block_mask(block_mask, kv_len=kv_len)
    last = moved(BUILTIN[name], device)

    def at_the_end(s, b, h, i, j):
        return last(s, b, h, i + kv_len[b] - 1, j)

    out = flex_attention(q.to(device), *caches, paged.get_score_mod(at_the_end, kv_len), block_mask)
    pages = [x[0].unflatten(1, (-1, page)).transpose(0, 1) for x in caches]
    table = paged.page_table[:4, : -(-S // page)].to(torch.int32)
    again = flex_attention(q.to(device), *pages, last, q_offset=kv_len - 1, kv_len=kv_len, block_table=table)
    for n, length in enumerate(lengths):
        rows = torch.zeros(1, 4, length, 16, dtype=torch.float64)
        rows[:, :, -1:] = q[n]
        want = attention(rows, *(x[n : n + 1, :, :length].double() for x in (k, v)), BUILTIN[name])[0][:, :, -1:]
        for has in (out, again):
            close(has[n : n + 1].cpu(), want, tolerance_of(device, out.dtype))
