/* Launches attn_fwd_short and attn_bwd_short. Nothing runs before them. */
#include "short.h"

#include "any_problem.h"
#include "launch.h"
#include "launchers.h"
#include "plan/gpu_short.h"

static fa_status launch_short(const fa_cuda_call *call, fa_variant variant, const fa_cuda_problem *a, fa_error *err) {
    enum { THREADS = 128, ROWS_OF_CTA = 64 };
    const int64_t units = ROWS_OF_CTA / fa_short_row(variant.family, variant.row)->rows;
    const int64_t ctas = (call->problem->b * call->problem->h + units - 1) / units;
    return fa_cuda_launch(call, variant, (fa_launch){(unsigned)ctas, 1, 1, .threads = THREADS}, a, err);
}

fa_status fa_cuda_short(const fa_cuda_call *call, fa_error *err) {
    const fa_cuda_problem a = fa_cuda_problem_of(call);
    const fa_status status = launch_short(call, fa_plan_variant(call->plan, call->gpu->capability), &a, err);
    return status == FA_OK && call->problem->pass == FA_FWD ? fa_cuda_launch_probs(call, &a, err) : status;
}

fa_status fa_cuda_bwd_short_beside(const fa_cuda_call *call, fa_error *err) {
    const int capability = call->gpu->capability;
    const int row = fa_find_short_row(call->problem, FA_BWD_SHORT, call->plan->gpu.short_rows, capability);
    const fa_variant variant = {FA_BWD_SHORT, row, fa_short_features(call->problem), capability, 0, NULL};
    fa_cuda_problem a = fa_cuda_problem_of(call);
    a.leaves_long = true;
    return launch_short(call, variant, &a, err);
}
