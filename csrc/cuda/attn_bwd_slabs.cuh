/* Where the backward kernels keep what belongs to BLOCK_Q query rows of one head: slabs, numbered per head. A packed
 * sequence has whole slabs of its own. */
#ifndef FA_ATTN_BWD_SLABS_CUH
#define FA_ATTN_BWD_SLABS_CUH

#include "attn_bwd_params.h"
#include "packed.cuh"
#include "ptx_sm90.cuh"
#include "quads.cuh"

constexpr bool WIDE = HEAD_DIM > 128; /* the rows of attn_bwd_wide_sm90 */

/* Columns come in chunks, whole ones in shared memory: beyond the heads' they are zero, or are not written. */
constexpr int CHUNK = 64, CHUNKS = (HEAD_DIM + CHUNK - 1) / CHUNK, COLUMNS = CHUNKS * CHUNK;
static_assert(HEAD_DIM % 32 == 0, "lanes store 16 bytes each");

/* dQ of a slab is summed by two warpgroups. 128 rows: each has 64 of them. 64 rows: each has half of the columns. */
constexpr int DQ_COLUMNS = COLUMNS * BLOCK_Q / 128, DQ_REGS = DQ_COLUMNS / 2, DQ_FLOATS = 64 * DQ_COLUMNS;
constexpr int SLAB_FLOATS =
    BLOCK_Q * HEAD_DIM; /* sums of a slab: DQ_FLOATS of the first warpgroup, the rest the second's */
DEVICE constexpr int dq_row(int wg) { return BLOCK_Q == 128 ? 64 * wg : 0; }
DEVICE constexpr int dq_column(int wg) { return BLOCK_Q == 128 ? 0 : DQ_COLUMNS * wg; }

/* Where row i of 16 lies among the statistics of 16 rows: the four that one lane of a quad needs are neighbours. */
DEVICE constexpr int stat_place(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

/* The key tiles that see rows of query tile i. A window of -1 is unlimited. */
struct kv_range {
    int begin, end;
};
DEVICE kv_range key_tiles_of(const fa_attn_bwd_params &p, int len_q, int len_kv, int i) {
    const int shift = len_kv - len_q, first_row = i * BLOCK_Q, last_row = min(first_row + BLOCK_Q, len_q) - 1;
    const int begin = p.window_left >= 0 ? clamp(first_row + shift - p.window_left, 0, len_kv) : 0;
    const int end = p.window_right >= 0 ? clamp(last_row + shift + p.window_right + 1, 0, len_kv) : len_kv;
    return {begin / BLOCK_KV, begin < end ? ceil_div(end, BLOCK_KV) : begin / BLOCK_KV};
}

/* A packed sequence's first slab: floor((begin + len) / n) + 1 >= floor(begin / n) + ceil(len / n), so that none meets
 * the next one's. */
DEVICE int slab_begin(const fa_attn_bwd_params &p, int b_idx) {
    return clamp(p.cu_seqlens_q[b_idx], 0, p.len_q) / BLOCK_Q + b_idx;
}

/* The rows of a slab. */
struct slab_rows {
    int b_idx, head;
    int row;   /* first one, in its sequence */
    int begin; /* of the sequence in a packed tensor */
    int rows;  /* up to BLOCK_Q; 0 or less: none */
};
DEVICE slab_rows slab_at(const fa_attn_bwd_params &p, int slab) {
    slab_rows t;
    const int head = slab / p.num_slabs, in_head = slab - head * p.num_slabs;
    if (VARLEN) {
        int low = 0, high = p.b - 1; /* the last sequence that begins at or before the slab */
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (slab_begin(p, middle) <= in_head)
                low = middle;
            else
                high = middle - 1;
        }
        const span q = span_at(p.cu_seqlens_q, low, p.len_q);
        t.b_idx = low, t.head = head, t.begin = q.begin;
        t.row = (in_head - slab_begin(p, low)) * BLOCK_Q;
        t.rows = t.row < 0 ? 0 : min(q.len - t.row, BLOCK_Q);
    } else {
        t.b_idx = head / p.h, t.head = head - t.b_idx * p.h, t.begin = 0;
        t.row = in_head * BLOCK_Q;
        t.rows = min(p.len_q - t.row, BLOCK_Q);
    }
    return t;
}

/* dQ = scale times the sums, in 16 bits: what lay in the registers of `thread`, one of a warpgroup's 128. When the four
 * lanes of a quad have exchanged their columns, each has 16 bytes of a row. Whole warp. */
DEVICE void convert_dq(const fa_attn_bwd_params &p, const slab_rows &t, const float *sums, int wg, int thread) {
    const int lane = thread % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = dq_row(wg) + 16 * (thread / 32) + lane / 4 + 8 * r;
        u16 *dst = (u16 *)p.dq.data + t.b_idx * p.dq.stride_b + t.head * p.dq.stride_h +
                   (long long)(t.begin + t.row + row) * p.dq.stride_row;
#pragma unroll
        for (int g = 0; g < DQ_COLUMNS / 32; g++) {
            const int column = dq_column(wg) + 32 * g + 8 * (lane % 4);
            u32 packed[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 x = *(const float2 *)(sums + ((4 * g + k) * 128 + thread) * 4 + 2 * r);
                packed[k] = cvt_x2<BF16>(x.x * p.scale, x.y * p.scale);
            }
            transpose_in_quad(packed);
            if (row < t.rows && column < p.d)
                *(uint4 *)(dst + column) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

#endif
