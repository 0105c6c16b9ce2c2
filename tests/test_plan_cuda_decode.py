"""The choice of a kernel over caches: tiles, parts of the keys, CTAs and clusters (harness_plan.py)."""

import re

import flash_attn_2_cuda
import pytest

from flash_attn._variants import choose


@pytest.mark.parametrize(
    ("len_q", "group", "heads"),
    [
        (300, 4, 2),
        (128, 4, 1),
        (65, 4, 4),
        (384, 4, 1),
        (64, 4, 2),
        (100, 1, 1),
        (64, 3, 1),
        (64, 6, 2),
        (33, 4, 2),
        (32, 4, 4),
    ]
    + [(32, 6, 2), (100, 8, 8), (17, 8, 4), (16, 8, 8), (9, 16, 8), (144, 8, 8), (40, 32, 8)],
)
def test_heads_share_tiles_where_fewer_are_left(plan, len_q, group, heads):
    """Work tiles of 64 or 128 rows at 128 columns. Row strips have 16 rows, so at most 8 heads share a tile."""
    numbers = {"len_q": len_q, "h": 2 * group, "h_kv": 2, "b": 200, "sms": 132, "launch": 1}
    assert plan(pages=8, **numbers).split(" | ")[-1] == str(heads)
    assert plan(**numbers | {"len_q": 300}).split(" | ")[-1] == "1"


@pytest.mark.parametrize(("len_q", "group"), [(16, 4), (32, 4), (64, 4), (20, 6), (9, 16)])
def test_one_split_shares_tiles_whatever_the_batch(plan, len_q, group):
    """Otherwise few sequences over two key tiles share none: their tiles fill the GPU at most once."""
    numbers = {"pages": 8, "len_q": len_q, "h": 2 * group, "h_kv": 2, "sms": 132, "launch": 1, "d": 256}
    of_batch = [plan(splits=1, b=b, **numbers).split(" | ")[-1] for b in (1, 3, 200)]
    assert len(set(of_batch)) == 1 and int(of_batch[0]) > 1
    assert int(plan(splits=0, b=1, **numbers).split(" | ")[-1]) <= 1


FEW = {"used": 1, "right": 0, "h": 32, "h_kv": 8, "sms": 132}


