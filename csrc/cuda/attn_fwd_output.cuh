/* The epilogue of attn_fwd_sm90.cu. O and the online softmax of a warp's row strip become o and lse in global
 * memory. */
#ifndef FA_ATTN_FWD_OUTPUT_CUH
#define FA_ATTN_FWD_OUTPUT_CUH

#include "attn_fwd_softmax.cuh"
#include "quads.cuh"

/* first_row is the first of a row strip, and row_block the row block that the strip is of. The warp's number in its
 * warpgroup says which of its strips. */
DEVICE int warp_of_group() { return threadIdx.x / 32 % 4; }

/* lse of both rows, and the factor that O is multiplied by. A row that saw no key has +inf and 0
 * here. */
DEVICE void finish_softmax(const online_softmax &softmax, const params &p, float (&factor)[2], float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = sum_of_quad(softmax.sum[r]);
        factor[r] = sum == 0 ? 0 : __fdividef(p.keep_scale, sum);
        lse[r] = sum == 0 ? INF : (softmax.max_log2[r] + __log2f(sum)) * LN_2;
    }
}

/* What was subtracted from the scores of a row of the strip, which may lie behind the last row. */
DEVICE float shift_of(const params &p, const tile &t, int row_block, int row) {
    return FLEX && row < t.len_q
               ? shift_of_row(p.sinks.shift, t.b_idx, head_of_strip(p, t, row_block, warp_of_group()), row)
               : 0;
}

/* The sink of the strip's head joins the sums of both rows. */
DEVICE void add_sinks(const params &p, const tile &t, int first_row, int row_block, float (&factor)[2],
                      float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float shift = shift_of(p, t, row_block, first_row + threadIdx.x % 32 / 4 + 8 * r);
        const row_with_sink x =
            add_sink(lse[r] == INF ? -INF : lse[r], sink_of_strip(p, t, row_block, warp_of_group()) - shift);
        lse[r] = x.lse, factor[r] *= x.share;
    }
}

/* Does nothing if nobody asked for lse. NOTE: lse is stored after O. Before O's store by TMA there is a fence, which
 * would wait until lse has arrived. */
DEVICE void store_lse(const float (&lse)[2], const params &p, const tile &t, int first_row, int row_block) {
    const int lane = threadIdx.x % 32, row = first_row + lane / 4;
    const int rows_left = lane % 4 == 0 && p.lse ? t.len_q - row : 0;
    const int head = head_of_strip(p, t, row_block, warp_of_group());
    float *dst = p.lse + t.b_idx * p.lse_stride_b + head * p.lse_stride_h + t.lse_origin + row;
    if (rows_left > 0) dst[0] = lse[0] == INF ? p.empty_lse : lse[0];
    if (rows_left > 8) dst[8] = lse[1] == INF ? p.empty_lse : lse[1];
}

#if FLEX_MAX
/* Where max_scores of a row lies. */
DEVICE float *max_score_at(const params &p, const tile &t, int row) {
    return p.flex.max_scores.data + t.b_idx * p.flex.max_scores.stride_b + t.head * p.flex.max_scores.stride_h + row;
}

/* Stores the largest score of each row, in natural units. */
DEVICE void store_max(const online_softmax &softmax, const params &p, const tile &t, int first_row) {
    const int lane = threadIdx.x % 32, row = first_row + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float x = softmax.highest[r];
        x = max_nan(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = max_nan(x, __shfl_xor_sync(0xffffffffu, x, 2));
        if (!FLEX_SCORE) x *= p.score_scale;
        if (x * (float)LOG2_E == -INF) x = -INF; /* as make_infinite */
        if (lane % 4 == 0 && row + 8 * r < t.len_q) *max_score_at(p, t, row + 8 * r) = x;
    }
}
#endif

/* Stores O times factor in 16 bits by TMA, chunk by chunk. Each warp passes its 16 rows through shared memory.
 * o_smem is the place of the first chunk. The next chunk lies O_ROWS rows behind it. */
DEVICE void store_by_tma(const float (&O)[O_REGS], const float (&factor)[2], const params &p, const tile &t,
                         element::output *o_smem, int first_row, int row_block) {
    const int lane = threadIdx.x % 32;
    if (!O_IN_Q) {
        if (elect_one()) cp_async_bulk_wait_all_read(); /* The last tile's store has left o_smem. */
        __syncwarp();
    }
    const u32 matrix_row = lane % 16, swizzle = (O_ROW_BYTES == 128 ? matrix_row : matrix_row / 2) % (O_ROW_BYTES / 16);
#pragma unroll
    for (int g = 0; g < D_V / 16; g++) {
        const int chunk = g * 16 / O_CHUNK;
        const u32 vector = (g * 32 % O_ROW_BYTES / 16 + lane / 16) ^ swizzle;
        const float *x = O + 8 * g;
        stmatrix_x4(smem_address(o_smem) + chunk * O_ROWS * O_ROW_BYTES + matrix_row * O_ROW_BYTES + vector * 16,
                    cvt_x2<element::output>(x[0] * factor[0], x[1] * factor[0]),
                    cvt_x2<element::output>(x[2] * factor[1], x[3] * factor[1]),
                    cvt_x2<element::output>(x[4] * factor[0], x[5] * factor[0]),
                    cvt_x2<element::output>(x[6] * factor[1], x[7] * factor[1]));
    }
    fence_proxy_async();
    __syncwarp();
    if (elect_one()) {
#pragma unroll
        for (int c = 0; c < O_CHUNKS; c++)
            cp_async_bulk_tensor_store(&p.o, o_smem + c * O_ROWS * O_CHUNK, c * O_CHUNK, t.q_origin + first_row,
                                       head_of_strip(p, t, row_block, warp_of_group()), t.q_batch);
        cp_async_bulk_commit_group();
    }
}

