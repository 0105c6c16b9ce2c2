/* Where the backward kernels keep what belongs to BLOCK_Q query rows of one head: slabs, numbered per head. A packed
 * sequence has whole slabs of its own. */
#ifndef FA_ATTN_BWD_SLABS_CUH
#define FA_ATTN_BWD_SLABS_CUH

#include "attn_bwd_params.h"
#include "ptx_sm90.cuh"

/* dQ of a slab is summed by two warpgroups. 128 rows: each has 64 of them. 64 rows: each has half of the columns. */
constexpr int DQ_COLUMNS = HEAD_DIM * BLOCK_Q / 128, DQ_REGS = DQ_COLUMNS / 2, DQ_FLOATS = 64 * DQ_COLUMNS;
DEVICE constexpr int dq_row(int wg) { return BLOCK_Q == 128 ? 64 * wg : 0; }
DEVICE constexpr int dq_column(int wg) { return BLOCK_Q == 128 ? 0 : DQ_COLUMNS * wg; }

/* Where row i of 16 lies among the statistics of 16 rows: the four that one lane of a quad needs are neighbours. */
DEVICE constexpr int stat_place(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

DEVICE int ceil_div(int x, int y) { return (x + y - 1) / y; }
DEVICE int clamp(int x, int low, int high) { return min(max(x, low), high); }

/* One packed sequence. Offsets are clamped: whatever the arrays hold, nothing outside the tensors is touched. */
struct span {
    int begin, len;
};
DEVICE span span_at(const int *cu_seqlens, int b_idx, int total) {
    int begin = clamp(cu_seqlens[b_idx], 0, total);
    return {begin, clamp(cu_seqlens[b_idx + 1], begin, total) - begin};
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

#endif