@pytest.mark.parametrize(
    ("b", "len_q", "keys", "d", "parts", "heads"),
    [
        (1, 16, 8192, 128, 8, 2),
        (1, 8, 65536, 128, 16, 4),
        (1, 64, 8192, 128, 8, 2),
        (1, 256, 8192, 128, 2, 1),
        (1, 512, 8192, 128, 1, 1),  # 128 tiles of one head
        (1, 700, 8192, 128, 3, 2),  # 176 tiles: four rounds of thirds
        (2, 32, 8192, 256, 4, 2),
        (4, 64, 8192, 256, 1, 1),  # 128 tiles of 64 rows
        (4, 128, 8192, 256, 1, 1),
        (1, 512, 65536, 64, 3, 4),  # a third of 88 tiles
        (4, 64, 2048, 256, 1, 1),  # 128 tiles of one head: combining would take longer
        (1, 64, 1600, 128, 4, 1),  # three parts of four key tiles, and one of one
        (1, 256, 2048, 256, 1, 1),
        (16, 64, 8192, 128, 1, 2),
    ],
)
def test_keys_of_few_tiles_are_cut_into_parts(plan, b, len_q, keys, d, parts, heads):
    numbers = {**FEW, "b": b, "len_q": len_q, "len_kv": keys, "d": d}
    name, _, _, workspace, num_splits, _ = plan(**numbers).splitlines()[0].split()
    assert name.startswith("attn_fwd_sm90_") and int(num_splits) == parts
    assert plan(**numbers, launch=1).split(" | ")[-1] == str(heads)
    assert int(workspace) == (4 * parts * b * 32 * len_q * (d + 1) if parts > 1 else 0)
    tiles = parts * b * -(-len_q // (int(name.split("_q")[1].split("kv")[0]) // heads)) * 32 // heads
    assert plan(**numbers, launch=1).split(" | ")[0].split()[2] == str(min(tiles, 132))


DENSE = {"b": 1, "h": 16, "h_kv": 16, "sms": 132}


@pytest.mark.parametrize(
    ("numbers", "tile", "parts"),
    [
        ({"len_q": 64, "len_kv": 8192}, "d128_q64kv128_cache", 8),
        ({"len_q": 64, "len_kv": 8192, "right": 0, "softcap": 5}, "d128_q64kv128_causal_score_cache", 8),
        ({"len_q": 33, "len_kv": 4096, "h": 32, "h_kv": 8, "b": 8}, "d128_q128kv128_cache", 1),  # heads share tiles
        ({"len_q": 512, "len_kv": 50000, "h": 8, "h_kv": 8, "d": 64}, "d64_q256kv64_cache", 8),
        ({"len_q": 1024, "len_kv": 1024, "h": 8, "h_kv": 8}, "d128_q64kv128", 1),  # 128 tiles instead of 64
        ({"len_q": 1500, "len_kv": 1500, "h": 20, "h_kv": 20, "d": 64}, "d64_q256kv64", 1),  # 120 tiles instead of 160
        ({"len_q": 2048, "len_kv": 2048, "b": 8}, "d128_q128kv128", 1),
        ({"len_q": 100, "len_kv": 511}, "d128_q128kv128", 1),  # few keys
        ({"len_q": 64, "len_kv": 8192, "dropout": 0.5}, "d128_q128kv128_dropout", 1),
        ({"len_q": 128, "len_kv": 8192, "splits": 1}, "d128_q128kv128", 1),
        ({"len_q": 128, "len_kv": 8192, "packed": 1}, "d128_q128kv128_varlen", 1),
    ],
    ids=str,
)
def test_dense_keys_count_as_a_cache_where_tiles_are_few(plan, numbers, tile, parts):
    name, _, _, workspace, num_splits, _ = plan(**DENSE | numbers).splitlines()[0].split()
    assert name == "attn_fwd_sm90_bf16_" + tile and int(num_splits) == parts
    assert (int(workspace) > 0) == (parts > 1)


def test_one_split_of_dense_keys_takes_the_same_tiles_in_every_batch(plan):
    numbers = {"d": 64, "len_q": 6400, "len_kv": 4096, "b": 1, "splits": 1, "sms": 132}
    assert len({plan(h=h, h_kv=h, **numbers).split()[0] for h in (1, 5, 8, 64)}) == 1


def test_wheels_have_the_kernels_of_plain_dense_calls(plan):
    shipped = {name for name, *_ in choose(flash_attn_2_cuda, ["sm_90a"])}
    for d in (64, 96, 128, 192, 256):
        for len_q, len_kv in ((64, 1024), (64, 8192), (256, 16384), (1024, 1024), (4096, 4096)):
            for h, right in ((8, -1), (8, 0), (32, -1)):
                numbers = {"d": d, "len_q": len_q, "len_kv": len_kv, "b": 1, "h": h, "h_kv": 8, "right": right}
                assert plan(**numbers, sms=132).split()[0] in shipped, numbers


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("len_q", (8, 33, 64, 300))
def test_num_splits_is_the_number_of_parts(plan, d, len_q):
    """Whatever the batch: 1 never cuts the keys, and there are no more parts than key tiles."""
    numbers = {**FEW, "d": d, "len_q": len_q}
    for splits, keys in ((1, 8192), (5, 8192), (100, 200)):
        plans = [plan(**numbers, b=b, splits=splits, len_kv=keys).splitlines()[0].split() for b in (1, 3, 200)]
        assert len({(name, num_splits) for name, _, _, _, num_splits, _ in plans}) == 1
        name, _, block_kv, _, num_splits, _ = plans[0]
        if name.startswith("attn_fwd_sm90_"):
            assert int(num_splits) == min(splits, -(-keys // int(block_kv)))


def test_keys_are_not_cut_where_parts_cannot_be_combined(plan):
    numbers = {**FEW, "b": 1, "len_q": 64, "len_kv": 65536}
    assert plan(**numbers).splitlines()[0].split()[4] == "8"
    for other in ({"used": 0, "packed_q": 1}, {"pages": 8, "packed": 1}):
        assert plan(**{k: v for k, v in {**numbers, **other}.items() if v}).splitlines()[0].split()[4] in "01"
    many = {**numbers, "len_q": 2**22, "h": 128, "h_kv": 1, "sms": 2**22}  # rows of two parts exceed 2^28
    assert plan(**many).splitlines()[0].split()[4] == "1"
    name, _, _, workspace, *_ = plan(**numbers, rotary=64, new=3, splits=3).splitlines()[0].split()
    rotated = 64 * 32 * 128 * 2
    assert name.startswith("attn_fwd_sm90_") and int(workspace) == rotated + 4 * 3 * 64 * 32 * 129


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"len_q": 1}, "attn_decode_sm90_bf16_d128_q16"),
        ({"len_q": 8, "d": 64, "dtype": 0}, "attn_decode_sm90_fp16_d64_q16"),
        ({"len_q": 9, "d": 72}, "attn_decode_sm90_bf16_d96_q32"),
        ({"len_q": 32, "d": 136, "softcap": 5, "sms": 132}, "attn_fwd_sm90_bf16_d192_q64kv96_score_cache"),
        ({"len_q": 33}, "attn_fwd_sm90_bf16_d128_q64kv64"),
        ({"len_q": 32, "d": 256, "left": 5, "sms": 132}, "attn_decode_sm90_bf16_d256_q32"),
        ({"len_q": 32, "d": 256, "left": 5, "splits": 1, "h": 2}, "attn_fwd_sm90_bf16_d256_q64kv64_local"),
        ({"pages": 8}, "attn_fwd_sm90_bf16_d128_q128kv128_cache"),
        ({"pages": 8, "splits": 2}, "attn_fwd_sm90_bf16_d128_q128kv128_cache"),
        ({"pages": 8, "splits": 2, "len_q": 8}, "attn_decode_sm90_bf16_d128_q16"),
        ({"pages": 8, "splits": 2, "packed": 1}, "attn_decode_sm90_bf16_d128_q64"),
        ({"used": 1, "len_q": 64, "len_kv": 8192, "sms": 132}, "attn_fwd_sm90_bf16_d128_q64kv128_cache"),
        ({"len_q": 32, "splits": 2, "len_kv": 8192}, "attn_decode_sm90_bf16_d128_q64"),  # keys of no cache
        ({"pages": 8, "len_q": 64, "sms": 132}, "attn_decode_sm90_bf16_d128_q64"),
        ({"pages": 8, "len_q": 64, "sms": 132, "b": 80}, "attn_fwd_sm90_bf16_d128_q128kv128_cache"),
        ({"pages": 8, "len_q": 64, "packed": 1, "d": 256, "h": 64}, "attn_fwd_sm90_bf16_d256_q128kv64_varlen_cache"),
        ({"pages": 8, "len_q": 63, "packed": 1, "d": 256, "h": 64}, "attn_decode_sm90_bf16_d256_q32"),
        ({"pages": 8, "len_q": 64, "d": 64, "b": 80}, "attn_fwd_sm90_bf16_d64_q192kv128_cache"),
        ({"pages": 8, "len_q": 512, "d": 64, "h": 16, "h_kv": 1}, "attn_fwd_sm90_bf16_d64_q256kv64_cache"),
        ({"new": 3, "right": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_causal_cache"),
        ({"used": 1, "len_q": 300, "alibi": 1}, "attn_fwd_sm90_bf16_d128_q128kv128_score_cache"),
        ({"len_q": 1, "packed": 1}, "attn_decode_sm90_bf16_d128_q16"),
        ({"leftpad": 1, "packed": 1}, "attn_fwd_sm80_bf16_d128_q128kv32s2_cache"),
        ({"leftpad": 1, "packed": 1, "splits": 2}, "attn_decode_sm90_bf16_d128_q64"),
        ({"len_q": 1, "dropout": 0.5}, "attn_fwd_sm90_bf16_d128_q128kv128_dropout"),
        ({"len_q": 1, "stride": 4}, "attn_fwd_any_bf16_d128_q128kv64"),
        ({"len_q": 1, "softcap": 1001}, "attn_fwd_sm80_bf16_d128_q128kv32s2_score"),
        ({"len_q": 1, "dropout": 0.5, "capability": 80}, "attn_fwd_sm80_bf16_d128_q128kv32s2_dropout"),
        ({"len_q": 1, "stride": 4, "capability": 80}, "attn_fwd_any_bf16_d128_q128kv64"),
        ({"len_q": 1, "len_kv": 255, "capability": 80}, "attn_fwd_sm80_bf16_d128_q128kv32s2"),
        ({"len_q": 33, "capability": 80}, "attn_fwd_sm80_bf16_d128_q128kv32s2"),  # 66 rows
        ({"pages": 1, "dtype": 2, "capability": 80}, "attn_fwd_any_fp32_d128_q128kv32"),
        ({"len_q": 1, "capability": 100}, "attn_decode_sm80_bf16_d128_q16t4s3"),
    ],
    ids=str,
)
def test_few_queries_and_caches(plan, numbers, kernel):
    first, *_ = plan(**numbers).splitlines()
    name, block_q, block_kv, workspace, *_ = first.split()
    assert name == kernel
    if "decode" in name:
        assert re.search(rf"_q{block_q}(t4s3)?$", name) and block_kv == ("32" if "d192_q64" in name else "64")
        assert 0 < int(workspace) < 64 << 20


@pytest.mark.parametrize("strides", ({}, {"v_batch": 2**20}), ids=str)
def test_one_split_of_a_dense_cache_does_not_depend_on_the_batch(plan, strides):
    """One row of a cache whose k and v have other strides is no exception."""
    for len_q in (1, 17, 64, 128, 512):
        numbers = {"capability": 80, "sms": 132, "leftpad": 1, "len_q": len_q, "len_kv": 4096, "splits": 1, **strides}
        assert len({plan(**numbers, h=16, h_kv=4, b=b).split()[0] for b in (1, 2, 8, 64)}) == 1


@pytest.mark.parametrize("d", (64, 128, 256))
@pytest.mark.parametrize("page", (12, 64))
@pytest.mark.parametrize("capability", (80, 90))
def test_one_split_does_not_depend_on_the_batch(plan, capability, page, d):
    """The kernel of a sequence decides about its bits."""
    for len_q in (1, 17, 40, 64, 100, 128, 512):
        numbers = {"capability": capability, "sms": 132, "pages": 8, "page": page, "d": d, "len_q": len_q, "splits": 1}
        assert len({plan(**numbers, h=16, h_kv=4, b=b).split()[0] for b in (1, 2, 8, 64)}) == 1


# The decode kernel before Hopper: tiles of 16, 32 and 64 rows for each head dimension.
DECODE_TILES = {
    64: (("q16t4s5", "q32t2s5", "q64t1s5"), ("q16t4s5", "q32t2s5", "q64t1s4")),
    96: (("q16t4s5", "q32t2s4", "q64t1s4"), ("q16t3s5", "q32t2s3", "q64t1s3")),
    128: (("q16t4s3", "q32t2s3", "q64t1s3"), ("q16t3s3", "q32t1s5", "q64t1s4")),
    192: (("q16t4s3", "q32t1s5", "q64t1s4"), ("q16t2s3", "q32t1s3", "q64t1s5")),
    256: (("q16t2s4", "q32t1s4", "q32t1s4"), ("q16t3s3", "q32t1s3", "q32t1s3")),
}


@pytest.mark.parametrize("d", DECODE_TILES)
@pytest.mark.parametrize(("capability", "is_small"), [(80, 0), (86, 1), (87, 0), (89, 1), (100, 0), (120, 1)])
def test_the_decode_before_hopper_takes_tiles_for_which_there_is_shared_memory(plan, capability, is_small, d):
    for len_q, name in zip((1, 8, 9, 16, 17, 32), sorted(DECODE_TILES[d][is_small] * 2), strict=True):
        kernel, *_, cluster = plan(capability=capability, d=d - 8, len_q=len_q, splits=2).splitlines()[0].split()
        assert kernel == f"attn_decode_sm80_bf16_d{d}_{name}" and cluster == "0"
    name = plan(capability=capability, d=d, pages=1, sms=108, splits=2).split()[0]
    assert name == f"attn_decode_sm80_bf16_d{d}_{DECODE_TILES[d][is_small][2]}"


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"used": 1}, "attn_decode_sm80"),  # 64 tiles of 128 queries would leave SMs idle
        ({"used": 1, "b": 4}, "attn_fwd_sm80"),
        ({"used": 1, "len_q": 32}, "attn_decode_sm80"),
        ({"used": 1, "len_q": 32, "len_kv": 40}, "attn_decode_sm80"),
        ({"len_q": 32, "len_kv": 40}, "attn_fwd_short"),
        ({"len_q": 32, "len_kv": 70}, "attn_fwd_sm80"),
        ({"used": 1, "leftpad": 1}, "attn_decode_sm80"),
        ({"used": 1, "rows": 3}, "attn_decode_sm80"),
        ({"used": 1, "new": 1}, "attn_decode_sm80"),
        ({"pages": 1, "packed": 1}, "attn_fwd_sm80"),
        ({"pages": 1, "cols": 128, "packed": 1, "b": 30, "len_q": 60}, "attn_decode_sm80"),
        ({"pages": 1, "cols": 128, "packed": 1, "b": 30, "len_q": 100}, "attn_fwd_sm80"),
        ({"packed_q": 1}, "attn_decode_sm80"),  # beside a cache that is not packed
        ({"pages": 1, "softcap": 1001}, "attn_fwd_sm80"),
        ({"pages": 1, "stride": 4}, "attn_fwd_any"),
        ({"pages": 1, "alibi": 1, "left": 5, "softcap": 9}, "attn_fwd_sm80"),
        ({"pages": 1, "d_v": 64}, "attn_fwd_any"),
        ({"pages": 1, "b": 3}, "attn_fwd_sm80"),
        ({"pages": 1, "b": 3, "splits": 2}, "attn_decode_sm80"),
        ({"pages": 1, "b": 30, "len_q": 32}, "attn_decode_sm80"),  # one tile of 64 rows
        ({"pages": 1, "b": 30, "len_q": 65}, "attn_fwd_sm80"),  # two tiles of 64 rows beside one of 128
        ({"pages": 1, "b": 30, "len_q": 128}, "attn_fwd_sm80"),
        ({"pages": 1, "b": 30, "len_q": 128, "splits": 1}, "attn_fwd_sm80"),
        ({"pages": 1, "b": 30, "len_q": 128, "stride": 4}, "attn_fwd_any"),
        ({"d": 256, "b": 30, "len_q": 16}, "attn_decode_sm80"),
        ({"d": 256, "b": 30, "len_q": 32}, "attn_fwd_sm80"),  # two tiles of 32 rows
        ({"d": 256, "b": 60, "len_q": 64, "h": 2}, "attn_fwd_sm80"),  # two tiles of 32 rows
        ({"d": 192, "b": 60, "len_q": 64, "h": 2}, "attn_decode_sm80"),
    ],
    ids=str,
)
def test_caches_before_hopper(plan, numbers, kernel):
    assert plan(capability=80, sms=108, **numbers).startswith(f"{kernel}_")


