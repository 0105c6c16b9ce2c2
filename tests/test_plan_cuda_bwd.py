"""The choice of a backward and of its order (harness_plan.py)."""

import re

import pytest


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"pass": 1, "d": 24}, "attn_bwd_sm90_bf16_d32_q128kv128"),
        ({"pass": 1, "d": 40}, "attn_bwd_sm90_bf16_d48_q128kv128"),
        ({"pass": 1, "d": 56}, "attn_bwd_sm90_bf16_d64_q128kv128"),
        ({"pass": 1, "d": 72, "right": 0, "packed": 1}, "attn_bwd_sm90_bf16_d80_q64kv128_causal_varlen"),
        ({"pass": 1, "d": 88}, "attn_bwd_sm90_bf16_d96_q64kv128"),
        ({"pass": 1, "d": 104}, "attn_bwd_sm90_bf16_d112_q64kv128"),
        ({"pass": 1, "d": 128, "alibi": 1}, "attn_bwd_sm90_bf16_d128_q64kv128_alibi"),  # alone, in the exponent
        (
            {"pass": 1, "d": 64, "alibi": 1, "right": 0, "packed": 1},
            "attn_bwd_sm90_bf16_d64_q128kv128_causal_varlen_alibi",
        ),
        ({"pass": 1, "d": 64, "alibi": 1, "dropout": 0.5}, "attn_bwd_sm90_bf16_d64_q64kv128_score_dropout"),  # heavy
        ({"pass": 1, "d": 56, "softcap": 5, "packed": 1}, "attn_bwd_sm90_bf16_d64_q64kv128_varlen_score"),
        ({"pass": 1, "d": 64, "dropout": 0.5, "right": 0}, "attn_bwd_sm90_bf16_d64_q64kv128_causal_dropout"),
        ({"pass": 1, "d": 48, "dropout": 0.5}, "attn_bwd_sm90_bf16_d48_q128kv128_dropout"),
        ({"pass": 1, "d": 128, "alibi": 1, "softcap": 5}, "attn_bwd_sm90_bf16_d128_q64kv128_score"),
        ({"pass": 1, "d": 128, "alibi": 1, "scale": -1}, "attn_bwd_sm90_bf16_d128_q64kv128_score"),
        ({"pass": 1, "d": 128, "alibi": 1, "dropout": 0.5}, "attn_bwd_sm90_bf16_d128_q64kv128_score_dropout"),
        ({"pass": 1, "d": 256, "alibi": 1}, "attn_bwd_wide_sm90_bf16_d256_q64kv128_score"),
        ({"pass": 1, "d": 136, "left": 5}, "attn_bwd_wide_sm90_bf16_d160_q64kv128_local"),
        ({"pass": 1, "d": 160, "packed": 1}, "attn_bwd_wide_sm90_bf16_d160_q64kv128_varlen"),
        ({"pass": 1, "d": 168}, "attn_bwd_wide_sm90_bf16_d192_q64kv128"),
        ({"pass": 1, "d": 200}, "attn_bwd_wide_sm90_bf16_d256_q64kv128"),
        ({"pass": 1, "ordered": 1, "dtype": 0}, "attn_bwd_sm90_fp16_d128_q64kv128"),
        ({"pass": 1, "d": 256, "ordered": 1}, "attn_bwd_wide_sm90_bf16_d256_q64kv128"),
    ],
    ids=str,
)
def test_kernel_of_the_backward(plan, numbers, kernel):
    name, block_q, block_kv, workspace, *_ = plan(**numbers).splitlines()[0].split()
    assert name == kernel and re.search(rf"_q{block_q}kv{block_kv}", name)
    d, sums = int(re.search(r"_d(\d+)", name)[1]), 2 * 1024 * 4
    d = 96 if d == 80 else d  # FA_SLAB_COLUMNS
    assert sums * (d + 2) * 4 <= int(workspace) <= 1.2 * sums * (d + 2) * 4


