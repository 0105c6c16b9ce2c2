/* The element-wise stage between the two products. S^T is [keys][lanes], with one query in each lane. So maxima, sums
 * and masks are plain vector instructions, and no option needs a kernel of its own.
 *
 *   scores_adjust          scale -> softcap -> ALiBi or bias -> mask, in this order; folds the maxima
 *   softmax_step           p = exp2(s - max), row sums, dropout, P as words
 *   softmax_step_scaling   softmax_step for scores that the product stored without their scale
 *
 * Scaled scores are in units of log2, because the scale contains log2(e). */
#ifndef FA_CPU_ELEMENTWISE_H
#define FA_CPU_ELEMENTWISE_H

#include <float.h>

#include "dropout.h"
#include "product.h"
#include "sequence.h"

#define LOG2_E 1.44269504088896341
#define LN_2   0.693147180559945309

/* The scale of the product: scores in units of log2, or with softcap in units of softcap. FA_E4M3: the descales of q
 * and k belong to the scale, so that no product of stored numbers can overflow. */
INLINE float score_scale(const fa_problem *p, int64_t b_idx, int64_t head_kv) {
    double scale = p->softcap > 0 ? p->scale / p->softcap : p->scale * LOG2_E;
    if (p->dtype == FA_E4M3)
        scale *= (double)fa_descale_of(&p->q_descale, b_idx, head_kv) * fa_descale_of(&p->k_descale, b_idx, head_kv);
    return (float)scale;
}

/* tanh as a P(a^2) / Q(a^2). The coefficients minimise the relative error up to `last`, where the quotient is exactly
 * 1. Degree 4 has an error of 3e-7, nearly all of it rounding. Degree 3, for bf16, has an error of 2e-6. */
INLINE vec vec_tanh(vec a) {
    const vec last = vec_set(WORD_ELEMS == 2 ? 7.0390625f : 9.03125f);
    const vec x = vec_max(vec_sub(vec_set(0.0f), last), vec_min(last, a)), square = vec_mul(x, x);
    vec p, q;
    if (WORD_ELEMS == 2) {
        p = vec_fma(vec_set(3.99586444e-06f), square, vec_set(0.00229308734f));
        q = vec_fma(vec_set(0.000143984298f), square, vec_set(0.0211516071f));
        p = vec_fma(p, square, vec_set(0.123220532f));
        q = vec_fma(q, square, vec_set(0.45654613f));
        p = vec_fma(p, square, vec_set(0.999998967f));
    } else {
        p = vec_fma(vec_set(1.33546527e-08f), square, vec_set(2.06090748e-05f));
        q = vec_fma(vec_set(7.77655436e-07f), square, vec_set(0.000328563402f));
        p = vec_fma(p, square, vec_set(0.00349558761f));
        q = vec_fma(q, square, vec_set(0.0258769802f));
        p = vec_fma(p, square, vec_set(0.133810252f));
        q = vec_fma(q, square, vec_set(0.467143408f));
        p = vec_fma(p, square, vec_set(0.999999979f));
    }
    return vec_div(vec_mul(p, x), vec_fma(q, square, vec_set(1.0f)));
}

/* Returns ALiBi's slope in units of log2. A finite slope stays finite, because an infinite slope makes NaN of the key
 * at distance 0. */
static inline float slope_in_log2(float slope) {
    const double product = slope * LOG2_E;
    return (float)(fabsf(slope) < INFINITY ? fmax(-FLT_MAX, fmin(product, FLT_MAX)) : product);
}

/* Options of one tile on one block of keys. Keys count from the start of the block. A lane sees keys [first, end) of
 * the block, and these bounds are whole numbers stored as floats. */
typedef struct {
    float scale;           /* scale of the scores; 1: the scores are scaled already */
    float softcap;         /* times log2(e); 0: off. With softcap the scores enter as scale / softcap q.k */
    const float *slope;    /* [lanes] ALiBi slope times log2(e); NULL: off */
    const float *diagonal; /* [lanes] the key at distance 0 */
    /* [keys][lanes] added to the scores, in units of log2, from the first key of the call; NULL: off */
    const float *bias;
    const float *first, *end;
    bool masked; /* some lane does not see every key of the range */
} score_options;

INLINE vec_mask keys_visible(vec first, vec end, vec j) { return mask_and(vec_le(first, j), vec_lt(j, end)); }

