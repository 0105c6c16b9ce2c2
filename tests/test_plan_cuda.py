"""The choice of a CUDA kernel, without a GPU. A C program links csrc/plan and prints the choice."""

import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import flash_attn_2_cuda
import pytest

from flash_attn._variants import ARCHS, choose

CSRC = Path(__file__).resolve().parents[1] / "csrc"
GCC = shutil.which("gcc")

pytestmark = pytest.mark.skipif(GCC is None, reason="gcc is not installed")

# Each argument sets one number of a problem that otherwise fits: name=value.
PROGRAM = r"""
#include "flex/flex.h"
#include "flex/source_words.h"
#include "plan/gpu.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fa_status fa_fail(fa_error *err, fa_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(err->text, sizeof err->text, format, values);
    va_end(values);
    return status;
}
size_t fa_flex_values_bytes(const fa_flex_program *score, const fa_flex_program *mask,
                            const fa_flex_program *derivative) {
    return (void)score, (void)mask, (void)derivative, 8; /* no functions */
}
size_t fa_dtype_bytes(fa_dtype dtype) { return dtype == FA_F32 ? 4 : dtype == FA_E4M3 ? 1 : 2; }

int main(int argc, char **argv) {
    static char memory[64];
    static const int32_t offsets[3];
    static const float slopes[1];
    int64_t d = 128, d_v = 0, stride = 0, offset = 0, stride_h = 0, stride_b = 0, k_batch = 0, v_batch = 0;
    fa_flex flex = {.mask_b = 1, .block_q = 128, .block_kv = 128}; /* masks: [1, masks, rows, columns] */
    bool prints_order = false, prints_launch = false, prints_follows = false;
    fa_machine machine = {.gpu_capability = 90, .gpu_kernels = getenv("KERNELS")};
    fa_problem p = {.device = FA_CUDA, .dtype = FA_BF16, .b = 2, .h = 4, .h_kv = 2, .len_q = 1024, .len_kv = 1024,
                    .scale = 0.1, .window_left = -1, .window_right = -1};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        double x = atof(strchr(name, '=') + 1);
#define SET(key, place) if (strncmp(name, key "=", sizeof key) == 0) place = x;
        SET("capability", machine.gpu_capability) SET("d", d) SET("d_v", d_v) SET("len_q", p.len_q)
        SET("softcap", p.softcap)
        SET("left", p.window_left) SET("right", p.window_right) SET("scale", p.scale) SET("dropout", p.dropout_p)
        SET("sms", machine.gpu_sms) SET("stride", stride) SET("offset", offset)
        SET("stride_h", stride_h) SET("stride_b", stride_b) SET("k_batch", k_batch) SET("v_batch", v_batch)
        SET("new", p.len_new) SET("page", p.page_size)
        SET("rotary", p.rotary_dim) SET("b", p.b) SET("h", p.h) SET("h_kv", p.h_kv) SET("len_kv", p.len_kv)
        SET("splits", p.num_splits) SET("margin", p.sm_margin) SET("chunk", p.attention_chunk) SET("empty", p.empty_lse)
        if (strncmp(name, "used_q=", 7) == 0) p.seqused_q = offsets;
        if (strncmp(name, "packed_q=", 9) == 0) p.cu_seqlens_q = offsets;
        if (strncmp(name, "packed_k=", 9) == 0) p.cu_seqlens_k = offsets;
        if (strncmp(name, "qv=", 3) == 0) p.qv.data = memory;
        if (strncmp(name, "probs=", 6) == 0) p.s_dmask = memory;
        if (strncmp(name, "pass=", 5) == 0) p.pass = (fa_pass)x;
        if (strncmp(name, "dtype=", 6) == 0) p.dtype = (fa_dtype)x;
        if (strncmp(name, "packed=", 7) == 0) p.cu_seqlens_q = p.cu_seqlens_k = offsets;
        if (strncmp(name, "ordered=", 8) == 0) p.deterministic = true;
        if (strncmp(name, "order=", 6) == 0) prints_order = true;
        if (strncmp(name, "launch=", 7) == 0) prints_launch = true;
        if (strncmp(name, "follows=", 8) == 0) prints_follows = true;
        if (strncmp(name, "alibi=", 6) == 0) p.alibi_slopes = slopes;
        if (strncmp(name, "masks=", 6) == 0) flex.mask_h = x, p.flex = &flex;
        if (strncmp(name, "used=", 5) == 0) p.seqused_k = offsets;
        if (strncmp(name, "leftpad=", 8) == 0) p.leftpad_k = offsets;
        if (strncmp(name, "rows=", 5) == 0) p.cache_batch_idx = offsets, p.cache_rows = x;
        if (strncmp(name, "pages=", 6) == 0)
            p.paged = true, p.block_table = offsets, p.num_pages = x, p.page_size = 64, p.block_table_cols = 2;
    }
    p.d = d, p.d_v = d_v ? d_v : d;
    p.total_q = p.b * p.len_q, p.total_kv = p.b * p.len_kv;
    flex.rows = (p.len_q + 127) / 128, flex.columns = (p.len_kv + 127) / 128;
    void *data = memory + (16 - (uintptr_t)memory % 16) + offset;
    fa_view view = {data, 1024 * 4 * d, 4 * d + stride, d};
    if (stride_h) view.stride_h = stride_h;
    if (stride_b) view.stride_b = stride_b;
    p.q = p.k = p.v = view;
    if (k_batch) p.k.stride_b = k_batch;
    if (v_batch) p.v.stride_b = v_batch;
    if (p.rotary_dim) p.rotary_cos = p.rotary_sin = memory;
    if (p.len_new) p.k_new = p.v_new = view;
    fa_plan plan;
    fa_error err = {""};
    if (fa_plan_cuda(&p, &machine, &plan, &err) != FA_OK) return puts(err.text), 0;
    if (prints_launch)
        return printf("%d %d %d | %d %d | %d %d %d | %d", plan.gpu.group_heads, plan.gpu.is_dynamic, plan.gpu.num_ctas,
                      plan.gpu.decode.lanes, plan.gpu.decode.groups, plan.gpu.decode_low.row >= 0,
                      plan.gpu.decode_low.lanes, plan.gpu.decode_low.groups, plan.gpu.tile_heads), 0;
    if (prints_follows) return printf("%d", plan.gpu.follows_rows), 0;
    if (prints_order) return printf("%d %d %d", plan.gpu.any_order, plan.gpu.converts, plan.gpu.group_heads), 0;
    printf("%s %d %d %zu %d %d", plan.kernel, plan.block_q, plan.block_kv, plan.workspace_bytes, plan.num_splits,
           plan.gpu.cluster);
    for (int i = 0; i < plan.num_ruled_out; i++) printf("\n%s: %s", plan.ruled_out[i].kernel, plan.ruled_out[i].reason);
    return 0;
}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "main.c").write_text(PROGRAM)
    files = [*CSRC.glob("plan/gpu*.c"), CSRC / "plan/kernel_table.c", CSRC / "flex/scatters.c"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    command = [GCC, "-std=c11", *sanitizers, "-I", CSRC, folder / "main.c", *files]
    subprocess.run([*command, "-o", folder / "plan"], check=True)

    def plan(**numbers):
        words = [f"{name}={value}" for name, value in numbers.items()]
        return subprocess.run([folder / "plan", *words], check=True, capture_output=True, text=True).stdout

    return plan


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"d": 8}, "attn_fwd_sm90_bf16_d64_q256kv64"),
        ({"d": 64, "len_q": 192}, "attn_fwd_sm90_bf16_d64_q192kv128"),
        ({"d": 64, "len_q": 1152}, "attn_fwd_sm90_bf16_d64_q192kv128"),
        ({"d": 64, "len_q": 100, "len_kv": 100}, "attn_fwd_sm90_bf16_d64_q128kv64"),
        ({"d": 64, "len_q": 100, "len_kv": 257}, "attn_fwd_sm90_bf16_d64_q192kv128"),
        ({"d": 64, "len_q": 192, "len_kv": 192}, "attn_fwd_sm90_bf16_d64_q256kv64"),
        ({"d": 64, "len_q": 17, "len_kv": 17}, "attn_fwd_sm90_bf16_d64_q64kv64"),
        ({"d": 64, "len_q": 64, "len_kv": 64, "dropout": 0.5}, "attn_fwd_sm90_bf16_d64_q64kv64_dropout"),
        ({"d": 64, "len_q": 65, "len_kv": 65}, "attn_fwd_sm90_bf16_d64_q128kv64"),
        ({"d": 64, "len_q": 17, "len_kv": 65}, "attn_fwd_sm90_bf16_d64_q64kv64"),
        ({"d": 64, "len_kv": 64}, "attn_fwd_sm90_bf16_d64_q256kv64"),
        ({"d": 64, "right": 0, "len_q": 4096}, "attn_fwd_sm90_bf16_d64_q256kv64_causal"),
        ({"d": 64, "right": 0, "len_q": 16384}, "attn_fwd_sm90_bf16_d64_q192kv128_causal"),
        ({"d": 64, "packed": 1}, "attn_fwd_sm90_bf16_d64_q192kv128_varlen"),
        ({"d": 64, "dropout": 0.5}, "attn_fwd_sm90_bf16_d64_q128kv128_dropout"),
        ({"d": 256, "dropout": 0.5, "right": 0}, "attn_fwd_sm90_bf16_d256_q128kv64_causal_dropout"),
        ({"d": 72, "dtype": 0}, "attn_fwd_sm90_fp16_d128_q128kv128"),
        ({"d": 80, "dtype": 0}, "attn_fwd_sm90_fp16_d96_q128kv128"),
        ({"d": 128}, "attn_fwd_sm90_bf16_d128_q128kv128"),
        ({"d": 128, "packed": 1, "right": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_causal_varlen"),
        ({"d": 128, "left": 7}, "attn_fwd_sm90_bf16_d128_q128kv128_local"),
        ({"d": 128, "left": 7, "right": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_local"),
        ({"d": 128, "softcap": 5}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "alibi": 1}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "scale": 0}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "scale": -1}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),
        ({"d": 128, "scale": 1e-46}, "attn_fwd_sm90_bf16_d128_q128kv128_score"),  # 0 in fp32
        ({"d": 160}, "attn_fwd_sm90_bf16_d192_q128kv96"),
        ({"d": 256}, "attn_fwd_sm90_bf16_d256_q128kv64"),
        ({"d": 256, "len_q": 17, "len_kv": 17}, "attn_fwd_sm90_bf16_d256_q128kv64"),
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
    assert all(re.fullmatch(r"attn_fwd_sm90_d\d+(v\d+)?_q\d+kv\d+: .+", line) for line in ruled_out)


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"pass": 1, "d": 40}, "attn_bwd_sm90_bf16_d64_q128kv128"),
        ({"pass": 1, "d": 72, "right": 0, "packed": 1}, "attn_bwd_sm90_bf16_d96_q64kv128_causal_varlen"),
        ({"pass": 1, "d": 104}, "attn_bwd_sm90_bf16_d128_q64kv128"),
        ({"pass": 1, "d": 128, "alibi": 1}, "attn_bwd_sm90_bf16_d128_q64kv128_alibi"),  # alone, in the exponent
        (
            {"pass": 1, "d": 64, "alibi": 1, "right": 0, "packed": 1},
            "attn_bwd_sm90_bf16_d64_q128kv128_causal_varlen_alibi",
        ),
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
        ({"pass": 1, "d": 100}, "a head dimension that is a multiple of 8"),
        ({"pass": 1, "stride": 4}, "with strides that are multiples of 8 elements"),
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


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (80, ("d64_q64kv256w8", "d96_q64kv128w8g2", "d128_q64kv128w8g2", "d192_q64kv64w8g2", "d256_q64kv64w8g2")),
        (86, ("d64_q64kv128w8", "d128_q32kv128w8", "d128_q32kv128w8", None, None)),
        (87, ("d64_q64kv256w8", "d96_q64kv128w8g2", "d128_q64kv128w8g2", "d192_q64kv64w8g2", "d256_q64kv64w8g2")),
        (89, ("d64_q64kv128w8", "d128_q32kv128w8", "d128_q32kv128w8", None, None)),
        (100, ("d64_q64kv128w4", "d96_q64kv128w8g2", "d128_q64kv128w8g2", "d192_q64kv64w8g2", "d256_q64kv64w8g2")),
        (120, ("d64_q64kv128w8", "d128_q32kv128w8", "d128_q32kv128w8", None, None)),
    ],
    ids=str,
)
def test_the_backward_before_hopper_takes_tiles_for_which_there_is_shared_memory(plan, capability, names):
    for d, name in zip((8, 72, 104, 136, 200), names, strict=True):
        first, *ruled_out = plan(**{"pass": 1}, capability=capability, d=d).splitlines()
        if name:
            assert first.split()[0] == f"attn_bwd_sm80_bf16_{name}"
            in_fp16 = plan(**{"pass": 1}, capability=capability, d=d, dtype=0).split()[0]
            assert in_fp16 == f"attn_bwd_sm80_fp16_{name.removesuffix('g2')}"  # two groups of warps are for bf16
        else:
            assert first.startswith("attn_bwd_any_bf16_") and any("in this GPU's shared memory" in x for x in ruled_out)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"d": 100}, "it wants a head dimension that is a multiple of 8"),
        ({"stride": 4}, "with strides that are multiples of 8 elements"),
        ({"offset": 8}, "to start at multiples of 16 bytes"),
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


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (80, ("d64_q128kv64s2", "d96_q128kv64s2", "d128_q128kv32s2", "d192_q128kv64s2", "d256_q128kv64s1")),
        (86, ("d64_q128kv64s2r", "d96_q128kv48s1", "d128_q256kv32s1", "d192_q128kv48s1", "d256_q128kv32s1")),
        (89, ("d64_q128kv64s2r", "d96_q128kv48s1", "d128_q256kv32s1", "d192_q128kv48s1", "d256_q128kv32s1")),
        (100, ("d64_q128kv64s2", "d96_q128kv64s2", "d128_q128kv32s2", "d192_q128kv64s2", "d256_q128kv64s2")),
        (120, ("d64_q128kv64s2r", "d96_q128kv48s1", "d128_q256kv32s1", "d192_q128kv48s1", "d256_q128kv32s1")),
    ],
    ids=str,
)
def test_the_forward_before_hopper_takes_tiles_for_which_there_is_shared_memory(plan, capability, names):
    for d, name in zip((8, 72, 104, 136, 200), names, strict=True):
        assert plan(capability=capability, d=d).split()[0] == f"attn_fwd_sm80_bf16_{name}"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"d": 100}, "it wants a head dimension that is a multiple of 8"),
        ({"stride": 4}, "with strides that are multiples of 8 elements"),
        ({"offset": 8}, "to start at multiples of 16 bytes"),
        ({"dtype": 2}, "it takes fp16 and bf16"),
        ({"pages": 1, "stride": 4}, "it takes no pages, left padding, cache_batch_idx and new keys"),
        ({"new": 3, "stride": 4}, "it takes no pages, left padding, cache_batch_idx and new keys"),
        ({"d_v": 64}, "it takes v with as many columns as k"),
        ({"chunk": 7}, "it has no attention_chunk"),
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
    ):
        assert plan(capability=80, **options).split()[0] == f"attn_fwd_sm80_bf16_d128_q128kv32s2{name}"


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
    assert plan(**numbers, len_kv=most - 128).startswith("attn_bwd_sm90_bf16_d128_q64kv128_flex ")
    many = {"b": 256, "h": 4096, "h_kv": 1, "masks": 4096, "d": 8, "len_q": 1, "len_kv": 2**18}
    assert "more tiles than 2^31" in plan(**numbers | many)


@pytest.mark.parametrize(
    ("len_q", "group", "heads"),
    [
        (300, 4, 2),
        (128, 4, 1),
        (65, 4, 4),
        (384, 4, 1),
        (64, 4, 2),
        (64, 1, 1),
        (64, 3, 1),
        (64, 6, 2),
        (33, 4, 2),
        (32, 4, 4),
    ]
    + [(32, 6, 2), (100, 8, 8), (17, 8, 4), (16, 8, 8), (9, 16, 8), (144, 8, 8), (40, 32, 8)],
)
def test_heads_share_tiles_where_fewer_are_left(plan, len_q, group, heads):
    """Work tiles of 128 rows at 128 columns. Row strips have 16 rows, so at most 8 heads share a tile."""
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
        (1, 16, 8192, 128, 16, 4),
        (1, 64, 8192, 128, 8, 2),
        (1, 256, 8192, 128, 2, 1),
        (1, 512, 8192, 128, 1, 1),  # 128 tiles of one head
        (1, 700, 8192, 128, 3, 2),  # 176 tiles: four rounds of thirds
        (2, 32, 8192, 256, 8, 4),
        (4, 64, 8192, 256, 2, 2),
        (4, 128, 8192, 256, 1, 1),
        (1, 512, 65536, 64, 3, 4),  # a third of 88 tiles
        (4, 64, 2048, 256, 1, 1),  # 128 tiles of one head: combining would take longer
        (1, 64, 1600, 128, 7, 2),  # seven parts of two key tiles
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
        ({"len_q": 32, "d": 136, "softcap": 5, "sms": 132}, "attn_decode_sm90_bf16_d192_q64"),
        ({"len_q": 33}, "attn_fwd_sm90_bf16_d128_q128kv128"),
        ({"len_q": 32, "d": 256, "left": 5, "sms": 132}, "attn_decode_sm90_bf16_d256_q32"),
        ({"len_q": 32, "d": 256, "left": 5, "splits": 1, "h": 2}, "attn_fwd_sm90_bf16_d256_q128kv64_local"),
        ({"pages": 8}, "attn_fwd_sm90_bf16_d128_q128kv128_cache"),
        ({"pages": 8, "splits": 2}, "attn_fwd_sm90_bf16_d128_q128kv128_cache"),
        ({"pages": 8, "splits": 2, "len_q": 8}, "attn_decode_sm90_bf16_d128_q16"),
        ({"pages": 8, "splits": 2, "packed": 1}, "attn_decode_sm90_bf16_d128_q64"),
        ({"used": 1, "len_q": 64, "len_kv": 8192, "sms": 132}, "attn_fwd_sm90_bf16_d128_q128kv128_cache"),
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
        ({"leftpad": 1, "packed": 1}, "attn_decode_sm90_bf16_d128_q64"),
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
        kernel, *_, cluster = plan(capability=capability, d=d - 8, len_q=len_q).splitlines()[0].split()
        assert kernel == f"attn_decode_sm80_bf16_d{d}_{name}" and cluster == "0"
    name = plan(capability=capability, d=d, pages=1, sms=108).split()[0]
    assert name == f"attn_decode_sm80_bf16_d{d}_{DECODE_TILES[d][is_small][2]}"


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 100, 120])
def test_kernels_before_hopper_are_built_ahead_where_a_plan_takes_them(plan, capability):
    """sm_87 is no architecture of prebuild, but the module knows which kernels it takes."""
    taken = {
        name
        for name, family, row, features, arch in flash_attn_2_cuda.cuda_kernels()
        if "_sm80_" in name and arch == 0 and flash_attn_2_cuda.cuda_kernel_is_taken(family, row, features, capability)
    }
    planned = set()
    for d in (64, 96, 128, 192, 256):
        for dtype in (0, 1):
            for numbers in ({"len_q": 300}, {"pass": 1}, *({"used": 1, "len_q": n} for n in (8, 16, 32))):
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
        ({"used": 1}, "attn_fwd_sm80"),  # long queries over used keys
        ({"used": 1, "len_q": 32}, "attn_decode_sm80"),
        ({"used": 1, "len_q": 32, "len_kv": 40}, "attn_decode_sm80"),
        ({"len_q": 32, "len_kv": 40}, "attn_fwd_sm80"),
        ({"used": 1, "leftpad": 1}, "attn_decode_sm80"),
        ({"used": 1, "rows": 3}, "attn_decode_sm80"),
        ({"used": 1, "new": 1}, "attn_decode_sm80"),
        ({"pages": 1, "packed": 1}, "attn_decode_sm80"),
        ({"packed_q": 1}, "attn_decode_sm80"),  # beside a cache that is not packed
        ({"pages": 1, "softcap": 1001}, "attn_fwd_any"),
        ({"pages": 1, "alibi": 1, "left": 5, "softcap": 9}, "attn_decode_sm80"),
        ({"pages": 1, "d_v": 64}, "attn_fwd_any"),
        ({"pages": 1, "b": 3}, "attn_fwd_any"),  # 96 tiles of 128 queries for 108 SMs; 64 with two sequences
        ({"pages": 1, "b": 3, "packed": 1}, "attn_decode_sm80"),  # only the GPU knows their lengths
        ({"pages": 1, "b": 3, "splits": 2}, "attn_decode_sm80"),
        ({"pages": 1, "b": 30, "len_q": 32}, "attn_decode_sm80"),  # one tile of 64 rows
        ({"pages": 1, "b": 30, "len_q": 65}, "attn_decode_sm80"),  # tiles of 128 queries would be half empty
        ({"pages": 1, "b": 30, "len_q": 128}, "attn_fwd_any"),
        ({"d": 256, "b": 30, "len_q": 32}, "attn_decode_sm80"),
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


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"len_q": 1, "len_kv": 1, "b": 1, "stride": 4}, "fwd_sm90"),
        ({"len_q": 1, "len_kv": 1, "stride": 4}, "fwd_any"),  # the stride between the rows of two sequences
        ({"h": 1, "h_kv": 1, "stride_h": 4}, "fwd_sm90"),
        ({"stride_h": 4}, "fwd_any"),
        ({"b": 1, "stride_b": 4}, "fwd_sm90"),
        ({"packed": 1, "stride_b": 4}, "fwd_sm90"),
        ({"stride_b": 4}, "fwd_any"),
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
    ("numbers", "group_heads", "is_dynamic", "ctas"),
    [
        ({}, 8, 0, 64),  # all heads; 8 tiles of each
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
        ({"pages": 8, "page": 12}, "attn_fwd_any_bf16_d128_q128kv64", "it wants pages of a multiple of 8 keys"),
        ({"pages": 8, "leftpad": 1}, "attn_fwd_any_bf16_d128_q128kv64", "no left padding beside a block table"),
        ({"packed_k": 1, "used": 1}, "attn_fwd_any_bf16_d128_q128kv64_of3", "no lengths beside dense queries"),
        (
            {"packed_k": 1, "leftpad": 1},
            "attn_fwd_any_bf16_d128_q128kv64_of3",
            "of packed keys it takes no left padding",
        ),
        ({"pages": 8, "page": 2**30}, "attn_fwd_any_bf16_d128_q128kv64", "it counts keys of a KV cache up to 2^30"),
        ({"pages": 8, "k_batch": 4}, "attn_fwd_any_bf16_d128_q128kv64", "strides that are multiples of 8 elements"),
        ({"d": 12}, "attn_fwd_any_bf16_d48_q128kv64", "a head dimension that is a multiple of 8"),
        ({"d": 255}, "attn_fwd_any_bf16_d256_q64kv64", "a head dimension that is a multiple of 8"),
        ({"stride": 4}, "attn_fwd_any_bf16_d128_q128kv64", "with strides that are multiples of 8 elements"),
        ({"offset": 2}, "attn_fwd_any_bf16_d128_q128kv64", "to start at multiples of 16 bytes"),
    ],
    ids=str,
)
def test_what_hopper_kernels_do_not_serve(plan, numbers, kernel, words):
    first, *ruled_out = plan(**numbers).splitlines()
    assert first.split()[0] == kernel
    assert re.search(rf"_q{first.split()[1]}kv{first.split()[2]}", kernel)
    assert any(line.startswith("attn_fwd_sm90: ") and words in line for line in ruled_out)


@pytest.mark.parametrize(
    ("numbers", "kernel"),
    [
        ({"chunk": 7}, "attn_fwd_any_bf16_d128_q128kv64_of3"),
        ({"used_q": 1}, "attn_fwd_any_bf16_d128_q128kv64_of3"),
        ({"packed_q": 1, "stride": 4}, "attn_fwd_any_bf16_d128_q128kv64_of3"),
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
        ({"used_q": 1}, "attn_fwd_any_bf16_d128_q128kv64_of3"),  # dense
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


def test_backward_of_every_dtype(plan):
    for dtype, name in enumerate(("fp16", "bf16", "fp32")):
        found = {d: plan(**{"pass": 1}, capability=80, dtype=dtype, d=d).split()[0] for d in (1, 64, 65, 128, 129, 256)}
        pattern = rf"attn_bwd_(any_{name}_dq|sm80_{name})_d(64|96|128|192|256)_q\d+kv\d+(w\d+(g2)?)?"
        assert all(re.fullmatch(pattern, kernel) for kernel in found.values())
        assert all(("sm80" in kernel) == (name != "fp32" and d % 8 == 0) for d, kernel in found.items())
        assert all(int(re.search(r"_d(\d+)", kernel)[1]) >= d for d, kernel in found.items())


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
        options += ([{}, {"pages": 8}],)
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


def test_the_environment_may_leave_only_some_kernels(plan, monkeypatch):
    monkeypatch.setenv("KERNELS", "any")
    first, *ruled_out = plan(d=128).splitlines()
    assert first.startswith("attn_fwd_any_")
    assert "attn_fwd_sm90: FLASH_ATTN_CUDA_KERNEL rules it out" in ruled_out
    monkeypatch.setenv("KERNELS", "none")
    assert plan(d=128) == (
        "flash_attn: no kernel takes this call. attn_decode_sm90: FLASH_ATTN_CUDA_KERNEL rules it out; "
        "attn_fwd_sm90: FLASH_ATTN_CUDA_KERNEL rules it out; attn_fwd_fp8_sm90: FLASH_ATTN_CUDA_KERNEL rules it out; "
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
