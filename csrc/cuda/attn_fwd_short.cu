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

/* Computes O and lse of the warp's rows, from `row` on. */
DEVICE void attend(const fa_cuda_problem &p, const unit_memory &unit, const sequence &s, int head, int row,
                   bool is_masked, bool is_exact) {
    const scorer score(p, s, head);
    const float scale = SCORE ? 1 : p.scale; /* the exponent scales plain scores */
    row_state rows[1][2] = {{{-INF, 0}, {-INF, 0}}};
    float scores[1][N][4], o[1][COLUMNS][4] = {};
    u32 seen[1] = {~0u};
    multiply_rows(scores, unit.q + row * PITCH, unit.k);
    if (SCORE) change_scores(p, s, head, scores[0], row, 0);
    if (is_masked) seen[0] = mask_scores(p, s, scores[0], row, 0);
    softmax_step(scores, o, rows, scale * LOG2_E);
    if (DROPOUT) drop_scores(p, s, head, scores[0], row, 0);
    if (is_exact)
        accumulate_by_fma<false>(o, scores, unit.v, seen);
    else
        accumulate(o, scores, unit.v);

    float weights[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        const row_state x = rows[0][half];
        const float sum = quad_sum(x.sum);
        const bool is_empty = saw_nothing(x, sum, scale);
        float lse = lse_of(x, sum, scale);
        weights[half] = p.keep_scale / sum;
        if (p.sinks.values.data) {
            const row_with_sink with = add_sink(lse, sink_of(p.sinks.values, head));
            lse = with.lse, weights[half] *= with.share;
        } else if (is_empty) {
            lse = p.empty_lse;
        }
        if (is_empty) {
            weights[half] = 0;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) o[0][c][2 * half] = o[0][c][2 * half + 1] = 0;
        }
        if (i < s.len_q && lane() % 4 == 0) *row_stat(p.lse, s, i, head) = lse;
    }
    store_rows((const float (&)[4 * COLUMNS]) o[0], weights,
               (element::output *)p.o.data + query_offset(p.o, s, 0, head), p.o.stride_row, row, s.len_q, p.d);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const fa_cuda_problem p) {
    extern __shared__ __align__(16) char memory[];
    unit_memory &unit = ((unit_memory *)memory)[unit_of_warp()];
    const long long idx = (long long)blockIdx.x * UNITS + unit_of_warp();
    if (idx >= (long long)p.b * p.h) return;
    const auto [b_idx, head] = unit_at(p, idx);
    const sequence s = {b_idx, 0, p.len_q, p.len_kv, b_idx, 0, p.len_kv, nullptr};
    const int head_kv = head / (p.h / p.h_kv), row = first_row_of_warp();
    load_own_rows(unit.q, (const factor *)p.q.data + query_offset(p.q, s, 0, head), p.q.stride_row, s.len_q, p.d);
    load_own_rows(unit.k, (const factor *)p.k.data + key_offset(p, p.k, s, 0, head_kv), p.k.stride_row, s.len_kv, p.d);
    load_own_rows(unit.v, (const factor *)p.v.data + key_offset(p, p.v, s, 0, head_kv), p.v.stride_row, s.len_kv, p.d);

    const tile_walk keys = keys_of(p, s, 0, s.len_q - 1);
    const bool hides = keys.full_begin > 0 || keys.full_end < s.len_kv, is_masked = hides || s.len_kv < UNIT_ROWS;
    cp_async_wait_all();
    const bool is_exact = any_in_unit(hides && own_has_nan_or_inf(unit.v));
    if (row < s.len_q) attend(p, unit, s, head, row, is_masked, is_exact);
}
