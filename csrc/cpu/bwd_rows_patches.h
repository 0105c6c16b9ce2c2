/* The products of the backward of few query rows that sum over rows or keys. The products over columns, S and dP, are
 * those of the decode kernel (decode_patches.h). The algorithm: attn_bwd_rows.h.
 *
 *   dQ += dS K                     rows of dQ in registers, one key after the other, as in decode's O += P V
 *   dK = scale dS^T Q, dV = P^T dO  some keys in registers, one row after the other; written once
 *
 * A head whose K, Q or dO is not finite takes its pairs one by one, and leaves hidden pairs out: 0 times NaN would be
 * NaN. */
#ifndef FA_CPU_BWD_ROWS_PATCHES_H
#define FA_CPU_BWD_ROWS_PATCHES_H

#include "bwd_rows_plan.h"
#include "decode_patches.h"
#include "nonfinite.h"

/* One task: a share of the keys of a sequence, for some heads. Lane r + rows (head - head_kv) holds row r of a head. */
typedef struct {
    decode_task t; /* the rows and the stream of keys; scores holds S, then P */
    fa_bwd_rows_scratch *scratch;
    const float *q_words, *dout_words; /* [heads][columns / LANES][rows / WORD_ELEMS][LANES] words */
    float *dq;                         /* [lanes][q_columns]; bf16 words leave the order of vec_interleave */
    float *ds_words;                   /* dS as words along the keys */
    uint64_t exact;                    /* bits of the heads whose pairs are taken one by one in this block */
    bool hides;                        /* flex: scratch->hidden tells the pairs of this block with a score of -inf */
    int64_t keys_begin, keys_end;      /* keys of the share */
    int64_t first_key, end_key;        /* some row sees these keys of the share */
    float lse[FA_BWD_ROWS_LANES], delta[FA_BWD_ROWS_LANES];
    /* Lanes that contribute nothing see no key. */
    int64_t first[FA_BWD_ROWS_LANES], end[FA_BWD_ROWS_LANES], row[FA_BWD_ROWS_LANES], head[FA_BWD_ROWS_LANES];
} bwd_rows_task;

static bool sees(const bwd_rows_task *b, int64_t lane, int64_t key) {
    return b->first[lane] <= b->t.block + key && b->t.block + key < b->end[lane] &&
           !(b->hides && b->scratch->hidden[key * b->t.lanes + lane]);
}

/* ---- dQ += dS K ---- */

INLINE void add_queries_of(const bwd_rows_task *b, int64_t head, fa_dtype DTYPE) {
    const decode_task *t = &b->t;
    const decode_ahead nothing = {(const char *)t->scores, 0};
    const int64_t n = t->num_keys, d = t->p->d, columns = t->q_columns, lanes = t->lanes, lane = head * t->rows;
    const char *k[FA_DECODE_BLOCK + 1], *const *keys = t->stream;
    float *dq = b->dq + lane * columns;
    const float *words = b->ds_words + lane;
    int64_t offset = head * t->k_head_bytes;
    for (int64_t r = 0; r < t->rows && b->exact >> head & 1; r++) {
        for (int64_t key = 0; key < n; key++) {
            if (!sees(b, lane + r, key)) continue;
            for (int e = 0; e < WORD_ELEMS; e++) k[e] = e == key % WORD_ELEMS ? keys[key] + offset : decode_zeros;
            /* Without dS of the other key of the word, which may be infinite. */
            const uint32_t own = WORD_ELEMS == 1 ? ~UINT32_C(0) : UINT32_C(0xffff) << 16 * (key % 2);
            const float word = fa_f32_of_bits(fa_bits_of(words[key / WORD_ELEMS * lanes + r]) & own);
            values_rows(1, lanes, dq + r * columns, d, columns, k, nothing, 0, &word, 1, DTYPE);
        }
    }
    if (b->exact >> head & 1) return;
    if (n % WORD_ELEMS) { /* the last word has one key */
        for (int64_t key = 0; key < n; key++) k[key] = keys[key] + offset;
        k[n] = decode_zeros;
        keys = k, offset = 0;
    }
    const int64_t num_words = (n + WORD_ELEMS - 1) / WORD_ELEMS;
    if (t->rows == 1)
        values_rows(1, lanes, dq, d, columns, keys, nothing, offset, words, num_words, DTYPE);
    else if (t->rows == 2)
        values_rows(2, lanes, dq, d, columns, keys, nothing, offset, words, num_words, DTYPE);
    else
        for (int64_t r = 0; r < t->rows; r += 4)
            values_rows(4, lanes, dq + r * columns, d, columns, keys, nothing, offset, words + r, num_words, DTYPE);
}
OUTLINE void add_queries(const bwd_rows_task *b, int64_t head) { WITH_DTYPE(b->t.p->dtype, add_queries_of, b, head); }

/* ---- dK, dV ---- */

/* The gradient of the keys of a block. */
typedef struct {
    const fa_view *view;  /* Q or dO */
    const float *rows;    /* its packed words */
    const float *weights; /* [keys][lanes / WORD_ELEMS]: dS or P as words along the lanes */
    int64_t d, columns;
    int64_t head_bytes; /* of the gradient */
    float factor;
    char *out[FA_DECODE_BLOCK]; /* rows of the first head */
} bwd_rows_gradient;

