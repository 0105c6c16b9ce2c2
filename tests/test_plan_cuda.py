"""The choice of a forward, of its order, and of the generic kernels (harness_plan.py)."""

import re
import shutil
import subprocess
from itertools import product

import flash_attn_2_cuda
import pytest
from harness_plan import CSRC

from flash_attn._variants import ARCHS, choose

# Of such calls no copies with aligned rows are made (csrc/plan/gpu_align.c). If only some tensors are copied, or if
# rows lie at odd elements, copies pay sooner.
SHORT, TINY, FEW = ({"len_q": n, "len_kv": n} for n in (90, 20, 7))


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"d": 8}, "attn_fwd_sm90_bf16_d64_q256kv64"),
        ({"d": 64, "len_q": 192}, "attn_fwd_sm90_bf16_d64_q192kv128"),
        ({"d": 64, "len_q": 1152}, "attn_fwd_sm90_bf16_d64_q192kv128"),
        ({"d": 64, "len_q": 100, "len_kv": 100}, "attn_fwd_sm90_bf16_d64_q128kv64x2"),
        ({"d": 64, "len_q": 100, "len_kv": 257}, "attn_fwd_sm90_bf16_d64_q192kv128"),
        ({"d": 64, "len_q": 192, "len_kv": 192}, "attn_fwd_sm90_bf16_d64_q256kv64"),
        ({"d": 64, "len_q": 64, "len_kv": 64, "dropout": 0.5}, "attn_fwd_sm90_bf16_d64_q64kv64_dropout"),
        ({"d": 64, "len_q": 65, "len_kv": 65}, "attn_fwd_sm90_bf16_d64_q128kv64x2"),
        ({"d": 64, "len_q": 17, "len_kv": 65}, "attn_fwd_sm90_bf16_d64_q64kv64"),
        ({"d": 64, "len_kv": 64}, "attn_fwd_sm90_bf16_d64_q256kv64"),
        ({"d": 64, "right": 0, "len_q": 4096}, "attn_fwd_sm90_bf16_d64_q256kv64_causal"),
        ({"d": 64, "right": 0, "len_q": 16384}, "attn_fwd_sm90_bf16_d64_q192kv128_causal"),
        ({"d": 64, "packed": 1}, "attn_fwd_sm90_bf16_d64_q192kv128_varlen"),
        ({"d": 64, "dropout": 0.5}, "attn_fwd_sm90_bf16_d64_q128kv128_dropout"),
        ({"d": 256, "dropout": 0.5, "right": 0}, "attn_fwd_sm90_bf16_d256_q128kv64_causal_dropout"),
        ({"d": 32, "len_q": 2048}, "attn_fwd_sm90_bf16_d32_q192kv128"),
        ({"d": 24, "len_q": 2048}, "attn_fwd_sm90_bf16_d48_q192kv128"),
        ({"d": 32, "len_q": 512, "len_kv": 512}, "attn_fwd_sm90_bf16_d32_q256kv64"),
        ({"d": 32, "len_q": 100, "len_kv": 100}, "attn_fwd_sm90_bf16_d64_q128kv64x2"),
        ({"d": 32, "dropout": 0.5}, "attn_fwd_sm90_bf16_d64_q128kv128_dropout"),
        ({"d": 40, "len_q": 4096}, "attn_fwd_sm90_bf16_d48_q192kv128"),
        ({"d": 40}, "attn_fwd_sm90_bf16_d64_q256kv64"),
        ({"d": 72, "dtype": 0}, "attn_fwd_sm90_fp16_d80_q192kv96"),
        ({"d": 72, "len_q": 512, "len_kv": 512}, "attn_fwd_sm90_bf16_d80_q128kv128"),
        ({"d": 80, "dtype": 0}, "attn_fwd_sm90_fp16_d80_q128kv128"),
        ({"d": 80, "len_q": 4096}, "attn_fwd_sm90_bf16_d80_q192kv96"),
        ({"d": 80, "dropout": 0.5}, "attn_fwd_sm90_bf16_d80_q128kv128_dropout"),
        ({"d": 88}, "attn_fwd_sm90_bf16_d96_q192kv96"),
        ({"d": 88, "len_q": 512, "len_kv": 512}, "attn_fwd_sm90_bf16_d112_q128kv128"),
        ({"d": 96}, "attn_fwd_sm90_bf16_d96_q128kv128"),
        ({"d": 96, "len_q": 8192}, "attn_fwd_sm90_bf16_d96_q192kv96"),
        ({"d": 104, "packed": 1}, "attn_fwd_sm90_bf16_d112_q192kv80_varlen"),
        ({"d": 112}, "attn_fwd_sm90_bf16_d112_q128kv128"),
        ({"d": 120}, "attn_fwd_sm90_bf16_d128_q128kv128"),
        ({"d": 128}, "attn_fwd_sm90_bf16_d128_q128kv128"),
        ({"d": 128, "packed": 1, "right": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_causal_varlen"),
        ({"d": 128, "left": 7}, "attn_fwd_sm90_bf16_d128_q128kv128_local"),
        ({"d": 128, "left": 7, "right": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_local"),
        ({"d": 128, "softcap": 5}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "alibi": 1}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "scale": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "scale": -1}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "scale": 1e-46}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),  # 0 in fp32
        ({"d": 128, "len_q": 192, "len_kv": 192}, "attn_fwd_sm90_bf16_d128_q64kv64"),
        ({"d": 128, "len_q": 193, "len_kv": 193}, "attn_fwd_sm90_bf16_d128_q128kv128"),
        ({"d": 128, "len_q": 300, "right": 0, "len_kv": 300}, "attn_fwd_sm90_bf16_d128_q64kv64_causal"),
        ({"d": 152}, "attn_fwd_sm90_bf16_d192_q128kv96"),
        ({"d": 160}, "attn_fwd_sm90_bf16_d160_q128kv128"),
        ({"d": 168}, "attn_fwd_sm90_bf16_d192_q128kv96"),
        ({"d": 256}, "attn_fwd_sm90_bf16_d256_q128kv64"),
        ({"d": 256, "len_q": 17, "len_kv": 17}, "attn_fwd_sm90_bf16_d256_q64kv64"),
    ],
    ids=str,
)
def test_kernel(plan, numbers, kernel):
    first, *ruled_out = plan(**numbers).splitlines()
    name, block_q, block_kv, workspace, num_splits, _ = first.split()
    assert name == kernel and workspace == "0" and num_splits == "1"
    assert re.search(rf"_q{block_q}kv{block_kv}", name)
    why_not_decode = "it has no dropout" if "dropout" in numbers else "it is for few queries over many keys"
    assert ruled_out.pop(0) == f"attn_decode_sm90: {why_not_decode}"
    assert ruled_out.pop(0).startswith("attn_fwd_short: ")
    assert all(re.fullmatch(r"attn_fwd_sm90_d\d+(v\d+)?_q\d+kv\d+(x2)?: .+", line) for line in ruled_out)