@pytest.mark.parametrize(
    ("capability", "sms", "d", "ctas"),
    [(80, 108, 128, 216), (80, 108, 256, 216), (86, 82, 128, 164), (86, 82, 256, 82), (89, 128, 64, 256),
     (89, 142, 128, 284), (120, 170, 128, 288), (120, 170, 256, 170)],
)  # fmt: skip
def test_ctas_of_a_decode_before_hopper(plan, capability, sms, d, ctas):
    """As many as have room on the GPU, up to 288."""
    numbers = {"launch": 1, "len_q": 1, "h": 2, "h_kv": 2, "d": d, "len_kv": 4096}
    lanes, groups = map(int, plan(capability=capability, sms=sms, **numbers).split(" | ")[1].split())
    assert lanes * groups == ctas


def test_a_decode_leaves_multiprocessors_to_others(plan):
    numbers = {"launch": 1, "len_q": 1, "h": 8, "h_kv": 8, "splits": 1, "len_kv": 4096}
    assert plan(sms=132, margin=12, **numbers) == plan(sms=120, **numbers) != plan(sms=132, **numbers)


@pytest.mark.parametrize("sms", [1, 20, 78, 132, 144])
@pytest.mark.parametrize("h_kv", [1, 2, 6, 8, 17, 32, 132])
def test_lanes_of_a_decode(plan, sms, h_kv):
    """The most lanes that divide the heads and leave at most one CTA in 32 over; two CTAs of the kernel fit an SM."""
    said = plan(sms=sms, launch=1, len_q=1, h=h_kv, h_kv=h_kv, splits=1, len_kv=4096).split(" | ")[1]
    ctas = 2 * sms
    lanes = max(n for n in range(1, h_kv + 1) if h_kv % n == 0 and n <= ctas and ctas % n * 32 <= ctas)
    assert said == f"{lanes} {ctas // lanes}"


