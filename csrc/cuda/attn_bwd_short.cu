/* Attention backward of short sequences, as attn_fwd_short.cu has it:
 *
 *   P_ij = exp(s_ij - lse_i)    dP = dO V^T    dS = P (z dP - delta) ds/dqk    delta = rowsum(dO O)    z: dropout
 *   dQ = scale dS K             dK = scale dS^T Q             dV = (z P)^T dO
 *
 *   q, o, dO, dQ [b, len_q, h, d]    k, v, dK, dV [b, len_kv, h, d]    lse, delta [b, h, len_q] float
 *
 * A unit of 1, 2 or 4 warps takes one head of one sequence (short_units.cuh). It has all queries and all keys of the
 * head, so no sum passes through memory, and no kernel runs before or after. Each warp makes P and dS of its 16
 * queries, and dQ of them. Through shared memory P and dS reach the warps that have their keys:
 *
 *   load Q, K, V, dO, O | delta | wait | S = Q K^T | dP = dO V^T | P, dS | store P, dS | dQ | wait | dV | dK
 *
 * Every key head has one query head. Memory binds. With VARLEN rows are packed, [row, h, d]. A packed sequence may be
 * longer than max_seqlen said. It then takes its own way (short_longer.cuh), or is left to attn_bwd_sm90 (leaves_long).
 *
 * With FLEX a user's functions change the scores, hide pairs, and give gradients to what they capture (short_mods.cuh).
 * Then a unit takes several sequences of its head, one after the other, and adds up the gradients that they share.
 *
 * Pairs that do not see each other, and rows that saw no key, are left out and never multiplied by zero: beside NaN or
 * inf all products go through FMAs that skip such pairs.
 *
 * Specification: ../cpu/reference.c. Design and measurements: short.md. */
#ifndef KERNEL
#define KERNEL attn_bwd_short
#endif

#include "short_units.cuh"
#include "short_mods.cuh"
#include "dot.cuh"
#include "quads.cuh"
#include "short_longer.cuh"

constexpr int MIN_CTAS = FLEX && CTAS > 2 ? CTAS - 1 : CTAS; /* functions and their sums need registers */
constexpr int WEIGHTS_PITCH = UNIT_ROWS + 8;                 /* like PITCH */

struct unit_memory {
    factor q[UNIT_ROWS * PITCH], k[UNIT_ROWS * PITCH], v[UNIT_ROWS * PITCH], dout[UNIT_ROWS * PITCH];
    factor p[UNIT_ROWS * WEIGHTS_PITCH], ds[UNIT_ROWS * WEIGHTS_PITCH]; /* [query, key] */
};

/* ---- delta ----------------------------------------------------------------------------------------------------- */

/* The lane's own pieces of O, as load_own_rows copies those of other tensors. */
DEVICE void read_own_rows(uint4 (&pieces)[OWN_PIECES], const factor *rows, const long long &stride, int num_rows,
                          int columns) {
    const int top = first_row_of_warp() + top_of_lane(), left = left_of_lane();
    const int num_own = left < columns ? num_rows - top : 0;
#pragma unroll
    for (int i = 0; i < OWN_PIECES; i++)
        pieces[i] =
            i * STEP < num_own ? *(const uint4 *)(rows + (top + i * STEP) * stride + left) : make_uint4(0, 0, 0, 0);
}

/* Returns dO O of the lane's rows lane / 4 and lane / 4 + 8. dO has come to shared memory. Whole warp. */
DEVICE float2 own_delta(const uint4 (&o)[OWN_PIECES], const factor *dout) {
    const factor *own = dout + (first_row_of_warp() + top_of_lane()) * PITCH + left_of_lane();
    float2 delta = {0, 0};
#pragma unroll
    for (int i = 0; i < OWN_PIECES; i++) {
        float sum = 0;
        if (LANES == PIECES || left_of_lane() < HEAD_DIM)
            sum = add_dot<factor>(0, o[i], *(const uint4 *)(own + i * STEP * PITCH));
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, step);
        const int row = lane() / 4; /* lanes LANES r to LANES r + LANES - 1 have row i STEP + r */
        const float of_row = __shfl_sync(WHOLE_WARP, sum, row % STEP * LANES);
        if (row / STEP == i) delta.x = of_row;
        if ((row + 8) / STEP == i) delta.y = of_row;
    }
    return delta;
}

