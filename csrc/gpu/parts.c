/* Launches cuda/combine.cu inside of a call. */
#include "parts.h"

#include "cuda/combine_params.h"
#include "launch.h"
#include "sinks.h"

fa_status fa_cuda_launch_combine(const fa_cuda_call *call, const fa_combination *c, fa_error *err) {
    const fa_combine_params a = {
        .out_partial = c->out_partial,
        .stride_part = c->stride_part,
        .stride_b = c->stride_b,
        .stride_row = c->stride_row,
        .stride_h = c->stride_h,
        .lse_partial = c->lse_partial,
        .lse_stride_part = c->lse_stride_part,
        .lse_stride_b = c->lse_stride_b,
        .lse_stride_h = c->lse_stride_h,
        .out = c->out.data,
        .out_stride_b = c->out.stride_b,
        .out_stride_row = c->out.stride_row,
        .out_stride_h = c->out.stride_h,
        .lse = c->lse,
        .num_parts = (int)c->num_parts,
        .h = (int)c->h,
        .len = c->len,
        .d = c->d,
        .num_rows = c->b * c->h * c->len,
        .sinks = {fa_cuda_read_sinks(&c->sinks), fa_cuda_read_sink_rows(&c->sink_shift)},
    };
    const fa_variant variant = {FA_COMBINE, 0, fa_dtype_feature(c->dtype), call->gpu->capability, 0, NULL};
    const int64_t ctas = (a.num_rows + FA_COMBINE_WARPS - 1) / FA_COMBINE_WARPS;
    const unsigned grid = ctas < INT32_MAX ? (unsigned)ctas : INT32_MAX;
    return fa_cuda_launch(call, variant, (fa_launch){grid, 1, 1, .threads = 32 * FA_COMBINE_WARPS}, &a, err);
}