@pytest.mark.parametrize(
    ("numbers", "launches"),
    [({}, 1), ({"len_q": 40}, 2), ({"len_q": 40, "b": 1}, 1), ({"len_q": 40, "packed": 0}, 1), ({"d": 256}, 1)],
    ids=str,
)
def test_launches_of_a_decode(plan, numbers, launches):
    """Packed sequences of few rows have a launch of their own where others have more rows than the highest tile."""
    given = {"sms": 132, "launch": 1, "len_q": 1, "pages": 1, "packed": 1} | numbers
    if not given["packed"]:
        del given["packed"]
    second = plan(**given).split(" | ")[2].split()
    assert second[0] == str(launches - 1) and (second[1] == "0") == (launches == 1)


@pytest.mark.parametrize("name", ["k_batch", "v_batch"])
def test_decoding_counts_either_cache_with_32_bits(plan, name):
    last_key = 1023 * 4 * 128 + 128  # offset of the last key of the second head; pieces have 8 elements
    for stride, fits in ((2**35 - 16 - last_key, True), (2**35 - 8 - last_key, False), (-8, False)):
        first, *ruled_out = plan(**{"len_q": 1, name: stride}).splitlines()
        assert first.startswith("attn_decode_sm90_" if fits else "attn_fwd_sm90_")
        assert fits or "attn_decode_sm90: it addresses up to 64 GB of keys and of values" in ruled_out


