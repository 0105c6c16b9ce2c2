/* Executes a plan on a GPU. The GPU's context is entered, PyTorch's stream is asked for, and the launcher of the plan's
 * family is called. */
#include "run.h"

#include "align.h"
#include "append.h"
#include "flex/flex.h"
#include "launchers.h"
#include "memory.h"

static fa_cuda_launcher *const launchers[FA_NUM_FAMILIES] = {
    [FA_FWD_SM90] = fa_cuda_fwd_sm90,         [FA_BWD_SM90] = fa_cuda_bwd_sm90, [FA_BWD_WIDE_SM90] = fa_cuda_bwd_sm90,
    [FA_FWD_ANY] = fa_cuda_fwd_any,           [FA_BWD_ANY] = fa_cuda_bwd_any,   [FA_DECODE_SM90] = fa_cuda_decode,
    [FA_FWD_FP8_SM90] = fa_cuda_fwd_fp8_sm90, [FA_BWD_SM80] = fa_cuda_bwd_sm80, [FA_FWD_SM80] = fa_cuda_fwd_sm80,
    [FA_DECODE_SM80] = fa_cuda_decode,        [FA_FWD_SHORT] = fa_cuda_short,   [FA_BWD_SHORT] = fa_cuda_short,
};

/* The kernels of these families fill the rows that belong to no sequence. */
static bool fills_unowned_rows(int family) {
    return family == FA_FWD_ANY || family == FA_BWD_ANY || family == FA_DECODE_SM90 || family == FA_DECODE_SM80 ||
           family == FA_FWD_SM80 || family == FA_FWD_SHORT;
}

static fa_status run_kernels(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const int family = call->plan->gpu.family;
    fa_status status = FA_OK;
    if (p->zero_tensors && !fills_unowned_rows(family))
        status = fa_cuda_zero_tensors(p, call->driver, call->stream, err);
    return status == FA_OK ? launchers[family](call, err) : status;
}

/* If q has no heads, keys are still appended. No query reads a key, so the gradients of keys and values are zero. */
static fa_status run_without_heads(const fa_cuda_call *call, fa_error *err) {
    return call->problem->pass == FA_FWD ? fa_cuda_append(call, NULL, err)
                                         : fa_cuda_zero_key_gradients(call->problem, call->driver, call->stream, err);
}

fa_status fa_cuda_run(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                      fa_error *err) {
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(problem->device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_kept_walks *kept = problem->flex ? problem->flex->kept : NULL;
    const bool is_kept = kept && kept->bytes > 0;
    const fa_cuda_call call = {.problem = problem,
                               .plan = plan,
                               .zero_tensors = zero_tensors,
                               .workspace = workspace,
                               .gpu = place.gpu,
                               .driver = place.driver,
                               .stream = place.stream,
                               .walks = is_kept ? kept->data : NULL,
                               .has_walks = is_kept && !kept->is_wanted};
    status = problem->h > 0 ? fa_cuda_run_aligned(&call, run_kernels, err) : run_without_heads(&call, err);
    fa_cuda_leave(&place);
    return status;
}
