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
 * Units do not wait for each other, and other CTAs of the SM load meanwhile. Memory binds. With VARLEN rows are packed,
 * [row, h, d]. A packed sequence may be longer than max_seqlen said, and then takes its own way (short_longer.cuh).
 *
 * With FLEX a user's functions change the scores and hide pairs, as attn_bias and attn_mask do (short_mods.cuh).
 *
 * Masked pairs are left out and never multiplied by zero: a V with NaN or inf that some row does not see goes through
 * FMAs that skip masked pairs.
 *
 * Specification: ../cpu/reference.c. Design and measurements: short.md. */
#ifndef KERNEL
#define KERNEL attn_fwd_short
#endif

#include "short_units.cuh"
#include "short_mods.cuh"
#include "softmax_any.cuh"
#include "quads.cuh"
#include "sinks.cuh"
#include "short_longer.cuh"

struct unit_memory {
    factor q[UNIT_ROWS * PITCH], k[UNIT_ROWS * PITCH], v[UNIT_ROWS * PITCH];
};

/* What a warp knows of its 16 rows. */
struct warp_rows {
    row_state state[1][2];
    float o[1][COLUMNS][4]; /* not normalised */
};

/* What makes natural scores of those that the softmax gets. The exponent scales plain scores. */
DEVICE float scale_of(const fa_cuda_problem &p) { return SCORE || MODS_CHANGE_SCORES ? 1 : p.scale; }

/* The products and the softmax of the rows from `row` on. */
DEVICE void make_rows(warp_rows &x, const problem &p, const unit_memory &unit, const unit_place &at, int row,
                      bool is_masked, bool is_exact, pair_values &pairs) {
    const float scale = scale_of(p);
    float scores[1][N][4];
    u32 seen[1] = {~0u};
    x.state[0][0] = x.state[0][1] = {-INF, 0};
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) x.o[0][c][0] = x.o[0][c][1] = x.o[0][c][2] = x.o[0][c][3] = 0;
    multiply_rows(scores, unit.q + row * PITCH, unit.k);
    if (SCORE) change_scores(p, at.s, at.head, scores[0], row, 0);
#if FLEX
    pairs.change_scores(scores[0]);
    seen[0] = pairs.seen, is_exact = is_exact && pairs.hides();
#else
    if (is_masked) seen[0] = mask_scores(p, at.s, scores[0], row, 0);
#endif
    softmax_step(scores, x.o, x.state, scale * LOG2_E);
    if (DROPOUT) drop_scores(p, at.s, at.head, scores[0], row, 0);
    if (is_exact)
        accumulate_by_fma<false>(x.o, scores, unit.v, seen);
    else
        accumulate(x.o, scores, unit.v);
}

/* How row i ends: its lse, and the factor of its O. */
struct row_result {
    float lse, weight;
    bool is_empty;
};
DEVICE row_result end_row(const fa_cuda_problem &p, const unit_place &at, int i, row_state state, float sum) {
    const float scale = scale_of(p);
    row_result r = {lse_of(state, sum, scale), p.keep_scale / sum, saw_nothing(state, sum, scale)};
    if (p.sinks.values.data) {
        const int row = min(i, at.s.len_q - 1);
        const float sink = FLEX ? sink_of_row(p.sinks.values, p.sinks.shift, at.s.b_idx, at.head, row)
                                : sink_of(p.sinks.values, at.head);
        const row_with_sink with = add_sink(r.lse, sink);
        r.lse = with.lse, r.weight *= with.share;
    } else if (r.is_empty) {
        r.lse = p.empty_lse;
    }
    if (r.is_empty) r.weight = 0;
    return r;
}

/* Stores O and lse of the rows from `row` on. */
DEVICE void finish_rows(warp_rows &x, const fa_cuda_problem &p, const unit_place &at, int row) {
    float weights[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        const row_result end = end_row(p, at, i, x.state[0][half], quad_sum(x.state[0][half].sum));
        weights[half] = end.weight;
        if (end.is_empty)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) x.o[0][c][2 * half] = x.o[0][c][2 * half + 1] = 0;
        if (i < at.s.len_q && lane() % 4 == 0) *row_stat(p.lse, at.s, i, at.head) = end.lse;
    }
    store_rows((const float (&)[4 * COLUMNS]) x.o[0], weights,
               (element::output *)p.o.data + query_offset(p.o, at.s, 0, at.head), p.o.stride_row, row, at.s.len_q, p.d);
}

