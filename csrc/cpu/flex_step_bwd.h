/* Programmable attention in the backward, for one tile on one block of keys: S and dP become P and dS.
 *
 *   s = score_mod(raw)      p = exp2(s - lse)      ds = p (z dp - delta)      dS = derivative(raw, ds)
 *
 * z is that of dropout: `kept` of gradient_args, or 0 where the pair is dropped, whose P is stored as 0. In a masked
 * pair, which also is one with s = -inf, P and dS are 0, and the derivative gets a gradient of 0. */
#ifndef FA_CPU_FLEX_STEP_BWD_H
#define FA_CPU_FLEX_STEP_BWD_H

#include "elementwise_bwd.h"
#include "flex_bias.h"
#include "flex_step.h"

/* 1 where dropout keeps the element, else 0. NaN stays NaN, because a dropped element is multiplied by 0. */
INLINE vec flex_kept(const uint8_t *byte, uint8_t keep_max) {
    return vec_select(mask_bytes_le(byte, keep_max), vec_set(1.0f), vec_set(0.0f));
}

/* One line of P and of the gradient of s. raw and dp are the scores before the score_mod and dP; they become 0 and the
 * gradient. `bytes` are those of the line in args->bytes. */
INLINE void flex_line_gradients(const gradient_args *args, int lanes, const float *s, float to_log2, float *raw,
                                float *dp, float *p, const uint8_t *hidden, const uint8_t *bytes) {
    const vec zero = vec_set(0.0f), lowest = vec_set(-INFINITY);
    for (int lane = 0; lane < lanes; lane += LANES) {
        const vec_mask visible = mask_bytes_le(hidden + lane, 0);
        const vec score = vec_select(visible, vec_load(s + lane), lowest);
        const vec_mask is_masked = vec_le(score, lowest);
        const vec prob = vec_exp2(vec_sub(vec_mul(score, vec_set(to_log2)), vec_load(args->lse + lane)));
        vec grad = vec_load(dp + lane), kept = prob;
        if (bytes) {
            const vec z = flex_kept(bytes + lane, args->keep_max);
            grad = vec_mul(grad, z);
            kept = vec_mul(prob, z);
        }
        const vec ds = vec_mul(prob, scores_minus(false, grad, vec_set(args->kept), vec_load(args->delta + lane)));
        vec_store(p + lane, vec_select(is_masked, zero, kept));
        vec_store(dp + lane, vec_select(is_masked, zero, ds));
        vec_store(raw + lane, vec_select(visible, vec_load(raw + lane), zero));
    }
}

/* Keys [begin, end) of the block. The arrays in args begin with the line of key `begin`, and `hidden` has all keys of
 * the block. Where marks_infinite is set, pairs with s = -inf become hidden. Without a score_mod `scale` contains
 * log2(e). */
OUTLINE void flex_gradients(const flex_tile *t, const gradient_args *args, int64_t begin, int64_t end, float scale,
                            uint8_t *hidden, bool marks_infinite) {
    const int lanes = t->lanes;
    float *scores = args->scores, *dprob = args->dprob;
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
        flex_line_gradients(args, lanes, s, to_log2, scores, dprob, p, hides,
                            args->bytes ? args->bytes + (key - begin) * lanes : NULL);
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

/* The same for a score_mod that adds a bias (flex_bias.h), of all lines at once. `bias` has a line for each key, which
 * becomes the gradient of the bias. hidden NULL: no pair is masked but those of a bias of -inf, and those of lanes with
 * an lse of +inf. */
INLINE void flex_bias_gradients_of(const gradient_args *args, bool DROPS, const uint8_t *hidden, float *bias) {
    const gradient_args copy = *args, *const a = &copy;
    const int64_t row_stride = a->row_stride, lanes = a->lanes;
    const vec zero = vec_set(0.0f), lowest = vec_set(-INFINITY), scale = vec_set(a->scale);
    const vec to_log2 = vec_set((float)LOG2_E);
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
        const float *score = a->scores + lane, *dprob = a->dprob + lane;
        float *p = a->p_rows + lane / WORD_ELEMS, *ds = a->ds_rows + lane / WORD_ELEMS, *line = bias + lane;
        float *ds_words = WORD_ELEMS == 2 ? a->ds_words + lane : NULL;
        const uint8_t *hides = hidden ? hidden + lane : NULL, *byte = DROPS ? a->bytes + lane : NULL;
        const vec lse = vec_load(a->lse + lane), delta = vec_load(a->delta + lane);
        const vec_mask is_idle = vec_le(vec_set(INFINITY), lse);
        for (int64_t key = 0; key < a->num_keys; key += 2) {
            gradient_pair pair[2];
            for (int i = 0; i < 2; i++, score += lanes, dprob += lanes, line += lanes) {
                vec s = vec_select(is_idle, lowest, vec_add(vec_mul(vec_load(score), scale), vec_load(line)));
                if (hides) s = vec_select(mask_bytes_le(hides, 0), s, lowest), hides += lanes;
                const vec_mask is_masked = vec_le(s, lowest);
                const vec prob = vec_exp2(vec_sub(vec_mul(s, to_log2), lse));
                vec grad = vec_load(dprob), kept = prob;
                if (DROPS) {
                    const vec z = flex_kept(byte, a->keep_max);
                    grad = vec_mul(grad, z);
                    kept = vec_mul(prob, z);
                    byte += lanes;
                }
                const vec ds = vec_mul(prob, scores_minus(false, grad, vec_set(a->kept), delta));
                pair[i].p = vec_select(is_masked, zero, kept);
                pair[i].ds = vec_select(is_masked, zero, ds);
                vec_store(line, pair[i].ds);
            }
#if WORD_ELEMS == 2
            vec_store_rows(p, p + row_stride, pair[0].p, pair[1].p);
            vec_store(ds_words, vec_store_rows(ds, ds + row_stride, pair[0].ds, pair[1].ds));
            ds_words += lanes;
#else
            vec_store(p, pair[0].p), vec_store(p + row_stride, pair[1].p);
            vec_store(ds, pair[0].ds), vec_store(ds + row_stride, pair[1].ds);
            (void)ds_words;
#endif
            p += 2 * row_stride, ds += 2 * row_stride;
        }
    }
}

OUTLINE void flex_bias_gradients(const gradient_args *args, const uint8_t *hidden, float *bias) {
    if (args->bytes)
        flex_bias_gradients_of(args, true, hidden, bias);
    else
        flex_bias_gradients_of(args, false, hidden, bias);
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
