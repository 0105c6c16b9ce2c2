/* Launches cuda/sinks.cu and cuda/sinks_grad.cu. */
#include "sinks.h"

#include "launch.h"
#include "memory.h"

/* The pieces of 16 bytes in a row of out, or 0 if rows are not aligned to 16 bytes. */
static int pieces_of(const fa_sinks *s) {
    const int64_t bytes = (int64_t)fa_dtype_bytes(s->dtype),
                  strides = s->out.stride_b | s->out.stride_row | s->out.stride_h | s->d;
    const bool is_aligned = (((uint64_t)(uintptr_t)s->out.data | (uint64_t)(strides * bytes)) & 15) == 0;
    return is_aligned ? (int)(s->d * bytes / 16) : 0;
}

static fa_status launch(int device_idx, fa_variant variant, fa_launch grid, const void *params, fa_error *err) {
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_cuda_call call = {.gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    variant.arch = place.gpu->capability;
    status = fa_cuda_launch(&call, variant, grid, params, err);
    fa_cuda_leave(&place);
    return status;
}

fa_status fa_cuda_add_sinks(const fa_sinks *s, fa_error *err) {
    fa_sinks_params a = {
        .sinks = fa_cuda_read_sinks(&s->sinks),
        .out = s->out.data,
        .out_stride_b = s->out.stride_b,
        .out_stride_row = s->out.stride_row,
        .out_stride_h = s->out.stride_h,
        .lse = fa_cuda_read_sink_rows(&s->lse),
        .shift = fa_cuda_read_sink_rows(&s->shift),
        .h = (int)s->h,
        .lanes = 1,
        .pieces = pieces_of(s),
        .rows = s->rows,
        .d = s->d,
        .num_rows = s->b * s->h * s->rows,
    };
    if (a.num_rows == 0) return FA_OK;
    while (s->sinks.data && a.lanes < 32 && a.lanes < (a.pieces ? a.pieces : s->d)) a.lanes *= 2;
    const int64_t rows_of_cta = 32 / a.lanes * FA_SINKS_WARPS, ctas = (a.num_rows + rows_of_cta - 1) / rows_of_cta;
    const fa_launch grid = {ctas < INT32_MAX ? (unsigned)ctas : INT32_MAX, 1, 1, .threads = 32 * FA_SINKS_WARPS};
    const fa_variant variant = {.family = FA_SINKS, .features = fa_dtype_feature(s->dtype)};
    return launch(s->device_idx, variant, grid, &a, err);
}

fa_status fa_cuda_gradient_of_sinks(const fa_sinks *s, fa_error *err) {
    const fa_sinks_grad_params a = {
        .sinks = fa_cuda_read_sinks(&s->sinks),
        .lse = fa_cuda_read_sink_rows(&s->lse),
        .delta = fa_cuda_read_sink_rows(&s->delta),
        .shift = fa_cuda_read_sink_rows(&s->shift),
        .gradient = s->gradient,
        .end = s->end,
        .b = s->b,
        .rows = s->rows,
    };
    if (s->h == 0) return FA_OK;
    const fa_launch grid = {(unsigned)s->h, 1, 1, .threads = 32 * FA_SINKS_GRAD_WARPS};
    return launch(s->device_idx, (fa_variant){.family = FA_SINKS_GRAD}, grid, &a, err);
}