/* O and lse of the unit's head, of a sequence that is longer than max_seqlen (short_longer.cuh). */
DEVICE void attend_long(const fa_cuda_problem &p, const unit_place &at) {
    const sequence &s = at.s;
    const int head_kv = at.head / (p.h / p.h_kv);
    const float factor = (SCORE ? 1 : p.scale) * LOG2_E;
    const scorer score(p, s, at.head);
#pragma unroll 1
    for (int i = first_row_of_warp() / 16; i < s.len_q; i += UNIT_WARPS) {
        const lane_row q = read_row(p.q.data, query_offset(p.q, s, i, at.head), p.d);
        const interval keys = {first_key_of_window(p, s, i), end_key_of_window(p, s, i)};
        const auto score_of = [&](int j) {
            const float qk = dot_of(q, read_row(p.k.data, key_offset(p, p.k, s, j, head_kv), p.d));
            float unused;
            return SCORE ? score(qk, i, j, unused) : qk;
        };
        row_state state = {-INF, 0};
        lane_row o = {};
#pragma unroll 1
        for (int j = keys.begin; j < keys.end; j++) state.max = fmaxf(state.max, score_of(j));
        const float found = base_of(state.max, factor), base = found == -INF ? 0 : found;
#pragma unroll 1
        for (int j = keys.begin; j < keys.end; j++) {
            const float prob = ex2(__fmul_rn(score_of(j), factor) - base - IN_EXPONENT);
            state.sum += prob;
            const float kept = !DROPOUT || keeps_pair(p, at, i, j) ? prob : 0;
            add_row(o, kept, read_row(p.v.data, key_offset(p, p.v, s, j, head_kv), p.d));
        }
        const row_result end = end_row(p, at, i, state, state.sum);
        if (end.is_empty) o = {};
        write_row(p.o.data, query_offset(p.o, s, i, at.head), p.d, o, end.weight);
        if (lane() == 0) *row_stat(p.lse, s, i, at.head) = end.lse;
    }
}

/* Packed rows behind the last sequence: the lse becomes -inf, and o zero if zero_tensors is set. */
DEVICE void fill_unowned_rows(const fa_cuda_problem &p, const unit_place &at) {
    fill_unowned_stats(p, p.lse, at, p.total_q, -INF);
    if (!VARLEN || !p.zero_tensors || left_of_lane() >= p.d) return;
    constexpr long long ROWS = UNIT_WARPS * STEP; /* that a unit clears at a time */
    const int first = clamp(p.cu_seqlens_q[p.b], 0, p.total_q), own = first_row_of_warp() / 16 * STEP + top_of_lane();
    element::output *o = (element::output *)p.o.data + at.head * p.o.stride_h + left_of_lane();
    for (long long i = first + at.s.b_idx * ROWS + own; i < p.total_q; i += p.b * ROWS)
        *(uint4 *)(o + i * p.o.stride_row) = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL(const problem p) {
    extern __shared__ __align__(16) char memory[];
    unit_memory &unit = ((unit_memory *)memory)[unit_of_warp()];
    const long long idx = (long long)blockIdx.x * UNITS + unit_of_warp();
    if (idx >= (long long)p.b * p.h) return;
    const unit_place at = unit_at(p, idx);
    const sequence &s = at.s;
    const int head_kv = at.head / (p.h / p.h_kv), row = first_row_of_warp();
    if (is_long(s)) {
        attend_long(p, at);
        fill_unowned_rows(p, at);
        return;
    }
    load_own_rows(unit.q, (const factor *)p.q.data + query_offset(p.q, s, 0, at.head), p.q.stride_row, s.len_q, p.d);
    load_own_rows(unit.k, (const factor *)p.k.data + key_offset(p, p.k, s, 0, head_kv), p.k.stride_row, s.len_kv, p.d);
    load_own_rows(unit.v, (const factor *)p.v.data + key_offset(p, p.v, s, 0, head_kv), p.v.stride_row, s.len_kv, p.d);
    fill_unowned_rows(p, at);
    pair_values pairs(p, at, row);

    const tile_walk keys = keys_of(p, s, 0, s.len_q - 1);
    const bool hides = FLEX || keys.full_begin > 0 || keys.full_end < s.len_kv,
               is_masked = hides || s.len_kv < UNIT_ROWS;
    cp_async_wait_all();
    const bool is_exact = any_in_unit(hides && own_has_nan_or_inf(unit.v));
    if (row < s.len_q) {
        warp_rows x;
        make_rows(x, p, unit, at, row, is_masked, is_exact, pairs);
        finish_rows(x, p, at, row);
    }
}
