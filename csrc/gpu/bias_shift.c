/* Launches cuda/bias_shift.cu. */
#include "bias_shift.h"

#include "cuda/bias_shift_params.h"
#include "launch.h"
#include "memory.h"
#include "sinks.h"

/* All batches, heads or rows share a bias of size 1. */
static int64_t stride_of(const fa_bias_shift *of, int dim) { return of->size[dim] == 1 ? 0 : of->stride[dim]; }

fa_status fa_cuda_bias_shift(const fa_bias_shift *of, fa_error *err) {
    enum { WARPS_OF_SM = 64 };
    fa_cuda_place place;
    fa_bias_shift_params a = {
        .bias = of->bias,
        .stride_b = stride_of(of, 0),
        .stride_h = stride_of(of, 1),
        .stride_row = stride_of(of, 2),
        .stride_key = of->stride[3],
        .shift = of->shift,
        .sinks = fa_cuda_read_sinks(&of->sinks),
        .sequence = (const long long *)of->sequence,
        .row = (const long long *)of->row,
        .least = (float)of->least,
        .h = (int)of->of_shift[1],
        .is_cut = of->is_cut,
        .last = of->last,
        .rows = of->of_shift[2],
        .keys = of->size[3],
        .rows_of_bias = of->size[2],
        .num_rows = of->of_shift[0] * of->of_shift[1] * of->of_shift[2],
    };
    if (a.num_rows == 0) return FA_OK;
    fa_status status = fa_cuda_enter(of->device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    const fa_variant variant = {FA_BIAS_SHIFT, 0, fa_dtype_feature(of->dtype), place.gpu->capability, 0, NULL};
    /* A warp may have to read its rows whole, so it has several only if there are many. */
    const int64_t many = (int64_t)place.gpu->num_sms * WARPS_OF_SM, of_warp = many > 0 ? a.num_rows / many : 0;
    a.rows_of_warp = of_warp < 1 ? 1 : of_warp < 32 ? (int)of_warp : 32;
    const int64_t of_cta = FA_BIAS_SHIFT_WARPS * a.rows_of_warp, ctas = (a.num_rows + of_cta - 1) / of_cta;
    const unsigned grid = ctas < INT32_MAX ? (unsigned)ctas : INT32_MAX;
    status = fa_cuda_launch(&call, variant, (fa_launch){grid, 1, 1, .threads = 32 * FA_BIAS_SHIFT_WARPS}, &a, err);
    fa_cuda_leave(&place);
    return status;
}