/* ---- weights --------------------------------------------------------------------------------------------------- */

/* The lse and the delta of the lane's two rows. The lse is that of powers of 2, but beside functions that change
 * scores. An lse of inf means that the row saw no key, or does not exist. */
struct row_stats {
    float lse[2], delta[2];
};
constexpr float LSE_UNIT = MODS_CHANGE_SCORES ? 1 : LOG2_E;

/* The keys that a row sees: [begin, end). */
DEVICE interval keys_of_row(const fa_cuda_problem &p, const sequence &s, int i, float lse) {
    return {first_key_of_window(p, s, i), lse == INF ? 0 : end_key_of_window(p, s, i)};
}

/* Bit 4 n + e says that the row of element e of fragment n sees the key. */
DEVICE u32 seen_pairs(const fa_cuda_problem &p, const sequence &s, int row, const row_stats &rows) {
    u32 seen = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const interval keys = keys_of_row(p, s, row + lane() / 4 + 8 * half, rows.lse[half]);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int j = 8 * n + 2 * (lane() % 4) + e;
                seen |= (u32)(j >= keys.begin && j < keys.end) << (4 * n + 2 * half + e);
            }
    }
    return seen;
}

/* S and dP [16, UNIT_ROWS] of the warp's rows from `row` on become z P and dS. MASKED: some pairs do not see each
 * other, or do not exist, and their weights become 0. */
template <bool MASKED>
DEVICE void make_weights(const fa_cuda_problem &p, const sequence &s, int head, int row, const row_stats &rows,
                         float (&x)[N][4], float (&dp)[N][4]) {
    const scorer score(p, s, head);
    const float scale_log2 = (SCORE ? 1 : p.scale) * LOG2_E;
    const u32 kept = DROPOUT ? dropout(p, s.b_idx, head).kept_rows_are_queries<N>(row, 0) : ~0u;
    const int left = 2 * (lane() % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        const interval keys = MASKED ? keys_of_row(p, s, i, rows.lse[half]) : interval{0, UNIT_ROWS};
        const u32 offset = left - keys.begin, num = max(keys.end - keys.begin, 0);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                float derivative = 1, y = x[n][e];
                if (SCORE) y = score(y, i, 8 * n + left + e % 2, derivative);
                y = fmaf(y, scale_log2, -rows.lse[half]);
                const bool sees = !MASKED || offset + (8 * n + e % 2) < num;
                const float prob = sees ? ex2(y) : 0, z = kept >> (4 * n + e) & 1 ? p.keep_scale : 0;
                float change = prob * ((DROPOUT ? z * dp[n][e] : dp[n][e]) - rows.delta[half]);
                if (SCORE) change *= derivative;
                x[n][e] = DROPOUT ? prob * z : prob;
                dp[n][e] = sees ? change : 0;
            }
    }
}

#if FLEX
/* The same with the user's functions. Pairs that do not count have weights of 0. Returns a bit for each that counts. */
DEVICE u32 make_flex_weights(const fa_cuda_problem &p, const unit_place &at, const row_stats &rows, pair_values &pairs,
                             capture_sums &sums, float (&x)[N][4], float (&dp)[N][4]) {
    const u32 kept = DROPOUT ? dropout(p, at.s.b_idx, at.head).kept_rows_are_queries<N>(pairs.row, 0) : ~0u;
    u32 seen = 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int half = e / 2;
            const float score = pairs.score(x[n][e], n, e);
            const bool sees = pairs.sees(n, e) && rows.lse[half] != INF;
            const float y =
                MODS_CHANGE_SCORES ? (score - rows.lse[half]) * LOG2_E : fmaf(score, p.scale * LOG2_E, -rows.lse[half]);
            const float prob = sees ? ex2(y) : 0, z = kept >> (4 * n + e) & 1 ? p.keep_scale : 0;
            const float grad = prob * ((DROPOUT ? z * dp[n][e] : dp[n][e]) - rows.delta[half]);
            const float change = derivative_of(pairs, sums, __fmul_rn(x[n][e], p.scale), grad, sees, n, e);
            seen |= (u32)sees << (4 * n + e);
            x[n][e] = DROPOUT ? prob * z : prob, dp[n][e] = sees ? change : 0;
        }
    return seen;
}
#endif