# Tiles where an SM has 163 KiB of shared memory or more, and where it has 100 KiB.
BIG = (
    "d32_q128kv64s2", "d48_q128kv64s2", "d64_q128kv64s2", "d80_q128kv64s2", "d96_q128kv64s2", "d112_q128kv32s2",
    "d128_q128kv32s2", "d160_q128kv64s2", "d192_q128kv64s2", "d256_q128kv64s1",
)  # fmt: skip
SMALL = (
    "d32_q128kv64s2", "d48_q128kv64s2", "d64_q128kv64s2r", "d80_q128kv64s1", "d96_q128kv48s1", "d112_q128kv32s1",
    "d128_q256kv32s1", "d160_q128kv64s1", "d192_q128kv48s1", "d256_q128kv32s1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (80, BIG),
        (86, SMALL),
        (89, SMALL),
        (100, (*BIG[:-1], "d256_q128kv64s2")),
        (120, SMALL),
    ],
    ids=str,
)
def test_the_forward_before_hopper_takes_tiles_for_which_there_is_shared_memory(plan, capability, names):
    for d, name in zip((8, 40, 56, 72, 88, 104, 120, 136, 168, 200), names, strict=True):
        assert plan(capability=capability, d=d).split()[0] == f"attn_fwd_sm80_bf16_{name}"


@pytest.mark.parametrize(
    ("numbers", "group_heads"),
    [
        ({}, 0),  # without a mask
        ({"left": 100}, 0),
        ({"right": 0}, 42),  # 8 tiles of each head; 216 CTAs want 324 tiles, which are 41 heads; 256 heads are 6 groups
        ({"right": 0, "left": 600}, 42),
        ({"right": 0, "packed": 1}, 45),  # rows that belong to no sequence count as heads of one more
        ({"right": 0, "len_q": 128}, 0),
        ({"right": 0, "len_q": 16384}, 3),
        ({"right": 0, "len_q": 65536}, 0),  # a head has enough tiles
        ({"right": 0, "b": 1}, 16),  # all
        ({"right": 0, "h": 1, "h_kv": 1, "b": 1}, 0),
        ({"right": 0, "d": 256}, 21),  # one CTA on an SM
        ({"right": 0, "sms": 0}, 0),  # unknown
        ({"right": 0, "pass": 1}, 21),
        ({"right": 0, "pass": 1, "d": 256}, 11),  # tiles of 64 keys
        ({"right": 0, "pass": 1, "h_kv": 4}, 21),  # key heads
        ({"right": 0, "pass": 1, "packed": 1}, 21),
        ({"pass": 1}, 0),
    ],
    ids=str,
)
def test_heads_that_are_walked_together_before_hopper(plan, numbers, group_heads):
    numbers = {"capability": 80, "sms": 108, "b": 16, "h": 16, "h_kv": 16, "launch": 1} | numbers
    assert plan(**numbers).split()[0] == str(group_heads)


TASKS = """
#include <stdio.h>
#include <string.h>
#define DEVICE static inline
template <class T> T min(T x, T y) { return x < y ? x : y; }
template <class T> T max(T x, T y) { return x < y ? y : x; }
#include "cuda/task_order.cuh"
int main() {
    static char seen[64][64];
    for (int tiles = 1; tiles < 12; tiles++)
        for (int heads = 1; heads < 40; heads++)
            for (int group = 0; group <= heads; group++) {
                memset(seen, 0, sizeof seen);
                task_place last = {-1, -1};
                for (int task = 0; task < tiles * heads; task++) {
                    const task_place x = place_of_task(task, tiles, heads, group);
                    if (x.head < 0 || x.head >= heads || x.tile < 0 || x.tile >= tiles || seen[x.head][x.tile]++)
                        return printf("%d tiles of %d heads, %d together: task %d", tiles, heads, group, task), 1;
                    if (task_in_order(task, tiles, heads, group) != x.head * tiles + x.tile) return puts("number"), 1;
                    /* The next tile is longer only where the next heads begin. */
                    if (task && x.tile < last.tile && (x.tile != 0 || x.head <= last.head)) return puts("order"), 1;
                    last = x;
                }
            }
    const long long far = (1ll << 32) + 5; /* the tasks of 2^20 heads of 2^13 tiles */
    const task_place x = place_of_task(far, 1 << 13, 1 << 20, 0), y = place_of_task(far, 1 << 13, 1 << 20, 2);
    if (x.head != 1 << 19 || x.tile != 5 || y.head != (1 << 19) + 1 || y.tile != 2) return puts("far"), 1;
    return 0;
}
"""


