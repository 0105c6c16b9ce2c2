/* Describes a problem in the terms of the generic kernels. */
#include "any_problem.h"

#include "division.h"
#include "launch.h"
#include "mods.h"
#include "plan/gpu_problem.h"
#include "sinks.h"

#include <math.h>

static fa_cuda_view view_of(const fa_view *t) {
    return (fa_cuda_view){t->data, t->stride_b, t->stride_row, t->stride_h};
}

static fa_cuda_descale descale_of(const fa_descale *t) { return (fa_cuda_descale){t->data, t->stride_b, t->stride_h}; }

static fa_cuda_row_stats stats_of(const fa_row_stats *t) {
    return (fa_cuda_row_stats){t->data, t->stride_b, t->stride_h};
}

/* Returns the largest piece of up to 16 bytes. All rows consist of whole pieces and start at a multiple of a piece. */
static int piece_bytes(const fa_problem *p) {
    const int64_t bytes = (int64_t)fa_dtype_bytes(p->dtype),
                  o_bytes = (int64_t)fa_dtype_bytes(fa_output_dtype(p->dtype));
    const int64_t kv_batches = p->paged               ? p->num_pages
                               : p->cu_seqlens_k      ? 1
                               : p->cache_rows > p->b ? p->cache_rows
                                                      : p->b;
    const int64_t kv_rows = p->paged ? p->page_size : p->cu_seqlens_k ? p->total_kv : p->len_kv;
    const fa_view *like_q[] = {&p->q, &p->qv, &p->dout, &p->dq}, *like_k[] = {&p->k, &p->v, &p->dk, &p->dv};
    uint64_t offsets = 16 | (uint64_t)(p->d * bytes) | (uint64_t)(p->d_v * bytes) |
                       fa_offsets_of(&p->o, o_bytes, p->b, p->total_q, p->h);
    for (int i = 0; i < 4; i++)
        offsets |= fa_offsets_of(like_q[i], bytes, p->b, p->total_q, p->h) |
                   fa_offsets_of(like_k[i], bytes, kv_batches, kv_rows, p->h_kv);
    return (int)(offsets & -offsets);
}

fa_cuda_problem fa_cuda_problem_of(const fa_cuda_call *call) {
    const fa_problem *p = call->problem;
    fa_cuda_problem a = {
        .b = (int)p->b,
        .h = (int)p->h,
        .h_kv = (int)p->h_kv,
        .d = (int)p->d,
        .len_q = (int)p->len_q,
        .len_kv = (int)p->len_kv,
        .total_q = (int)p->total_q,
        .total_kv = (int)p->total_kv,
        .q = view_of(&p->q),
        .k = view_of(&p->k),
        .v = view_of(&p->v),
        .o = view_of(&p->o),
        .dout = view_of(&p->dout),
        .dq = view_of(&p->dq),
        .dk = view_of(&p->dk),
        .dv = view_of(&p->dv),
        .lse = stats_of(&p->lse),
        .softmax_d = stats_of(&p->softmax_d),
        /* The rows behind the queries are cleared, too. Programmable attention has none. */
        .softmax_d_rows = (int)(p->flex ? p->len_q : p->softmax_d.stride_h),
        .scale = (float)p->scale,
        .softcap = (float)p->softcap,
        .window_left = fa_clamp_window(p->window_left),
        .window_right = fa_clamp_window(p->window_right),
        .alibi_slopes = p->alibi_slopes,
        .alibi_stride_b = p->alibi_stride_b,
        .rng_state = (const unsigned long long *)p->rng_state,
        .keep_max = p->keep_max,
        .keep_scale = (float)(1 / (1 - p->dropout_p)),
        .s_dmask = p->s_dmask,
        .s_dmask_rows = p->s_dmask_rows,
        .s_dmask_cols = p->s_dmask_cols,
        .cu_seqlens_q = p->cu_seqlens_q,
        .cu_seqlens_k = p->cu_seqlens_k,
        .seqused_k = p->seqused_k,
        .leftpad_k = p->leftpad_k,
        .cache_batch_idx = p->cache_batch_idx,
        .paged = p->paged,
        .block_table = p->block_table,
        .block_table_stride = p->block_table_stride,
        .block_table_cols = (int)p->block_table_cols,
        .page_size = (int)p->page_size,
        .num_pages = (int)p->num_pages,
        .cache_rows = (int)p->cache_rows,
        .k_new = view_of(&p->k_new),
        .v_new = view_of(&p->v_new),
        .rotary_cos = p->rotary_cos,
        .rotary_sin = p->rotary_sin,
        .len_new = (int)p->len_new,
        .rotary_rows = (int)p->rotary_rows,
        .rotary_dim = (int)p->rotary_dim,
        .rotary_interleaved = p->rotary_interleaved,
        .rotary_q_by_row = p->rotary_q_by_row,
        .piece_bytes = piece_bytes(p),
        .zero_tensors = p->cu_seqlens_q && call->zero_tensors,
        .d_v = (int)p->d_v,
        .num_v_blocks = 1,
        .num_parts = 1,
        .attention_chunk = fa_clamp_window(p->attention_chunk),
        .empty_lse = p->flex ? -INFINITY : p->empty_lse,
        .sinks = fa_cuda_sinks_of(p),
        .qv = view_of(&p->qv),
        .q_descale = descale_of(&p->q_descale),
        .k_descale = descale_of(&p->k_descale),
        .v_descale = descale_of(&p->v_descale),
        .seqused_q = p->seqused_q,
        .cu_seqlens_k_new = p->cu_seqlens_k_new,
        .seqlens_rotary = p->seqlens_rotary,
        .rotary_e4m3 = p->rotary_dtype == FA_E4M3,
        .by_page_size = fa_division_by(p->page_size > 0 ? (unsigned)p->page_size : 1),
        .total_new = p->total_new > 0 ? (int)p->total_new : INT32_MAX,
    };
    if (p->num_pages == 0) a.block_table_cols = 0; /* there is no key to read */
    if (p->cache_batch_idx && p->cache_rows == 0) a.cache_batch_idx = NULL, a.block_table_cols = a.len_kv = 0;
    return a;
}

