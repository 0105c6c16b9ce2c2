/* The softmax of forwards that raise the maximum in every step: S to P, and the LSE of a row. Fragments lie as in
 * tile_any.cuh, and N are those of a step. */
#ifndef FA_SOFTMAX_ANY_CUH
#define FA_SOFTMAX_ANY_CUH

#include "rows_any.cuh"

/* The largest P of a row is 2^-HEADROOM. In 16 bits the exponent contains HEADROOM. Beside such a number the exponent
 * would lose digits that show in fp32, so P is scaled there. */
constexpr float HEADROOM = factor::HEADROOM, IN_EXPONENT = F32 ? 0 : HEADROOM;
constexpr float RAISED = 1u << (int)HEADROOM; /* 2^HEADROOM */

/* Beyond this base a fused product would differ from base by more than an exponent should see. */
DEVICE bool is_large(float base) { return fabsf(base) > 0x1p24f; }

/* factor max, rounded. Where base is not large, base + IN_EXPONENT is a float. */
DEVICE float base_of(float max, float factor) {
    const float scaled = __fmul_rn(max, factor);
    return IN_EXPONENT == 0 || is_large(scaled) ? scaled : scaled + IN_EXPONENT - IN_EXPONENT;
}

/* P with the exponent x, which contains IN_EXPONENT. */
DEVICE float prob_of(float x) { return F32 ? ex2(x) * (1 / RAISED) : ex2(x); }

/* S becomes P = 2^(factor S - base - HEADROOM), with base = factor max, and O is rescaled to a new maximum. base is
 * rounded. All scores of a row have the same base, so the rounding cancels in the quotient. lse adds the part that was
 * rounded away. fmaxf ignores NaN, but NaN reaches the output through the sum. */
DEVICE void softmax_step(float (&s)[BLOCKS][N][4], float (&o)[BLOCKS][COLUMNS][4], row_state (&rows)[BLOCKS][2],
                         float factor) {
    float rescale[BLOCKS][2];
    bool is_raised = false;
#pragma unroll
    for (int m = 0; m < BLOCKS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_state &row = rows[m][half];
            float largest = row.max, sum = 0;
#pragma unroll
            for (int n = 0; n < N; n++) largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            largest = quad_max(largest);
            const float found = base_of(largest, factor);
            const float base = found == -INF ? 0 : found;            /* no key seen yet, or only scores of -inf */
            rescale[m][half] = ex2(base_of(row.max, factor) - base); /* rounded like base, not fused */
            is_raised |= rescale[m][half] != 1;
            row.max = largest;
            if (!is_large(base)) {
                const float raised = base + IN_EXPONENT;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++)
                        sum += s[m][n][e] = prob_of(fmaf(s[m][n][e], factor, -raised));
            } else {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++)
                        sum += s[m][n][e] = prob_of(__fmul_rn(s[m][n][e], factor) - base - IN_EXPONENT);
            }
            row.sum = row.sum * rescale[m][half] + sum;
        }
    if (__any_sync(WHOLE_WARP, is_raised))
#pragma unroll
        for (int m = 0; m < BLOCKS; m++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[m][c][e] *= rescale[m][e / 2];
}

/* Has the row of this state seen no key, or only scores of -inf? sum is that of the whole row. */
DEVICE bool saw_nothing(row_state row, float sum, float unit) {
    return sum == 0 && base_of(row.max, unit * LOG2_E) == -INF;
}

/* Returns the LSE of such a row, or of another one. lg2 gets the sum of larger P, because its error grows with its
 * result. */
DEVICE float lse_of(row_state row, float sum, float unit) {
    const float base = base_of(row.max, unit * LOG2_E), rest = fmaf(row.max, unit * LOG2_E, -base);
    return saw_nothing(row, sum, unit) ? -INF
           : sum == 0                  ? sum / sum
                                       : row.max * unit + (lg2(sum * RAISED) - rest) * LN_2;
}

#endif