def test_each_task_before_hopper_is_a_tile_of_its_own(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    (tmp_path / "tasks.cpp").write_text(TASKS)
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    command = [compiler, "-std=c++17", "-O1", *sanitizers, "-I", CSRC, tmp_path / "tasks.cpp", "-o", tmp_path / "tasks"]
    subprocess.run(command, check=True)
    subprocess.run([tmp_path / "tasks"], check=True)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"d": 100, **SHORT}, "it wants a head dimension that is a multiple of 8"),
        ({"stride": 4, **SHORT}, "with strides that are multiples of 8 elements"),
        ({"offset": 8, **SHORT}, "to start at multiples of 16 bytes"),
        ({"dtype": 2}, "it takes fp16 and bf16"),
        ({"pages": 1, "stride": 4}, "it wants the cache to start at a multiple of 16 bytes"),
        ({"new": 3, "stride": 4}, "it wants the cache to start at a multiple of 16 bytes"),
        ({"pages": 2, "k_batch": 2**15}, "it wants a KV cache whose k and v have the same strides"),
        ({"pages": 9, "k_batch": 2**33, "v_batch": 2**33, "dropout": 0.5}, "it addresses up to 64 GiB"),
        ({"leftpad": 1, "b": 1, "k_batch": 2**21, "dropout": 0.5}, "whose k and v have the same strides"),
        ({"b": 2**20, "h": 4096}, "the problem has more heads than 2^31"),
        ({"d_v": 64}, "it takes v with as many columns as k"),
        ({"qv": 1}, "it takes no qv"),
        ({"h": 0}, "it wants a query head"),
        ({"masks": 1}, "it takes no mod and no block mask"),
    ],
    ids=str,
)
def test_what_the_forward_before_hopper_does_not_serve(plan, numbers, words):
    first, *ruled_out = plan(capability=80, **numbers).splitlines()
    assert first.startswith("attn_fwd_any_")
    assert any(line.startswith("attn_fwd_sm80: ") and words in line for line in ruled_out)


def test_the_forward_before_hopper_serves_masks_scores_and_dropout(plan):
    for options, name in (
        ({"left": 5, "right": 9, "packed": 1}, ""),
        ({"len_q": 1, "right": 0, "len_kv": 255}, ""),
        ({"softcap": 9}, "_score"),
        ({"alibi": 1, "right": 0}, "_score"),
        ({"dropout": 0.5, "scale": 0}, "_score_dropout"),
        ({"scale": 1e31}, "_score"),
        ({"pages": 1, "b": 9}, "_cache"),
        ({"chunk": 7}, "_cache"),
        ({"used_q": 1, "packed": 1}, "_cache"),
        ({"new": 3, "softcap": 1, "dropout": 0.5}, "_score_cache_dropout"),
        ({"pages": 1, "packed": 1, "dropout": 0.5}, "_cache_dropout"),
        ({"packed_q": 1, "dropout": 0.5}, "_cache_dropout"),  # beside a cache that is not packed
        ({"pages": 2, "k_batch": 2**16, "v_batch": 2**16, "leftpad": 1, "dropout": 0.5}, "_cache_dropout"),
    ):
        assert plan(capability=80, **options).split()[0] == f"attn_fwd_sm80_bf16_d128_q128kv32s2{name}"


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 100, 120])
def test_kernels_before_hopper_are_built_ahead_where_a_plan_takes_them(plan, capability):
    """sm_87 is no architecture of prebuild, but the module knows which kernels it takes."""
    taken = {
        name
        for name, family, row, features, arch in flash_attn_2_cuda.cuda_kernels()
        if "_sm80_" in name and arch == 0 and flash_attn_2_cuda.cuda_kernel_is_taken(family, row, features, capability)
    }
    planned = set()
    for d in (32, 48, 64, 80, 96, 112, 128, 160, 192, 256):
        for dtype in (0, 1):
            few = ({"used": 1, "len_q": n} for n in (8, 16, 32))
            for numbers in ({"len_q": 300}, {"pass": 1}, {"pages": 1, "len_q": 300, "b": 9}, *few):
                planned.add(plan(capability=capability, d=d, dtype=dtype, **numbers).split()[0])
    planned = {name for name in planned if "_sm80_" in name}
    planned |= {name.replace("attn_bwd_", "attn_bwd_dq_") for name in planned if "_bwd_" in name}
    assert planned == {name for name in taken if not re.search("score|dropout", name)}
    if f"sm_{capability}" in ARCHS:
        chosen = {name for name, *_ in choose(flash_attn_2_cuda, [f"sm_{capability}"], True)}
        assert taken == {name for name in chosen if "_sm80_" in name}


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"len_q": 1, "len_kv": 1, "b": 1, "stride": 4}, "fwd_short"),
        ({"len_q": 1, "len_kv": 1, "stride": 4}, "fwd_any"),  # the stride between the rows of two sequences
        ({"h": 1, "h_kv": 1, "stride_h": 4}, "fwd_sm90"),
        ({"stride_h": 4, **TINY}, "fwd_any"),
        ({"b": 1, "stride_b": 4}, "fwd_sm90"),
        ({"packed": 1, "stride_b": 4}, "fwd_sm90"),
        ({"stride_b": 4, **TINY}, "fwd_any"),
        ({"len_q": 1, "h": 1, "h_kv": 1, "stride_h": 4}, "decode_sm90"),
        ({"len_q": 1, "stride_h": 4}, "fwd_any"),
        ({"len_q": 1, "b": 1, "stride_b": 4}, "decode_sm90"),
        ({"len_q": 1, "stride_b": 4}, "fwd_any"),
    ],
    ids=str,
)
def test_the_stride_of_one_element_is_never_taken(plan, numbers, kernel):
    assert plan(**numbers).startswith(f"attn_{kernel}_")


