/* attn_bwd_short, for a packed sequence that is longer than max_seqlen says and has no room in a unit. Upstream's kernels
 * take such calls, too. Here they are correct and slow: a warp takes one row or one key at a time, and reads each pair's
 * rows from memory. A lane has every 32nd column. */
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

/* A query, with the keys that it sees. lse: in powers of 2. */
struct long_query {
    lane_row q, dout;
    interval keys;
    float lse, delta;
};

DEVICE long_query query_at(const fa_cuda_problem &p, const unit_place &at, int i) {
    const sequence &s = at.s;
    const auto row = [&](const fa_cuda_view &x) { return read_row(x.data, query_offset(x, s, i, at.head), p.d); };
    long_query r = {row(p.q), row(p.dout), {first_key_of_window(p, s, i), end_key_of_window(p, s, i)}, 0, 0};
    const float lse = *row_stat(p.lse, s, i, at.head);
    if (fabsf(lse) == INF) r.keys.end = r.keys.begin; /* it saw only scores of -inf */
    r.lse = lse * LOG2_E;
    if (r.keys.begin < r.keys.end) r.delta = dot_of(r.dout, row(p.o));
    return r;
}

/* Does dropout keep the pair? dropout::kept_rows_are_queries says which byte of which lane belongs to it. */
DEVICE bool keeps_pair(const fa_cuda_problem &p, const unit_place &at, int i, int j) {
    const dropout drop(p, at.s.b_idx, at.head);
    u32 words[4];
    drop.draw(words, i / 16, j / 32, i % 8 * 4 + j % 8 / 2);
    const int n = j % 32 / 8;
    return drop.keeps(n == 0 ? words[0] : n == 1 ? words[1] : n == 2 ? words[2] : words[3], i % 16 / 8 * 2 + j % 2);
}

/* z P and dS of a pair that sees each other. */
DEVICE float2 weights_of(const fa_cuda_problem &p, const unit_place &at, const long_query &query, int i, int j,
                         const lane_row &k, const lane_row &v) {
    float y = dot_of(query.q, k), derivative = 1;
    if (SCORE) y = scorer(p, at.s, at.head)(y, i, j, derivative);
    const float prob = ex2(fmaf(y, (SCORE ? 1 : p.scale) * LOG2_E, -query.lse));
    const float z = !DROPOUT ? 1 : keeps_pair(p, at, i, j) ? p.keep_scale : 0;
    return {prob * z, prob * (z * dot_of(query.dout, v) - query.delta) * derivative};
}

/* dQ, dK, dV and delta of the unit's head. */
DEVICE void make_long_gradients(const fa_cuda_problem &p, const unit_place &at) {
    const sequence &s = at.s;
    const int own = first_row_of_warp() / 16;
    const auto key_row = [&](const fa_cuda_view &x, int j) {
        return read_row(x.data, key_offset(p, x, s, j, at.head), p.d);
    };
#pragma unroll 1
    for (int i = own; i < s.len_q; i += UNIT_WARPS) {
        const long_query query = query_at(p, at, i);
        lane_row dq = {};
#pragma unroll 1
        for (int j = query.keys.begin; j < query.keys.end; j++) {
            const lane_row k = key_row(p.k, j);
            add_row(dq, weights_of(p, at, query, i, j, k, key_row(p.v, j)).y, k);
        }
        write_row(p.dq.data, query_offset(p.dq, s, i, at.head), p.d, dq, p.scale);
        if (lane() == 0) *row_stat(p.softmax_d, s, i, at.head) = query.delta;
    }
#pragma unroll 1
    for (int j = own; j < s.len_kv; j += UNIT_WARPS) {
        const lane_row k = key_row(p.k, j), v = key_row(p.v, j);
        lane_row dk = {}, dv = {};
#pragma unroll 1
        for (int i = 0; i < s.len_q; i++) {
            const long_query query = query_at(p, at, i);
            if (j < query.keys.begin || j >= query.keys.end) continue;
            const float2 weights = weights_of(p, at, query, i, j, k, v);
            add_row(dv, weights.x, query.dout);
            add_row(dk, weights.y, query.q);
        }
        write_row(p.dk.data, key_offset(p, p.dk, s, j, at.head), p.d, dk, p.scale);
        write_row(p.dv.data, key_offset(p, p.dv, s, j, at.head), p.d, dv, 1);
    }
}

#endif
