"""Kernels with mods are compiled in advance, without a GPU: ``flash_attn.prebuild_call``.

A library that is no compiler takes NVRTC's place. It keeps the texts and options that it gets, and may fail.
"""

import math
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import fresh_python
import pytest
import torch

import flash_attn
from flash_attn import _extended, _extended_directly, _imagined, _prebuild
from flash_attn.flex import calls, ops
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention

ROOT = Path(__file__).resolve().parents[2]
GCC, NVCC = shutil.which("gcc"), shutil.which("nvcc")
LENGTH = 300
slopes = torch.arange(8.0)


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx // 100 == kv_idx // 100)


def qkv(*, length=LENGTH, d=128, dtype=torch.bfloat16, grad=True, heads=8, device="meta"):
    return [torch.empty(1, heads, length, d, dtype=dtype, device=device, requires_grad=grad) for _ in range(3)]


def kernels_of(function, *args, archs="sm_90a", **kwargs):
    return flash_attn.prebuild_call(function, *args, archs=archs, compiles=False, **kwargs)


def names_of(*args, **kwargs):
    """The names of the kernels; the hashes of mods become #."""
    return [re.sub(r"_[0-9a-f]{16}$", "_#", kernel.name) for kernel in kernels_of(*args, **kwargs)]


def lists(mask_mod, length=LENGTH):
    return create_block_mask(mask_mod, None, None, length, length, device="cpu")


# ---- which kernels --------------------------------------------------------------------------------------------------

GENERIC_BACKWARD = [
    "attn_delta_any_bf16_of3_flex",
    "attn_bwd_any_bf16_dq_d128_q64kv64_of3_flex_#",
    "attn_bwd_any_bf16_dkdv_d128_q64kv32_of3_flex_#",
]
HOPPER_BACKWARD = ["attn_bwd_prep_bf16_d128_q64kv128", "attn_bwd_sm90_bf16_d128_q64kv128_flex_#"]
CLASSIFY = ["flex_classify_flex_#", "flex_lists"]
HOPPER = ["flex_walks", "flex_hidden_flex_#", "attn_fwd_sm90_bf16_d128_q128kv128_flex_#"]


def test_forward_on_hopper():
    assert names_of(flex_attention, *qkv(grad=False), alibi, lists(documents)) == HOPPER
    assert names_of(flex_attention, *qkv(grad=False), alibi, mask_mod=documents) == [*CLASSIFY, *HOPPER]


@pytest.mark.parametrize("grad", [False, True])
def test_without_a_block_mask_the_text_has_none(grad):
    """On Hopper the kernels of a score_mod without a block mask are others than those with one."""

    def keys_of(mask):
        kernels = kernels_of(flex_attention, *qkv(grad=grad), alibi, mask)
        return {kernel.key for kernel in kernels if re.match("attn_.*_flex_", kernel.name)}

    without, everything = keys_of(None), keys_of(lists(lambda b, h, q_idx, kv_idx: q_idx >= 0))
    assert len(without) == 1 + grad and not without & everything
    assert everything == keys_of(lists(documents))


@pytest.mark.parametrize("places", [("q_offset",), ("kv_len",), ("q_offset", "kv_len")], ids=str)
def test_prefills_with_places_have_no_lists(places):
    """Hopper's forward reads caches with mods, but no block mask. So no blocks of the mask_mod are looked for."""
    given = {name: torch.zeros(1, dtype=torch.int32, device="meta") for name in places}
    names = names_of(flex_attention, *qkv(grad=False, length=4096), alibi, mask_mod=documents, **given)
    assert names == ["attn_fwd_sm90_bf16_d128_q128kv128_cache_flex_#"]


def laid(*shape, offset=0, padding=0, dtype=torch.bfloat16, device="cpu"):
    """A tensor that begins at an element of its memory, and whose rows lie further apart than they are long."""
    *leading, columns = shape
    rows = torch.empty(offset + math.prod(leading) * (columns + padding), dtype=dtype, device=device)[offset:]
    return rows.view(*leading, columns + padding)[..., :columns]


BIASES = torch.empty(8, 424, 424, dtype=torch.bfloat16, device="meta")
LAID_IN_EIGHTS = {
    "meta": (laid(8, 424, 424, device="meta"), True),
    "eight elements on": (laid(8, 424, 424, offset=8), True),
    "two elements on": (laid(8, 424, 424, offset=2), False),
    "one element on": (laid(8, 424, 424, offset=1), False),
    "padded by eight": (laid(8, 424, 424, padding=8), True),
    "padded by six": (laid(8, 424, 424, padding=6), False),
    "expanded": (laid(1, 424, 424).expand(8, -1, -1), True),
    "fewer rows": (laid(8, 300, 424), True),
    "fewer keys": (laid(8, 424, 416), False),
    "more keys": (laid(8, 424, 432), True),
    "keys to 426": (laid(8, 424, 426), False),
    "transposed": (laid(8, 424, 424).mT, False),
    "fp32": (laid(8, 424, 424, dtype=torch.float32), False),
}


