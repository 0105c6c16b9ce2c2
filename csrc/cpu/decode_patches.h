/* The two products of the decode kernel over a block of keys, S = Q K^T and O += P V. A table holds them by dtype and
 * number of unrolled rows. The algorithm: attn_decode.h. */
#ifndef FA_CPU_DECODE_PATCHES_H
#define FA_CPU_DECODE_PATCHES_H

#include "decode_mods.h"
#include "vec_load_first.h"

INLINE vec load_words(const void *p, fa_dtype DTYPE) { return WORD_ELEMS == 2 ? vec_load(p) : load_elems(p, DTYPE); }
INLINE vec load_words_first(const void *p, int64_t n, fa_dtype DTYPE) {
#if WORD_ELEMS == 2
    (void)DTYPE;
    return vec_load_words_first(p, n);
#else
    return DTYPE == FA_F32    ? vec_load_first(p, n)
           : DTYPE == FA_F16  ? vec_load_f16_first(p, n)
           : DTYPE == FA_E4M3 ? vec_load_e4m3_first(p, n)
                              : vec_load_bf16_first(p, n);
#endif
}

/* ---- S = Q K^T ---- */

#define DECODE_TOKENS(ROWS) (DECODE_SUMS / (ROWS) < 4 ? DECODE_SUMS / (ROWS) : 4)
#define DECODE_HEADS(ROWS)  (DECODE_SUMS / (ROWS) / DECODE_TOKENS(ROWS))

/* A tile of DECODE_SUMS dot products: ROWS rows of Q, a few tokens, and several heads if sums remain. A vector of Q
 * serves all tokens, and a vector of K serves all rows, so the multiply-adds bind and not the loads. k holds the
 * tokens' rows of head 0, and `ahead` the lines to prefetch. */
INLINE void scores_tile(int ROWS, const decode_task *t, const decode_scores *x, const char *const *k,
                        decode_ahead ahead, int64_t head, int64_t row, const int64_t *out_at, fa_dtype DTYPE) {
    const int TOKENS = DECODE_TOKENS(ROWS), HEADS = DECODE_HEADS(ROWS), STEP = LANES * WORD_ELEMS;
    const int64_t d = x->d, q_step = t->rows * LANES, head_words = t->rows * x->columns / WORD_ELEMS;
    const float *q[DECODE_SUMS];
    int64_t k_at[DECODE_SUMS];
    vec acc[DECODE_SUMS];
    UNROLL for (int i = 0; i < DECODE_SUMS; i++) acc[i] = vec_set(0.0f);
    UNROLL for (int h = 0; h < HEADS; h++) {
        const int64_t existing = head + h < t->num_heads ? head + h : t->num_heads - 1;
        q[h] = x->q + existing * head_words + row * LANES;
        k_at[h] = existing * x->head_bytes;
    }
    int64_t elem = 0, q_at = 0;
    for (; elem + STEP <= d; elem += STEP, q_at += q_step, ahead.row += HEADS * TOKENS * STEP * DTYPE_BYTES(DTYPE)) {
        UNROLL for (int h = 0; h < HEADS; h++) {
            vec q_vec[4];
            UNROLL for (int r = 0; r < ROWS; r++) {
                q_vec[r] = vec_load(q[h] + q_at + r * LANES);
                vec_pin(&q_vec[r]);
            }
            UNROLL for (int i = 0; i < TOKENS; i++) {
                vec k_vec = load_words(k[i] + k_at[h] + elem * DTYPE_BYTES(DTYPE), DTYPE),
                    *sum = acc + (i * HEADS + h) * ROWS;
                if (ROWS > 1) vec_pin(&k_vec);
                fetch_ahead(ahead, (i + h * TOKENS) * STEP * DTYPE_BYTES(DTYPE), DTYPE);
                UNROLL for (int r = 0; r < ROWS; r++) sum[r] = vec_dot(sum[r], k_vec, q_vec[r]);
            }
        }
    }
    if (elem < d) {
        UNROLL for (int h = 0; h < HEADS; h++) {
            UNROLL for (int i = 0; i < TOKENS; i++) {
                vec k_vec = load_words_first(k[i] + k_at[h] + elem * DTYPE_BYTES(DTYPE), d - elem, DTYPE);
                vec *sum = acc + (i * HEADS + h) * ROWS;
                UNROLL for (int r = 0; r < ROWS; r++) {
                    sum[r] = vec_dot(sum[r], k_vec, vec_load(q[h] + q_at + r * LANES));
                }
            }
        }
    }
    float sums[DECODE_SUMS];
    UNROLL for (int i = 0; i < DECODE_SUMS; i += LANES) {
        vec_store(sums + i, vec_mul(vec_sums(acc + i), vec_set(x->scale)));
    }
    UNROLL for (int i = 0; i < TOKENS; i++) {
        UNROLL for (int h = 0; h < HEADS; h++) {
            const int64_t existing = head + h < t->num_heads ? head + h : t->num_heads - 1;
            memcpy(x->out + out_at[i] + existing * t->rows + row, sums + (i * HEADS + h) * ROWS,
                   (size_t)ROWS * sizeof(float));
        }
    }
}