@pytest.mark.parametrize(
    ("numbers", "cut"),
    [
        ({}, 32),  # 32 tiles in all, of 16 steps with each of two query heads
        ({"sms": 64}, 32),
        ({"sms": 63}, 0),  # two rounds of pieces do not pay
        ({"sms": 32}, 0),
        ({"sms": 31}, 1),  # one tile is left for a second round
        ({"sms": 27}, 5),
        ({"sms": 20}, 0),  # 12 tiles are too many
        ({"len_q": 64}, 0),  # two steps do not pay for a cut
        # All tiles are cut where a CTA has few of them, because a head's last tile takes longer.
        ({"b": 4, "h": 16, "h_kv": 1, "len_q": 4096, "len_kv": 4096}, 128),
        ({"b": 4, "h": 16, "h_kv": 2, "len_q": 4096, "len_kv": 4096}, 256),
        ({"b": 4, "h": 16, "h_kv": 4, "len_q": 4096, "len_kv": 4096}, 0),  # would save 2%
        ({"b": 1, "h": 1, "h_kv": 1, "len_q": 8192, "len_kv": 16384}, 128),
        ({"b": 1, "h": 1, "h_kv": 1, "len_q": 4096, "len_kv": 16384}, 0),  # pieces would have fewer than 64 steps
        # Cuts along the query heads, into two or more pieces with 1024 rows in total, or 1536 or 6144 if there are many
        # tiles.
        ({"right": 0}, 0),
        ({"packed": 1}, 0),
        ({"right": 0, "h": 8}, 32),
        ({"right": 0, "h": 8, "len_q": 1022}, 0),
        ({"right": 0, "h": 8, "len_kv": 70000}, 0),  # four tiles a CTA
        ({"right": 0, "h": 8, "len_q": 4096, "len_kv": 8192}, 256),
        ({"right": 0, "h": 8, "len_q": 4096, "len_kv": 8192, "d": 96}, 0),
        ({"right": 0, "h": 16, "len_q": 4096, "len_kv": 8192, "d": 96}, 256),
        ({"left": 1000, "right": 0, "h": 8, "len_q": 4096}, 32),
        ({"left": 300, "right": 0, "h": 8, "len_q": 4096}, 0),
        ({"left": 300, "right": 2**62, "h": 8}, 32),
        ({"right": 0, "h": 6}, 0),
        ({"right": 0, "h": 12, "len_q": 2048}, 32),
        ({"packed": 1, "h": 8}, 36),  # the limit for packed sequences
        ({"right": 0, "h": 8, "d": 256}, 0),
        ({"d": 256}, 0),
    ],
    ids=str,
)
def test_key_tiles_are_cut_where_there_are_too_few(plan, numbers, cut):
    """Pieces add up dK and dV of 128 keys in the workspace, and 8 warps count the pieces."""
    cut_bytes, bytes_ = (int(plan(**{"pass": 1} | {"sms": sms} | numbers | extra).splitlines()[0].split()[3])
                         for sms, extra in ((132, {}), (0, {"sms": 0})))  # fmt: skip
    assert cut_bytes - bytes_ == cut * (2 * 128 * (96 if numbers.get("d") == 96 else 128) + 8) * 4