@pytest.mark.parametrize(
    "d, kind, has_room", [(128, "_fwd_", True), (64, "_bwd_sm90", True), (128, "_bwd_sm90", False)]
)
@pytest.mark.parametrize("name", LAID_IN_EIGHTS)
def test_biases_that_lie_in_vectors_of_eight_keys(name, d, kind, has_room):
    """Hopper's kernels copy their elements in 16 bytes, where there is room. They have another text for them."""
    bias, are_eights = LAID_IN_EIGHTS[name]

    def key_of(bias):
        mod = lambda s, b, h, i, j: s + bias[h, i, j]  # noqa: E731
        kernels = kernels_of(flex_attention, *qkv(grad="bwd" in kind, d=d, length=424), mod)
        return [(kernel.name, kernel.key) for kernel in kernels if kind in kernel.name]

    assert len(key_of(bias)) == 1
    of_two_bytes = bias.dtype == torch.bfloat16
    assert (key_of(bias) == key_of(laid(8, 424, 424))) == (are_eights or (not has_room and of_two_bytes))


@pytest.mark.parametrize("rows, mod", [
    (64, lambda s, b, h, i, j: s + BIASES[h, i, j]), (64, lambda s, b, h, i, j: torch.sin(s)),
    (128, lambda s, b, h, i, j: s + 0.5 * (j - i)), (128, lambda s, b, h, i, j: s + BIASES[h, 0, j])
])  # fmt: skip
def test_heavy_scores_have_fewer_rows_at_64_columns(rows, mod):
    assert f"attn_bwd_sm90_bf16_d64_q{rows}kv128_flex_#" in names_of(flex_attention, *qkv(d=64, length=424), mod)


def test_other_gpus_have_the_generic_kernels():
    names = names_of(flex_attention, *qkv(), alibi, lists(documents), archs="sm_80")
    assert names == ["flex_blocks", "attn_fwd_any_bf16_d128_q128kv64_of3_flex_#", *GENERIC_BACKWARD]


def test_the_backward_belongs_to_a_call_that_requires_grad():
    names = names_of(flex_attention, *qkv(), alibi, lists(documents))
    assert names[:3] == HOPPER and len(names) > 3 and all("_bwd_" in x for x in names[3:])


def test_each_wanted_gradient_has_its_kernel():
    query, key, value = qkv(grad=False)
    names = names_of(flex_attention, query, key, value.requires_grad_(), alibi, archs="sm_80")
    assert names[-1] == GENERIC_BACKWARD[2] and GENERIC_BACKWARD[1] not in names
    names = names_of(flex_attention, query.requires_grad_(), key, value.detach(), alibi, archs="sm_80")
    assert names[-1] == GENERIC_BACKWARD[1] and GENERIC_BACKWARD[2] not in names


def test_gradients_of_captures():
    """Hopper's backward has them, also if nothing else is wanted. Others have the generic kernels."""
    learned = torch.empty(8, device="meta", requires_grad=True)
    mod = lambda s, b, h, i, j: s + learned[h] * (i - j)  # noqa: E731
    for grad in (True, False):
        assert names_of(flex_attention, *qkv(grad=grad), mod) == [HOPPER[-1], *HOPPER_BACKWARD]
    assert names_of(flex_attention, *qkv(d=192), mod)[-1] == "attn_bwd_wide_sm90_bf16_d192_q64kv128_flex_#"
    assert "attn_bwd_any" in names_of(flex_attention, *qkv(dtype=torch.float32), mod)[-1]
    learned = torch.empty(8, device="meta", dtype=torch.float64, requires_grad=True)
    assert names_of(flex_attention, *qkv(), mod)[1:] == GENERIC_BACKWARD
    learned = torch.empty(8, device="meta", requires_grad=True)
    many = lambda s, b, h, i, j: s + learned[i - j] + learned[i] + learned[2 * i - 2 * j]  # noqa: E731
    assert names_of(flex_attention, *qkv(), many)[1:] == GENERIC_BACKWARD


def test_windows_and_softcaps_have_the_plain_kernels():
    names = names_of(flex_attention, *qkv(), None, lists(causal))
    assert names[0] == "attn_fwd_sm90_bf16_d128_q64kv64_causal" and "attn_bwd_prep_bf16_d128_q64kv128" in names
    assert not any("flex" in name for name in names)
    capped = names_of(flex_attention, *qkv(grad=False), lambda s, b, h, i, j: 20 * torch.tanh(s / 20))
    assert capped == ["attn_fwd_sm90_bf16_d128_q128kv128_score"]


def test_an_lse_may_or_may_not_have_a_gradient():
    names = names_of(flex_attention, *qkv(), return_aux=AuxRequest(lse=True))
    assert "attn_bwd_sm90_bf16_d128_q64kv128" in names


def test_a_function_with_all_of_a_step():
    def step(query, key, value):
        block_mask = create_block_mask(documents, None, None, LENGTH, LENGTH, device="cuda")
        return flex_attention(query, key, value, alibi, block_mask)

    names = names_of(step, *qkv(grad=False))
    assert names == ["flex_classify_flex_#", "flex_lists", *HOPPER]