INLINE void scores_adjust_of(float *scores, int64_t stride, int64_t lanes, int64_t begin, int64_t end,
                             const score_options *o, float *lane_max, bool CAPS, bool SLOPES, bool MASKED,
                             bool BIASED) {
    const vec scale = vec_set(o->scale), softcap = vec_set(o->softcap), zero = vec_set(0.0f);
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
        vec high = vec_load(lane_max + lane), first = zero, last = zero, slope = zero, diagonal = zero;
        if (MASKED) first = vec_load(o->first + lane), last = vec_load(o->end + lane);
        if (SLOPES) slope = vec_load(o->slope + lane), diagonal = vec_load(o->diagonal + lane);
        vec j = vec_set((float)begin);
        float *at = scores + begin * stride + lane;
        const float *bias = BIASED ? o->bias + lane : NULL;
        for (int64_t key = begin; key < end; key++, at += stride) {
            vec s = vec_mul(vec_load(at), scale);
            if (BIASED) s = vec_add(s, vec_load(bias)), bias += stride;
            if (CAPS) s = vec_mul(vec_tanh(s), softcap);
            if (SLOPES) {
                const vec distance = vec_sub(diagonal, j);
                s = vec_sub(s, vec_mul(slope, vec_max(distance, vec_sub(zero, distance))));
            }
            if (MASKED) s = vec_select(keys_visible(first, last, j), s, vec_set(-INFINITY));
            if (SLOPES || MASKED) j = vec_add(j, vec_set(1.0f));
            high = vec_max(s, high);
            vec_store(at, s);
        }
        vec_store(lane_max + lane, high);
    }
}

/* Adjusts `lanes` lanes of keys [begin, end). The rows of scores and of the bias have `stride` floats. Every set of
 * options has its own loop. Branches at each vector would take as many instructions as the arithmetic. */
OUTLINE void scores_adjust(float *scores, int64_t stride, int64_t lanes, int64_t begin, int64_t end,
                           const score_options *o, float *lane_max) {
    switch ((o->softcap > 0.0f) | (o->slope != NULL) << 1 | o->masked << 2 | (o->bias != NULL) << 3) {
#define CASE(n) \
    case n: scores_adjust_of(scores, stride, lanes, begin, end, o, lane_max, n & 1, n & 2, n & 4, n & 8); break;
        CASE(8) CASE(12) CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#undef CASE
    }
}

/* Masks scores that have no other option, and folds their maxima times scale, which is above 0. */
OUTLINE void scores_mask(float *scores, int64_t stride, int64_t lanes, int64_t begin, int64_t end, const float *first,
                         const float *last, float scale, float *lane_max) {
    const vec lowest = vec_set(-INFINITY), one = vec_set(1.0f);
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
        const vec from = vec_load(first + lane), to = vec_load(last + lane);
        vec high = lowest, j = vec_set((float)begin);
        float *at = scores + begin * stride + lane;
        for (int64_t key = begin; key < end; key++, at += stride) {
            const vec s = vec_select(keys_visible(from, to, j), vec_load(at), lowest);
            j = vec_add(j, one);
            high = vec_max(s, high);
            vec_store(at, s);
        }
        vec_store(lane_max + lane, vec_max(vec_mul(high, vec_set(scale)), vec_load(lane_max + lane)));
    }
}

/* s scale - reference, or s - reference if s is scaled already. NOTE: for fp32 the product is rounded, just as the
 * maximum and lse are. So a score far above all others gives exactly 1, here and in the backward. For bf16 the
 * difference does not matter. */
INLINE vec scores_minus(bool SCALED, vec s, vec scale, vec reference) {
    if (SCALED) return vec_sub(s, reference);
    if (WORD_ELEMS == 1) return vec_sub(vec_mul(s, scale), reference);
    return vec_fma(s, scale, vec_sub(vec_set(0.0f), reference));
}

/* One row of P. With DROPS, an element that the generator's bytes drop becomes zero in P but stays in the sum. */
INLINE vec softmax_row(bool SCALED, bool DROPS, vec score, vec scale, vec reference, vec *sum, const uint8_t *bytes,
                       uint8_t keep_max) {
    vec p = vec_exp2(scores_minus(SCALED, score, scale, reference));
    *sum = vec_add(*sum, p);
    return DROPS ? vec_select(mask_bytes_le(bytes, keep_max), p, vec_set(0.0f)) : p;
}