@pytest.mark.parametrize(
    ("numbers", "any_order", "converts", "heads"),
    [
        ({"d": 64, "b": 33}, 0, 0, 32),  # no mask: in order, if CTAs have 8 tiles or more
        ({"d": 64, "b": 32}, 1, 0, 32),
        ({"d": 64, "b": 1, "h": 32, "len": 16384}, 0, 0, 4),  # as many heads as the L2 can hold
        ({"b": 4, "h": 16, "len": 4096}, 0, 0, 8),
        ({"b": 1, "h": 16, "len": 16384}, 1, 0, 1),
        ({"b": 1, "h": 16, "len": 16384, "ordered": 1}, 0, 0, 2),
        ({"d": 256, "b": 4, "h": 8, "len": 4096}, 1, 0, 2),
        ({"d": 64, "b": 4, "h": 32, "len": 4096, "right": 0}, 1, 1, 8),
        ({"d": 64, "b": 4, "h": 32, "len": 4096, "right": 0, "ordered": 1}, 0, 0, 32),
        ({"d": 64, "b": 4, "h": 32, "h_kv": 8, "len": 4096, "right": 0}, 0, 0, 8),  # grouped heads: in order
        ({"d": 64, "b": 1, "h": 32, "h_kv": 8, "len": 4096, "right": 0}, 1, 1, 8),  # few tiles: in any order
        ({"d": 64, "b": 4, "h": 32, "h_kv": 8, "len": 4096, "left": 99, "right": 0}, 1, 0, 2),
        ({"d": 96, "b": 4, "h": 20, "h_kv": 5, "len": 4096, "right": 0}, 1, 0, 10),  # two groups of 10, not 8, 8 and 4
        ({"d": 96, "b": 1, "h": 20, "h_kv": 5, "len": 16384, "right": 0}, 1, 0, 3),
        ({"b": 8, "h": 32, "h_kv": 8, "len": 2048, "right": 0}, 1, 0, 4),  # a tile for every CTA, within 32 MB
        ({"b": 8, "h": 16, "h_kv": 8, "len": 2048, "right": 0}, 1, 0, 8),
        ({"d": 256, "b": 8, "h": 8, "h_kv": 2, "len": 2048, "right": 0}, 1, 0, 2),
        ({"d": 64, "b": 33, "packed": 1}, 0, 0, 4),  # tiles of all sequences are counted
        ({"d": 64, "b": 32, "packed": 1}, 1, 0, 4),
        ({"b": 0, "right": 0}, 0, 0, 0),
    ],
    ids=str,
)
def test_order_of_the_backward(plan, numbers, any_order, converts, heads):
    length = numbers.get("len", 1024)
    given = {name: value for name, value in numbers.items() if name != "len"}
    given = {"pass": 1, "sms": 132, "order": 1, "h": 4, "len_q": length, "len_kv": length} | given
    assert plan(**{"h_kv": given["h"]} | given) == f"{any_order} {converts} {heads}"


@pytest.mark.parametrize(
    ("numbers", "follows"),
    [
        ({"h": 8, "len": 16384}, 1),  # the rows of 8 heads, 128 columns x 8 bytes, are 134 MB
        ({"h": 16, "len": 8192}, 1),  # the same of 8 of 16 heads: 67 MB
        ({"h": 16, "len": 4096}, 0),  # 34 MB
        ({"h": 2, "len": 16384}, 0),
        ({"h": 32, "h_kv": 8, "len": 16384}, 1),  # a group has two key heads of four query heads each
        ({"h": 8, "d": 64, "len": 32768}, 0),
        ({"h": 8, "d": 256, "len": 4096}, 0),
        ({"h": 8, "d": 256, "len": 8192}, 1),
        ({"h": 8, "len": 16384, "masks": 0}, 0),  # no block mask
    ],
    ids=str,
)
def test_when_key_tiles_of_a_block_mask_keep_their_order(plan, numbers, follows):
    given = {name: value for name, value in numbers.items() if name not in ("len", "masks")}
    given |= {"masks": 1} if numbers.get("masks", 1) else {}
    sizes = {"b": 1, "h_kv": given["h"], "len_q": numbers["len"], "len_kv": numbers["len"]}
    assert plan(**{"pass": 1, "sms": 132, "follows": 1} | sizes | given) == str(follows)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"pass": 1, "d": 100, "len_q": 10, "len_kv": 10}, "a head dimension that is a multiple of 8"),
        ({"pass": 1, "stride": 4, "len_q": 1, "len_kv": 1}, "with strides that are multiples of 8 elements"),
        ({"pass": 1, "dtype": 2}, "it takes fp16 and bf16"),
        ({"pass": 1, "softcap": 1001}, "its scores lose their digits"),
        ({"pass": 1, "capability": 80}, "it is for compute capability 9.0 (Hopper)"),
    ],
    ids=str,
)
def test_what_the_backward_on_hopper_does_not_serve(plan, numbers, words):
    first, *ruled_out = plan(**numbers).splitlines()
    assert first.startswith("attn_bwd_sm80_" if numbers.keys() & {"softcap", "capability"} else "attn_bwd_any_")
    assert any(line.startswith("attn_bwd_sm90: ") and words in line for line in ruled_out)


