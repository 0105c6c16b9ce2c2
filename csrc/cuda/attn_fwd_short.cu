/* Attention forward of short sequences:  O = softmax(scale Q K^T + mask) V,  lse = log-sum-exp of each row
 *
 *   q, o [b, len_q, h, d]    k, v [b, len_kv, h_kv, d]    lse [b, h, len_q] float    lengths of at most UNIT_ROWS
 *
 * Images in windows, frames at each place of a video, and rows of a table give thousands of such sequences. Kernels
 * with large tiles leave most of a tile empty for each of them, and many SMs wait for one work tile's loads. Here a
 * unit of 1, 2 or 4 warps takes one head of one sequence (short_units.cuh), so everything happens once:
 *
 *   load Q, K, V | wait | S = Q K^T | softmax | O = P V | store
 *
 * Units do not wait for each other, and other CTAs of the SM load meanwhile. Memory binds.
 *
 * Masked pairs are left out and never multiplied by zero: a V with NaN or inf that some row does not see goes through
 * FMAs that skip masked pairs.
 *
 * Specification: ../cpu/reference.c. Design and measurements: short.md. */
#ifndef KERNEL
#define KERNEL attn_fwd_short
#endif

#include "short_units.cuh"
#include "softmax_any.cuh"
#include "quads.cuh"
#include "sinks.cuh"

struct unit_memory {
    factor q[UNIT_ROWS * PITCH], k[UNIT_ROWS * PITCH], v[UNIT_ROWS * PITCH];
};

/* What a warp knows of its 16 rows. */
struct warp_rows {
    row_state state[1][2];
    float o[1][COLUMNS][4]; /* not normalised */
};

DEVICE void clear(warp_rows &x) {
    x.state[0][0] = x.state[0][1] = {-INF, 0};
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) x.o[0][c][0] = x.o[0][c][1] = x.o[0][c][2] = x.o[0][c][3] = 0;
}

/* Adds the tile of keys from `first` on to the rows from `row` on. q: these rows in shared memory. */
DEVICE void add_keys(warp_rows &x, const fa_cuda_problem &p, const unit_memory &unit, const unit_place &at,
                     const factor *q, int row, int first, bool is_masked, bool is_exact) {
    const float scale = SCORE ? 1 : p.scale; /* the exponent scales plain scores */
    float scores[1][N][4];
    u32 seen[1] = {~0u};
    multiply_rows(scores, q, unit.k);
    if (SCORE) change_scores(p, at.s, at.head, scores[0], row, first);
    if (is_masked) seen[0] = mask_scores(p, at.s, scores[0], row, first);
    softmax_step(scores, x.o, x.state, scale * LOG2_E);
    if (DROPOUT) drop_scores(p, at.s, at.head, scores[0], row, first);
    if (is_exact)
        accumulate_by_fma<false>(x.o, scores, unit.v, seen);
    else
        accumulate(x.o, scores, unit.v);
}

/* Stores O and lse of the rows from `row` on. */
DEVICE void finish_rows(warp_rows &x, const fa_cuda_problem &p, const unit_place &at, int row) {
    const float scale = SCORE ? 1 : p.scale;
    float weights[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        const row_state state = x.state[0][half];
        const float sum = quad_sum(state.sum);
        const bool is_empty = saw_nothing(state, sum, scale);
        float lse = lse_of(state, sum, scale);
        weights[half] = p.keep_scale / sum;
        if (p.sinks.values.data) {
            const row_with_sink with = add_sink(lse, sink_of(p.sinks.values, at.head));
            lse = with.lse, weights[half] *= with.share;
        } else if (is_empty) {
            lse = p.empty_lse;
        }
        if (is_empty) {
            weights[half] = 0;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) x.o[0][c][2 * half] = x.o[0][c][2 * half + 1] = 0;
        }
        if (i < at.s.len_q && lane() % 4 == 0) *row_stat(p.lse, at.s, i, at.head) = lse;
    }
    store_rows((const float (&)[4 * COLUMNS]) x.o[0], weights,
               (element::output *)p.o.data + query_offset(p.o, at.s, 0, at.head), p.o.stride_row, row, at.s.len_q, p.d);
}

DEVICE void load_queries(const fa_cuda_problem &p, unit_memory &unit, const unit_place &at, int top) {
    load_own_rows(unit.q, (const factor *)p.q.data + query_offset(p.q, at.s, top, at.head), p.q.stride_row,
                  at.s.len_q - top, p.d);
}

DEVICE void load_keys(const fa_cuda_problem &p, unit_memory &unit, const unit_place &at, int first) {
    const int head_kv = at.head / (p.h / p.h_kv), num = at.s.len_kv - first;
    load_own_rows(unit.k, (const factor *)p.k.data + key_offset(p, p.k, at.s, first, head_kv), p.k.stride_row, num,
                  p.d);
    load_own_rows(unit.v, (const factor *)p.v.data + key_offset(p, p.v, at.s, first, head_kv), p.v.stride_row, num,
                  p.d);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const fa_cuda_problem p) {
    extern __shared__ __align__(16) char memory[];
    unit_memory &unit = ((unit_memory *)memory)[unit_of_warp()];
    const long long idx = (long long)blockIdx.x * UNITS + unit_of_warp();
    if (idx >= (long long)p.b * p.h) return;
    const unit_place at = unit_at(p, idx);
    const sequence &s = at.s;
    const int own = first_row_of_warp();
    fill_unowned_stats(p, p.lse, at, p.total_q, -INF);

    /* One tile of queries and one of keys, unless a packed sequence is longer than max_seqlen. */
#pragma unroll 1
    for (int top = 0; top < (VARLEN ? s.len_q : 1); top += UNIT_ROWS) {
        const int row = top + own;
        warp_rows x;
        clear(x);
        load_queries(p, unit, at, top);
#pragma unroll 1
        for (int first = 0; first < (VARLEN ? max(s.len_kv, 1) : 1); first += UNIT_ROWS) {
            load_keys(p, unit, at, first);
            const int last_row = (VARLEN ? min(top + UNIT_ROWS, s.len_q) : s.len_q) - 1;
            const tile_walk keys = keys_of(p, s, top, last_row);
            const bool hides =
                keys.full_begin > first || keys.full_end < (VARLEN ? min(first + UNIT_ROWS, s.len_kv) : s.len_kv);
            const bool is_masked = hides || s.len_kv < first + UNIT_ROWS;
            cp_async_wait_all();
            const bool is_exact = any_in_unit(hides && own_has_nan_or_inf(unit.v));
            if (row < s.len_q) add_keys(x, p, unit, at, unit.q + own * PITCH, row, first, is_masked, is_exact);
            if (VARLEN) meet_in_unit(); /* all have read the tiles */
        }
        if (row < s.len_q) finish_rows(x, p, at, row);
    }
}
