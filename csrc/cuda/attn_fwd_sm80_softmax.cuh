/* The softmax of attn_fwd_sm80: P of scores, with a row maximum that lags. */
#ifndef FA_ATTN_FWD_SM80_SOFTMAX_CUH
#define FA_ATTN_FWD_SM80_SOFTMAX_CUH

#include "attn_fwd_sm80_products.cuh"

/* The state of one row of a thread: P = 2^(scale_log2 S - base), for the lagging maximum. base is rounded. All scores
 * of a row have the same base, so the rounding cancels in the quotient. base is -INF while no score has been found. A
 * large base does not contain HEADROOM, which might vanish in it. P = 2^(scale_log2 S - base - HEADROOM) there. */
struct lagging_row {
    float base, sum;
};

/* Beyond this base a fused product would differ from base by more than an exponent should see. */
DEVICE bool is_large(float base) { return fabsf(base) > 0x1p24f; }

DEVICE float base_of(float max, float scale_log2) {
    const float scaled = __fmul_rn(max, scale_log2), raised = scaled + HEADROOM;
    return HEADROOM != 0 && is_large(scaled) && is_large(raised) ? scaled : raised;
}
DEVICE float without_headroom(float base) { return HEADROOM == 0 || is_large(base) ? base : base - HEADROOM; }

/* Finds the largest of a thread's scores in its rows. fmaxf ignores NaN, but NaN reaches the output through the sum. */
DEVICE void find_own_largest(float (&largest)[BLOCKS][2], const float (&s)[BLOCKS][N][4]) {
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = -INF;
#pragma unroll
            for (int n = 0; n < N; n++) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            largest[m][half] = x;
        }
}

/* Finds the largest scores of the rows. */
DEVICE void find_largest(float (&largest)[BLOCKS][2], const float (&s)[BLOCKS][N][4]) {
    find_own_largest(largest, s);
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) largest[r / 2][r % 2] = quad_max(largest[r / 2][r % 2]);
}

/* The warps that share rows meet at a barrier of their own. Returns whether x is true in one of their threads. */
DEVICE bool meet(bool x) { return bar_red_or(1 + warp() / SPLIT, 32 * SPLIT, x); }

/* Makes the largest of a thread's scores the largest of the rows, whose keys other warps have, too. These warps call
 * this function together. */
DEVICE void share_largest(shared_memory &shared, int own_row, int part, float (&largest)[BLOCKS][2]) {
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) {
        const float own = quad_max(largest[r / 2][r % 2]);
        if (lane() % 4 == 0) shared.part(own_row + 8 * r + lane() / 4, part) = own;
    }
    meet(false);
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) {
        float &x = largest[r / 2][r % 2];
        x = -INF;
#pragma unroll
        for (int i = 0; i < SPLIT; i++) x = fmaxf(x, shared.part(own_row + 8 * r + lane() / 4, i));
    }
}

/* Does a score exceed its lagging maximum by too much, or is a score NaN, or has a row no maximum yet? */
DEVICE bool lags_behind(const float (&largest)[BLOCKS][2], const lagging_row (&rows)[BLOCKS][2], float scale_log2) {
    bool lags = false;
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++)
        lags |= !(fmaf(largest[r / 2][r % 2], scale_log2, -rows[r / 2][r % 2].base) <= MOST_LOG2);
    return lags;
}

/* Raises the maxima of the warp's rows, and rescales the sums and O. Returns whether a base of the thread is large. */
DEVICE bool raise(shared_memory &shared, int own_row, lagging_row (&rows)[BLOCKS][2],
                  float (&o)[BLOCKS][OWN_COLUMNS][4], const float (&largest)[BLOCKS][2], float scale_log2,
                  bool writes) {
    bool has_large = false;
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            lagging_row &row = rows[m][half];
            const float wanted = base_of(largest[m][half], scale_log2);
            if (without_headroom(wanted) > without_headroom(row.base)) {
                const float rescale = ex2(without_headroom(row.base) - without_headroom(wanted));
                row = {wanted, row.sum * rescale};
                if (writes && lane() % 4 == 0)
                    shared.maximum(own_row + 16 * m + 8 * half + lane() / 4) = largest[m][half];
#pragma unroll
                for (int c = 0; c < OWN_COLUMNS; c++) o[m][c][2 * half] *= rescale, o[m][c][2 * half + 1] *= rescale;
            }
            has_large |= row.base != -INF && is_large(row.base);
        }
    return has_large;
}

/* S becomes P in the order of operands. kept says which elements dropout keeps. sums are those of this step.
 * IS_USUAL: no row has a large base, and P V of the step before is added meanwhile. Then beside(i) runs after product i
 * of 16 keys and 16 columns. */
template <bool IS_USUAL, class worker>
DEVICE void softmax(float (&s)[BLOCKS][N][4], weights &p, float (&o)[BLOCKS][OWN_COLUMNS][4], float (&sums)[BLOCKS][2],
                    const lagging_row (&rows)[BLOCKS][2], float scale_log2, const weights_source &last, u32 v,
                    const u32 (&kept)[BLOCKS], const worker &beside) {
    constexpr int PARTS = SPLIT * OWN_COLUMNS / 2, ELEMENTS = 8 * BLOCKS; /* of 16 keys */
    float bases[BLOCKS][2];
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) {
        const float base = rows[r / 2][r % 2].base;
        bases[r / 2][r % 2] = !IS_USUAL && base == -INF ? 0 : base;
        sums[r / 2][r % 2] = 0;
    }
    /* Makes one of PARTS parts of P of keys [16 k, 16 k + 16). */
    const auto make = [&](int k, int part) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            if (i * PARTS / ELEMENTS != part) continue;
            const int m = i / 8, half = i % 4 / 2;
            float &x = s[m][2 * k + i % 8 / 4][i % 4];
            const float base = bases[m][half];
            x = ex2(IS_USUAL || !is_large(base) ? fmaf(x, scale_log2, -base)
                                                : __fmul_rn(x, scale_log2) - base - HEADROOM);
            sums[m][half] += x;
        }
        if (part < PARTS - 1) return;
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = 2 * k + i / 2, e = i % 2 * 2;
                const u32 bits = DROPOUT ? kept[m] >> (4 * n + e) : 3;
                p[m][k][i] = cvt_x2<factor>(bits & 1 ? s[m][n][e] : 0, bits & 2 ? s[m][n][e + 1] : 0);
            }
    };
    if (IS_USUAL && LATE == 1) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) make(0, part);
        add_values<true>(o, last, v, [&](int i) {
            if (i / PARTS + 1 < N / 2) make(i / PARTS + 1, i % PARTS);
            beside(i);
        });
    } else {
        add_values<IS_USUAL && IS_LATE>(o, last, v, [&](int i) {
            make(i / PARTS, i % PARTS);
            beside(i);
        });
    }
}

/* Is a sum of the step so large that some P may exceed 2^MOST_LOG2? A sum is NaN if a score is NaN, or if a row has no
 * maximum yet. */
DEVICE bool is_too_large(const float (&sums)[BLOCKS][2]) {
    bool is = false;
#pragma unroll
    for (int r = 0; r < 2 * BLOCKS; r++) is |= !(sums[r / 2][r % 2] <= __int_as_float((127 + MOST_LOG2) << 23));
    return is;
}

#endif