# Tiles from 72 columns on where an SM has 163 KiB of shared memory or more, and from 40 on where it has 100 KiB.
WIDE = ("d96_q64kv128w8g2", "d128_q64kv128w8g2", "d160_q64kv64w8g2", "d192_q64kv64w8g2", "d256_q64kv64w8g2")
SMALL = ("d64_q64kv128w8", "d128_q32kv128w8", "d128_q32kv128w8", None, None, None)


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (80, ("d32_q64kv128w4", "d64_q64kv256w8", *WIDE)),
        (86, ("d32_q64kv128w8", *SMALL)),
        (87, ("d32_q64kv128w4", "d64_q64kv256w8", *WIDE)),
        (89, ("d32_q64kv128w8", *SMALL)),
        (100, ("d32_q64kv128w4", "d48_q64kv128w4", *WIDE)),
        (120, ("d32_q64kv128w8", *SMALL)),
    ],
    ids=str,
)
def test_the_backward_before_hopper_takes_tiles_for_which_there_is_shared_memory(plan, capability, names):
    for d, name in zip((8, 40, 72, 104, 136, 168, 200), names, strict=True):
        first, *ruled_out = plan(**{"pass": 1}, capability=capability, d=d).splitlines()
        if name:
            assert first.split()[0] == f"attn_bwd_sm80_bf16_{name}"
            in_fp16 = plan(**{"pass": 1}, capability=capability, d=d, dtype=0).split()[0]
            one_group = name.removesuffix("g2").replace("d160", "d192")  # two groups of warps are for bf16
            assert in_fp16 == f"attn_bwd_sm80_fp16_{one_group}"
        else:
            assert first.startswith("attn_bwd_any_bf16_") and any("in this GPU's shared memory" in x for x in ruled_out)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"d": 100, "len_q": 100, "len_kv": 100}, "it wants a head dimension that is a multiple of 8"),
        ({"stride": 4, "len_q": 20, "len_kv": 20}, "with strides that are multiples of 8 elements"),
        ({"offset": 8, "len_q": 20, "len_kv": 20}, "to start at multiples of 16 bytes"),
        ({"dtype": 2}, "it takes fp16 and bf16"),
        ({"d_v": 64}, "it takes v with as many columns as k"),
        ({"chunk": 7}, "it has no attention_chunk"),
        ({"h": 0}, "it wants a query head"),
        ({"masks": 1}, "it takes no mod and no block mask"),
        ({"len_q": 2**30 + 1}, "the problem has more rows than 2^30"),
    ],
    ids=str,
)
def test_what_the_backward_before_hopper_does_not_serve(plan, numbers, words):
    ruled_out = plan(**{"pass": 1}, capability=80, **numbers).splitlines()
    assert any(line.startswith("attn_bwd_sm80: ") and words in line for line in ruled_out) or (
        numbers.get("len_q") and f"attn_bwd_sm80: {words}" in ruled_out[0]
    )


@pytest.mark.parametrize("direction", (0, 1))
def test_the_kernels_of_short_sequences_count_rows_up_to_2_30(plan, direction):
    sizes = {"pass": direction, "h": 1, "h_kv": 1, "packed": 1, "len_q": 16, "len_kv": 16}
    assert plan(**sizes, b=2**26 - 1).startswith(f"attn_{'bwd' if direction else 'fwd'}_short")
    assert "_short: the problem has more rows than 2^30" in plan(**sizes, b=2**27)