@pytest.mark.parametrize(
    ("d", "longest", "mean", "kernel"),
    [
        (64, 128, 128, "d64_q128kv64x2"),
        (64, 128, 64, "d64_q128kv64x2"),
        (64, 64, 33, "d64_q64kv64"),
        (64, 512, 256, "d64_q128kv64x2"),
        (64, 512, 512, "d64_q192kv128"),
        (64, 1024, 512, "d64_q192kv128"),
        (96, 128, 64, "d128_q64kv64"),
        (128, 128, 64, "d128_q64kv64"),
        (128, 128, 128, "d128_q128kv64"),
        (128, 256, 128, "d128_q64kv64"),
        (128, 512, 256, "d128_q128kv128"),
        (256, 128, 64, "d256_q128kv64"),
        (64, 2048, 511, "d64_q192kv128"),  # a few long ones have most of the work
        (64, 128, 20, "d64_q128kv64x2"),
        (128, 32768, 129, "d128_q128kv128"),
        (128, 2048, 16, "d128_q128kv128"),
    ],
    ids=str,
)
def test_packed_sequences_count_by_their_mean(plan, d, longest, mean, kernel):
    """They take what was faster on an H200 (csrc/cuda/measurements/forward.md, Two CTAs of an SM)."""
    numbers = {"d": d, "b": 256, "h": 16, "h_kv": 16, "len_q": longest, "len_kv": longest, "packed": 1}
    for right, mask in ((-1, ""), (0, "_causal")):
        name = plan(**numbers, mean_q=mean, mean_kv=mean, right=right, sms=132).split()[0]
        assert name == f"attn_fwd_sm90_bf16_{kernel}{mask}_varlen"


@pytest.mark.parametrize(
    ("b", "len_q", "len_kv", "h", "h_kv", "kernel"),
    [
        (1, 2048, 2048, 8, 8, "d64_q192kv128"),
        (8, 512, 8192, 4, 1, "d64_q256kv64_cache"),
        (4, 128, 16384, 32, 32, "d64_q192kv128"),
        (2, 200, 4096, 32, 32, "d64_q192kv128"),
    ],
)
def test_a_cta_alone_on_its_multiprocessor_hides_no_waits(plan, b, len_q, len_kv, h, h_kv, kernel):
    numbers = {"d": 64, "b": b, "len_q": len_q, "len_kv": len_kv, "h": h, "h_kv": h_kv, "sms": 132}
    assert plan(**numbers).split()[0] == f"attn_fwd_sm90_bf16_{kernel}"


@pytest.mark.parametrize(
    ("numbers", "group_heads", "is_dynamic", "ctas"),
    [
        ({}, 8, 0, 128),  # all heads; 16 tiles of each
        ({"b": 32}, 64, 1, 132),  # 32 key heads of 512 KiB are 16 MiB
        ({"b": 32, "h_kv": 4}, 32, 1, 132),
        ({"b": 1, "h": 16, "h_kv": 16, "len_q": 8192, "len_kv": 8192}, 8, 1, 132),  # of 4 MiB, fewer than 16: 32 MiB
        ({"b": 1, "h": 16, "h_kv": 16, "len_q": 131072, "len_kv": 131072}, 1, 1, 132),
        ({"b": 128, "len_q": 100, "len_kv": 256}, 256, 0, 132),  # one short tile each
        ({"b": 512, "len_q": 100, "len_kv": 256}, 256, 1, 132),  # so many that CTAs drift apart
        ({"b": 128, "len_q": 100, "len_kv": 257}, 128, 1, 132),
        ({"b": 128, "len_q": 100, "len_kv": 256, "packed": 1}, 256, 1, 132),
        ({"b": 0}, 0, 0, 0),
        ({"sms": 16}, 8, 1, 16),
        ({"b": 32, "margin": 12}, 64, 1, 120),  # sm_margin
        ({"b": 32, "margin": 500}, 64, 1, 1),
        ({"b": 32, "dtype": 4, "margin": 12}, 128, 1, 120),  # half of the bytes
    ],
    ids=str,
)
def test_order_of_the_forward(plan, numbers, group_heads, is_dynamic, ctas):
    said = plan(**{"sms": 132, "launch": 1} | numbers).split(" | ")[0]
    assert said == f"{group_heads} {is_dynamic} {ctas}"


