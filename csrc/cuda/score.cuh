/* This file computes the score of a query and a key. Every GPU kernel computes the score here, and the backward also
 * computes the derivative here:
 *
 *   score(x, b, h, i, j) = cap(scale x) - slope(b, h) |i + shift - j|        x = q.k        shift = len_kv - len_q
 *   cap(y) = softcap tanh(y / softcap), or y where softcap is 0              slope: ALiBi's, or 0
 *
 * Scores are in natural units. Exponentials are powers of 2, so a kernel multiplies by log2 e within the exponent.
 *
 * A plain score is scale x alone. Kernels do not need score_of for plain scores. The row maximum is then the maximum
 * of x, and the factor of the exponent is scale log2 e. SCORE marks scores that are not plain in Hopper's forward
 * and backward, and changes_scores marks such scores in decode. is_plain marks plain scores in the generic kernels.
 *
 * The score_mod of a user takes scale x, and is no part of this file (flex.cuh). Kernels with a score_mod have no plain
 * scores. */
#ifndef FA_SCORE_CUH
#define FA_SCORE_CUH

#include "ptx_sm80.cuh"

#define INF __int_as_float(0x7f800000)
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;

/* A score_head is one query head of one sequence. A member that the score does not need costs nothing. */
struct score_head {
    int b_idx, head;
    int shift; /* len_kv - len_q: query i has the diagonal i + shift */
    float slope;
};

/* A kernel rounds its scores in one of two ways.
 *
 * FAST serves Hopper's kernels. scale and log2 e are one factor of softcap's exponent. The hardware's tanh is right
 * only to 2^-11, and this error shows in lse. tanh is therefore made of ex2 and rcp:
 *
 *   r = 1 / (1 + exp(2 y / softcap))
 *   softcap tanh(y / softcap) = softcap - 2 softcap r        1 - tanh^2 = 4 r (1 - r)
 *
 * Products may be fused with sums.
 *
 * EXACT serves the generic kernels. scale x is rounded, so that forward and backward have the same score. tanh is
 * right within 2 units of the last place, near zero too. */
enum score_precision { FAST, EXACT };

DEVICE float tanh_exactly(float x) {
    const float a = fabsf(x), x2 = x * x;
    if (a < 0.55f)
        return x + x * x2 *
                       (-0.333333194f +
                        x2 * (0.133326024f + x2 * (-0.0538538545f + x2 * (0.0210777503f - x2 * 0.00628246367f))));
    const float y = 1 - 2 / (ex2(2 * LOG2_E * a) + 1);
    return x < 0 ? -y : y;
}

/* p are the parameters of a kernel, with score_scale and softcap. */
template <score_precision PRECISION, bool HAS_DERIVATIVE, class params> struct score_of {
    float scale, softcap; /* NOTE: copies. NVRTC would keep the question for softcap in each score otherwise. */
    float exponent;       /* FAST: the exponent of softcap, 2^(exponent x) = exp(2 y / softcap) */

    DEVICE score_of(const params &p)
        : scale(p.score_scale), softcap(p.softcap),
          exponent(PRECISION == FAST && softcap > 0 ? scale * 2 * LOG2_E / softcap : 0) {}

    /* Returns cap(scale x), and its derivative by scale x. */
    DEVICE float capped(float x, float &derivative) const {
        if (PRECISION == EXACT) {
            float y = __fmul_rn(x, scale), t = 0;
            if (softcap > 0) {
                t = tanh_exactly(y / softcap);
                y = softcap * t;
            }
            derivative = 1 - t * t;
            return y;
        }
        float r = 0;
        if (HAS_DERIVATIVE) {
            r = softcap > 0 ? rcp(1 + ex2(x * exponent)) : 0;
            derivative = softcap > 0 ? 4 * r * (1 - r) : 1;
        }
        return softcap > 0 ? softcap - 2 * softcap * (HAS_DERIVATIVE ? r : rcp(1 + ex2(x * exponent))) : x * scale;
    }

    /* Returns the score of key j and the query at `diagonal`, and the derivative of the score by scale x. */
    DEVICE float operator()(float x, const score_head &at, int diagonal, int j, float &derivative) const {
        return biased(capped(x, derivative), at, diagonal, j);
    }

    /* Returns a score with ALiBi's bias. */
    DEVICE float biased(float y, const score_head &at, int diagonal, int j) const {
        if (PRECISION == EXACT) return at.slope == 0 ? y : y - at.slope * (float)abs(diagonal - j);
        return y - at.slope * fabsf((float)(diagonal - j));
    }

    /* Returns the score alone. */
    DEVICE float operator()(float x, const score_head &at, int diagonal, int j) const {
        float unused;
        return (*this)(x, at, diagonal, j, unused);
    }
};

#endif