fa_status fa_cuda_launch_any(const fa_cuda_call *call, fa_family_id family, int row, const fa_cuda_problem *problem,
                             int64_t num_tasks, int threads, fa_error *err) {
    const unsigned features = fa_any_features(call->problem) & fa_families[family].knows;
    const fa_variant variant = {family, row, features, call->gpu->capability, 0, NULL};
    const unsigned grid = num_tasks < INT32_MAX ? (unsigned)num_tasks : INT32_MAX;
    const fa_launch launch = {grid, 1, 1, .threads = (unsigned)threads};
    return fa_cuda_launch_with_mods(call, variant, launch, problem, sizeof *problem, err);
}

int fa_count_tiles(int64_t len, int64_t total, bool packed, int rows) {
    if (packed && total < len) len = total;
    return len <= rows ? 1 : (int)((len + rows - 1) / rows);
}

fa_status fa_cuda_launch_probs(const fa_cuda_call *call, const fa_cuda_problem *problem, fa_error *err) {
    enum { PROBS_ROWS = 64, PROBS_THREADS = 128 };
    const fa_problem *p = call->problem;
    if (!p->s_dmask) return FA_OK;
    const int64_t num_tiles = (p->s_dmask_rows + PROBS_ROWS - 1) / PROBS_ROWS;
    return fa_cuda_launch_any(call, FA_PROBS_ANY, 0, problem, p->b * p->h * num_tiles, PROBS_THREADS, err);
}

fa_status fa_cuda_launch_delta(const fa_cuda_call *call, fa_error *err) {
    enum { DELTA_ROWS = 16, DELTA_THREADS = 8 * DELTA_ROWS };
    const fa_problem *p = call->problem;
    const bool packed = p->cu_seqlens_q != NULL;
    fa_cuda_problem a = fa_cuda_problem_of(call);
    a.num_tiles = fa_count_tiles(packed ? p->len_q : a.softmax_d_rows, p->total_q, packed, DELTA_ROWS);
    return fa_cuda_launch_any(call, FA_DELTA_ANY, 0, &a, (p->b + packed) * p->h * a.num_tiles, DELTA_THREADS, err);
}
