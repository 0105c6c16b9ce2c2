/* Launches cuda/bias_shift.cu. */
#include "bias_shift.h"

#include "cuda/bias_shift_params.h"
#include "launch.h"
#include "memory.h"

fa_status fa_cuda_bias_shift(const fa_bias_shift *of, fa_error *err) {
    fa_cuda_place place;
    const fa_bias_shift_params a = {
        .bias = of->bias,
        .stride_b = of->stride[0],
        .stride_h = of->stride[1],
        .stride_row = of->stride[2],
        .stride_key = of->stride[3],
        .shift = of->shift,
        .least = of->least,
        .h = (int)of->size[1],
        .rows = of->size[2],
        .keys = of->size[3],
        .num_rows = of->size[0] * of->size[1] * of->size[2],
    };
    if (a.num_rows == 0) return FA_OK;
    fa_status status = fa_cuda_enter(of->device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    const fa_variant variant = {FA_BIAS_SHIFT, 0, fa_dtype_feature(of->dtype), place.gpu->capability, 0, NULL};
    const int64_t ctas = (a.num_rows + FA_BIAS_SHIFT_WARPS - 1) / FA_BIAS_SHIFT_WARPS;
    const unsigned grid = ctas < INT32_MAX ? (unsigned)ctas : INT32_MAX;
    status = fa_cuda_launch(&call, variant, (fa_launch){grid, 1, 1, .threads = 32 * FA_BIAS_SHIFT_WARPS}, &a, err);
    fa_cuda_leave(&place);
    return status;
}
