/* The element-wise stage of the backward. S^T and dP^T [keys][lanes] become P and dS.
 *
 *   p = exp2(s - lse)      ds = p (dp - delta)      softcap: ds (1 - tanh^2)      dropout: P and dp only where kept
 *
 * The products for dV and dK need P and dS as rows of words along the lanes. The product for dQ needs dS as words along
 * the keys. For fp32 both forms are the same buffer. For bf16 each form is a converted copy. */
#ifndef FA_CPU_ELEMENTWISE_BWD_H
#define FA_CPU_ELEMENTWISE_BWD_H

#include "elementwise.h"

typedef struct {
    float *scores, *dprob;    /* [num_keys][lanes] */
    float *p_rows, *ds_rows;  /* P and dS, words along the lanes; may overlap scores and dprob */
    int64_t row_stride;       /* stride of p_rows and ds_rows */
    float *ds_words;          /* [num_keys / 2][lanes]: dS as words along the keys; not used if WORD_ELEMS is 1 */
    int64_t lanes, num_keys;  /* num_keys is even */
    int64_t key;              /* the first key, for options */
    const float *lse, *delta; /* [lanes] */
    const uint8_t *bytes;     /* bytes of the dropout generator, [num_keys][lanes]; NULL: no dropout */
    uint8_t keep_max;
    float scale, kept; /* scale of scores, and factor of dprob */
    score_options options;
} gradient_args;

/* One vector of lanes, and the position of the next key. */
typedef struct {
    vec lse, delta, slope, diagonal, first, end, key;
    const float *score, *dprob, *bias;
    const uint8_t *byte;
} gradient_lanes;

typedef struct {
    vec p, ds;
} gradient_pair;

/* Computes P and dS of the next key. Masks select and do not multiply, because a masked score may be NaN. */
INLINE gradient_pair gradient_at(const gradient_args *a, bool CAPS, bool SLOPES, bool MASKED, bool BIASED, bool DROPS,
                                 gradient_lanes *x) {
    const vec zero = vec_set(0.0f), one = vec_set(1.0f);
    vec s = vec_load(x->score), dp = vec_load(x->dprob), slope = zero;
    if (CAPS || SLOPES || BIASED) s = vec_mul(s, vec_set(a->scale));
    if (BIASED) s = vec_add(s, vec_load(x->bias)), x->bias += a->lanes;
    if (CAPS) {
        vec t = vec_tanh(s);
        slope = vec_sub(one, vec_mul(t, t));
        s = vec_mul(t, vec_set(a->options.softcap));
    }
    if (SLOPES) {
        vec distance = vec_sub(x->diagonal, x->key);
        s = vec_sub(s, vec_mul(x->slope, vec_max(distance, vec_sub(zero, distance))));
    }
    vec p = vec_exp2(scores_minus(CAPS || SLOPES || BIASED, s, vec_set(a->scale), x->lse)), kept = p;
    if (DROPS) { /* NaN stays NaN, because a dropped element is multiplied by 0 */
        const vec z = vec_select(mask_bytes_le(x->byte, a->keep_max), one, zero);
        dp = vec_mul(dp, z);
        kept = vec_mul(p, z);
    }
    vec ds = vec_mul(p, scores_minus(false, dp, vec_set(a->kept), x->delta));
    if (CAPS) ds = vec_mul(ds, slope);
    if (MASKED) {
        vec_mask visible = keys_visible(x->first, x->end, x->key);
        kept = vec_select(visible, kept, zero);
        ds = vec_select(visible, ds, zero);
    }
    if (SLOPES || MASKED) x->key = vec_add(x->key, one);
    x->score += a->lanes, x->dprob += a->lanes;
    if (DROPS) x->byte += a->lanes;
    return (gradient_pair){kept, ds};
}

/* NOTE: the loop reads a copy of the arguments, which no store can change. Otherwise the compiler reads all arguments
 * again for every key. These reads are half as many instructions as the arithmetic. */
INLINE void gradient_step_of(const gradient_args *args, bool CAPS, bool SLOPES, bool MASKED, bool BIASED, bool DROPS) {
    const gradient_args copy = *args, *const a = &copy;
    const int64_t row_stride = a->row_stride;
    for (int64_t lane = 0; lane < a->lanes; lane += LANES) {
        gradient_lanes x = {.lse = vec_load(a->lse + lane),
                            .delta = vec_load(a->delta + lane),
                            .key = vec_set((float)a->key),
                            .score = a->scores + lane,
                            .dprob = a->dprob + lane};
        if (MASKED) x.first = vec_load(a->options.first + lane), x.end = vec_load(a->options.end + lane);
        if (SLOPES) x.slope = vec_load(a->options.slope + lane), x.diagonal = vec_load(a->options.diagonal + lane);
        if (BIASED) x.bias = a->options.bias + lane;
        if (DROPS) x.byte = a->bytes + lane;
        float *p = a->p_rows + lane / WORD_ELEMS, *ds = a->ds_rows + lane / WORD_ELEMS;
        float *ds_words = WORD_ELEMS == 2 ? a->ds_words + lane : NULL;
        for (int64_t key = 0; key < a->num_keys; key += 2, p += 2 * row_stride, ds += 2 * row_stride) {
            gradient_pair even = gradient_at(a, CAPS, SLOPES, MASKED, BIASED, DROPS, &x);
            gradient_pair odd = gradient_at(a, CAPS, SLOPES, MASKED, BIASED, DROPS, &x);
#if WORD_ELEMS == 2 /* rows of bf16 overwrite floats that were read already */
            vec_store_rows(p, p + row_stride, even.p, odd.p);
            vec_store(ds_words, vec_store_rows(ds, ds + row_stride, even.ds, odd.ds));
            ds_words += a->lanes;
#else
            vec_store(p, even.p);
            vec_store(p + row_stride, odd.p);
            vec_store(ds, even.ds);
            vec_store(ds + row_stride, odd.ds);
            (void)ds_words;
#endif
        }
    }
}

/* Every set of options has its own loop, as in scores_adjust. */
OUTLINE void gradient_step(const gradient_args *a) {
    const score_options *o = &a->options;
    switch ((o->softcap > 0.0f) | (o->slope != NULL) << 1 | o->masked << 2 | (o->bias != NULL) << 3) {
#define CASE(n)                                                     \
    case n:                                                         \
        if (a->bytes)                                               \
            gradient_step_of(a, n & 1, n & 2, n & 4, n & 8, true);  \
        else                                                        \
            gradient_step_of(a, n & 1, n & 2, n & 4, n & 8, false); \
        break;
        CASE(8) CASE(12) CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#undef CASE
    }
}

#endif
