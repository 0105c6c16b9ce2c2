/* Launches cuda/sinks.cu. */
#include "sinks.h"

#include "cuda/sinks_params.h"
#include "launch.h"
#include "memory.h"

/* The pieces of 16 bytes in a row of out, or 0 if rows are not aligned to 16 bytes. */
static int pieces_of(const fa_cuda_sinks *s) {
    const int64_t bytes = (int64_t)fa_dtype_bytes(s->dtype),
                  strides = s->out.stride_b | s->out.stride_row | s->out.stride_h | s->d;
    const bool is_aligned = (((uint64_t)(uintptr_t)s->out.data | (uint64_t)(strides * bytes)) & 15) == 0;
    return is_aligned ? (int)(s->d * bytes / 16) : 0;
}

static int number_of(fa_dtype dtype) {
    return dtype == FA_F16    ? FA_SINKS_OF_F16
           : dtype == FA_BF16 ? FA_SINKS_OF_BF16
           : dtype == FA_F32  ? FA_SINKS_OF_F32
                              : FA_SINKS_OF_F64;
}

fa_status fa_cuda_add_sinks(const fa_cuda_sinks *s, fa_error *err) {
    fa_cuda_place place;
    fa_sinks_params a = {
        .out = s->out.data,
        .out_stride_b = s->out.stride_b,
        .out_stride_row = s->out.stride_row,
        .out_stride_h = s->out.stride_h,
        .lse = s->lse.data,
        .lse_stride_b = s->lse.stride_b,
        .lse_stride_h = s->lse.stride_h,
        .lse_stride_row = s->lse.stride_row ? s->lse.stride_row : 1,
        .sinks = s->sinks,
        .sinks_stride = s->sinks_stride,
        .sinks_dtype = number_of(s->sinks_dtype),
        .h = (int)s->h,
        .lanes = 1,
        .pieces = pieces_of(s),
        .rows = s->rows,
        .d = s->d,
        .num_rows = s->b * s->h * s->rows,
    };
    if (a.num_rows == 0) return FA_OK;
    while (s->sinks && a.lanes < 32 && a.lanes < (a.pieces ? a.pieces : s->d)) a.lanes *= 2;
    fa_status status = fa_cuda_enter(s->device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    const fa_variant variant = {FA_SINKS, 0, fa_dtype_feature(s->dtype), place.gpu->capability, 0, NULL};
    const int64_t rows_of_cta = 32 / a.lanes * FA_SINKS_WARPS, ctas = (a.num_rows + rows_of_cta - 1) / rows_of_cta;
    const unsigned grid = ctas < INT32_MAX ? (unsigned)ctas : INT32_MAX;
    status = fa_cuda_launch(&call, variant, (fa_launch){grid, 1, 1, .threads = 32 * FA_SINKS_WARPS}, &a, err);
    fa_cuda_leave(&place);
    return status;
}