/* Stores weights of the warp's rows. MARKS: pairs that do not see each other are marked. */
template <bool MARKS> DEVICE void store_weights(factor *weights, const float (&x)[N][4], u32 seen) {
    u32 *own = (u32 *)(weights + (first_row_of_warp() + lane() / 4) * WEIGHTS_PITCH + 2 * (lane() % 4));
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 pair = cvt_x2<factor>(x[n][2 * half], x[n][2 * half + 1]);
            own[half * (8 * WEIGHTS_PITCH / 2) + 4 * n] = MARKS ? mark_unseen(pair, seen >> (4 * n + 2 * half)) : pair;
        }
}

/* ---- dV and dK ------------------------------------------------------------------------------------------------- */

/* Adds W^T B to dV or dK [16, HEAD_DIM] of the warp's keys, which lie in W from `key` on. W [query, key] and B lie in
 * shared memory. */
DEVICE void multiply_transposed(float (&o)[1][COLUMNS][4], const factor *weights, int key, const factor *b) {
    constexpr int BYTES = factor::BYTES;
    const int l = lane();
    const u32 w_row = smem_address(weights + (l / 16 * 8 + l % 8) * WEIGHTS_PITCH + key + l / 8 % 2 * 8);
    const u32 b_row = smem_address(b + l % 16 * PITCH + l / 16 * 8);
#pragma unroll
    for (int k = 0; k < UNIT_ROWS / 16; k++) {
        u32 a[4];
        ldmatrix_x4_trans(a, w_row + 16 * k * WEIGHTS_PITCH * BYTES);
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            u32 b_regs[4];
            ldmatrix_x4_trans(b_regs, b_row + (16 * k * PITCH + 8 * c) * BYTES);
            mma_m16n8k16<factor>(o[0][c], a, b_regs[0], b_regs[1]);
            mma_m16n8k16<factor>(o[0][c + 1], a, b_regs[2], b_regs[3]);
        }
    }
}

/* Does the same by FMAs that skip the marked pairs. */
DEVICE void multiply_seen(float (&o)[1][COLUMNS][4], const factor *weights, int key, const factor *b) {
    float w[1][N][4];
    u32 seen[1] = {0};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const factor x = weights[(8 * n + 2 * (lane() % 4) + e % 2) * WEIGHTS_PITCH + key + lane() / 4 + e / 2 * 8];
            seen[0] |= (u32)(x.bits != UNSEEN) << (4 * n + e);
            w[0][n][e] = cvt_f32(x);
        }
    accumulate_by_fma<false>(o, w, b, seen);
}

/* Stores x times `weight` to rows from `row` on of a gradient. num_rows rows exist. `result` is row 0. */
DEVICE void store_gradient(element::output *result, const long long &stride, const float (&x)[1][COLUMNS][4],
                           float weight, int row, int num_rows, int d) {
    const float weights[2] = {weight, weight};
    store_rows((const float (&)[4 * COLUMNS]) x[0], weights, result, stride, row, num_rows, d);
}

DEVICE void store_query_gradient(const fa_cuda_problem &p, const unit_place &at, const float (&x)[1][COLUMNS][4],
                                 int row) {
    store_gradient((element::output *)p.dq.data + query_offset(p.dq, at.s, 0, at.head), p.dq.stride_row, x, p.scale,
                   row, at.s.len_q, p.d);
}

DEVICE void store_key_gradient(const fa_cuda_problem &p, const unit_place &at, const fa_cuda_view &result,
                               const float (&x)[1][COLUMNS][4], float weight, int key) {
    store_gradient((element::output *)result.data + key_offset(p, result, at.s, 0, at.head), result.stride_row, x,
                   weight, key, at.s.len_kv, p.d);
}

