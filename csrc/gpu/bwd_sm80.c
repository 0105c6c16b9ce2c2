/* Launches attn_bwd_sm80: delta, the sums, and dQ of the sums. */
#include "any_problem.h"
#include "cuda/attn_bwd_sm80_params.h"
#include "launch.h"
#include "launchers.h"
#include "plan/bwd_sm80_workspace.h"

static fa_status launch(const fa_cuda_call *call, fa_family_id family, int64_t num_tasks, int threads,
                        const fa_attn_bwd_sm80_params *a, fa_error *err) {
    fa_variant variant = fa_plan_variant(call->plan, call->gpu->capability);
    variant.family = family;
    variant.features &= fa_families[family].knows;
    const unsigned grid = num_tasks < INT32_MAX ? (unsigned)num_tasks : INT32_MAX;
    return fa_cuda_launch(call, variant, (fa_launch){grid, 1, 1, .threads = (unsigned)threads}, a, err);
}

fa_status fa_cuda_bwd_sm80(const fa_cuda_call *call, fa_error *err) {
    enum { DQ_THREADS = 128 };
    const fa_problem *p = call->problem;
    const fa_bwd_sm80_columns *tile = fa_bwd_sm80_row(call->plan->gpu.row);
    const fa_bwd_sm80_workspace w = fa_bwd_sm80_workspace_of(p, tile);
    const bool packed = p->cu_seqlens_q != NULL;
    char *workspace = call->workspace;
    fa_attn_bwd_sm80_params a = {.problem = fa_cuda_problem_of(call),
                                 .dq_sums = (float *)workspace,
                                 .num_slabs = (int)w.num_slabs,
                                 .num_q_tiles = fa_count_tiles(p->len_q, p->total_q, packed, tile->block_q)};
    a.problem.num_tiles = fa_count_tiles(p->len_kv, p->total_kv, packed, tile->block_kv);
    a.problem.group_heads = call->plan->gpu.group_heads;
    if (p->deterministic) {
        a.turns = (unsigned *)(workspace + w.turns);
        a.tile_counter = (unsigned *)(workspace + w.tile_counter);
    }
    fa_status status = fa_cuda_launch_delta(call, err);
    if (status == FA_OK && w.bytes > 0)
        status = fa_driver_check(
            call->driver->cuMemsetD32Async((uintptr_t)workspace, 0, w.bytes / sizeof(uint32_t), call->stream),
            "filling the GPU's memory", err);
    if (status == FA_OK && (p->dq.data || p->dk.data || p->dv.data))
        status = launch(call, FA_BWD_SM80, p->b * p->h_kv * a.problem.num_tiles, 32 * tile->warps, &a, err);
    if (status == FA_OK && p->dq.data)
        status = launch(call, FA_BWD_DQ_SM80, p->b * p->h * a.num_q_tiles, DQ_THREADS, &a, err);
    return status;
}
