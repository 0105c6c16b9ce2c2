/* What happens to a tile of scores in the backward, lane by lane: S^T and dP^T [keys][lanes] become P and dS.
 *
 *   p = exp2(s - lse)      ds = p (dp - delta)      softcap: ds (1 - tanh^2)      dropout: P and dp only where kept
 *
 * The products want P and dS as rows of words along the lanes (dV, dK) and dS as words along the keys (dQ): for fp32 the
 * same buffer, for bf16 a converted copy of each. */
#ifndef FA_ELEMENTWISE_BWD_H
#define FA_ELEMENTWISE_BWD_H

#include "elementwise.h"

typedef struct {
    float *scores, *dprob;    /* [num_keys][lanes] */
    float *p_rows, *ds_rows;  /* P and dS, words along the lanes; may lie over scores and dprob */
    int64_t row_stride;       /* of these two */
    float *ds_words;          /* [num_keys / 2][lanes]: dS as words along the keys; WORD_ELEMS 1: not used */
    int64_t lanes, num_keys;  /* num_keys is even */
    const float *lse, *delta; /* [lanes] */
    const uint8_t *bytes;     /* of the dropout generator, [num_keys][lanes]; NULL: nothing is dropped */
    uint8_t keep_max;
    float scale, kept; /* of scores and of dprob */
    score_options options;
} gradient_args;

typedef struct {
    vec lse, delta, slope, diagonal, first, end;
} gradient_lanes;

typedef struct {
    vec p, ds;
} gradient_pair;

/* Masks select, they do not multiply: a masked score may be NaN. */
INLINE gradient_pair gradient_at(const gradient_args *a, bool CAPS, bool SLOPES, bool MASKED, bool DROPS,
                                 const gradient_lanes *x, int64_t key, int64_t lane) {
    const vec zero = vec_set(0.0f);
    vec s = vec_load(a->scores + key * a->lanes + lane), dp = vec_load(a->dprob + key * a->lanes + lane), slope = zero;
    if (CAPS || SLOPES) s = vec_mul(s, vec_set(a->scale));
    if (CAPS) {
        vec t = vec_tanh(s);
        slope = vec_sub(vec_set(1.0f), vec_mul(t, t));
        s = vec_mul(t, vec_set(a->options.softcap));
    }
    if (SLOPES) {
        vec distance = vec_sub(x->diagonal, vec_set((float)key));
        s = vec_sub(s, vec_mul(x->slope, vec_max(distance, vec_sub(zero, distance))));
    }
    vec p = vec_exp2(scores_minus(CAPS || SLOPES, s, vec_set(a->scale), x->lse)), kept = p;
    if (DROPS) { /* a product: what is dropped is multiplied by 0, and NaN stays NaN */
        const vec z = vec_select(mask_bytes_le(a->bytes + key * a->lanes + lane, a->keep_max), vec_set(1.0f), zero);
        dp = vec_mul(dp, z);
        kept = vec_mul(p, z);
    }
    vec ds = vec_mul(p, scores_minus(false, dp, vec_set(a->kept), x->delta));
    if (CAPS) ds = vec_mul(ds, slope);
    if (MASKED) {
        vec_mask visible = keys_visible(x->first, x->end, vec_set((float)key));
        kept = vec_select(visible, kept, zero);
        ds = vec_select(visible, ds, zero);
    }
    return (gradient_pair){kept, ds};
}

INLINE void gradient_step_of(const gradient_args *a, bool CAPS, bool SLOPES, bool MASKED, bool DROPS) {
    for (int64_t lane = 0; lane < a->lanes; lane += LANES) {
        gradient_lanes x = {.lse = vec_load(a->lse + lane), .delta = vec_load(a->delta + lane)};
        if (MASKED) x.first = vec_load(a->options.first + lane), x.end = vec_load(a->options.end + lane);
        if (SLOPES) x.slope = vec_load(a->options.slope + lane), x.diagonal = vec_load(a->options.diagonal + lane);
        for (int64_t key = 0; key < a->num_keys; key += 2) {
            gradient_pair even = gradient_at(a, CAPS, SLOPES, MASKED, DROPS, &x, key, lane);
            gradient_pair odd = gradient_at(a, CAPS, SLOPES, MASKED, DROPS, &x, key + 1, lane);
            float *p = a->p_rows + key * a->row_stride, *ds = a->ds_rows + key * a->row_stride;
#if WORD_ELEMS == 2 /* row "lane" of bf16 lies over floats that were read already */
            vec_store_bf16((uint16_t *)p + lane, even.p);
            vec_store_bf16((uint16_t *)(p + a->row_stride) + lane, odd.p);
            vec_store_bf16((uint16_t *)ds + lane, even.ds);
            vec_store_bf16((uint16_t *)(ds + a->row_stride) + lane, odd.ds);
            vec_store(a->ds_words + key / 2 * a->lanes + lane, vec_pack_words(even.ds, odd.ds));
#else
            vec_store(p + lane, even.p);
            vec_store(p + a->row_stride + lane, odd.p);
            vec_store(ds + lane, even.ds);
            vec_store(ds + a->row_stride + lane, odd.ds);
#endif
        }
    }
}

/* Every set of options is a loop of its own, as in scores_adjust. */
OUTLINE void gradient_step(const gradient_args *a) {
    const score_options *o = &a->options;
    switch ((o->softcap > 0.0f) | (o->slope != NULL) << 1 | o->masked << 2) {
#define CASE(n)                                              \
    case n:                                                  \
        if (a->bytes)                                        \
            gradient_step_of(a, n & 1, n & 2, n & 4, true);  \
        else                                                 \
            gradient_step_of(a, n & 1, n & 2, n & 4, false); \
        break;
        CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
#undef CASE
    }
}

#endif
