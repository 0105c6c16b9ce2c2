/* attn_fwd_short and attn_bwd_short, for a packed sequence that is longer than max_seqlen says and has no room in a
 * unit. Upstream's kernels take such calls, too. Here they are correct and slow: a warp takes one row or one key at a
 * time, and reads each pair's rows from memory. A lane has every 32nd column. */
#ifndef FA_SHORT_LONGER_CUH
#define FA_SHORT_LONGER_CUH

#include "short_units.cuh"

constexpr int LANE_COLUMNS = (HEAD_DIM + 31) / 32;

struct lane_row {
    float x[LANE_COLUMNS];
};

DEVICE lane_row read_row(const void *data, long long offset, int d) {
    lane_row r;
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; c++) {
        const int column = 32 * c + lane();
        r.x[c] = column < d ? cvt_f32(((const factor *)data)[offset + column]) : 0;
    }
    return r;
}

DEVICE void write_row(void *data, long long offset, int d, const lane_row &r, float weight) {
    if (!data) return;
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; c++) {
        const int column = 32 * c + lane();
        if (column < d) ((element::output *)data)[offset + column] = cvt<element::output>(r.x[c] * weight);
    }
}

DEVICE float dot_of(const lane_row &a, const lane_row &b) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; c++) sum += a.x[c] * b.x[c];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, step);
    return sum;
}

DEVICE void add_row(lane_row &sum, float weight, const lane_row &r) {
#pragma unroll
    for (int c = 0; c < LANE_COLUMNS; c++) sum.x[c] += weight * r.x[c];
}

/* Does dropout keep the pair? dropout::kept_rows_are_queries says which byte of which lane belongs to it. */
DEVICE bool keeps_pair(const fa_cuda_problem &p, const unit_place &at, int i, int j) {
    const dropout drop(p, at.s.b_idx, at.head);
    u32 words[4];
    drop.draw(words, i / 16, j / 32, i % 8 * 4 + j % 8 / 2);
    const int n = j % 32 / 8;
    return drop.keeps(n == 0 ? words[0] : n == 1 ? words[1] : n == 2 ? words[2] : words[3], i % 16 / 8 * 2 + j % 2);
}

#endif