@pytest.mark.parametrize(
    ("numbers", "cluster"),
    [
        ({}, 8),  # 4 heads, 1024 keys
        ({"b": 8}, 8),
        ({"b": 9}, 4),
        ({"b": 16}, 4),
        ({"b": 17}, 2),
        ({"b": 32}, 2),
        ({"b": 33, "h_kv": 1}, 0),
        ({"len_kv": 2049}, 8),  # long: a head needs four clusters
        ({"len_kv": 2049, "b": 3}, 4),
        ({"len_kv": 2049, "b": 8}, 2),
        ({"len_kv": 2049, "b": 9}, 0),
        ({"len_kv": 2049, "b": 1, "h_kv": 16, "h": 16}, 8),  # in one sequence all heads are alike
        ({"len_kv": 2049, "b": 1, "h_kv": 66, "h": 66}, 2),
        ({"len_kv": 2049, "b": 1, "h_kv": 67, "h": 67}, 0),
        ({"len_kv": 32768, "b": 1, "h_kv": 8, "h": 32}, 8),
        ({"len_kv": 32769, "b": 1, "h_kv": 8, "h": 32}, 2),  # more than 128 MB
        ({"len_kv": 32769, "b": 1, "h_kv": 132, "h": 132}, 2),
        ({"len_kv": 32769, "b": 1, "h_kv": 133, "h": 133}, 0),
        ({"len_kv": 65536, "b": 8, "h": 2, "h_kv": 1}, 0),
        ({"len_kv": 1 << 20, "b": 1}, 8),  # few heads
        ({"h": 32}, 8),
        ({"h": 34}, 0),  # 17 rows
        ({"splits": 2}, 0),
        ({"packed": 1}, 0),
        ({"sms": 78, "b": 5}, 4),
        ({"sms": 0}, 0),
    ],
    ids=str,
)
def test_clusters_where_there_are_few_heads(plan, numbers, cluster):
    first, *_ = plan(**{"sms": 132, "len_q": 1} | numbers).splitlines()
    assert first.startswith("attn_decode_sm90_") and int(first.split()[-1]) == cluster