def test_decoding():
    query = torch.empty(2, 8, 1, 128, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(2, 32, 8, 16, 128, dtype=torch.bfloat16, device="meta").unbind()
    int32 = {"dtype": torch.int32, "device": "meta"}
    places = {"kv_len": torch.empty(2, **int32), "block_table": torch.empty(2, 16, **int32)}
    names = names_of(flex_attention, query, *pages, alibi, q_offset=torch.empty(2, **int32), **places)
    assert names == ["attn_decode_sm90_bf16_d128_q16_flex_#"]
    assert names_of(flex_attention, query, *pages, **places) == ["attn_decode_sm90_bf16_d128_q16"]
    float32 = [x.float() for x in (query, *pages)]
    names = names_of(flex_attention, *float32, alibi, q_offset=torch.empty(2, **int32), **places)
    assert names == ["attn_fwd_any_fp32_d128_q128kv32_of3_flex_#"]


@pytest.mark.parametrize(
    "heads, keys, parts", [(8, 4096, True), (8, 1024, False), (32, 2048, True), (300, 4096, False)]
)
def test_few_queries_over_many_keys(heads, keys, parts):
    """The decode kernel takes them. It takes no fp32: there parts of the keys fill the GPU, and are combined."""
    table = torch.empty(heads, device="meta")
    offset = torch.empty(1, dtype=torch.int32, device="meta")

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[h] * (kv_idx - q_idx)

    def names(dtype, **kwargs):
        query = torch.empty(1, heads, 1, 128, dtype=dtype, device="meta")
        cache = torch.empty(2, 1, heads, keys, 128, dtype=dtype, device="meta").unbind()
        return names_of(flex_attention, query, *cache, mod, **kwargs)

    for kwargs in ({}, {"q_offset": offset}):
        assert names(torch.bfloat16, **kwargs) == ["attn_decode_sm90_bf16_d128_q16_flex_#"]
        wanted = ["attn_fwd_any_fp32_d128_q128kv32_of3_flex_#", *["combine_fp32"] * parts]
        assert names(torch.float32, **kwargs) == wanted
    largest = names(torch.bfloat16, return_aux=AuxRequest(max_scores=True))
    assert largest == ["attn_fwd_sm90_bf16_d128_q128kv128_flex_#"]


def test_max_scores_have_hoppers_kernel():
    """Another text than without. A call that has no mods has such a kernel, too."""
    aux = AuxRequest(max_scores=True)
    names = [
        [kernel.name for kernel in kernels_of(flex_attention, *qkv(grad=False), *mods, return_aux=wanted)][-1]
        for mods in ((alibi, lists(documents)), ())
        for wanted in (None, aux)
    ]
    assert len(set(names)) == 4 and all(x.startswith("attn_fwd_sm90_bf16_d128_q") for x in names)
    assert ["_flex_" in x for x in names] == [True, True, False, True]


@pytest.mark.parametrize("d, row", [(136, "d160"), (192, "d192"), (256, "d256")])
@pytest.mark.parametrize("heads, keys, of_heads", [(8, 2, 1), (8, 8, 8), (8, 2, 8)])
def test_backward_of_more_than_128_columns(d, row, heads, keys, of_heads):
    """Masks of their own for the heads of a group have generic kernels."""
    sizes = [(1, heads, LENGTH, d), (1, keys, LENGTH, d), (1, keys, LENGTH, d)]
    q, k, v = (torch.empty(size, dtype=torch.bfloat16, device="meta", requires_grad=True) for size in sizes)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j + h, 1, of_heads, LENGTH, LENGTH, device="cpu")
    names = names_of(flex_attention, q, k, v, alibi, block_mask, enable_gqa=True)
    is_grouped = keys < heads and of_heads > 1
    assert names[-1].startswith("attn_bwd_any_" if is_grouped else f"attn_bwd_wide_sm90_bf16_{row}_q64kv128_flex_")


def test_masks_and_captures_may_lie_anywhere():
    want = kernels_of(flex_attention, *qkv(), alibi, lists(documents))
    for device in ("cpu", "meta"):
        table = slopes.to(device)
        block_mask = lists(documents).to(device)

        def score_mod(score, b, h, q_idx, kv_idx, table=table):
            return score + table[h] * (kv_idx - q_idx)

        assert kernels_of(flex_attention, *qkv(), score_mod, block_mask) == want