/* A lane keeps its old maximum until the maximum would grow by a factor of 2^8. P then stays below 256 instead of 1,
 * and has as many significant digits as before. So O^T is almost never rescaled. Each lane decides for itself, so the
 * bits of a lane do not depend on other lanes.
 *
 * bf16: P is rounded for its product with V. A P of 1 loses nothing, so a row's largest P is exact under the row's own
 * maximum. A larger P loses up to 2^-9 of itself. The loss shows in O where the key has a large share of the row's
 * sum. There the maximum grows. */
#define LAZY_MAX    8.0f
#define LARGE_SHARE 0.25f /* share of the sum over earlier keys; for its cost see measurements.md */

/* Where products overlap the softmax, the maximum is guessed. The guess hardly ever fails if the sum over earlier keys
 * is above this value. */
#define SURE_SUM 8.0f

/* The lanes whose maximum grows from m to `high`. `high` is the maximum over all keys so far, and `sum` is the sum of P
 * over earlier keys, under m. */
INLINE vec_mask max_outgrown(vec m, vec high, vec sum) {
    if (WORD_ELEMS == 1) return vec_lt(vec_add(m, vec_set(LAZY_MAX)), high);
    const vec far = vec_set(exp2f(LAZY_MAX)), large = vec_max(vec_mul(sum, vec_set(LARGE_SHARE)), vec_set(1.0f));
    return vec_lt(vec_min(far, large), vec_exp2(vec_min(vec_set(LAZY_MAX + 1), vec_sub(high, m))));
}

/* bf16: a fused product is exact, but the maximum is rounded. Above this value the rounding would change exp2
 * visibly. */
#define FUSED_SCORES_MAX 0x1p24f

/* The sink beside a row whose largest score is `largest`, in units of log2. It is rounded as the scores are. So a sink
 * that equals a score in natural units equals it here. is_rounded: scores are stored in these units. */
static inline double sink_in_log2(double sink, float largest, bool is_rounded) {
    if (WORD_ELEMS == 1 || is_rounded || fabsf(largest) > FUSED_SCORES_MAX)
        return (double)((float)sink * (float)LOG2_E);
    return sink * (double)(float)LOG2_E;
}

/* The number of keys between two calls of product_advance, where products overlap the softmax. */
#define SOFTMAX_KEYS 16

typedef struct {
    const float *scores;   /* S^T, keys [begin, end) */
    float *p;              /* P as words, in row key / WORD_ELEMS; may overlap the scores if the maxima are known */
    int64_t stride, lanes; /* of a row of scores, P and bytes; and how many of them are computed */
    int64_t begin, end;    /* begin is a multiple of WORD_ELEMS */
    float scale;           /* scale of the scores, if the scores are not scaled yet */
    /* The maxima over all keys so far, times scale. Not read if products overlap and the scores are not scaled yet. */
    const float *new_max;
    float *row_max, *row_sum, *alpha;
    const uint8_t *bytes; /* bytes of the dropout generator, [key][lanes]; NULL: no dropout */
    uint8_t keep_max;
    product_queue *queue; /* products that may be computed meanwhile */
} softmax_args;

typedef struct {
    vec sum_even, sum_odd, highest;
} softmax_sums;

/* Computes P of one vector of lanes. Returns the sums, and the highest score as it is stored. */
INLINE softmax_sums softmax_lanes(const softmax_args *a, bool SCALED, bool DROPS, int64_t lane, vec scale,
                                  vec reference) {
    const vec zero = vec_set(0.0f);
    const int64_t lanes = a->stride, end = a->end;
    const float *s = a->scores + a->begin * lanes + lane;
    float *p = a->p + a->begin / WORD_ELEMS * lanes + lane;
    const uint8_t keep_max = a->keep_max, *byte = DROPS ? a->bytes + a->begin * lanes + lane : (const uint8_t *)s;
    const int64_t byte_stride = DROPS ? lanes : 0;
    product_queue *const queue = a->queue;
    softmax_sums x = {zero, zero, vec_set(-INFINITY)};
    int64_t key = a->begin;
    while (key + 2 <= end) {
        const int64_t stop = PRODUCT_OVERLAPS && key + SOFTMAX_KEYS < end ? key + SOFTMAX_KEYS : end;
        product_advance(queue);
        for (; key + 2 <= stop; key += 2, s += 2 * lanes, p += 2 / WORD_ELEMS * lanes, byte += 2 * byte_stride) {
            const vec s_even = vec_load(s), s_odd = vec_load(s + lanes);
            if (!SCALED && PRODUCT_OVERLAPS) x.highest = vec_max(vec_max(s_even, s_odd), x.highest);
            vec even = softmax_row(SCALED, DROPS, s_even, scale, reference, &x.sum_even, byte, keep_max);
            vec odd = softmax_row(SCALED, DROPS, s_odd, scale, reference, &x.sum_odd, byte + byte_stride, keep_max);
#if WORD_ELEMS == 2
            vec_store(p, vec_pack_words(even, odd));
#else
            vec_store(p, even);
            vec_store(p + lanes, odd);
#endif
        }
    }
    if (key < end) {
        if (!SCALED && PRODUCT_OVERLAPS) x.highest = vec_max(vec_load(s), x.highest);
        vec even = softmax_row(SCALED, DROPS, vec_load(s), scale, reference, &x.sum_even, byte, keep_max);
#if WORD_ELEMS == 2
        even = vec_pack_words(even, zero);
#endif
        vec_store(p, even);
    }
    return x;
}

