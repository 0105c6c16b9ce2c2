/* The end of a tile of attn_fwd_sm90.cu: O and the running softmax of a warp's 16 rows become o and lse. */
#ifndef FA_ATTN_FWD_OUTPUT_CUH
#define FA_ATTN_FWD_OUTPUT_CUH

#include "attn_fwd_softmax.cuh"
#include "quads.cuh"

/* lse of both rows, and what O is multiplied by; a row that saw no key gets +inf and 0. */
DEVICE void finish_rows(const softmax_rows &rows, const params &p, const tile &t, int row, float (&factor)[2],
                        float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        factor[r] = sum == 0 ? 0 : __fdividef(p.keep_scale, sum);
        lse[r] = sum == 0 ? INF : (rows.max_log2[r] + __log2f(sum)) * LN_2;
    }
}

/* NOTE: after O. The fence before O's store by TMA would wait until lse has arrived. */
DEVICE void store_lse(const float (&lse)[2], const params &p, const tile &t, int row) {
    const int lane = threadIdx.x % 32, i = row + lane / 4, left = lane % 4 == 0 ? t.len_q - i : 0;
    float *dst = p.lse + t.b_idx * p.lse_stride_b + t.head * p.lse_stride_h + t.lse_row + i;
    if (left > 0) dst[0] = lse[0];
    if (left > 8) dst[8] = lse[1];
}

/* o times factor in 16 bits, through shared memory: each warp stores its own 16 rows, chunk by chunk, by TMA. o_smem: the
 * first chunk, from which the next is O_ROWS rows away. */
DEVICE void store_by_tma(const float (&o)[O_REGS], const float (&factor)[2], const params &p, const tile &t,
                         u16 *o_smem, int row) {
    const int lane = threadIdx.x % 32;
    if (!O_IN_Q) {
        if (lane == 0) cp_async_bulk_wait_all_read(); /* the last tile's store has left o_smem */
        __syncwarp();
    }
    const u32 matrix_row = lane % 16, swizzle = (ROW_BYTES == 128 ? matrix_row : matrix_row / 2) % (ROW_BYTES / 16);
#pragma unroll
    for (int g = 0; g < HEAD_DIM / 16; g++) {
        const int chunk = g * 16 / CHUNK;
        const u32 piece = (g * 32 % ROW_BYTES / 16 + lane / 16) ^ swizzle;
        const float *x = o + 8 * g;
        stmatrix_x4(smem_address(o_smem) + chunk * O_ROWS * ROW_BYTES + matrix_row * ROW_BYTES + piece * 16,
                    cvt_x2<BF16>(x[0] * factor[0], x[1] * factor[0]), cvt_x2<BF16>(x[2] * factor[1], x[3] * factor[1]),
                    cvt_x2<BF16>(x[4] * factor[0], x[5] * factor[0]), cvt_x2<BF16>(x[6] * factor[1], x[7] * factor[1]));
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            cp_async_bulk_tensor_store(&p.o, o_smem + c * O_ROWS * CHUNK, c * CHUNK, t.row_0 + row, t.head, t.batch);
        cp_async_bulk_commit_group();
    }
}

/* The same without shared memory, where none is left. */
DEVICE void store_directly(const float (&o)[O_REGS], const float (&factor)[2], const params &p, const tile &t,
                           int row) {
    u16 *base = (u16 *)p.o_data + t.b_idx * p.o_stride_b + t.head * p.o_stride_h + t.lse_row * p.o_stride_row;
    store_rows(o, factor, base, p.o_stride_row, row, t.len_q, p.d);
}

/* Rows that see no key. Whole warp: 16 rows from `row` on. */
DEVICE void store_zeros(const params &p, const tile &t, int row) {
    const int lane = threadIdx.x % 32, pieces = p.d / 8, rows = min(t.len_q - row, 16);
    u16 *o = (u16 *)p.o_data + t.b_idx * p.o_stride_b + t.head * p.o_stride_h + (t.lse_row + row) * p.o_stride_row;
    for (int i = lane; i < rows * pieces; i += 32)
        *(uint4 *)(o + i / pieces * p.o_stride_row + i % pieces * 8) = make_uint4(0, 0, 0, 0);
    if (lane < rows) p.lse[t.b_idx * p.lse_stride_b + t.head * p.lse_stride_h + t.lse_row + row + lane] = INF;
}

#endif
