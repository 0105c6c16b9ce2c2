/* Launches cuda/combine.cu inside of a call. */
#include "parts.h"

#include "cuda/combine_params.h"
#include "division.h"
#include "launch.h"
#include "sinks.h"

/* Does every group of four columns begin at a multiple of its bytes? */
static bool takes_four(const fa_combination *c) {
    const size_t four = 4 * fa_dtype_bytes(c->dtype);
    const int64_t strides = c->d | c->stride_part | c->stride_b | c->stride_row | c->stride_h | c->out.stride_b |
                            c->out.stride_row | c->out.stride_h;
    return strides % 4 == 0 && (uintptr_t)c->out_partial % 16 == 0 && (uintptr_t)c->out.data % four == 0;
}

fa_status fa_cuda_launch_combine(const fa_cuda_call *call, const fa_combination *c, fa_error *err) {
    const bool four = takes_four(c);
    const int64_t groups = c->d == 0 ? 1 : four ? c->d / 4 : c->d, num_tasks = c->b * c->h * c->len * groups;
    const bool is_small = num_tasks > 0 && num_tasks <= INT32_MAX;
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
        .lse = c->lse.data,
        .lse_stride_to_b = c->lse.stride_b,
        .lse_stride_to_h = c->lse.stride_h,
        .empty_lse = c->empty_lse,
        .takes_four = four,
        .has_columns = c->d > 0,
        .groups = groups,
        .num_parts = (int)c->num_parts,
        .h = (int)c->h,
        .len = c->len,
        .num_tasks = num_tasks,
        .by_groups = fa_division_by(is_small ? (unsigned)groups : 1),
        .by_len = fa_division_by(is_small ? (unsigned)c->len : 1),
        .by_h = fa_division_by(is_small ? (unsigned)c->h : 1),
        .sinks = {fa_cuda_read_sinks(&c->sinks), fa_cuda_read_sink_rows(&c->sink_shift)},
    };
    const fa_variant variant = {FA_COMBINE, 0, fa_dtype_feature(c->dtype), call->gpu->capability, 0, NULL};
    const int64_t ctas = (a.num_tasks + FA_COMBINE_THREADS - 1) / FA_COMBINE_THREADS; /* < 2^31: out fits in memory */
    const fa_launch launch = {(unsigned)ctas, 1, 1, .threads = FA_COMBINE_THREADS, .waits_itself = variant.arch >= 90};
    return fa_cuda_launch(call, variant, launch, &a, err);
}

fa_status fa_cuda_combine_parts(const fa_cuda_call *call, const float *part_o, const float *part_lse, float empty_lse,
                                fa_error *err) {
    const fa_problem *p = call->problem;
    const int64_t of_head = p->len_q, of_b = p->h * of_head, of_part = p->b * of_b;
    const fa_combination parts = {
        .num_parts = call->plan->num_splits,
        .b = p->b,
        .len = p->len_q,
        .h = p->h,
        .d = p->d_v,
        .out_partial = part_o,
        .stride_part = of_part * p->d_v,
        .stride_b = of_b * p->d_v,
        .stride_row = p->d_v,
        .stride_h = of_head * p->d_v,
        .lse_partial = part_lse,
        .lse_stride_part = of_part,
        .lse_stride_b = of_b,
        .lse_stride_h = of_head,
        .dtype = p->dtype,
        .out = p->o,
        .lse = p->lse,
        .empty_lse = empty_lse,
        .sinks = p->sinks,
        .sink_shift = p->sink_shift,
    };
    return fa_cuda_launch_combine(call, &parts, err);
}