def test_other_functions():
    q, k, v = (torch.empty(1, 80, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    bias = torch.empty(80, 80, dtype=torch.bfloat16, device="meta", requires_grad=True)
    names = names_of(flash_attn.flash_attn_func, q, k, v, attn_bias=bias)
    assert names == ["bias_shift_bf16", HOPPER[-1], *HOPPER_BACKWARD]
    names = names_of(flash_attn.flash_attn_func, q, k, v, 0.1, causal=True)
    assert names[0].endswith("_causal_dropout")


def test_options_with_a_window_have_blocks():
    """As on a GPU, where the blocks of a window are listed in front of the kernels."""
    q, k, v = (x.transpose(1, 2) for x in qkv())
    options = {"causal": True, "attn_bias": torch.empty(LENGTH, LENGTH, dtype=torch.bfloat16, device="meta")}
    for device in ("meta", "cpu"):
        inputs = [torch.empty_like(x, device=device).requires_grad_() for x in (q, k, v)]
        names = names_of(flash_attn.flash_attn_func, *inputs, **options)
        assert names[:4] == ["bias_shift_bf16", *HOPPER] and all("_bwd_" in x for x in names[4:])


def test_mods_share_a_kernel_that_reads_none():
    names = [
        kernel.name
        for score_mod in (alibi, lambda s, b, h, i, j: s * 0.5)
        for kernel in kernels_of(flex_attention, *qkv(), score_mod, lists(documents))
        if "prep" in kernel.name
    ]
    assert names == ["attn_bwd_prep_bf16_d128_q64kv128"] * 2


def test_more_captures_than_the_parameters_of_hoppers_kernel_hold():
    """Generic kernels have fewer other parameters, and take the call."""
    tables, rows = [torch.rand(2, 2, 2, 2, 2) for _ in range(9)], [torch.rand(2, 2, 2, 2, 2) > 0.5 for _ in range(12)]

    def score_mod(score, b, h, i, j):
        return score * sum((table[b, h, i, j, i] for table in tables[1:]), tables[0][b, h, i, j, i])

    def mask_mod(b, h, i, j):
        seen = rows[0][b, h, i, j, i]
        for row in rows[1:]:
            seen = seen & row[b, h, i, j, i]
        return seen

    names = names_of(flex_attention, *qkv(), score_mod, mask_mod=mask_mod)
    assert names == [HOPPER[-1], *GENERIC_BACKWARD]


def test_sinks_and_the_lse_of_rows_without_keys_need_no_launch():
    q, sinks = qkv(grad=False)[0].transpose(1, 2), torch.ones(8)
    cache = torch.empty(1, 64, 8, 128, dtype=torch.bfloat16)
    for names in (
        names_of(flash_attn.flash_attn_func, q, q, q, sinks=sinks, causal=True),
        names_of(flash_attn.flash_attn_func, q, q, q, return_lse=True),
        names_of(flash_attn.flash_attn_with_kvcache, q[:, :1], cache, cache, sinks=sinks),
    ):
        assert len(names) == 1 and re.match("attn_(fwd|decode)_sm90_bf16_d128", names[0])


@pytest.mark.parametrize("options", [{}, {"attn_bias": torch.ones(8, LENGTH, LENGTH)}, {"return_lse": True}], ids=str)
def test_the_gradient_of_sinks_is_one_launch_behind_the_backward(options):
    q, sinks = (x.requires_grad_() for x in (qkv()[0].detach().transpose(1, 2), torch.ones(8)))
    names = names_of(flash_attn.flash_attn_func, q, q, q, sinks=sinks, **options)
    assert names.count("sinks_grad") == 1 and names[-1] == "sinks_grad"
    assert "sinks_bf16" not in names  # the forward itself adds them
    assert "sinks_grad" not in names_of(flash_attn.flash_attn_func, q, q, q, sinks=sinks.detach(), **options)


def test_the_shift_of_a_bias_is_one_launch_before_the_kernel():
    q = qkv(grad=False)[0].transpose(1, 2)
    cu = torch.tensor([0, LENGTH], dtype=torch.int32)
    for bias in (torch.ones(8, LENGTH, LENGTH), torch.ones(8, LENGTH, 1), torch.ones(LENGTH).half(), torch.ones(())):
        for options in ({}, {"causal": True}, {"sinks": torch.ones(8)}):
            for call in (
                (flash_attn.flash_attn_func, q, q, q),
                (flash_attn.flash_attn_varlen_func, q[0], q[0], q[0], cu, cu, LENGTH, LENGTH),
            ):
                names = names_of(*call, attn_bias=bias, **options)
                assert names[0] == ("bias_shift_fp16" if bias.dtype == torch.float16 else "bias_shift_fp32")
                assert not any(name.startswith("bias_shift") for name in names[1:]) and len(names) > 1
    names = names_of(flash_attn.flash_attn_func, q, q, q, attn_bias=torch.ones(8, LENGTH, LENGTH).double())
    assert not any(name.startswith("bias_shift") for name in names)


def test_the_largest_score_of_each_head_is_one_launch_behind_the_forward():
    q, bias = qkv(grad=False)[0].transpose(1, 2), torch.ones(8, LENGTH, LENGTH)
    cu = torch.tensor([0, LENGTH], dtype=torch.int32)
    for options in ({}, {"attn_bias": bias}, {"sinks": torch.ones(8)}):
        for call in (
            (flash_attn.flash_attn_func, q, q, q),
            (flash_attn.flash_attn_varlen_func, q[0], q[0], q[0], cu, cu, LENGTH, LENGTH),
        ):
            assert names_of(*call, return_max_logits=True, **options).count("max_logits") == 1
            assert "max_logits" not in names_of(*call, **options)


def of_options(name, device="meta", grad=True, length=LENGTH, heads=8):
    """Options of flash_attn_func."""
    dtype, shape = torch.float32, (heads, length, length)
    made = {
        "attn_bias": lambda: torch.zeros(shape, device=device, requires_grad=grad),
        "attn_mask": lambda: torch.ones(shape[1:], dtype=torch.bool, device=device),
        "sinks": lambda: torch.zeros(heads, device=device, requires_grad=grad),
        "alibi_slopes": lambda: torch.zeros(heads, device=device, dtype=dtype),
        "softcap": lambda: 20.0, "causal": lambda: True, "window_size": lambda: (50, 9),
        "return_lse": lambda: True, "return_max_logits": lambda: True,
    }  # fmt: skip
    return {part: made[part]() for part in name.split()}


OPTIONS = [
    "attn_bias", "attn_bias causal", "attn_mask", "attn_mask window_size", "sinks", "sinks attn_bias", "return_lse",
    "return_max_logits causal", "return_lse sinks", "attn_bias attn_mask sinks alibi_slopes softcap causal return_lse",
]  # fmt: skip


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_short_way_has_the_programs_that_were_prebuilt(monkeypatch, name, is_packed):
    """A program is a part of a kernel's name. An imagined GPU goes the long way, and a call on a GPU the short way."""
    found = {"long": [], "short": []}

    def note(way, score, mask, blocks):
        mods = [None if x is None else (x[0], len(x[1]), len(x[2])) for x in (score, mask)]
        found[way].append((mods, blocks is None))

    def long(function):
        def call(*args):
            note("long", *args[8:11])
            return function(*args)

        return call

    def short(function):
        def call(*args):
            results = function(*args)
            record = args[-3]
            note("short", *record[1:4])
            return results

        return call

    directly = _extended_directly.flash_attn_2_cuda
    q, options = torch.zeros(1, LENGTH, 8, 64, requires_grad=True), of_options(name, "cpu")
    cu = torch.tensor([0, LENGTH], dtype=torch.int32)

    def step():
        if is_packed:
            return flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, LENGTH, LENGTH, **options)
        return flash_attn.flash_attn_func(q, q, q, **options)

    monkeypatch.setattr(_prebuild, "WIDTHS", {})  # so the long way is gone once
    monkeypatch.setattr(ops, "FEW_PAIRS", 0)
    monkeypatch.setattr(calls, "forward", long(calls.forward))
    kernels_of(step)
    monkeypatch.setattr(_extended_directly, "_device_type", lambda q: "cuda")
    monkeypatch.setattr(_extended, "attend", lambda *_: pytest.fail("the short way was not taken"))
    for function in ("direct_mods", "direct_varlen_mods"):
        monkeypatch.setattr(directly, function, short(getattr(directly, function)))
    step()
    assert found["long"] == found["short"] and (len(found["long"]) == 1 or name == "sinks")


@pytest.mark.parametrize("name", ["sinks attn_bias causal", "attn_mask return_lse", "sinks return_lse"])
def test_compiled_functions(name):
    """A graph has kernels of its own. Sinks are torch's operations there, and a launch finds the blocks of a window."""
    torch.compiler.reset()
    q = torch.zeros(1, LENGTH, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    options = of_options(name, "cpu")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q):
        return flash_attn.flash_attn_func(q, q, q, **options)

    names = names_of(step, q)
    for kind in ("attn_fwd_sm90_", "attn_bwd_sm90_", "attn_bwd_prep_"):
        assert any(x.startswith(kind) for x in names)
    assert not any(re.match("sinks|bias_shift", x) for x in names)
    assert any(x.startswith("flex_classify") for x in names) == ("causal" in name) == ("flex_lists" in names)


@pytest.mark.skipif(GCC is None, reason="no gcc: apt-get install gcc")
def test_inductor_keeps_what_a_second_backward_needs():
    """The backward of out, and that of out and lse."""
    torch.compiler.reset()
    tensors = [torch.empty(1, 80, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3)]
    sinks, bias = (torch.empty(n, device="meta", requires_grad=True) for n in ((2,), (80, 80)))

    @torch.compile(dynamic=True)
    def step(q, k, v, sinks, bias):
        return flash_attn.flash_attn_func(q, k, v, sinks=sinks, attn_bias=bias, causal=True, return_lse=True)

    names = names_of(step, *tensors, sinks, bias)
    assert [name.split("_bf16")[0] for name in names] == ["attn_fwd_sm90", "attn_bwd_prep", "attn_bwd_sm90"]


def test_several_architectures():
    kernels = kernels_of(flex_attention, *qkv(grad=False), alibi, archs=["sm_80", "sm_90", "sm_120"])
    assert [kernel.arch for kernel in kernels] == [80, 90, 120]
    assert len({kernel.key for kernel in kernels}) == 3
    assert not any(kernel.was_there or kernel.is_compiled for kernel in kernels)


# ---- what the kernels depend on -------------------------------------------------------------------------------------


def score_of(table, scale):
    return lambda score, b, h, q_idx, kv_idx: score + scale * table[h, q_idx]


def test_values_and_sizes_do_not_matter():
    forward = {kernels_of(flex_attention, *qkv(grad=False), score_of(table, scale))[0]
               for table in (torch.randn(8, 512), torch.empty(8, 999, device="meta"))
               for scale in (1, 2, -7)}  # fmt: skip
    forward |= {kernels_of(flex_attention, *qkv(grad=False, length=2000), score_of(torch.ones(8, 2000), 3))[0]}
    assert len(forward) == 1
    assert kernels_of(flex_attention, *qkv(grad=False), score_of(torch.ones(8, 512).double(), 1))[0] not in forward
    assert kernels_of(flex_attention, *qkv(grad=False), score_of(torch.ones(8, 512), 1 << 40))[0] not in forward


def test_the_derivative_has_the_wanted_gradients():
    table = torch.empty(8, 512, device="meta")
    without = kernels_of(flex_attention, *qkv(), score_of(table, 1))
    kernels = kernels_of(flex_attention, *qkv(), score_of(table.requires_grad_(), 1))
    assert without[0] == kernels[0] and without[-2:] != kernels[-2:]


def test_every_number_of_multiprocessors_has_its_kernels(monkeypatch):
    calls = [(flex_attention, *qkv(length=5000), alibi, lists(documents, 5000)),
             (flex_attention, *qkv(length=1, grad=False)[:1], *qkv(length=5000, grad=False)[1:])]  # fmt: skip
    calls += [(flex_attention, *qkv(length=n), None, lists(causal, n)) for n in (1000, 2000, 3500, 4000)]
    found = [kernels_of(*call) for call in calls]
    for sms in (132, 114, 78):
        monkeypatch.setattr(_prebuild, "WIDTHS", {90: (sms,)})
        alone = [kernels_of(*call) for call in calls]
        assert all(set(x) <= set(y) for x, y in zip(alone, found))
    assert found[:2] == alone[:2] and found[2:] != alone[2:]


def test_it_is_the_kernel_of_the_plan():
    for archs, capability in (("sm_80", 80), ("sm_90a", 90)):
        q, k, v = qkv(device="cpu")
        kernels = [kernel.name for kernel in kernels_of(flex_attention, q, k, v, alibi, lists(documents), archs=archs)]
        with _imagined.imagined_gpu(capability, _imagined.NOTED):
            plan = flash_attn.explain(flex_attention, q, k, v, alibi, lists(documents))
        assert plan.kernel in kernels and plan.backward.kernel in kernels
        assert plan.device == "cuda" and len(kernels) > 4


def test_a_compiled_call_has_the_same_kernels():
    eager = kernels_of(flex_attention, *qkv(device="cpu"), alibi, mask_mod=documents)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    assert kernels_of(compiled, *qkv(device="cpu"), alibi, mask_mod=documents) == eager


# ---- nothing runs ---------------------------------------------------------------------------------------------------


def test_nothing_is_written_and_calls_are_real_again():
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    cache = torch.randn(2, 1, 32, 2, 16)
    before, version = cache.clone(), cache._version
    want = flash_attn.flash_attn_func(q, k, v)
    lengths = torch.tensor([5], dtype=torch.int32)
    names = names_of(flash_attn.flash_attn_with_kvcache, q, *cache.unbind(), k, v, cache_seqlens=lengths)
    assert names == ["kvcache_fp32", "attn_fwd_any_fp32_d64_q128kv64"]
    assert torch.equal(cache, before) and cache._version == version

    def fails(*args):
        flash_attn.flash_attn_func(*args)
        raise KeyError("a fault of the function")

    with pytest.raises(KeyError):
        kernels_of(fails, q, k, v)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v), want)


