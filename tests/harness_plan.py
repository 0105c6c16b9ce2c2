"""The choice of a CUDA kernel, without a GPU. A C program links csrc/plan and prints the choice."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
GCC = shutil.which("gcc")

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
    int64_t mean_q = 0, mean_kv = 0; /* of packed sequences, of which len_q and len_kv are the longest */
    fa_flex flex = {.mask_b = 1, .block_q = 128, .block_kv = 128}; /* masks: [1, masks, rows, columns] */
    static fa_flex_instruction instructions[9];
    fa_flex_program program = {.instructions = instructions};
    const fa_flex_bound bound = {.program = &program};
    for (int i = 0; i < 9; i++) instructions[i].op = FA_FLEX_sin;
    bool prints_order = false, prints_launch = false, prints_follows = false;
    fa_machine machine = {.gpu_capability = 90, .gpu_kernels = getenv("KERNELS")};
    fa_problem p = {.device = FA_CUDA, .dtype = FA_BF16, .b = 2, .h = 4, .h_kv = 2, .len_q = 1024, .len_kv = 1024,
                    .scale = 0.1, .window_left = -1, .window_right = -1};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        double x = atof(strchr(name, '=') + 1);
#define SET(key, place) if (strncmp(name, key "=", sizeof key) == 0) place = x;
        SET("capability", machine.gpu_capability) SET("d", d) SET("d_v", d_v) SET("len_q", p.len_q)
        SET("mean_q", mean_q) SET("mean_kv", mean_kv) SET("softcap", p.softcap)
        SET("left", p.window_left) SET("right", p.window_right) SET("scale", p.scale) SET("dropout", p.dropout_p)
        SET("sms", machine.gpu_sms) SET("stride", stride) SET("offset", offset)
        SET("stride_h", stride_h) SET("stride_b", stride_b) SET("k_batch", k_batch) SET("v_batch", v_batch)
        SET("new", p.len_new) SET("page", p.page_size) SET("cols", p.block_table_cols)
        SET("rotary", p.rotary_dim) SET("rotary_rows", p.rotary_rows)
        SET("b", p.b) SET("h", p.h) SET("h_kv", p.h_kv) SET("len_kv", p.len_kv)
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
        if (strncmp(name, "score=", 6) == 0) /* operations of a score_mod without a block mask */
            flex.score = &bound, flex.block_q = 0, program.num_instructions = x, p.flex = &flex;
        if (strncmp(name, "max=", 4) == 0) flex.max_scores.data = (float *)memory;
        if (strncmp(name, "q_offset=", 9) == 0) flex.q_offset = offsets;
        if (strncmp(name, "used=", 5) == 0) p.seqused_k = offsets;
        if (strncmp(name, "leftpad=", 8) == 0) p.leftpad_k = offsets;
        if (strncmp(name, "rows=", 5) == 0) p.cache_batch_idx = offsets, p.cache_rows = x;
        if (strncmp(name, "pages=", 6) == 0)
            p.paged = true, p.block_table = offsets, p.num_pages = x, p.page_size = 64, p.block_table_cols = 2;
    }
    p.d = d, p.d_v = d_v ? d_v : d;
    p.total_q = p.b * (mean_q ? mean_q : p.len_q), p.total_kv = p.b * (mean_kv ? mean_kv : p.len_kv);
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


@pytest.fixture(scope="session")
def plan(tmp_path_factory):
    """Prints the choice for the numbers of a problem."""
    if GCC is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("plan")
    (folder / "main.c").write_text(PROGRAM)
    files = [
        *CSRC.glob("plan/gpu*.c"),
        CSRC / "plan/kernel_table.c",
        *[CSRC / f"flex/{name}.c" for name in ("scatters", "pairs", "sums")],
    ]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    command = [GCC, "-std=c11", *sanitizers, "-I", CSRC, folder / "main.c", *files]
    subprocess.run([*command, "-o", folder / "plan"], check=True)

    def plan(**numbers):
        words = [f"{name}={value}" for name, value in numbers.items()]
        return subprocess.run([folder / "plan", *words], check=True, capture_output=True, text=True).stdout

    return plan