@pytest.mark.parametrize(
    ("numbers", "kernel", "words"),
    [
        (
            {"capability": 80},
            "attn_fwd_sm80_bf16_d128_q128kv32s2",
            "it is for compute capability 9.0 (Hopper), and this GPU",
        ),
        (
            {"capability": 120, "d": 64},
            "attn_fwd_sm80_bf16_d64_q128kv64s2r",
            "it is for compute capability 9.0 (Hopper)",
        ),
        ({"dtype": 2}, "attn_fwd_any_fp32_d128_q128kv32", "it takes fp16 and bf16"),
        ({"dtype": 2, "d": 129}, "attn_fwd_any_fp32_d256_q64kv16", "it takes fp16 and bf16"),
        ({"pages": 1, "dtype": 2}, "attn_fwd_any_fp32_d128_q128kv32", "it takes fp16 and bf16"),
        (
            {"new": 3, "d": 12},
            "attn_fwd_any_bf16_d48_q128kv64",
            "it wants the cache to start at a multiple of 16 bytes",
        ),
        (
            {"pages": 8, "page": 12, "k_batch": 2**35, "splits": 1},
            "attn_fwd_any_bf16_d128_q128kv64",
            "it wants pages of a multiple of 8 keys, or pages within 64 GiB",
        ),
        (
            {"pages": 8, "page": 2**20 + 1, "k_batch": 2**35},  # two sequences of two pages each
            "attn_fwd_any_bf16_d128_q128kv64",
            "it wants pages of a multiple of 8 keys, or pages within 64 GiB",
        ),
        ({"pages": 8, "leftpad": 1}, "attn_fwd_sm80_bf16_d128_q128kv32s2_cache", "no left padding beside a block"),
        ({"packed_k": 1, "used": 1}, "attn_fwd_sm80_bf16_d128_q128kv32s2_cache", "no lengths beside dense queries"),
        (
            {"packed_k": 1, "leftpad": 1},
            "attn_fwd_sm80_bf16_d128_q128kv32s2_cache",
            "of packed keys it takes no left padding",
        ),
        ({"pages": 8, "page": 2**30}, "attn_fwd_any_bf16_d128_q128kv64", "it counts keys of a KV cache up to 2^30"),
        ({"pages": 8, "k_batch": 4}, "attn_fwd_any_bf16_d128_q128kv64", "strides that are multiples of 8 elements"),
        ({"d": 12, **SHORT}, "attn_fwd_any_bf16_d48_q128kv64", "a head dimension that is a multiple of 8"),
        ({"d": 255, **TINY}, "attn_fwd_any_bf16_d256_q64kv64", "a head dimension that is a multiple of 8"),
        ({"stride": 4, **TINY}, "attn_fwd_any_bf16_d128_q128kv64", "with strides that are multiples of 8 elements"),
        ({"offset": 2, **FEW}, "attn_fwd_any_bf16_d128_q128kv64", "to start at multiples of 16 bytes"),
    ],
    ids=str,
)
def test_what_hopper_kernels_do_not_serve(plan, numbers, kernel, words):
    first, *ruled_out = plan(**numbers).splitlines()
    assert first.split()[0] == kernel
    assert re.search(rf"_q{first.split()[1]}kv{first.split()[2]}", kernel)
    assert any(line.startswith("attn_fwd_sm90: ") and words in line for line in ruled_out)