def test_other_threads_compute():
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    want, found = flash_attn.flash_attn_func(q, k, v), []

    def meanwhile(*args):
        thread = threading.Thread(target=lambda: found.append(flash_attn.flash_attn_func(*args)))
        thread.start()
        thread.join()
        return flash_attn.flash_attn_func(*args)

    assert names_of(meanwhile, q, k, v) == ["attn_fwd_any_fp32_d64_q128kv64"]
    assert torch.equal(found[0], want)


def test_gradients_are_not_touched():
    leaves = qkv(device="cpu", dtype=torch.float32, length=8)
    learned = torch.ones(8, requires_grad=True)
    kernels_of(flex_attention, *leaves, lambda s, b, h, i, j: s * learned[h])
    assert all(x.grad is None for x in (*leaves, learned))


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_unknown_architecture():
    with pytest.raises(ValueError, match="there are kernels for sm_80, .*, not for sm_42"):
        kernels_of(flex_attention, *qkv(), archs=["sm_90a", "sm_42"])


def test_a_mod_that_cannot_be_traced_is_named_with_its_line():
    def branches(score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else -score

    line = branches.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError, match=rf"branches, .*test_flex_prebuild.py, line {line}"):
        kernels_of(flex_attention, *qkv(), branches)


def test_a_call_without_attention():
    with pytest.raises(TypeError, match="prebuild_call: 'sum' asks for no kernel of a GPU"):
        kernels_of(torch.sum, torch.empty(3, device="meta"))
    with pytest.raises(RuntimeError, match="must not call itself"):
        kernels_of(lambda: kernels_of(flex_attention, *qkv()))