/* S of all heads of the block. In an incomplete last tile, missing tokens and heads repeat the last existing token or
 * head. */
INLINE void scores_of_block(int ROWS, decode_task *t, const decode_scores *x, fa_dtype DTYPE) {
    const int TOKENS = DECODE_TOKENS(ROWS), HEADS = DECODE_HEADS(ROWS);
    const decode_ahead nothing = {(const char *)t->scores, 0};
    decode_cursor cursor = cursor_at(t, x->first + t->ahead);
    for (int64_t key = 0; key < t->num_keys; key += TOKENS) {
        const char *k[4];
        int64_t out_at[4];
        for (int i = 0; i < TOKENS; i++) {
            int64_t existing = key + i < t->num_keys ? key + i : t->num_keys - 1;
            k[i] = t->stream[x->first + existing];
            out_at[i] = existing * t->lanes;
        }
        int64_t remaining = (t->num_keys - key < TOKENS ? t->num_keys - key : TOKENS) * t->num_heads;
        for (int64_t head = 0; head < t->num_heads; head += HEADS) {
            const int64_t num_rows = remaining < TOKENS * HEADS ? remaining : TOKENS * HEADS;
            decode_ahead ahead = next_rows(t, &cursor, num_rows);
            remaining -= num_rows;
            for (int64_t row = 0; row < t->rows; row += ROWS, ahead = nothing)
                scores_tile(ROWS, t, x, k, ahead, head, row, out_at, DTYPE);
        }
    }
}

/* ---- O += P V ---- */

/* Does every row see the key of the block? With mods: do the products of the head take it? */
INLINE bool is_common(const decode_task *t, int64_t head, int64_t key) {
    if (t->mods) return key < t->num_keys && t->mods->common[head] >> key & 1;
    return t->common_first <= t->block + key && t->block + key < t->common_end && key < t->num_keys;
}

/* Adds num_words words of keys to ROWS rows of O, over CHUNKS LANES WORD_ELEMS of its d columns. v holds the keys'
 * rows, to which `offset` bytes are added, and `ahead` the lines to prefetch. */
INLINE void values_patch(int ROWS, int CHUNKS, bool PARTIAL, int64_t lanes, float *o, int64_t d, int64_t columns,
                         const char *const *v, decode_ahead ahead, int64_t offset, int64_t elem, const float *p_words,
                         int64_t num_words, fa_dtype DTYPE) {
    const int VECS = CHUNKS * WORD_ELEMS, line = LANES * WORD_ELEMS * DTYPE_BYTES(DTYPE);
    vec acc[LANES][8];
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int c = 0; c < VECS; c++) acc[r][c] = vec_load(o + r * columns + elem + c * LANES);
    }
    for (int64_t w = 0; w < num_words; w++, v += WORD_ELEMS, ahead.row += VECS * line, p_words += lanes) {
        vec v_vec[8];
        UNROLL for (int c = 0; c < CHUNKS; c++) {
            const int64_t at = elem + c * LANES * WORD_ELEMS;
            UNROLL for (int e = 0; e < WORD_ELEMS; e++) {
                const char *data = v[e] + offset + at * DTYPE_BYTES(DTYPE);
                fetch_ahead(ahead, (c * WORD_ELEMS + e) * line, DTYPE);
                v_vec[c * WORD_ELEMS + e] = PARTIAL ? load_words_first(data, d - at, DTYPE) : load_words(data, DTYPE);
            }
#if WORD_ELEMS == 2
            vec_interleave(&v_vec[2 * c], &v_vec[2 * c + 1]);
#endif
        }
        if (ROWS > 1) {
            UNROLL for (int c = 0; c < VECS; c++) vec_pin(&v_vec[c]);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            vec p = vec_broadcast(p_words + r);
            UNROLL for (int c = 0; c < VECS; c++) acc[r][c] = vec_dot(acc[r][c], p, v_vec[c]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int c = 0; c < VECS; c++) vec_store(o + r * columns + elem + c * LANES, acc[r][c]);
    }
}

/* Adds num_words words of keys to ROWS rows of O, over all d columns. Rows of O lie `columns` apart, and words of P
 * `lanes`. */