/* dV and dK of the warp's keys. */
DEVICE void make_key_gradients(const fa_cuda_problem &p, const unit_memory &unit, const unit_place &at, int key,
                               bool is_exact) {
    const auto make = [&](const factor *weights, const factor *rows, const fa_cuda_view &result, float weight) {
        if (!result.data) return;
        float sums[1][COLUMNS][4] = {};
        if (is_exact)
            multiply_seen(sums, weights, key, rows);
        else
            multiply_transposed(sums, weights, key, rows);
        store_key_gradient(p, at, result, sums, weight, key);
    };
    make(unit.p, unit.dout, p.dv, 1);
    make(unit.ds, unit.q, p.dk, p.scale);
}

/* ---- a sequence that is longer than max_seqlen (short_longer.cuh) ----------------------------------------------- */

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

/* ---- a unit ---------------------------------------------------------------------------------------------------- */

/* Loads the unit's tiles. O goes to registers. */
DEVICE void load_unit(const fa_cuda_problem &p, unit_memory &unit, const unit_place &at, uint4 (&o)[OWN_PIECES]) {
    const auto queries = [&](const fa_cuda_view &x) {
        return (const factor *)x.data + query_offset(x, at.s, 0, at.head);
    };
    const auto keys = [&](const fa_cuda_view &x) {
        return (const factor *)x.data + key_offset(p, x, at.s, 0, at.head);
    };
    load_own_rows(unit.q, queries(p.q), p.q.stride_row, at.s.len_q, p.d);
    load_own_rows(unit.k, keys(p.k), p.k.stride_row, at.s.len_kv, p.d);
    load_own_rows(unit.v, keys(p.v), p.v.stride_row, at.s.len_kv, p.d);
    load_own_rows(unit.dout, queries(p.dout), p.dout.stride_row, at.s.len_q, p.d);
    read_own_rows(o, queries(p.o), p.o.stride_row, at.s.len_q, p.d);
}

/* Reads the lse of the warp's rows from `row` on. Returns whether some row saw no key, or only scores of -inf. */
DEVICE bool read_lse(row_stats &rows, const fa_cuda_problem &p, const unit_place &at, int row) {
    const sequence &s = at.s;
    bool is_silent = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        const float lse = i < s.len_q ? *row_stat(p.lse, s, i, at.head) : INF;
        const bool saw_a_key = fabsf(lse) != INF && first_key_of_window(p, s, i) < end_key_of_window(p, s, i);
        rows.lse[half] = saw_a_key ? lse * LSE_UNIT : INF;
        is_silent |= i < s.len_q && !saw_a_key;
    }
    return is_silent;
}

/* Computes delta of the warp's rows from `row` on, whose dO has come. The lse may have a gradient, too. */
DEVICE void find_delta(row_stats &rows, const problem &p, const unit_memory &unit, const unit_place &at, int row,
                       const uint4 (&o)[OWN_PIECES]) {
    float2 delta = own_delta(o, unit.dout);
#if FLEX
    const int i = row + lane() / 4;
    if (p.flex.dlse.data && i < at.s.len_q) delta.x -= *row_stat(p.flex.dlse, at.s, i, at.head);
    if (p.flex.dlse.data && i + 8 < at.s.len_q) delta.y -= *row_stat(p.flex.dlse, at.s, i + 8, at.head);
#endif
    rows.delta[0] = rows.lse[0] == INF ? 0 : delta.x, rows.delta[1] = rows.lse[1] == INF ? 0 : delta.y;
}

DEVICE void store_delta(const row_stats &rows, const fa_cuda_problem &p, const unit_place &at, int row) {
    if (lane() % 4) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane() / 4 + 8 * half;
        if (i < at.s.len_q) *row_stat(p.softmax_d, at.s, i, at.head) = rows.delta[half];
    }
}

/* Rows that only round up the size of softmax_d become zero, and so do those of no sequence. */
DEVICE void fill_softmax_d(const fa_cuda_problem &p, const unit_place &at) {
    if constexpr (VARLEN)
        fill_unowned_stats(p, p.softmax_d, at, p.softmax_d_rows, 0);
    else
        for (int i = at.s.len_q + 2 * first_row_of_warp() + lane(); i < p.softmax_d_rows; i += 32 * UNIT_WARPS)
            *row_stat(p.softmax_d, at.s, i, at.head) = 0;
}

