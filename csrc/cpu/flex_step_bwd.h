/* Programmable attention in the backward, for one tile on one block of keys: S and dP become P and dS.
 *
 *   s = score_mod(raw)      p = exp2(s - lse)      ds = p (dp - delta)      dS = derivative(raw, ds)
 *
 * In a masked pair, which also is one with s = -inf, P and dS are 0, and the derivative gets a gradient of 0. */
#ifndef FA_CPU_FLEX_STEP_BWD_H
#define FA_CPU_FLEX_STEP_BWD_H

#include "elementwise_bwd.h"
#include "flex_step.h"

/* One line of P and of the gradient of s. raw and dp are the scores before the score_mod and dP; they become 0 and the
 * gradient. */
INLINE void flex_line_gradients(int lanes, const float *s, float to_log2, float *raw, float *dp, float *p,
                                const float *lse, const float *delta, const uint8_t *hidden) {
    const vec zero = vec_set(0.0f), lowest = vec_set(-INFINITY);
    for (int lane = 0; lane < lanes; lane += LANES) {
        const vec_mask visible = mask_bytes_le(hidden + lane, 0);
        const vec score = vec_select(visible, vec_load(s + lane), lowest);
        const vec_mask is_masked = vec_le(score, lowest);
        const vec prob = vec_exp2(vec_sub(vec_mul(score, vec_set(to_log2)), vec_load(lse + lane)));
        const vec ds = vec_mul(prob, vec_sub(vec_load(dp + lane), vec_load(delta + lane)));
        vec_store(p + lane, vec_select(is_masked, zero, prob));
        vec_store(dp + lane, vec_select(is_masked, zero, ds));
        vec_store(raw + lane, vec_select(visible, vec_load(raw + lane), zero));
    }
}

/* Keys [begin, end) of the block. The first line of scores and dprob is that of key `begin`, and `hidden` has all keys
 * of the block. Where marks_infinite is set, pairs with s = -inf become hidden. Without a score_mod `scale` contains
 * log2(e). */
OUTLINE void flex_gradients(const flex_tile *t, float *scores, float *dprob, int64_t begin, int64_t end, float scale,
                            const float *lse, const float *delta, uint8_t *hidden, bool marks_infinite) {
    const int lanes = t->lanes;
    fa_flex_evaluator *score = t->programs->score, *derivative = t->programs->derivative;
    const float to_log2 = score ? (float)LOG2_E : 1.0f;
    float p[FA_FLEX_TILE], sums[FA_FLEX_TILE];
    flex_bias bias = {{NULL, 0, 0}, 0};
    if (score) flex_start(score, t);
    if (derivative) flex_start(derivative, t);
    for (int64_t key = begin; key < end; key++, scores += lanes, dprob += lanes) {
        uint8_t *hides = hidden + key * lanes;
        if (!memchr(hides, 0, (size_t)lanes)) {
            memset(scores, 0, (size_t)lanes * sizeof *scores);
            memset(dprob, 0, (size_t)lanes * sizeof *dprob);
            continue;
        }
        const float *s = flex_modify(score, &bias, (int)key, scores, lanes, scale, sums);
        if (marks_infinite) flex_hide_infinite(s, lanes, 0, 1, hides);
        flex_line_gradients(lanes, s, to_log2, scores, dprob, p, lse, delta, hides);
        if (derivative) {
            const float *ds = fa_flex_line(derivative, (int)key, scores, dprob);
            for (int lane = 0; lane < lanes; lane += LANES) {
                const vec_mask visible = mask_bytes_le(hides + lane, 0);
                vec_store(dprob + lane, vec_select(visible, vec_load(ds + lane), vec_set(0.0f)));
            }
        }
        memcpy(scores, p, (size_t)lanes * sizeof *p);
    }
    if (derivative) fa_flex_add_waiting(derivative);
}

/* The forms of P and dS that the products read. For fp32 the floats are these forms. */
OUTLINE void flex_store_gradients(const gradient_args *args) {
#if WORD_ELEMS == 2
    const gradient_args copy = *args, *const a = &copy;
    for (int64_t lane = 0; lane < a->lanes; lane += LANES) {
        float *p = a->p_rows + lane / 2, *ds = a->ds_rows + lane / 2, *ds_words = a->ds_words + lane;
        const float *from_p = a->scores + lane, *from_ds = a->dprob + lane;
        for (int64_t key = 0; key < a->num_keys; key += 2) {
            vec_store_rows(p, p + a->row_stride, vec_load(from_p), vec_load(from_p + a->lanes));
            vec_store(ds_words,
                      vec_store_rows(ds, ds + a->row_stride, vec_load(from_ds), vec_load(from_ds + a->lanes)));
            p += 2 * a->row_stride, ds += 2 * a->row_stride, ds_words += a->lanes;
            from_p += 2 * a->lanes, from_ds += 2 * a->lanes;
        }
    }
#else
    (void)args;
#endif
}

#endif