@pytest.mark.parametrize("page", (1, 7, 12, 2**18 - 1))
def test_copies_take_the_place_of_pages_that_are_far_apart(plan, page):
    """Two sequences of two pages, two key heads. The copies are k, v and the lengths. A GiB holds the largest. Offsets
    of single keys have 32 bits."""
    kernel, _, _, workspace, *_ = plan(pages=8, page=page, k_batch=2**35).split()
    assert kernel.startswith("attn_fwd_sm90_bf16_d128_") and kernel.endswith("_cache")
    assert int(workspace) == 2 * -(-(2 * 2 * page * 2 * 128 * 2) // 256) * 256 + 256


@pytest.mark.parametrize("page", (1, 2, 4, 7, 12, 100))
@pytest.mark.parametrize("d", (64, 128, 256))
def test_few_queries_read_single_keys_and_many_read_copies(plan, d, page):
    """With num_splits = 1 the choice must not depend on the batch."""
    sizes = {"h": 32, "h_kv": 8, "used": 1, "right": 0, "sms": 132, "pages": 2 * 8000 // page, "page": page}
    sizes |= {"cols": 8000 // page, "k_batch": 8 * d * page, "v_batch": 8 * d * page, "d": d}
    for len_q, splits, has_copies in ((64, 0, False), (2048, 0, True), (64, 1, False), (2048, 1, False)):
        kernel, _, _, workspace, *_ = plan(len_q=len_q, splits=splits, **sizes).split()
        assert kernel.startswith("attn_fwd_sm90_") and kernel.endswith("_cache" if has_copies else "_cache_single")
        assert (int(workspace) > 2 * 2 * 7900 * 8 * d * 2) == has_copies


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, "_cache_whole"),
        ({"page": 8}, "_cache_whole"),
        ({"page": 24}, "_cache_whole"),
        ({"page": 48}, "_cache_whole"),
        ({"page": 32}, "_cache"),
        ({"page": 256}, "_cache"),
        ({"page": 12}, "_cache"),  # which reads copies
        ({"d": 256}, "_cache_whole"),
        ({"d": 192}, "_cache_whole"),
        ({"d": 192, "d_v": 128}, "_cache_whole"),
        ({"d": 64, "d_v": 128}, "_cache_whole"),
        ({"d": 64}, "_cache"),  # one chunk of columns
        ({"d": 96}, "_cache"),
        ({"d": 120}, "_cache"),
        ({"d": 128, "d_v": 64}, "_cache"),
        ({"between": 16}, "_cache_whole"),  # pages of K and V in turns
        ({"between": 1}, "_cache"),
        ({"between": -8}, "_cache"),
        ({"of_v": 1}, "_cache"),
        ({"of_v": 8}, "_cache_whole"),
        ({"page": 8, "pages": 46339, "between": 8 * 46338}, "_cache_whole"),  # fewer groups than 2^31
        ({"page": 8, "pages": 46340, "between": 8 * 46339}, "_cache"),
        ({"pages": 1, "between": 1}, "_cache_whole"),
        ({"pages": 1, "page": 8192, "between": 1}, "_cache"),
        ({"d": 192, "d_v": 128, "dropout": 0.1}, "_cache_dropout"),  # by tiles of 192 columns of V
        ({"dropout": 0.1}, "_cache_whole_dropout"),
    ],
)
def test_short_pages_are_loaded_with_whole_keys(plan, changes, ends):
    x = {"d": 128, "page": 16, "between": 0, "of_v": 0, "dropout": 0} | changes
    d, page = x["d"], x["page"]
    pages = x.get("pages", 16384 // page)
    far = 4 * d * (page + x["between"])  # from a page to the next one; rows are 4 d apart
    sizes = {"h": 32, "h_kv": 8, "used": 1, "right": 0, "sms": 132, "pages": pages, "cols": 8192 // page}
    shape = {"len_q": 2048, "page": page, "d": d, "d_v": x.get("d_v", d), "dropout": x["dropout"]}
    kernel = plan(**sizes, **shape, k_batch=far, v_batch=far + 4 * d * x["of_v"]).split()[0]
    assert re.fullmatch(rf"attn_fwd_sm90_bf16_\w*_causal{ends}", kernel)


@pytest.mark.parametrize("page", (1, 16))
def test_the_decode_kernel_takes_what_the_forward_cannot_count(plan, page):
    """The forward counts the keys of all sequences in 32 bits. The decode kernel does not leave it more."""
    few = {"pages": 1000, "page": page, "h": 20, "len_q": 31, "splits": 1, "sms": 132, "used": 1}
    for b, kernel in ((100, "attn_fwd_sm90_"), (120, "attn_decode_sm90_")):
        cols = 20_000_000 // page
        assert plan(**few, b=b, cols=cols, len_kv=cols * page).startswith(kernel)


@pytest.mark.parametrize("page", (12, 16))
@pytest.mark.parametrize("numbers", ({"rows": 2**31}, {"new": 2**30 + 1}), ids=str)
def test_a_cache_is_counted_in_32_bits_with_copies_too(plan, page, numbers):
    said = plan(pages=8, page=page, **numbers)
    assert "no kernel takes this call" in said and "it counts rows and pages of a KV cache up to 2^30" in said


def test_estimates_for_expanded_caches_do_not_overflow(plan):
    """The elements of all keys, and the pairs of queries and keys, are more than 2^63."""
    said = plan(pages=8, page=2**26 - 2**14, b=2**20, h=2**10, h_kv=2**10, len_q=33)
    assert said.startswith(("attn_decode_sm90", "attn_fwd_sm90"))


def test_every_row_and_every_kernel_that_is_ruled_out_has_a_reason(plan):
    """In rows for 248 columns of Q, the last box of V begins behind 40 columns. Only the last planner has no boxes."""
    first, *ruled_out = plan(d=248, d_v=40, packed=1).splitlines()
    assert first.startswith("attn_fwd_any_")
    tiles = (CSRC / "cuda" / "tiles.def").read_text()
    num_rows = len(re.findall(r"^FA_FWD_TILE_SM90\(", tiles, re.MULTILINE))
    kernels = [line.split(":")[0] for line in ruled_out]
    assert len({name for name in kernels if re.match(r"attn_fwd_sm90_d\d", name)}) == num_rows
    planners = [name for name in kernels if not re.search(r"_d\d", name)]
    assert planners == [
        "attn_decode_sm90", "attn_fwd_short", "attn_fwd_sm90", "attn_fwd_fp8_sm90", "attn_decode_sm80", "attn_fwd_sm80",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"chunk": 7, "stride": 4, **SHORT}, "attn_fwd_any_bf16_d128_q128kv64_of3"),
        ({"used_q": 1, "dtype": 2}, "attn_fwd_any_fp32_d128_q128kv32_of3"),
        ({"packed_q": 1, "stride": 4, **SHORT}, "attn_fwd_any_bf16_d128_q128kv64_of3"),
        ({"empty": "-inf"}, "attn_fwd_sm80_bf16_d128_q128kv32s2"),
        ({"empty": "-inf", "dtype": 2}, "attn_fwd_any_fp32_d128_q128kv32"),
        ({"d_v": 64}, "attn_fwd_any_bf16_d128_q128kv64_of3"),
        ({"d": 64, "d_v": 192}, "attn_fwd_any_bf16_d192_q64kv64_of3"),
        ({"d": 64, "d_v": 512}, "attn_fwd_any_bf16_d256_q64kv64_of3"),
        ({"d": 64, "d_v": 64, "qv": 1}, "attn_fwd_any_bf16_d256_q64kv64_of3"),
        ({"dtype": 4, "d": 64}, "attn_fwd_any_e4m3_d64_q128kv64_of3"),
        ({"pass": 1, "d": 64, "d_v": 512}, "attn_bwd_any_bf16_dq_d256_q64kv32_of3"),
        ({"pass": 1, "d": 192, "d_v": 128}, "attn_bwd_any_bf16_dq_d192_q64kv32_of3"),
        ({"pass": 1, "empty": "-inf"}, "attn_bwd_sm80_bf16_d128_q64kv128w8g2"),
    ],
    ids=str,
)
def test_generic_kernels_take_what_flash_attn_3_adds(plan, numbers, kernel):
    assert plan(capability=80, **numbers).split()[0] == kernel


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"chunk": 7}, "attn_fwd_sm90_bf16_d128_q128kv128_local"),
        ({"chunk": 7, "right": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_local"),
        ({"used_q": 1, "packed": 1}, "attn_fwd_sm90_bf16_d128_q128kv128_varlen"),
        ({"used_q": 1}, "attn_fwd_sm80_bf16_d128_q128kv32s2_cache"),  # dense
        ({"empty": "-inf"}, "attn_fwd_sm90_bf16_d128_q128kv128"),
        ({"empty": "-inf", "len_q": 1}, "attn_decode_sm90_bf16_d128_q16"),
        ({"chunk": 7, "len_q": 1}, "attn_decode_sm90_bf16_d128_q16"),
        ({"d": 192, "d_v": 128}, "attn_fwd_sm90_bf16_d192v128_q128kv96"),
        ({"d": 192, "d_v": 64}, "attn_fwd_sm90_bf16_d192v128_q128kv96"),
        ({"d": 192, "d_v": 64, "packed": 1}, "attn_fwd_any_bf16_d192_q64kv64_of3"),  # no box of columns 64 to 127
        ({"d": 192, "d_v": 72, "packed": 1}, "attn_fwd_sm90_bf16_d192v128_q128kv96_varlen"),
        ({"d": 64, "d_v": 128}, "attn_fwd_sm90_bf16_d64v128_q128kv128"),
        ({"d": 64, "d_v": 200, "packed": 1}, "attn_fwd_sm90_bf16_d64v256_q128kv64_varlen"),
        ({"d": 64, "d_v": 160}, "attn_fwd_sm90_bf16_d64v256_q128kv64"),
        ({"d": 64, "d_v": 512}, "attn_fwd_any_bf16_d256_q64kv64_of3"),
        ({"d": 128, "d_v": 128}, "attn_fwd_sm90_bf16_d128_q128kv128"),
        ({"pass": 1, "d": 192, "d_v": 128}, "attn_bwd_wide_sm90_bf16_d192v128_q64kv128"),
        ({"pass": 1, "d": 136, "d_v": 128}, "attn_bwd_wide_sm90_bf16_d160_q64kv128"),
        ({"pass": 1, "d": 192, "d_v": 128, "packed": 1}, "attn_bwd_wide_sm90_bf16_d192v128_q64kv128_varlen"),
        ({"pass": 1, "d": 64, "d_v": 128}, "attn_bwd_sm90_bf16_d128_q64kv128"),
        ({"pass": 1, "d": 64, "d_v": 128, "packed": 1}, "attn_bwd_any_bf16_dq_d128_q64kv64_of3"),
        ({"pass": 1, "chunk": 7}, "attn_bwd_any_bf16_dq_d128_q64kv64_of3"),
    ],
    ids=str,
)
def test_hopper_kernels_take_what_flash_attn_3_adds(plan, numbers, kernel):
    assert plan(capability=90, **numbers).split()[0] == kernel


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"dtype": 4, "qv": 1}, "attn_fwd_any: it takes no qv of float8_e4m3fn"),
        ({"qv": 1, "probs": 1}, "attn_fwd_any: its s_dmask takes no qv and no float8_e4m3fn"),
        ({"dtype": 4, "probs": 1}, "attn_fwd_any: its s_dmask takes no qv and no float8_e4m3fn"),
        ({"pass": 1, "qv": 1}, "attn_bwd_any: it takes no qv"),
        ({"pass": 1, "dtype": 4}, "attn_bwd_any: it takes no float8_e4m3fn"),
    ],
    ids=str,
)
def test_generic_kernels_name_what_they_do_not_take(plan, numbers, words):
    assert words in plan(capability=80, **numbers)