def test_rotary_takes_a_workspace_for_the_turned_queries(plan):
    assert plan(new=1, rotary=64, d=64, dtype=2, capability=80).split()[3] == str(2 * 1024 * 4 * 64 * 4)


@pytest.mark.parametrize(
    ("numbers", "apart"),
    [
        ({"new": 9}, 1024),  # more new keys than the kernel appends itself
        ({"new": 9, "len_q": 40}, 40 * 1024),
        ({"new": 9, "len_q": 1, "h": 34, "b": 1}, 34 * 128),
        ({"new": 8}, 0),
        ({"new": 8, "len_q": 40}, 40 * 1024),  # more rows than a tile has
    ],
    ids=str,
)
def test_turned_queries_lie_beside_the_parts_of_a_decode(plan, numbers, apart):
    plain, turned = (
        int(plan(**{"d": 64, "len_q": 1, "sms": 132} | numbers | extra).split()[3]) for extra in ({}, {"rotary": 64})
    )
    assert turned - plain == (apart + 255) // 256 * 256


PREFILL = {"score": 1, "len_q": 2048, "len_kv": 16384, "h": 32, "h_kv": 8, "sms": 132}
PLACES = [
    {"used": 1},
    {"q_offset": 1},
    {"pages": 512, "cols": 256},
    {"used": 1, "q_offset": 1, "pages": 512, "cols": 256},
]


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("len_q", [256, 2048])
def test_prefills_with_mods_beside_places_have_hoppers_forward(plan, places, len_q):
    numbers = PREFILL | places | {"len_q": len_q}
    assert re.match("attn_fwd_sm90_bf16_d128_q128kv128_cache_flex", plan(**numbers))
    assert plan(**numbers | {"dtype": 2, "len_q": 1}).startswith("attn_fwd_any_fp32")
    assert plan(**numbers | {"len_q": 1}).startswith("attn_decode_sm90_bf16_d128_q16_flex")
    assert plan(**numbers | {"d_v": 64, "d": 192}).startswith("attn_fwd_sm90_bf16_d192v128_q128kv96_cache_flex")


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize(
    ("more", "kernel", "reason"),
    [
        ({"score": 9}, "attn_decode_sm90_bf16_d128_q64_flex", None),  # would spill in the forward
        ({"scale": -0.1}, "attn_decode_sm90_bf16_d128_q64_flex", None),
        ({"score": 9, "d_v": 64}, "attn_fwd_any_bf16", "the mods are long"),
        ({"max": 1}, "attn_fwd_any_bf16", "it keeps no maximum of scores beside a KV cache"),
        ({"masks": 1}, "attn_fwd_any_bf16", "it takes no block mask beside a KV cache"),
    ],
    ids=str,
)
def test_other_prefills_with_places_have_other_kernels(plan, places, more, kernel, reason):
    numbers = {key: x for key, x in PREFILL.items() if key != "score" or "masks" not in more} | places | more
    found = plan(**numbers)
    assert found.startswith(kernel)
    assert reason is None or re.search(f"attn_fwd_sm90: {reason}", found)