/* The highest scores of one vector of lanes, as they are stored. A maximum takes four clocks, so there are four
 * chains. */
INLINE vec highest_score(const softmax_args *a, int64_t lane) {
    const int64_t lanes = a->stride;
    const float *s = a->scores + a->begin * lanes + lane;
    vec high[4] = {vec_set(-INFINITY), vec_set(-INFINITY), vec_set(-INFINITY), vec_set(-INFINITY)};
    int64_t key = a->begin;
    for (; key + 4 <= a->end; key += 4, s += 4 * lanes)
        UNROLL for (int i = 0; i < 4; i++) high[i] = vec_max(vec_load(s + i * lanes), high[i]);
    for (; key < a->end; key++, s += lanes) high[0] = vec_max(vec_load(s), high[0]);
    return vec_max(vec_max(high[0], high[1]), vec_max(high[2], high[3]));
}

/* Multiplies the scores of one vector of lanes by scale. The products are rounded like the maxima. */
OUTLINE void scale_scores(const softmax_args *a, int64_t lane) {
    for (int64_t key = a->begin; key < a->end; key++) {
        float *at = (float *)a->scores + key * a->stride + lane;
        vec_store(at, vec_mul(vec_load(at), vec_set(a->scale)));
    }
}

/* Scores become P. row_max becomes the new maximum, and row_sum becomes the sum over all keys so far. alpha is the
 * factor for the old accumulators. alpha is 1 if there was no key yet, because then the accumulators are zero.
 *
 * If products overlap the softmax and the scores are not adjusted, the maxima are not known. The same pass then finds
 * the maxima, on the guess that no row outgrows its maximum. If some row outgrew its maximum, the pass is repeated.
 * Rows of a small sum often outgrow their maximum, so their maxima are found first. */
INLINE void softmax_step_of(const softmax_args *a, bool SCALED, bool DROPS) {
    const bool KNOWN = SCALED || !PRODUCT_OVERLAPS;
    const vec lowest = vec_set(-INFINITY), zero = vec_set(0.0f), sure_sum = vec_set(SURE_SUM);
    const vec fused_max = vec_set(FUSED_SCORES_MAX), one = vec_set(1.0f);
    for (int64_t lane = 0; lane < a->lanes; lane += LANES) {
        const vec old = vec_load(a->row_max + lane), sum = vec_load(a->row_sum + lane);
        vec m = old, reference, scale = vec_set(a->scale);
        bool scaled = SCALED || WORD_ELEMS == 1;
        softmax_sums x;
        if (KNOWN) {
            m = vec_load(a->new_max + lane);
            m = vec_select(max_outgrown(old, m, sum), m, old);
        } else if (mask_any(vec_le(old, lowest)) || (WORD_ELEMS == 2 && mask_any(vec_lt(sum, sure_sum)))) {
            m = vec_max(vec_mul(highest_score(a, lane), scale), old);
            m = vec_select(max_outgrown(old, m, sum), m, old);
        }
        for (;;) {
            reference = vec_select(vec_le(m, lowest), zero, m); /* without a key yet, -inf - 0 stays -inf */
            if (!scaled && mask_any(vec_lt(fused_max, vec_max(reference, vec_sub(zero, reference))))) {
                scale_scores(a, lane);
                scale = one;
                scaled = true;
            }
            x = softmax_lanes(a, SCALED, DROPS, lane, scale, reference);
            if (KNOWN) break;
            const vec high = vec_mul(x.highest, scale);
            const vec_mask grown = max_outgrown(m, high, sum);
            if (!mask_any(grown)) break;
            m = vec_select(grown, high, m);
        }
        vec rescale = vec_exp2(vec_sub(old, reference));
        rescale = vec_select(vec_le(old, lowest), one, rescale); /* there is nothing to rescale */
        vec_store(a->alpha + lane, rescale);
        vec_store(a->row_max + lane, m);
        vec_store(a->row_sum + lane, vec_fma(sum, rescale, vec_add(x.sum_even, x.sum_odd)));
    }
}