@pytest.mark.parametrize("more", ({"len_q": 1}, {"dropout": 0.5}, {"capability": 90}), ids=str)
def test_no_kernel_takes_rotary_tables_that_it_cannot_count(plan, more):
    numbers = {"capability": 80, "new": 3, "rotary": 64, **more}
    assert plan(**numbers, rotary_rows=2**31 - 1).startswith("attn_")
    assert plan(**numbers, rotary_rows=2**31).startswith("flash_attn: no kernel takes this call")


@pytest.mark.parametrize("more", ({}, {"pass": 1}, {"len_q": 1}, {"packed": 1}), ids=str)
def test_queries_without_heads_go_to_the_generic_kernels(plan, more):
    first, *ruled_out = plan(h=0, **more).splitlines()
    assert "_any_" in first.split()[0] and any("it wants a query head" in line for line in ruled_out)


E4M3 = 4


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"d": 16}, "attn_fwd_fp8_sm90_e4m3_d64_q192kv128"),
        ({"d": 64, "packed": 1, "right": 0}, "attn_fwd_fp8_sm90_e4m3_d64_q192kv128_causal_varlen"),
        ({"d": 80}, "attn_fwd_fp8_sm90_e4m3_d128_q192kv96"),
        ({"d": 128, "left": 5, "softcap": 9}, "attn_fwd_fp8_sm90_e4m3_d128_q192kv96_local_score"),
        ({"d": 144}, "attn_fwd_fp8_sm90_e4m3_d192_q128kv128"),
        ({"d": 256, "right": 0}, "attn_fwd_fp8_sm90_e4m3_d256_q128kv128_causal"),
    ],
    ids=str,
)
def test_eight_bits_have_kernels_of_their_own(plan, numbers, kernel):
    assert plan(dtype=E4M3, **numbers).split()[0] == kernel