def test_single_keys_of_prefills_with_mods_are_copied(plan):
    numbers = PREFILL | {"pages": 4096, "cols": 1366, "page": 12}
    bytes_of_copies = 2 * (2 * 1366 * 12 * 8 * 128 * 2) + 256
    assert re.match(rf"attn_fwd_sm90_bf16_d128_q128kv128_cache_flex\w* 128 128 {bytes_of_copies} ", plan(**numbers))
    assert re.match("attn_fwd_sm90_bf16_d128_q128kv128_cache_whole_flex", plan(**numbers | {"page": 24}))


@pytest.mark.parametrize("places", [{}, {"used": 1, "q_offset": 1}], ids=str)
def test_keys_of_few_tiles_with_mods_are_cut(plan, places):
    numbers = {"score": 1, "b": 1, "len_q": 128, "len_kv": 16384, "h": 8, "h_kv": 8, "sms": 132} | places
    kernel, _, _, workspace, parts, _ = plan(**numbers).splitlines()[0].split()
    assert kernel.startswith("attn_fwd_sm90_bf16_d128_q128kv128_cache_flex") and int(parts) == 16
    assert int(workspace) == 16 * 8 * 128 * (128 + 1) * 4


@pytest.mark.parametrize("more", [{"masks": 1}, {"score": 1, "max": 1}, {"score": 1, "len_q": 16384}], ids=str)
def test_keys_of_lists_and_of_many_tiles_are_not_cut(plan, more):
    numbers = {"b": 1, "len_q": 128, "len_kv": 16384, "h": 8, "h_kv": 8, "sms": 132}
    kernel, _, _, _, parts, _ = plan(**numbers | more).splitlines()[0].split()
    assert kernel.startswith("attn_fwd_sm90_bf16_d128_q128kv128_flex") and parts == "1"