OUTLINE void softmax_step(const softmax_args *a) {
    if (a->bytes)
        softmax_step_of(a, true, true);
    else
        softmax_step_of(a, true, false);
}

/* softmax_step for scores without their scale. new_max, row_max and row_sum belong to scaled scores. */
OUTLINE void softmax_step_scaling(const softmax_args *a) {
    if (a->bytes)
        softmax_step_of(a, false, true);
    else
        softmax_step_of(a, false, false);
}

/* The bytes of one patch of 16 rows x 32 keys, bytes[c][r]. Each lane runs one call of the generator.
 * Call 8 ((c % 8) / 2) + r % 8 serves row r and column c, so the 8 rows r % 8 of a pair of columns are neighbours.
 * NOTE: the code uses vector verbs, because compilers turn the 64-bit products of fa_philox into 64-bit
 * multiplications. Such multiplications are several times slower. */
static inline void dropout_patch(uint64_t seed, uint64_t stream, int64_t row_patch, int64_t col_patch,
                                 uint8_t bytes[FA_PATCH_COLS][FA_PATCH_ROWS]) {
    enum { RUN = LANES < 8 ? LANES : 8 };
    for (int call = 0; call < FA_PHILOX_LANES; call += LANES) {
        uint32_t counter[2][LANES];
        for (int i = 0; i < LANES; i++) {
            uint64_t low = stream + (uint64_t)(4 * ((call + i) % 8) + (call + i) / 8);
            counter[0][i] = (uint32_t)low;
            counter[1][i] = (uint32_t)(low >> 32);
        }
        vec x, y, z = vec_set_bits((uint32_t)row_patch), w = vec_set_bits((uint32_t)col_patch);
        memcpy(&x, counter[0], sizeof x);
        memcpy(&y, counter[1], sizeof y);
        uint32_t key_0 = (uint32_t)seed, key_1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < FA_PHILOX_ROUNDS; round++) {
            vec low_x, low_z;
            vec high_x = vec_multiply_bits(x, 0xD2511F53u, &low_x), high_z = vec_multiply_bits(z, 0xCD9E8D57u, &low_z);
            x = vec_xor(vec_xor(high_z, y), vec_set_bits(key_0));
            z = vec_xor(vec_xor(high_x, w), vec_set_bits(key_1));
            y = low_z;
            w = low_x;
            key_0 += 0x9E3779B9u;
            key_1 += 0xBB67AE85u;
        }
        const vec words[4] = {x, y, z, w};
        UNROLL for (int word = 0; word < 4; word++) {
            UNROLL for (int byte = 0; byte < 4; byte++) {
                uint8_t lanes[LANES];
                vec_store_bytes(lanes, words[word], 8 * byte);
                for (int i = 0; i < LANES; i += RUN)
                    memcpy(&bytes[8 * word + 2 * ((call + i) / 8) + byte % 2][8 * (byte / 2) + (call + i) % 8],
                           lanes + i, RUN);
            }
        }
    }
}

/* Writes the generator's bytes [key][lanes] for keys [begin, end) of a block. The lanes are rows
 * [row, row + lanes) of one head, and row and lanes are multiples of 16. The block starts at key first_key, a multiple
 * of 32. */
OUTLINE void dropout_bytes(uint8_t *bytes, int64_t lanes, int64_t begin, int64_t end, uint64_t seed, uint64_t stream,
                           int64_t row, int64_t first_key) {
    for (int64_t key = begin / FA_PATCH_COLS * FA_PATCH_COLS; key < end; key += FA_PATCH_COLS) {
        for (int64_t lane = 0; lane < lanes; lane += FA_PATCH_ROWS) {
            uint8_t patch[FA_PATCH_COLS][FA_PATCH_ROWS];
            dropout_patch(seed, stream, (row + lane) / FA_PATCH_ROWS, (first_key + key) / FA_PATCH_COLS, patch);
            for (int c = 0; c < FA_PATCH_COLS; c++) memcpy(bytes + (key + c) * lanes + lane, patch[c], FA_PATCH_ROWS);
        }
    }
}

#endif