INLINE void values_rows(int ROWS, int64_t lanes, float *o, int64_t d, int64_t columns, const char *const *v,
                        decode_ahead ahead, int64_t offset, const float *p_words, int64_t num_words, fa_dtype DTYPE) {
    const int64_t chunk = LANES * WORD_ELEMS, column_bytes = num_words * WORD_ELEMS * DTYPE_BYTES(DTYPE);
    const int CHUNKS = ROWS == 1 ? 8 / WORD_ELEMS : DECODE_SUMS / (ROWS * WORD_ELEMS);
    const char *const row = ahead.row;
    int64_t elem = 0;
    for (; elem + CHUNKS * chunk <= d; elem += CHUNKS * chunk, ahead.row = row + elem * column_bytes)
        values_patch(ROWS, CHUNKS, false, lanes, o, d, columns, v, ahead, offset, elem, p_words, num_words, DTYPE);
    for (; elem + chunk <= d; elem += chunk, ahead.row = row + elem * column_bytes)
        values_patch(ROWS, 1, false, lanes, o, d, columns, v, ahead, offset, elem, p_words, num_words, DTYPE);
    if (elem < d) values_patch(ROWS, 1, true, lanes, o, d, columns, v, ahead, offset, elem, p_words, num_words, DTYPE);
}

/* O of all heads of the block. A key that some row does not see is a row of zeros here. */
INLINE void values_of_block(int ROWS, decode_task *t, fa_dtype DTYPE) {
    const decode_ahead nothing = {(const char *)t->scores, 0};
    const int64_t n = t->num_keys, rows = t->rows;
    decode_cursor cursor = cursor_at(t, n + t->ahead);
    for (int64_t key = 0; key < n; key += t->ahead) {
        const int64_t existing = n - key < t->ahead ? n - key : t->ahead, tokens = round_up(existing, WORD_ELEMS);
        for (int64_t head = 0; head < t->num_heads; head++) {
            const char *common[DECODE_MAX_AHEAD], *const *v = t->stream + n + key;
            int64_t offset = head * t->v_head_bytes;
            bool all_common = is_common(t, head, key) && is_common(t, head, key + tokens - 1);
            for (int64_t i = 1; t->mods && i < tokens - 1; i++) all_common = all_common && is_common(t, head, key + i);
            if (!all_common) {
                for (int64_t i = 0; i < tokens; i++)
                    common[i] = is_common(t, head, key + i) ? v[i] + offset : decode_zeros;
                v = common;
                offset = 0;
            }
            decode_ahead ahead = next_rows(t, &cursor, existing);
            float *o = t->o + head * rows * t->columns;
            const float *p_words = t->scores + key / WORD_ELEMS * t->lanes + head * rows;
            for (int64_t row = 0; row < rows; row += ROWS, ahead = nothing)
                values_rows(ROWS, t->lanes, o + row * t->columns, t->p->d_v, t->columns, v, ahead, offset,
                            p_words + row, tokens / WORD_ELEMS, DTYPE);
        }
    }
}

#define DECODE_PATCHES(ROWS, DTYPE)                                               \
    static void scores_##ROWS##_##DTYPE(decode_task *t, const decode_scores *x) { \
        scores_of_block(ROWS, t, x, DTYPE);                                       \
    }                                                                             \
    static void values_##ROWS##_##DTYPE(decode_task *t) { values_of_block(ROWS, t, DTYPE); }
#define DECODE_DTYPE(DTYPE)                                                                                 \
    DECODE_PATCHES(1, DTYPE)                                                                                \
    DECODE_PATCHES(2, DTYPE)                                                                                \
    DECODE_PATCHES(4, DTYPE)                                                                                \
    static void value_##DTYPE(const decode_task *t, float *o, const char *const *v, const float *p_words) { \
        const decode_ahead nothing = {(const char *)t->scores, 0};                                          \
        values_rows(1, t->lanes, o, t->p->d_v, t->columns, v, nothing, 0, p_words, 1, DTYPE);               \
    }
#define DECODE_ROWS(DTYPE)                                      \
    {                                                           \
        {1, scores_1_##DTYPE, values_1_##DTYPE, value_##DTYPE}, \
        {2, scores_2_##DTYPE, values_2_##DTYPE, value_##DTYPE}, \
        {4, scores_4_##DTYPE, values_4_##DTYPE, value_##DTYPE}, \
    }

DECODE_DTYPE(FA_BF16)
#if WORD_ELEMS == 1
DECODE_DTYPE(FA_F16)
DECODE_DTYPE(FA_F32)
DECODE_DTYPE(FA_E4M3)
#endif

static decode_patches decode_patches_of(fa_dtype dtype, int64_t rows) {
    static const decode_patches table[FA_E4M3 + 1][3] = {
        [FA_BF16] = DECODE_ROWS(FA_BF16),
#if WORD_ELEMS == 1
        [FA_F16] = DECODE_ROWS(FA_F16),
        [FA_F32] = DECODE_ROWS(FA_F32),
        [FA_E4M3] = DECODE_ROWS(FA_E4M3),
#endif
    };
    return table[dtype][rows > 2 ? 2 : rows - 1];
}

#endif