def test_the_backward_before_hopper_serves_masks_scores_and_dropout(plan):
    for options, name in (
        ({"left": 5, "right": 9, "packed": 1}, ""),
        ({"softcap": 9}, "_score"),
        ({"alibi": 1, "right": 0}, "_score"),
        ({"dropout": 0.5, "scale": 0}, "_score_dropout"),
    ):
        found = plan(**{"pass": 1}, capability=80, **options).split()[0]
        assert found == f"attn_bwd_sm80_bf16_d128_q64kv128w8g2{name}"


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"h": 32, "h_kv": 8, "b": 1, "len_kv": 768}, "attn_bwd_any_"),  # 48 tiles of keys for 108 SMs
        ({"h": 32, "h_kv": 8, "b": 1, "len_kv": 1024}, "attn_bwd_sm80_"),
        ({"h": 32, "h_kv": 32, "b": 1, "len_kv": 128}, "attn_bwd_sm80_"),  # generic kernels would be no better
        ({"h": 32, "h_kv": 1, "b": 54, "len_kv": 128}, "attn_bwd_any_"),
        ({"h": 32, "h_kv": 1, "b": 55, "len_kv": 128}, "attn_bwd_sm80_"),
    ],
    ids=str,
)
def test_the_backward_before_hopper_wants_tiles_for_half_of_the_multiprocessors(plan, numbers, kernel):
    assert plan(**{"pass": 1}, capability=80, sms=108, **numbers).startswith(kernel)


def test_sums_of_dq_before_hopper(plan):
    """fp32 sums of whole query tiles. Each packed sequence begins a new one. A fixed order counts key tiles."""
    numbers = {"pass": 1, "capability": 80, "b": 2, "h": 4, "d": 128, "len_q": 100, "len_kv": 100}
    assert int(plan(**numbers).split()[3]) == 2 * 4 * 2 * 64 * 128 * 4
    assert int(plan(**numbers, ordered=1).split()[3]) == 2 * 4 * 2 * (64 * 128 * 4 + 4) + 4
    assert int(plan(**numbers, packed=1).split()[3]) == 4 * (200 // 64 + 2 + 1) * 64 * 128 * 4


def test_sums_of_pieces_are_counted_in_32_bits(plan):
    """Query heads of one key head with masks of their own cut each key tile. Its sums are numbered by an int."""
    numbers = {"pass": 1, "b": 1, "h": 128, "h_kv": 64, "masks": 128, "len_q": 128, "sms": 132}
    most = 2**31 // (2 * 128 * 128 // 4) // 64 * 128  # keys, in 64 heads of tiles of 2 * 128 * 128 floats
    first, *ruled_out = plan(**numbers, len_kv=most).splitlines()
    assert first.startswith("attn_bwd_any_") and any("more than 32 GiB" in line for line in ruled_out)
    assert plan(**numbers, len_kv=most - 128).startswith("attn_bwd_sm90_bf16_d128_q64kv128_flex_")
    many = {"b": 256, "h": 4096, "h_kv": 1, "masks": 4096, "d": 8, "len_q": 1, "len_kv": 2**18}
    assert "more tiles than 2^31" in plan(**numbers | many)


def test_backward_of_every_dtype(plan):
    for dtype, name in enumerate(("fp16", "bf16", "fp32")):
        found = {d: plan(**{"pass": 1}, capability=80, dtype=dtype, d=d).split()[0] for d in (1, 64, 65, 128, 129, 256)}
        pattern = rf"attn_bwd_(any_{name}_dq|sm80_{name})_d(32|64|96|128|160|192|256)_q\d+kv\d+(w\d+(g2)?)?"
        assert all(re.fullmatch(pattern, kernel) for kernel in found.values())
        assert all(("sm80" in kernel) == (name != "fp32") for d, kernel in found.items())
        assert all(int(re.search(r"_d(\d+)", kernel)[1]) >= d for d, kernel in found.items())