def test_what_a_gpu_refuses_is_refused():
    with pytest.raises(NotImplementedError, match="fp64 on the CPU"):
        kernels_of(flex_attention, *qkv(dtype=torch.float64))
    with pytest.raises(RuntimeError, match="on the CPU fp64; q is fp64"):
        kernels_of(flash_attn.flash_attn_func, *(x.transpose(1, 2) for x in qkv(dtype=torch.float64)))


# ---- the compiler ---------------------------------------------------------------------------------------------------

# Keeps the texts of the last program and its options in FOLDER, if set. Fails with the log FAILS_WITH, if set.
COMPILER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void keep(const char *name, const char *text, const char *mode) {
    char path[1024];
    if (!getenv("FOLDER")) return;
    snprintf(path, sizeof path, "%s/%s", getenv("FOLDER"), name);
    FILE *file = fopen(path, mode);
    fputs(text, file);
    fclose(file);
}
static const char *log_text(void) { return getenv("FAILS_WITH") ? getenv("FAILS_WITH") : ""; }
int nvrtcVersion(int *major, int *minor) { return *major = 99, *minor = 1, 0; }
const char *nvrtcGetErrorString(int result) { return result == 6 ? "NVRTC_ERROR_COMPILATION" : "?"; }
int nvrtcCreateProgram(void **program, const char *source, const char *name, int num, const char *const *headers,
                       const char *const *names) {
    keep(name, source, "w");
    keep("options", "", "w");
    for (int i = 0; i < num; i++) keep(names[i], headers[i], "w");
    return *program = &num, 0;
}
int nvrtcDestroyProgram(void **program) { return *program = NULL, 0; }
int nvrtcCompileProgram(void *program, int num, const char *const *options) {
    for (int i = 0; i < num; i++) keep("options", options[i], "a"), keep("options", "\n", "a");
    return getenv("FAILS_WITH") ? 6 : 0;
}
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { return *bytes = strlen(log_text()) + 1, 0; }
int nvrtcGetProgramLog(void *program, char *log) { return strcpy(log, log_text()), 0; }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { return *bytes = 6, 0; }
int nvrtcGetCUBIN(void *program, char *cubin) { return memcpy(cubin, "cubin", 6), 0; }
"""

# What a user writes for python -m flash_attn.build --call.
MODULE = """
import torch
from flash_attn.flex_attention import flex_attention