/* What the store of a row strip needs besides O. The places are uniform, so that TMA's instruction takes them as they
 * are. */
struct row_ends {
    float factor[2] = {0, 0}; /* NaN if the row's sum or maximum left its range */
    float lse[2] = {0, 0};
    float *lse_dst = nullptr;
    int rows_left = 0; /* of the sequence, from the thread's first row on; 0 if the thread stores no lse */
    int row = 0, head = 0, batch = 0; /* of the strip in the tensor map of O */
    int place = 0;                    /* of O in shared memory, in elements */
};

/* Puts O times factor into shared memory in 16 bits, as store_by_tma does. Says whether the row strip has failed: in
 * 16 bits the check takes half of the instructions. Whole warp. */
DEVICE bool put_checked(const float (&O)[O_REGS], const row_ends &ends, element::output *o_smem) {
    const int lane = threadIdx.x % 32;
    if (!O_IN_Q) {
        if (elect_one()) cp_async_bulk_wait_all_read(); /* The last tile's store has left o_smem. */
        __syncwarp();
    }
    const u32 matrix_row = lane % 16, swizzle = (O_ROW_BYTES == 128 ? matrix_row : matrix_row / 2) % (O_ROW_BYTES / 16);
    u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll
    for (int g = 0; g < D_V / 16; g++) {
        const int chunk = g * 16 / O_CHUNK;
        const u32 vector = (g * 32 % O_ROW_BYTES / 16 + lane / 16) ^ swizzle;
        const float *x = O + 8 * g;
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            packed[i] = cvt_x2<element::output>(x[2 * i] * ends.factor[i % 2], x[2 * i + 1] * ends.factor[i % 2]);
            zeros[i] = zeros_x2<element::output>(packed[i], zeros[i]);
        }
        stmatrix_x4(smem_address(o_smem) + chunk * O_ROWS * O_ROW_BYTES + matrix_row * O_ROW_BYTES + vector * 16,
                    packed[0], packed[1], packed[2], packed[3]);
    }
    fence_proxy_async();
    const bool has_failed = __any_sync(0xffffffffu, ((zeros[0] | zeros[1] | zeros[2] | zeros[3]) & 0x7fff7fff) != 0);
    __syncwarp();
    return uniform(has_failed);
}

/* Stores what put_checked has put into shared memory, and then lse, whose place is known. Whole warp. */
DEVICE void store_put(const row_ends &ends, const params &p, element::output *o_smem) {
    if (elect_one()) {
#pragma unroll
        for (int c = 0; c < O_CHUNKS; c++)
            cp_async_bulk_tensor_store(&p.o, o_smem + c * O_ROWS * O_CHUNK, c * O_CHUNK, ends.row, ends.head,
                                       ends.batch);
        cp_async_bulk_commit_group();
    }
    if (ends.rows_left > 0) ends.lse_dst[0] = ends.lse[0];
    if (ends.rows_left > 8) ends.lse_dst[8] = ends.lse[1];
}

/* Stores O times factor without shared memory, of which none is left above 128 columns. */
DEVICE void store_directly(const float (&O)[O_REGS], const float (&factor)[2], const params &p, const tile &t,
                           int first_row, int row_block) {
    const int head = head_of_strip(p, t, row_block, warp_of_group());
    element::output *base =
        (element::output *)p.o_data + t.b_idx * p.o_stride_b + head * p.o_stride_h + t.lse_origin * p.o_stride_row;
    store_rows(O, factor, base, p.o_stride_row, first_row, t.len_q, p.d_v);
}

/* Stores O times factor of a part, as floats. A quad of lanes writes the 32 bytes of 8 columns. */
DEVICE void store_part(const float (&O)[O_REGS], const float (&factor)[2], const params &p, const tile &t,
                       int first_row, int row_block) {
    const int lane = threadIdx.x % 32, row = first_row + lane / 4;
    const int head = head_of_strip(p, t, row_block, warp_of_group());
    float *dst =
        p.cache.part_o + (t.b_idx * p.lse_stride_b + head * p.lse_stride_h + t.lse_origin + row) * p.d_v + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++, dst += 8 * p.d_v)
        if (row + 8 * r < t.len_q)
#pragma unroll
            for (int g = 0; g < D_V / 8; g++)
                if (8 * g < p.d_v)
                    *(float2 *)(dst + 8 * g) =
                        make_float2(O[4 * g + 2 * r] * factor[r], O[4 * g + 2 * r + 1] * factor[r]);
}

/* Stores the row strip of rows that see no key. O of a part has none. Whole warp. */
DEVICE void store_zeros(const params &p, const tile &t, int first_row, int row_block) {
    const int lane = threadIdx.x % 32, vectors = p.d_v / 8, rows = min(t.len_q - first_row, 16);
    const int head = head_of_strip(p, t, row_block, warp_of_group());
    element::output *o = (element::output *)p.o_data + t.b_idx * p.o_stride_b + head * p.o_stride_h +
                         (t.lse_origin + first_row) * p.o_stride_row;
    for (int i = lane; i < rows * vectors && !is_cut(p); i += 32)
        *(uint4 *)(o + i / vectors * p.o_stride_row + i % vectors * 8) = make_uint4(0, 0, 0, 0);
    if (lane < rows && p.lse)
        p.lse[t.b_idx * p.lse_stride_b + head * p.lse_stride_h + t.lse_origin + first_row + lane] =
            p.sinks.values.data
                ? sink_of_strip(p, t, row_block, warp_of_group()) - shift_of(p, t, row_block, first_row + lane)
                : p.empty_lse;
#if FLEX_MAX
    if (lane < rows) *max_score_at(p, t, first_row + lane) = -INF;
#endif
}

#endif
