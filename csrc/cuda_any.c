/* Launches the generic kernels, which serve every problem on every GPU. */
#include "cuda_any.h"

#include "cpu/cpu.h"

static fa_cuda_view view_of(const fa_view *t) {
    return (fa_cuda_view){t->data, t->stride_b, t->stride_row, t->stride_h};
}

static fa_cuda_row_stats stats_of(const fa_row_stats *t) {
    return (fa_cuda_row_stats){t->data, t->stride_b, t->stride_h};
}

/* Low bits that are zero here are zero in the address of every row. A stride of a dimension of one element is never taken. */
static uint64_t offsets_of(const fa_view *t, int64_t element_bytes, int64_t batches, int64_t rows, int64_t heads) {
    const int64_t strides =
        (batches > 1 ? t->stride_b : 0) | (rows > 1 ? t->stride_row : 0) | (heads > 1 ? t->stride_h : 0);
    return (uintptr_t)t->data | (uint64_t)(strides * element_bytes);
}

/* The largest piece, up to 16 bytes, that all rows consist of and start at multiples of. */
static int piece_bytes(const fa_problem *p) {
    const int64_t bytes = (int64_t)fa_dtype_bytes(p->dtype);
    const int64_t kv_batches = p->paged               ? p->num_pages
                               : p->cu_seqlens_k      ? 1
                               : p->cache_rows > p->b ? p->cache_rows
                                                      : p->b;
    const int64_t kv_rows = p->paged ? p->page_size : p->cu_seqlens_k ? p->total_kv : p->len_kv;
    const fa_view *like_q[] = {&p->q, &p->o, &p->dout, &p->dq}, *like_k[] = {&p->k, &p->v, &p->dk, &p->dv};
    uint64_t offsets = 16 | (uint64_t)(p->d * bytes);
    for (int i = 0; i < 4; i++)
        offsets |= offsets_of(like_q[i], bytes, p->b, p->total_q, p->h) |
                   offsets_of(like_k[i], bytes, kv_batches, kv_rows, p->h_kv);
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
        .softmax_d_rows = (int)p->softmax_d.stride_h,
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
    };
    if (p->num_pages == 0) a.block_table_cols = 0; /* no key can be read */
    if (p->cache_batch_idx && p->cache_rows == 0) a.cache_batch_idx = NULL, a.block_table_cols = a.len_kv = 0;
    return a;
}

fa_status fa_cuda_launch_any(const fa_cuda_call *call, fa_family_id family, int row, const fa_cuda_problem *problem,
                             int64_t num_tasks, int threads, fa_error *err) {
    const fa_variant variant = {family, row, fa_dtype_feature(call->problem->dtype), call->gpu->capability};
    const unsigned grid = num_tasks < INT32_MAX ? (unsigned)num_tasks : INT32_MAX;
    return fa_cuda_launch(call, variant, (fa_launch){grid, 1, 1, .threads = (unsigned)threads}, problem, err);
}

/* CTAs of one head: tiles of `rows` of the longest sequence, at least one. */
static int count_tiles(int64_t len, int64_t total, bool packed, int rows) {
    if (packed && total < len) len = total;
    return len <= rows ? 1 : (int)((len + rows - 1) / rows);
}

fa_status fa_cuda_fwd_any(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const int row = call->plan->cuda_row, block_q = call->plan->block_q;
    const bool packed = p->cu_seqlens_q != NULL;
    fa_cuda_problem a = fa_cuda_problem_of(call);
    a.num_tiles = count_tiles(p->len_q, p->total_q, packed, block_q);
    fa_status status = fa_cuda_append(call, call->workspace, err);
    if (status == FA_OK && p->rotary_cos)
        a.q = (fa_cuda_view){call->workspace, p->len_q * p->h * p->d, p->h * p->d, p->d};
    if (status == FA_OK)
        status = fa_cuda_launch_any(call, FA_FWD_ANY, row, &a, (p->b + packed) * p->h * a.num_tiles,
                                    32 * fa_fwd_any_row(row)->warps, err);
    if (status == FA_OK && p->s_dmask)
        status = fa_cuda_launch_any(call, FA_PROBS_ANY, 0, &a, p->b * p->h * p->s_dmask_rows, 128, err);
    return status;
}

fa_status fa_cuda_bwd_any(const fa_cuda_call *call, fa_error *err) {
    enum { DELTA_ROWS = 4 };
    const fa_problem *p = call->problem;
    const int first = call->plan->cuda_row, num_rows = fa_families[FA_BWD_ANY].num_rows;
    const bool packed = p->cu_seqlens_q != NULL;
    const bool is_wanted[] = {p->dq.data, p->dk.data, p->dv.data, p->dk.data || p->dv.data};
    fa_cuda_problem a = fa_cuda_problem_of(call);
    a.num_tiles = count_tiles(packed ? p->len_q : a.softmax_d_rows, p->total_q, packed, DELTA_ROWS);
    fa_status status =
        fa_cuda_launch_any(call, FA_DELTA_ANY, 0, &a, (p->b + packed) * p->h * a.num_tiles, 32 * DELTA_ROWS, err);
    for (int row = first; status == FA_OK && row < num_rows; row++) {
        const fa_bwd_any_columns *tile = fa_bwd_any_row(row);
        const int grad = tile->grad, own = 16 * tile->blocks * tile->warps;
        const bool owns_keys = grad > 0;
        if (row > first && grad == 0) break; /* the next tile's */
        if (!is_wanted[grad]) continue;
        a.num_tiles = owns_keys ? count_tiles(p->len_kv, p->total_kv, packed, own)
                                : count_tiles(p->len_q, p->total_q, packed, own);
        status = fa_cuda_launch_any(call, FA_BWD_ANY, row, &a,
                                    (p->b + a.zero_tensors) * (owns_keys ? p->h_kv : p->h) * a.num_tiles,
                                    32 * tile->warps, err);
    }
    return status;
}
