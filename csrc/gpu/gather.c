/* Launches cuda/gather.cu. */
#include "gather.h"

#include "any_problem.h"
#include "cuda/gather_params.h"
#include "launch.h"
#include "plan/gpu_gather.h"

fa_status fa_cuda_gather(const fa_cuda_call *call, fa_problem *gathered, fa_error *err) {
    const fa_problem *p = call->problem;
    *gathered = fa_gathered(p, (char *)call->workspace + call->plan->workspace_bytes - fa_gather_bytes(p));
    const fa_gather_params a = {
        .problem = fa_cuda_problem_of(call),
        .k = gathered->k.data,
        .v = gathered->v.data,
        .lengths = (int *)(uintptr_t)gathered->seqused_k,
        .rows = (int)gathered->len_kv,
    };
    const int64_t tasks = p->b * ((gathered->len_kv + FA_GATHER_KEYS - 1) / FA_GATHER_KEYS);
    const fa_variant variant = {FA_GATHER, 0, 0, call->gpu->capability, 0, NULL};
    const unsigned grid = tasks < INT32_MAX ? (unsigned)tasks : INT32_MAX;
    return fa_cuda_launch(call, variant, (fa_launch){grid, 1, 1, .threads = 32 * FA_GATHER_WARPS}, &a, err);
}
