/* Launches attn_fwd_short and attn_bwd_short. Nothing runs before them. */
#include "any_problem.h"
#include "launch.h"
#include "launchers.h"

fa_status fa_cuda_short(const fa_cuda_call *call, fa_error *err) {
    enum { THREADS = 128, ROWS_OF_CTA = 64 };
    const fa_problem *p = call->problem;
    const fa_cuda_problem a = fa_cuda_problem_of(call);
    const int64_t units = ROWS_OF_CTA / call->plan->block_q, ctas = (p->b * p->h + units - 1) / units;
    const fa_status status = fa_cuda_launch(call, fa_plan_variant(call->plan, call->gpu->capability),
                                            (fa_launch){(unsigned)ctas, 1, 1, .threads = THREADS}, &a, err);
    return status == FA_OK && p->pass == FA_FWD ? fa_cuda_launch_probs(call, &a, err) : status;
}