@pytest.mark.parametrize(
    ("numbers", "rows", "columns"),
    [
        ({"d": 128, "len_kv": 65536}, 0, 0),
        ({"d": 144, "len_kv": 4096}, 0, 0),
        ({"d": 144, "len_kv": 4097}, 128, 192),
        ({"d": 256, "len_q": 1024, "len_kv": 65536}, 128, 256),
        ({"d": 256, "packed": 1, "len_kv": 65536}, 128, 256),
    ],
    ids=str,
)
def test_sums_of_eight_bits_have_rows_for_each_cta(plan, numbers, rows, columns):
    """Up to 128 columns the sums lie in shared memory. Shorter sequences than a flush need none."""
    workspace = int(plan(dtype=E4M3, sms=132, **numbers).split()[3])
    ctas = int(plan(dtype=E4M3, launch=1, sms=132, **numbers).split()[2])
    assert ctas > 0 and workspace == ctas * rows * columns * 4


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"d": 72}, "it wants a head dimension that is a multiple of 16"),
        ({"dropout": 0.5}, "it has no dropout"),
        ({"softcap": 1001}, "its scores lose their digits with a softcap above 1000"),
        ({"stride": 1000}, "strides that are multiples of 16 elements"),
        ({"capability": 80}, "it is for compute capability 9.0"),
    ],
    ids=str,
)
def test_eight_bits_are_refused_by_name(plan, numbers, reason):
    text = plan(dtype=E4M3, **numbers)
    assert "attn_fwd_fp8_sm90: " in text and reason in text


@pytest.mark.parametrize("dtype", (1, 4), ids=("bf16", "e4m3"))
@pytest.mark.parametrize("packed", ({}, {"packed": 1}), ids=("dense", "packed"))
def test_more_rows_than_32_bits_count(plan, dtype, packed):
    """The end of a window, i + len_kv - len_q + right + 1, must be an int."""
    most = 1 << 30
    assert "_sm90_" in plan(dtype=dtype, b=1, len_kv=most, right=5, **packed).split()[0]
    text = plan(dtype=dtype, b=1, len_kv=most + 1, right=5, **packed)
    assert "the problem has more rows than 2^30" in text or "up to 2^30" in text
    assert "_sm90_" not in text.split()[0]


@pytest.mark.parametrize("backward", (0, 1))
def test_kernels_are_named_in_full(plan, backward):
    """Names are the names in the list of all kernels. Other tests compare that list with tiles.def."""
    names = {name for name, *_ in flash_attn_2_cuda.cuda_kernels()}
    options = [{}, {"right": 0}, {"left": 5}], [{}, {"packed": 1}], [{}, {"softcap": 1}], [{}, {"dropout": 0.1}]
    if not backward:
        options += ([{}, {"pages": 8}, {"pages": 8, "page": 12, "splits": 1}],)
    found = set()
    for d in (64, 96, 128, 192, 256):
        for chosen in product(*options):
            numbers = {key: value for option in chosen for key, value in option.items()}
            found.add(plan(d=d, dtype=0, **{"pass": backward}, **numbers).split()[0])
    assert found <= names and max(map(len, found)) == max(len(name) for name in names if ("bwd" in name) == backward)


def test_names_have_room_for_the_hash_of_a_text():
    """A function of the user will become a part of a kernel. Its hash, "_" and 16 digits, will become a part of the
    kernel's name."""
    room = int(re.search(r"FA_KERNEL_NAME_BYTES\s+(\d+)", (CSRC / "flash_attn.h").read_text())[1])
    assert max(len(name) for name, *_ in flash_attn_2_cuda.cuda_kernels()) + 17 < room


def test_the_environment_may_leave_only_some_kernels(plan, monkeypatch):
    monkeypatch.setenv("KERNELS", "any")
    first, *ruled_out = plan(d=128).splitlines()
    assert first.startswith("attn_fwd_any_")
    assert "attn_fwd_sm90: FLASH_ATTN_CUDA_KERNEL rules it out" in ruled_out
    monkeypatch.setenv("KERNELS", "none")
    assert plan(d=128) == (
        "flash_attn: no kernel takes this call. attn_decode_sm90: FLASH_ATTN_CUDA_KERNEL rules it out; "
        "attn_fwd_short: FLASH_ATTN_CUDA_KERNEL rules it out; attn_fwd_sm90: FLASH_ATTN_CUDA_KERNEL rules it out; "
        "attn_fwd_fp8_sm90: FLASH_ATTN_CUDA_KERNEL rules it out; "
        "attn_decode_sm80: FLASH_ATTN_CUDA_KERNEL rules it out; attn_fwd_sm80: FLASH_ATTN_CUDA_KERNEL rules it out; "
        "attn_fwd_any: FLASH_ATTN_CUDA_KERNEL rules it out\n"
    )
    monkeypatch.setenv("KERNELS", "sm90")
    assert (
        "; attn_fwd_sm90: it takes fp16 and bf16; attn_fwd_fp8_sm90: it takes float8_e4m3fn; attn_decode_sm80: FLASH"
    ) in plan(d=128, dtype=2)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"capability": 75}, "this GPU has compute capability 7.5, and the kernels begin at 8.0; use torch.nn.func"),
        ({"len_q": 2**40}, "it counts rows up to 2^30"),
    ],
    ids=str,
)
def test_refusal_names_what_is_missing(plan, numbers, words):
    assert plan(**numbers).startswith("flash_attn: ")
    assert words in plan(**numbers)
