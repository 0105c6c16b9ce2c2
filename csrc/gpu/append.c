/* Launches cuda/kvcache.cu, which appends and rotates before attention over a cache. */
#include "append.h"

#include "any_problem.h"

fa_status fa_cuda_append(const fa_cuda_call *call, void *q_rotated, fa_error *err) {
    enum { WARPS = 4 };
    const fa_problem *p = call->problem;
    if (p->len_new == 0 && !p->rotary_cos) return FA_OK;
    fa_cuda_problem a = fa_cuda_problem_of(call);
    a.q_rotated = p->rotary_cos ? q_rotated : NULL;
    /* Every sequence counts as the longest one. */
    const int64_t num_rows = p->b * (p->len_new * p->h_kv + (a.q_rotated ? p->len_q * p->h : 0));
    return fa_cuda_launch_any(call, FA_KVCACHE, 0, &a, (num_rows + WARPS - 1) / WARPS, 32 * WARPS, err);
}
