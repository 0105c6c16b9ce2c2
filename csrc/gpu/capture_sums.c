#include "capture_sums.h"

#include "cuda/cuda_flex.h"
#include "driver.h"
#include "flex/flex.h"
#include "launch.h"
#include "plan/gpu_problem.h"

enum { PASS_BITS_AT = 58, FIRST_PASS = 1 };

/* Where the sums of a capture lie; NULL: its gradient is not wanted. */
static void place_sums(const fa_problem *p, char *sums, void **places) {
    for (int32_t i = 0; i < p->flex->derivative->program->num_captures; i++) {
        places[i] = p->flex->gradients[i] ? sums : NULL;
        if (places[i]) sums += fa_count_capture(p->flex->derivative, i) * (int64_t)sizeof(fa_cuda_exact_sum);
    }
}

static fa_status launch_pass(const fa_cuda_call *call, void *const *places, int pass, fa_capture_kernel *launch,
                             const void *context, fa_error *err) {
    void *marked[FA_FLEX_MAX_CAPTURES];
    for (int32_t i = 0; i < call->problem->flex->derivative->program->num_captures; i++)
        marked[i] = places[i] ? (void *)((uintptr_t)places[i] | (uintptr_t)pass << PASS_BITS_AT) : NULL;
    fa_flex flex = *call->problem->flex;
    fa_problem problem = *call->problem;
    fa_cuda_call with_sums = *call;
    flex.gradients = marked;
    problem.flex = &flex;
    with_sums.problem = &problem;
    return launch(&with_sums, context, err);
}

static fa_status add_sums(const fa_cuda_call *call, int32_t capture, const void *sums, fa_error *err) {
    const fa_flex *flex = call->problem->flex;
    const int64_t num = fa_count_capture(flex->derivative, capture), most = 1 << 16;
    const fa_cuda_exact_sums a = {
        .sums = sums,
        .gradient = flex->gradients[capture],
        .num = num,
        .digits = fa_exact_sums_digits(call->problem),
        .is_double = flex->derivative->program->captures[capture].dtype == FA_FLEX_OF_F64,
    };
    const fa_variant variant = {.family = FA_FLEX_EXACT_SUMS, .arch = call->gpu->capability};
    const int64_t ctas = (num + FA_FLEX_SUMS_THREADS - 1) / FA_FLEX_SUMS_THREADS;
    const fa_launch launch = {(unsigned)(ctas < most ? ctas : most), 1, 1, .threads = FA_FLEX_SUMS_THREADS};
    return fa_cuda_launch(call, variant, launch, &a, err);
}

fa_status fa_cuda_add_exactly(const fa_cuda_call *call, fa_capture_kernel *launch, const void *context, fa_error *err) {
    const fa_problem *p = call->problem;
    const int32_t num = p->flex->derivative->program->num_captures;
    char *sums = (char *)call->workspace + fa_exact_sums_at(p);
    void *places[FA_FLEX_MAX_CAPTURES];
    place_sums(p, sums, places);
    const size_t words = fa_exact_sums_bytes(p) / sizeof(uint32_t);
    fa_status status = FA_OK;
    if (words > 0)
        status = fa_driver_check(call->driver->cuMemsetD32Async((uintptr_t)sums, 0, words, call->stream),
                                 "filling the GPU's memory", err);
    if (status == FA_OK) status = launch_pass(call, places, FIRST_PASS, launch, context, err);
    if (status == FA_OK) status = launch_pass(call, places, fa_exact_sums_digits(p), launch, context, err);
    for (int32_t i = 0; status == FA_OK && i < num; i++)
        if (places[i]) status = add_sums(call, i, places[i], err);
    return status;
}