/* The gradients of a unit's sequence and head. */
DEVICE void make_gradients(const problem &p, unit_memory &unit, const unit_place &at, capture_sums &sums) {
    const sequence &s = at.s;
    const int row = first_row_of_warp();
    uint4 o[OWN_PIECES];
    row_stats rows;
    load_unit(p, unit, at, o);
    const bool is_silent = read_lse(rows, p, at, row);
    pair_values pairs(p, at, row);

    const tile_walk keys = keys_of(p, s, 0, s.len_q - 1);
    const bool hides = FLEX || any_in_unit(is_silent) || keys.full_begin > 0 || keys.full_end < s.len_kv;
    const bool is_masked = hides || s.len_q < UNIT_ROWS || s.len_kv < UNIT_ROWS;
    cp_async_wait_all();
    find_delta(rows, p, unit, at, row, o);
    const bool is_exact = any_in_unit(hides && (own_has_nan_or_inf(unit.q) || own_has_nan_or_inf(unit.k) ||
                                                own_has_nan_or_inf(unit.v) || own_has_nan_or_inf(unit.dout)));
    if (row < s.len_q) {
        float x[1][N][4], dp[1][N][4];
        multiply_rows(x, unit.q + row * PITCH, unit.k);
        multiply_rows(dp, unit.dout + row * PITCH, unit.v);
        u32 seen[1];
#if FLEX
        seen[0] = make_flex_weights(p, at, rows, pairs, sums, x[0], dp[0]);
#else
        if (is_masked)
            make_weights<true>(p, s, at.head, row, rows, x[0], dp[0]);
        else
            make_weights<false>(p, s, at.head, row, rows, x[0], dp[0]);
#endif
        if (is_exact) {
            if (!FLEX) seen[0] = seen_pairs(p, s, row, rows);
            store_weights<true>(unit.p, x[0], seen[0]), store_weights<true>(unit.ds, dp[0], seen[0]);
        } else {
            store_weights<false>(unit.p, x[0], 0), store_weights<false>(unit.ds, dp[0], 0);
        }
        store_delta(rows, p, at, row);
        if (p.dq.data) {
            float dq[1][COLUMNS][4] = {};
            if (is_exact)
                accumulate_by_fma<false>(dq, dp, unit.k, seen);
            else
                accumulate(dq, dp, unit.k);
            store_query_gradient(p, at, dq, row);
        }
    } else {
        /* The rows do not exist, but the products below read their weights. */
        const float none[N][4] = {};
        store_weights<true>(unit.p, none, 0), store_weights<true>(unit.ds, none, 0);
    }
    fill_softmax_d(p, at);
    meet_in_unit();
    if (row < s.len_kv) make_key_gradients(p, unit, at, row, is_exact);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) KERNEL(const problem p) {
    extern __shared__ __align__(16) char memory[];
    unit_memory &unit = ((unit_memory *)memory)[unit_of_warp()];
    const long long idx = (long long)blockIdx.x * UNITS + unit_of_warp();
    capture_sums sums;
#if FLEX
    /* The unit has some sequences of a head, one after the other. */
    const int head = (int)((u32)idx % (u32)p.h), begin = (int)((u32)idx / (u32)p.h) * p.unit_sequences;
    const int end = min(begin + p.unit_sequences, p.b), row = first_row_of_warp();
    if (begin >= end) return;
#pragma unroll 1
    for (int b_idx = begin; b_idx < end; b_idx++) {
        make_gradients(p, unit, unit_of(p, b_idx, head), sums);
        sums.give<true>(mods(p.flex, p.values, b_idx, head), row);
        meet_in_unit(); /* all have read the tiles */
    }
    sums.give<false>(mods(p.flex, p.values, begin, head), row);
#else
    if (idx >= (long long)p.b * p.h) return;
    const unit_place at = unit_at(p, idx);
    if (!is_long(at.s)) {
        make_gradients(p, unit, at, sums);
    } else if (!p.leaves_long) {
        make_long_gradients(p, at);
        fill_softmax_d(p, at);
    }
#endif
}
