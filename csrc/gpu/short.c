/* Launches attn_fwd_short and attn_bwd_short. Nothing runs before them. */
#include "short.h"

#include "any_problem.h"
#include "launch.h"
#include "launchers.h"
#include "mods.h"
#include "plan/gpu_problem.h"
#include "plan/gpu_short.h"

static int64_t units_of_cta(fa_variant variant) {
    enum { ROWS_OF_CTA = 64 };
    return ROWS_OF_CTA / fa_short_row(variant.family, variant.row)->rows;
}

/* Sequences that a unit takes one after the other: as many as give each unit of one wave of CTAs its part. The unit
 * adds up what they give to the gradients of captures, so that it adds to memory more rarely. */
static int sequences_of_unit(const fa_cuda_call *call, fa_variant variant) {
    const fa_problem *p = call->problem;
    if (p->pass == FA_FWD || !fa_wants_capture_gradients(p)) return 1;
    const int ctas = fa_short_row(variant.family, variant.row)->ctas, with_mods = ctas > 2 ? ctas - 1 : ctas;
    const int64_t units = (int64_t)with_mods * call->plan->gpu.num_sms * units_of_cta(variant);
    const int64_t groups = units > p->h ? units / p->h : 1, num = (p->b + groups - 1) / groups;
    return num < 1 ? 1 : (int)num;
}

static fa_status launch_short(const fa_cuda_call *call, fa_variant variant, fa_cuda_problem *a, fa_error *err) {
    enum { THREADS = 128 };
    a->unit_sequences = sequences_of_unit(call, variant);
    const int64_t groups = (call->problem->b + a->unit_sequences - 1) / a->unit_sequences;
    const int64_t units = units_of_cta(variant), ctas = (groups * call->problem->h + units - 1) / units;
    const fa_launch launch = {(unsigned)ctas, 1, 1, .threads = THREADS};
    return fa_cuda_launch_with_mods(call, variant, launch, a, sizeof *a, err);
}

fa_status fa_cuda_short(const fa_cuda_call *call, fa_error *err) {
    fa_cuda_problem a = fa_cuda_problem_of(call);
    fa_status status = call->plan->gpu.features & FA_FLEX ? fa_cuda_make_block_map(call, err) : FA_OK;
    if (status == FA_OK) status = launch_short(call, fa_plan_variant(call->plan, call->gpu->capability), &a, err);
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