slopes = torch.ones(8)


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) * (q_idx - kv_idx) < 100


def step():
    query, key, value = (torch.empty(1, 8, 64, 32) for _ in range(3))
    return flex_attention(query, key, value, alibi, mask_mod=near)


def plain():
    query, key, value = (torch.empty(1, 8, 64, 32) for _ in range(3))
    return flex_attention(query, key, value)
"""


# A first call of mods: its kernels are pending, threads compile them, and the call finds them.
AHEAD = """
import sys
import threading
import torch
import flash_attn
import flash_attn_2_cuda
from flash_attn.flex import ahead, attention
from flash_attn.flex_attention import create_block_mask, flex_attention

slopes, n = torch.ones(8), 300


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


query, key, value = torch.empty(3, 1, 8, n, 128, dtype=torch.bfloat16).requires_grad_().unbind()
mask = create_block_mask(causal, None, None, n, n, device="cpu")
blocks = attention._blocks_of(mask, None, query, n)


def kernels():
    return flash_attn.prebuild_call(flex_attention, query, key, value, alibi, mask, compiles=False)


call, tensors = attention.prepare(query, key, None, alibi, causal, blocks)
for is_recorded, num in ((False, 3), (True, 5)):
    assert not any(kernel.was_there for kernel in kernels()[:num])
    print("rehearsal", file=sys.stderr, flush=True)
    assert ahead.rehearse(call, query, key, value, tensors, is_recorded, 90) == num
    print("end", file=sys.stderr, flush=True)
    if is_recorded:
        threads = [threading.Thread(target=ahead._compile_pending) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        while flash_attn_2_cuda.compile_pending_kernel():
            pass
        assert [kernel.was_there for kernel in kernels()] == 3 * [True] + 2 * [False]
        for path in flash_attn.kernel_root().iterdir():
            path.unlink()
assert len(kernels()) == 5 and all(kernel.was_there for kernel in kernels())
assert ahead.rehearse(call, query, key, value, tensors, True, 90) == 0

flash_attn_2_cuda.plan_only(True)
ahead.compile_kernels(call, query, key, value, tensors, True)
flash_attn_2_cuda.plan_only(False)
assert not ahead._rehearsed

learned = torch.ones(8, n, n, requires_grad=True)
call, tensors = attention.prepare(query, key, None, lambda s, b, h, i, j: s + learned[h, i, j], None, None)
assert ahead.rehearse(call, query, key, value, tensors, True, 90) > 0
torch.use_deterministic_algorithms(True)
assert ahead.rehearse(call, query, key, value, tensors, False, 90) > 0
ahead.MOST_BYTES = 1 << 21  # torch would fill what is empty
assert ahead.rehearse(call, query, key, value, tensors, False, 90) == 0
torch.use_deterministic_algorithms(False)
ahead.MOST_BYTES = 1000  # the host would fill the gradient with zeros
assert ahead.rehearse(call, query, key, value, tensors, True, 90) == 0
assert flex_attention(query[:, :, :9], key, value, alibi, mask_mod=causal).device.type == "cpu"  # calls are real again
print("done")
"""


def test_kernels_of_a_first_call_are_compiled_at_once(build):
    done = build(program=AHEAD, FLASH_ATTN_LOG="plan")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert " on cuda, tile" in done.stderr and done.stderr.count("rehearsal\nend\n") == 2  # which shows no plan


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    if GCC is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("compiler")
    (folder / "nvrtc.c").write_text(COMPILER)
    library = folder / "libnvrtc.so"
    subprocess.run([GCC, "-shared", "-fPIC", "-w", "-o", library, folder / "nvrtc.c"], check=True)
    return library


@pytest.fixture
def build(compiler, tmp_path):
    """build(words.., VARIABLE=value..): the finished process of python -m flash_attn.build."""
    (tmp_path / "kernels.py").write_text(MODULE)
    (tmp_path / "cache").mkdir(mode=0o700)

    def build(*words, program=None, **variables):
        environment = {**os.environ, "FLASH_ATTN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
        environment |= {"FLASH_ATTN_NVRTC": str(compiler), **variables}
        run = {"env": environment, "cwd": tmp_path}
        return (
            fresh_python.module("flash_attn.build", *words, **run)
            if program is None
            else fresh_python.python(program, **run)
        )

    build.folder = tmp_path
    return build


def test_kernels_are_compiled_into_the_cache(build, monkeypatch):
    texts = build.folder / "texts"
    texts.mkdir()
    done = build("--arch", "sm_80", "--call", "kernels:step", FOLDER=str(texts))
    assert done.returncode == 0 and done.stdout == "1 kernels compiled; the others were there\n", done.stderr
    assert re.fullmatch(r"compiled  sm_80  attn_fwd_any_fp32_d64_q128kv64_of3_flex_[0-9a-f]{16}\n", done.stderr)
    (cubin,) = (build.folder / "cache").iterdir()
    done = build("--arch", "sm_80", "--call", "kernels:step")
    assert done.stdout.startswith("0 kernels compiled") and done.stderr.startswith("was there  sm_80  attn_fwd_any")
    # The name of the file follows from the same functions that a call on a GPU asks.
    scope = {}
    exec(MODULE, scope)
    monkeypatch.setenv("FLASH_ATTN_CACHE_DIR", str(build.folder / "cache"))
    (kernel,) = kernels_of(scope["step"], archs="sm_80")
    assert re.fullmatch(rf"{kernel.name}-{kernel.key}-[0-9a-f]{{8}}\.cubin", cubin.name)
    if NVCC is not None:
        of_nvrtc = ("--gpu-architecture", "--device-as-default-execution-space")
        options = [x for x in (texts / "options").read_text().splitlines() if not x.startswith(of_nvrtc)]
        command = [NVCC, "-cubin", "-arch=sm_80", *options, "-o", texts / "cubin", texts / "attn_fwd_any.cu"]
        subprocess.run(command, check=True)
        assert kernel.name.encode() in (texts / "cubin").read_bytes()


SUM = """
import torch, flash_attn
from flash_attn.flex_attention import flex_attention
keys, slopes, pairs = (torch.empty(n, dtype=torch.bfloat16) for n in (424, 8, (424, 424)))
q = [torch.empty(1, 8, 424, 128, dtype=torch.bfloat16) for _ in range(3)]
flash_attn.prebuild_call(flex_attention, *q, lambda s, b, h, i, j: {}, archs="sm_90a")
"""


@pytest.mark.parametrize(("score", "is_in_exponent"), [
    ("s + slopes[h] * (j - i)", True), ("s + pairs[i, j]", True), ("s + keys[j]", False), ("s + keys[i]", False),
    ("s + pairs[i, j] + keys[j]", False), ("s + pairs[i, j] * slopes[h]", True)
])  # fmt: skip
def test_sums_that_load_of_queries_or_keys_are_no_exponents_of_the_forward(build, score, is_in_exponent):
    (texts := build.folder / "texts").mkdir()
    done = build(program=SUM.format(score), FOLDER=str(texts))
    assert done.returncode == 0, done.stderr
    assert f"#define FLEX_ADDS       {int(is_in_exponent)}\n" in (texts / "flex_mods.cuh").read_text()


LOG = """flex_mods.cuh(23): error: identifier "lost" is undefined
      const float v5 = lost(v0);
                       ^

1 error detected in the compilation of "attn_fwd_any.cu".
"""


def test_a_kernel_with_mods_that_does_not_compile(build):
    done = build("--arch", "sm_80", "--call", "kernels:step", FAILS_WITH=LOG)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    first, *rest = done.stderr.splitlines()
    kernel = r"attn_fwd_any_fp32_d64_q128kv64_of3_flex_\w{16}"
    words = r'flex_mods.cuh\(23\): error: identifier "lost" is undefined, in the line: const '
    assert re.match(f"flash_attn: NVRTC 99.1 does not compile {kernel}: {words}", first)
    assert first.endswith(("csrc/cuda)", "flash_attn/cuda)"))
    module = build.folder / "kernels.py"
    line = {name: number for number, text in enumerate(MODULE.splitlines(), 1)
            for name in re.findall(r"^def (\w+)", text)}  # fmt: skip
    assert rest[:2] == [f"score_mod: alibi, {module}, line {line['alibi']}",
                        f"mask_mod: near, {module}, line {line['near']}"]  # fmt: skip
    assert rest[2] == "The compiler says:" and rest[3:8] == [f"    {text}" for text in LOG.splitlines()]
    quoted = first.split("in the line: ")[1].split(" (the texts")[0]
    assert f"  23      {quoted}" in rest
    assert rest[-1].startswith("flash_attn made this text from the mods") and "Please report" in rest[-1]
    assert list((build.folder / "cache").iterdir()) == []


def test_a_plain_kernel_that_does_not_compile(build):
    done = build("--arch", "sm_80", "--call", "kernels:plain", FAILS_WITH="score.cuh(9): error: " + 999 * "x")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "does not compile attn_fwd_any_fp32_d64_q128kv64: score.cuh(9): error: xxx" in done.stderr
    assert re.search(r"x \(the texts are in .*cuda\)$", done.stderr.strip())
    done = build("--arch", "sm_80", "--call", "kernels:plain", FAILS_WITH="")
    assert "does not compile attn_fwd_any_fp32_d64_q128kv64: NVRTC_ERROR_COMPILATION (the texts" in done.stderr


def test_a_compiler_that_is_too_old_for_the_gpu(build):
    log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n"
    done = build("--arch", "sm_121", "--call", "kernels:step", FAILS_WITH=log)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "NVRTC 99.1 compiles no kernels for sm_121: install a newer nvidia-cuda-nvrtc" in done.stderr


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("kernels", "--call takes module:function, not 'kernels'"),
        ("no_such_module:step", "No module named 'no_such_module'"),
        ("kernels:stop", "no attribute 'stop'"),
    ],
)
def test_a_place_that_is_not_there(build, place, words):
    done = build("--call", place)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