INLINE void keys_patch(int KEYS, int VECS, const float *rows, int64_t chunk, const float *weights, int64_t stride,
                       int64_t num_words, float factor, char *const *out, int64_t offset, int64_t elem, int64_t count,
                       fa_dtype DTYPE) {
    vec acc[UNROLL_ROWS][UNROLL_VECS];
    UNROLL for (int k = 0; k < KEYS; k++) { UNROLL for (int v = 0; v < VECS; v++) acc[k][v] = vec_set(0.0f); }
    for (int64_t w = 0; w < num_words; w++, rows += LANES, weights++) {
        vec row[UNROLL_VECS];
        UNROLL for (int v = 0; v < VECS; v++) {
            row[v] = vec_load(rows + v * chunk);
            if (KEYS > 1) vec_pin(&row[v]);
        }
        UNROLL for (int k = 0; k < KEYS; k++) {
            const vec weight = vec_broadcast(weights + k * stride);
            UNROLL for (int v = 0; v < VECS; v++) acc[k][v] = vec_dot(acc[k][v], weight, row[v]);
        }
    }
    UNROLL for (int k = 0; k < KEYS; k++) {
        UNROLL for (int v = 0; v < VECS; v++) {
            store_row_elems(out[k] + offset, elem + v * LANES, count, vec_mul(acc[k][v], vec_set(factor)), DTYPE);
        }
    }
}

/* KEYS keys of one head. */
INLINE void keys_of_head(int KEYS, const bwd_rows_task *b, const bwd_rows_gradient *x, int64_t key, int64_t head,
                         fa_dtype DTYPE) {
    const int64_t num_words = b->t.rows / WORD_ELEMS, chunk = num_words * LANES, d = x->d, stride = b->t.lanes;
    const float *rows = x->rows + head * num_words * x->columns;
    const float *weights = x->weights + key * stride + head * num_words;
    const int64_t offset = head * x->head_bytes;
    int64_t elem = 0;
    for (; elem + UNROLL_VECS * LANES <= d; elem += UNROLL_VECS * LANES, rows += UNROLL_VECS * chunk)
        keys_patch(KEYS, UNROLL_VECS, rows, chunk, weights, stride, num_words, x->factor, x->out + key, offset, elem,
                   LANES, DTYPE);
    for (; elem + LANES <= d; elem += LANES, rows += chunk)
        keys_patch(KEYS, 1, rows, chunk, weights, stride, num_words, x->factor, x->out + key, offset, elem, LANES,
                   DTYPE);
    if (elem < d)
        keys_patch(KEYS, 1, rows, chunk, weights, stride, num_words, x->factor, x->out + key, offset, elem, d - elem,
                   DTYPE);
}

/* One key of one head, from the rows that see the key. */
OUTLINE void write_key_exactly(const bwd_rows_task *b, const bwd_rows_gradient *x, int64_t key, int64_t head) {
    const decode_task *t = &b->t;
    float sum[FA_MAX_HEAD_DIM_V] = {0}, row[FA_MAX_HEAD_DIM_V];
    for (int64_t lane = head * t->rows; lane < (head + 1) * t->rows; lane++) {
        if (!sees(b, lane, key)) continue;
        const int64_t at = fa_query_offset(x->view, &t->s, b->row[lane], b->head[lane]) * DTYPE_BYTES(t->p->dtype);
        load_nonfinite(row, (const char *)x->view->data + at, x->d, t->p->dtype);
        const vec weight = vec_set(word_element(x->weights + key * t->lanes + lane / WORD_ELEMS, lane % WORD_ELEMS));
        for (int64_t c = 0; c < x->d; c += LANES)
            vec_store(sum + c, vec_fma(weight, vec_load(row + c), vec_load(sum + c)));
    }
    unpack_row(x->out[key] + head * x->head_bytes, x->d, sum, x->factor, t->p->dtype);
}

/* All keys of the block. */
INLINE void write_keys_of(const bwd_rows_task *b, const bwd_rows_gradient *x, fa_dtype DTYPE) {
    const decode_task *t = &b->t;
    const int64_t row_bytes = x->d * DTYPE_BYTES(DTYPE);
    for (int64_t key = 0, num; key < t->num_keys; key += num) {
        num = t->num_keys - key < UNROLL_ROWS ? 1 : UNROLL_ROWS;
        for (int64_t head = 0; head < t->num_heads; head++) {
            for (int64_t i = key + num; i < key + 2 * num && i < t->num_keys; i++)
                for (int64_t at = head * x->head_bytes; at < head * x->head_bytes + row_bytes; at += 64)
                    PREFETCH(x->out[i] + at);
            if (b->exact >> head & 1)
                for (int64_t i = 0; i < num; i++) write_key_exactly(b, x, key + i, head);
            else if (num == 1)
                keys_of_head(1, b, x, key, head, DTYPE);
            else
                keys_of_head(UNROLL_ROWS, b, x, key, head, DTYPE);
        }
    }
}
static void write_keys(const bwd_rows_task *b, const bwd_rows_gradient *x) {
    WITH_DTYPE(b->t.p->dtype, write_keys_of, b, x);
}

#endif
