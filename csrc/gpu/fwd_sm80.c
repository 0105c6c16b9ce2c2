/* Launches attn_fwd_sm80. Before, new keys are appended to a cache, and queries are rotated. */
#include "any_problem.h"
#include "append.h"
#include "launch.h"
#include "launchers.h"

fa_status fa_cuda_fwd_sm80(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const bool packed = p->cu_seqlens_q != NULL;
    fa_cuda_problem a = fa_cuda_problem_of(call);
    if (p->k_new.data || p->rotary_cos) {
        const fa_status appended = fa_cuda_append(call, call->workspace, err);
        if (appended != FA_OK) return appended;
    }
    if (p->rotary_cos) {
        const long long row = p->h * p->d;
        a.q = (fa_cuda_view){call->workspace, packed ? 0 : p->len_q * row, row, p->d};
    }
    a.num_tiles = fa_count_tiles(p->len_q, p->total_q, packed, call->plan->block_q);
    a.group_heads = call->plan->gpu.group_heads;
    const int64_t num_tasks = (p->b + packed) * p->h * a.num_tiles;
    const unsigned grid = num_tasks < INT32_MAX ? (unsigned)num_tasks : INT32_MAX;
    const unsigned threads = 32 * (unsigned)fa_fwd_sm80_row(call->plan->gpu.row)->warps;
    fa_status status = fa_cuda_launch(call, fa_plan_variant(call->plan, call->gpu->capability),
                                      (fa_launch){grid, 1, 1, .threads = threads}, &a, err);
    return status == FA_OK ? fa_cuda_launch_probs(call, &a, err) : status;
}
