/* Attention forward for few queries against a long cache:  O = softmax(scale Q K^T + bias + mask) V,  lse.
 *
 *   q [b, len_q, h, d]    k, v [b, len_kv, h_kv, d] or pages    o like q    lse [b, h, len_q]        len_q g <= 16
 *
 * Every byte of K and V is used g len_q times and never again, so memory binds, and the order of reading is everything:
 * tokens in ascending order, all heads of a token together, which is one sequential stream in the layout of a cache.
 *
 *   first pass, one task for each (sequence, split of its keys, range of heads):
 *       for each block of 64 keys:
 *           S = Q K^T     tiles of a few tokens of a head: dot products in registers, all sums by one shuffle tree
 *           softmax       S is [keys][rows of all heads], a row in each lane, as in attn_fwd.h
 *           O += P V      a few tokens of one head at a time, accumulators in registers
 *   second pass, one task for each (sequence, head):
 *       O = sum of the splits' O, each times exp2(its maximum - the largest), in the order of the keys
 *
 * All along the stream the rows that come next are prefetched in the order of memory, a fixed distance ahead, over the
 * borders between K and V, blocks and splits, a line for each line that the arithmetic loads: left to itself the
 * processor reads half as fast. Specification: reference.c. Splits and workspace: decode_plan.h. Measurements: README.md. */
#ifndef FA_ATTN_DECODE_H
#define FA_ATTN_DECODE_H

#include "cpu.h"
#include "decode_plan.h"
#include "elementwise.h"
#include "pack.h"

#define DECODE_MAX_LANES   64
#define DECODE_MAX_AHEAD   16
#define DECODE_AHEAD_BYTES (16 * 1024) /* a third of a first-level cache */
#define DECODE_AGAIN_BYTES (4 * 1024)

struct decode_task;
/* What is compiled for each dtype and number of unrolled rows. */
typedef struct {
    int unrolled_rows;
    void (*scores)(struct decode_task *t);
    void (*values)(struct decode_task *t);
    void (*value)(const struct decode_task *t, float *o, const char *const *v, const float *p_words);
} decode_patches;

typedef struct {
    const fa_problem *p;
    decode_patches patches;
    const int64_t *first_partial; /* [b + 1] */
    float *partials;
    int64_t num_partials, heads_per_task;
    int64_t rows, columns, partial_floats; /* see decode_plan.h */
    float scale, softcap;                  /* of the product, and of what softcap multiplies, in units of log2 */
} decode_job;

/* One task: heads [head_kv, head_kv + num_heads) of one split. Lane r + rows (head - head_kv) is row r of a head. */
typedef struct decode_task {
    const decode_job *job;
    const fa_problem *p;
    fa_sequence s;
    int64_t head_kv, num_heads, rows, columns, lanes;
    int64_t common_first, common_end; /* the keys that every row sees */
    float *o; /* [lanes][columns]; bf16 words leave the columns in the order of vec_interleave */

    /* Keys of the block, then its values, then the first keys of the next block: the order in which they are read. */
    const char *stream[2 * FA_DECODE_BLOCK + DECODE_MAX_AHEAD + 1];
    int64_t block, num_keys; /* first key and number of keys of the block */
    int64_t ahead, again;    /* distance of the prefetch in tokens, and by how much the second follows the first */
    bool is_side_by_side;    /* the heads of a token */
    int64_t k_head_bytes, v_head_bytes, row_bytes;

    float row_max[DECODE_MAX_LANES], row_sum[DECODE_MAX_LANES];
    float slope[DECODE_MAX_LANES];
    _Alignas(64) float q[4096]; /* [heads][columns / WORD_ELEMS / LANES][rows][LANES] words */
    _Alignas(64) float scores[FA_DECODE_BLOCK * DECODE_MAX_LANES]; /* [keys][lanes] */
} decode_task;

static const char decode_zeros[4 * FA_MAX_HEAD_DIM];

INLINE vec load_words(const void *p, fa_dtype DTYPE) { return WORD_ELEMS == 2 ? vec_load(p) : load_elems(p, DTYPE); }
INLINE vec load_words_first(const void *p, int64_t n, fa_dtype DTYPE) {
#if WORD_ELEMS == 2
    (void)DTYPE;
    return vec_load_words_first(p, n);
#else
    return DTYPE == FA_F32   ? vec_load_first(p, n)
           : DTYPE == FA_F16 ? vec_load_f16_first(p, n)
                             : vec_load_bf16_first(p, n);
#endif
}

/* ---- the stream ---- */

/* Addresses of n rows of k or v from key `first` on. */
static void list_rows(const decode_task *t, const fa_view *view, int64_t first, int64_t n, const char **rows) {
    const fa_problem *p = t->p;
    const int64_t bytes = DTYPE_BYTES(p->dtype);
    for (int64_t j = 0; j < n;) {
        int64_t run = n - j, in_page = p->page_size - (t->s.kv_row + first + j) % (p->page_size ? p->page_size : 1);
        if (t->s.pages && in_page < run) run = in_page;
        const char *row = (const char *)view->data + fa_key_offset(p, view, &t->s, first + j, t->head_kv) * bytes;
        for (int64_t end = j + run; j < end; j++, row += view->stride_row * bytes) rows[j] = row;
    }
}

/* Where the prefetch stands: `left` rows of `token`, which is an index of the stream, lie side by side from `row` on. */
typedef struct {
    int64_t token, left, back;
    const char *row;
} decode_cursor;

/* What to fetch with the lines that the arithmetic loads: rows side by side, and once more what lies `back` bytes before. A
 * processor whose queue of misses is full drops a prefetch; the second finds most lines in the first-level cache. */
typedef struct {
    const char *row;
    int64_t back;
} decode_ahead;

INLINE decode_cursor cursor_at(const decode_task *t, int64_t token) {
    const char *row = t->stream[token];
    return (decode_cursor){.token = token, .left = t->num_heads, .back = row - t->stream[token - t->again], .row = row};
}

/* The next num_rows rows of the stream. If they do not lie side by side they are fetched here and now, and the address is
 * one of the first-level cache. */
INLINE decode_ahead next_rows(const decode_task *t, decode_cursor *c, int64_t num_rows) {
    decode_ahead found = {(const char *)t->scores, 0};
    if (t->is_side_by_side && num_rows <= c->left) {
        found = (decode_ahead){c->row, c->back};
        c->row += num_rows * t->row_bytes;
        c->left -= num_rows;
        if (c->left == 0) *c = cursor_at(t, c->token + 1);
        return found;
    }
    for (int64_t i = 0; i < num_rows; i++) {
        const bool is_value = c->token >= t->num_keys && c->token < 2 * t->num_keys;
        for (int64_t at = 0; at < t->row_bytes; at += 64) PREFETCH(c->row + at);
        c->row += is_value ? t->v_head_bytes : t->k_head_bytes;
        if (--c->left == 0) *c = cursor_at(t, c->token + 1);
    }
    return found;
}

INLINE void fetch_ahead(decode_ahead ahead, int64_t at, fa_dtype DTYPE) {
    PREFETCH(ahead.row + at);
    if (DTYPE != FA_F16) PREFETCH(ahead.row + at - ahead.back);
}

/* ---- S = Q K^T ---- */

#define DECODE_TOKENS(ROWS) (LANES / (ROWS) < 4 ? LANES / (ROWS) : 4)
#define DECODE_HEADS(ROWS)  (LANES / (ROWS) / DECODE_TOKENS(ROWS))

/* A tile of LANES dot products: ROWS rows of Q, a few tokens, and more heads if that leaves room. A vector of Q serves
 * all tokens and one of K all rows, so that the multiply-adds bind and not the loads. k: the tokens' rows of head 0; ahead: what to fetch
 * meanwhile. */
INLINE void scores_tile(int ROWS, const decode_task *t, const char *const *k, decode_ahead ahead, int64_t head,
                        int64_t row, float *out, const int64_t *out_at, fa_dtype DTYPE) {
    const int TOKENS = DECODE_TOKENS(ROWS), HEADS = DECODE_HEADS(ROWS), STEP = LANES * WORD_ELEMS;
    const int64_t d = t->p->d, q_step = t->rows * LANES, head_words = t->rows * t->columns / WORD_ELEMS;
    const float *q[LANES];
    int64_t k_at[LANES];
    vec acc[LANES];
    UNROLL for (int i = 0; i < LANES; i++) acc[i] = vec_set(0.0f);
    UNROLL for (int h = 0; h < HEADS; h++) {
        const int64_t existing = head + h < t->num_heads ? head + h : t->num_heads - 1;
        q[h] = t->q + existing * head_words + row * LANES;
        k_at[h] = existing * t->k_head_bytes;
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
    float sums[LANES];
    vec_store(sums, vec_mul(vec_sums(acc), vec_set(t->job->scale)));
    UNROLL for (int i = 0; i < TOKENS; i++) {
        UNROLL for (int h = 0; h < HEADS; h++) {
            const int64_t existing = head + h < t->num_heads ? head + h : t->num_heads - 1;
            memcpy(out + out_at[i] + existing * t->rows + row, sums + (i * HEADS + h) * ROWS,
                   (size_t)ROWS * sizeof(float));
        }
    }
}

/* All heads of the block. What does not exist in the last tile of tokens or heads is computed as the last one again. */
INLINE void scores_of_block(int ROWS, decode_task *t, fa_dtype DTYPE) {
    const int TOKENS = DECODE_TOKENS(ROWS), HEADS = DECODE_HEADS(ROWS);
    const decode_ahead nothing = {(const char *)t->scores, 0};
    decode_cursor cursor = cursor_at(t, t->ahead);
    for (int64_t key = 0; key < t->num_keys; key += TOKENS) {
        const char *k[4];
        int64_t out_at[4];
        for (int i = 0; i < TOKENS; i++) {
            int64_t existing = key + i < t->num_keys ? key + i : t->num_keys - 1;
            k[i] = t->stream[existing];
            out_at[i] = existing * t->lanes;
        }
        int64_t remaining = (t->num_keys - key < TOKENS ? t->num_keys - key : TOKENS) * t->num_heads;
        for (int64_t head = 0; head < t->num_heads; head += HEADS) {
            const int64_t num_rows = remaining < TOKENS * HEADS ? remaining : TOKENS * HEADS;
            decode_ahead ahead = next_rows(t, &cursor, num_rows);
            remaining -= num_rows;
            for (int64_t row = 0; row < t->rows; row += ROWS, ahead = nothing)
                scores_tile(ROWS, t, k, ahead, head, row, t->scores, out_at, DTYPE);
        }
    }
}

/* ---- softmax ---- */

static void softmax_of_block(decode_task *t, float alpha[DECODE_MAX_LANES]) {
    const fa_problem *p = t->p;
    const int64_t g = p->h / p->h_kv, n = t->num_keys;
    float new_max[DECODE_MAX_LANES], first[DECODE_MAX_LANES], end[DECODE_MAX_LANES], diagonal[DECODE_MAX_LANES];
    score_options options = {.scale = 1,
                             .softcap = t->job->softcap,
                             .slope = p->alibi_slopes ? t->slope : NULL,
                             .diagonal = diagonal,
                             .first = first,
                             .end = end,
                             .masked = t->common_first > t->block || t->common_end < t->block + n};
    for (int64_t lane = 0; lane < t->lanes && (options.masked || options.slope); lane++) {
        int64_t row = lane % t->rows / g, row_first, row_end;
        if (row >= t->s.len_q) row = 0;
        fa_visible_keys(p, &t->s, row, &row_first, &row_end);
        row_first -= t->block, row_end -= t->block;
        first[lane] = (float)(row_first < 0 ? 0 : row_first > n ? n : row_first);
        end[lane] = (float)(row_end < 0 ? 0 : row_end > n ? n : row_end);
        diagonal[lane] = (float)(row + t->s.len_kv - t->s.len_q - t->block);
    }
    memcpy(new_max, t->row_max, sizeof new_max);
    scores_adjust(t->scores, t->lanes, 0, n, &options, new_max);
    softmax_step(&(softmax_args){.scores = t->scores,
                                 .p = t->scores,
                                 .lanes = t->lanes,
                                 .end = n,
                                 .new_max = new_max,
                                 .row_max = t->row_max,
                                 .row_sum = t->row_sum,
                                 .alpha = alpha});
}

static void rescale_output(const decode_task *t, const float alpha[DECODE_MAX_LANES]) {
    for (int64_t lane = 0; lane < t->num_heads * t->rows; lane++) {
        if (alpha[lane] == 1.0f) continue;
        float *o = t->o + lane * t->columns;
        for (int64_t c = 0; c < t->columns; c += LANES)
            vec_store(o + c, vec_mul(vec_load(o + c), vec_set(alpha[lane])));
    }
}

/* ---- O += P V ---- */

/* Every row sees the key of the block. */
INLINE bool is_common(const decode_task *t, int64_t key) {
    return t->common_first <= t->block + key && t->block + key < t->common_end && key < t->num_keys;
}

/* ROWS rows of O, CHUNKS LANES WORD_ELEMS of their columns, over num_words words of keys. v: their rows, to which offset
 * bytes are added; ahead: what to fetch meanwhile. */
INLINE void values_patch(int ROWS, int CHUNKS, bool PARTIAL, const decode_task *t, float *o, const char *const *v,
                         decode_ahead ahead, int64_t offset, int64_t elem, const float *p_words, int64_t num_words,
                         fa_dtype DTYPE) {
    const int VECS = CHUNKS * WORD_ELEMS, line = LANES * WORD_ELEMS * DTYPE_BYTES(DTYPE);
    const int64_t columns = t->columns, lanes = t->lanes, d = t->p->d;
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

/* The same over all columns. */
INLINE void values_rows(int ROWS, const decode_task *t, float *o, const char *const *v, decode_ahead ahead,
                        int64_t offset, const float *p_words, int64_t num_words, fa_dtype DTYPE) {
    const int64_t d = t->p->d, chunk = LANES * WORD_ELEMS, column_bytes = num_words * WORD_ELEMS * DTYPE_BYTES(DTYPE);
    const int CHUNKS = ROWS == 1 ? 8 / WORD_ELEMS : LANES / (ROWS * WORD_ELEMS);
    const char *const row = ahead.row;
    int64_t elem = 0;
    for (; elem + CHUNKS * chunk <= d; elem += CHUNKS * chunk, ahead.row = row + elem * column_bytes)
        values_patch(ROWS, CHUNKS, false, t, o, v, ahead, offset, elem, p_words, num_words, DTYPE);
    for (; elem + chunk <= d; elem += chunk, ahead.row = row + elem * column_bytes)
        values_patch(ROWS, 1, false, t, o, v, ahead, offset, elem, p_words, num_words, DTYPE);
    if (elem < d) values_patch(ROWS, 1, true, t, o, v, ahead, offset, elem, p_words, num_words, DTYPE);
}

/* All heads of the block; a key that some row does not see is a row of zeros. */
INLINE void values_of_block(int ROWS, decode_task *t, fa_dtype DTYPE) {
    const decode_ahead nothing = {(const char *)t->scores, 0};
    const int64_t n = t->num_keys, rows = t->rows;
    decode_cursor cursor = cursor_at(t, n + t->ahead);
    for (int64_t key = 0; key < n; key += t->ahead) {
        const int64_t existing = n - key < t->ahead ? n - key : t->ahead, tokens = round_up(existing, WORD_ELEMS);
        const bool all_common = is_common(t, key) && is_common(t, key + tokens - 1);
        for (int64_t head = 0; head < t->num_heads; head++) {
            const char *common[DECODE_MAX_AHEAD], *const *v = t->stream + n + key;
            int64_t offset = head * t->v_head_bytes;
            if (!all_common) {
                for (int64_t i = 0; i < tokens; i++) common[i] = is_common(t, key + i) ? v[i] + offset : decode_zeros;
                v = common;
                offset = 0;
            }
            decode_ahead ahead = next_rows(t, &cursor, existing);
            float *o = t->o + head * rows * t->columns;
            const float *p_words = t->scores + key / WORD_ELEMS * t->lanes + head * rows;
            for (int64_t row = 0; row < rows; row += ROWS, ahead = nothing)
                values_rows(ROWS, t, o + row * t->columns, v, ahead, offset, p_words + row, tokens / WORD_ELEMS, DTYPE);
        }
    }
}

#define DECODE_PATCHES(ROWS, DTYPE)                                                          \
    static void scores_##ROWS##_##DTYPE(decode_task *t) { scores_of_block(ROWS, t, DTYPE); } \
    static void values_##ROWS##_##DTYPE(decode_task *t) { values_of_block(ROWS, t, DTYPE); }
#define DECODE_DTYPE(DTYPE)                                                                                 \
    DECODE_PATCHES(1, DTYPE)                                                                                \
    DECODE_PATCHES(2, DTYPE)                                                                                \
    DECODE_PATCHES(4, DTYPE)                                                                                \
    static void value_##DTYPE(const decode_task *t, float *o, const char *const *v, const float *p_words) { \
        const decode_ahead nothing = {(const char *)t->scores, 0};                                          \
        values_rows(1, t, o, v, nothing, 0, p_words, 1, DTYPE);                                             \
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
#endif

static decode_patches decode_patches_of(fa_dtype dtype, int64_t rows) {
    static const decode_patches table[FA_F64][3] = {
        [FA_BF16] = DECODE_ROWS(FA_BF16),
#if WORD_ELEMS == 1
        [FA_F16] = DECODE_ROWS(FA_F16),
        [FA_F32] = DECODE_ROWS(FA_F32),
#endif
    };
    return table[dtype][rows > 2 ? 2 : rows - 1];
}

/* A key that only some rows see was a row of zeros so far: NaN times the others' p = 0 would be NaN. */
static void add_value(decode_task *t, int64_t key) {
    for (int64_t head = 0; head < t->num_heads; head++) {
        const char *v[WORD_ELEMS];
        for (int e = 0; e < WORD_ELEMS; e++)
            v[e] = e == key % WORD_ELEMS ? t->stream[t->num_keys + key] + head * t->v_head_bytes : decode_zeros;
        for (int64_t r = 0; r < t->s.len_q * (t->p->h / t->p->h_kv); r++) {
            int64_t first, end, lane = head * t->rows + r;
            fa_visible_keys(t->p, &t->s, r / (t->p->h / t->p->h_kv), &first, &end);
            if (t->block + key < first || t->block + key >= end) continue;
            t->job->patches.value(t, t->o + lane * t->columns, v, t->scores + key / WORD_ELEMS * t->lanes + lane);
        }
    }
}

/* ---- a task ---- */

/* Vectors of Q, the rows of a head side by side. */
INLINE void pack_queries(decode_task *t, const char *const *rows, fa_dtype DTYPE) {
    const int64_t step = LANES * WORD_ELEMS, head_words = t->rows * t->columns / WORD_ELEMS;
    for (int64_t lane = 0; lane < t->num_heads * t->rows; lane++) {
        float *q = t->q + lane / t->rows * head_words + lane % t->rows * LANES;
        for (int64_t elem = 0; elem < t->p->d; elem += step, q += t->rows * LANES)
            vec_store(q, load_row_words(rows[lane], elem, t->p->d, DTYPE));
    }
}

static void open_task(decode_task *t) {
    const fa_problem *p = t->p;
    const int64_t g = p->h / p->h_kv, bytes = DTYPE_BYTES(p->dtype);
    const char *q_rows[DECODE_MAX_LANES];
    t->lanes = round_up(t->num_heads * t->rows, LANES);
    t->row_bytes = p->d * bytes;
    t->k_head_bytes = p->k.stride_h * bytes, t->v_head_bytes = p->v.stride_h * bytes;
    t->ahead = DECODE_AHEAD_BYTES / (t->row_bytes * t->num_heads) / 2 * 2;
    if (t->ahead < 4) t->ahead = 4;
    if (t->ahead > DECODE_MAX_AHEAD) t->ahead = DECODE_MAX_AHEAD;
    t->again = DECODE_AGAIN_BYTES / (t->row_bytes * t->num_heads);
    if (t->again < 1) t->again = 1;
    if (t->again > t->ahead) t->again = t->ahead;
    t->is_side_by_side = t->k_head_bytes == t->row_bytes && t->v_head_bytes == t->row_bytes;

    int64_t ignored;
    fa_visible_keys(p, &t->s, t->s.len_q - 1, &t->common_first, &ignored);
    fa_visible_keys(p, &t->s, 0, &ignored, &t->common_end);
    for (int64_t lane = 0; lane < t->lanes; lane++) {
        int64_t r = lane % t->rows, head = (t->head_kv + lane / t->rows) * g + r % g;
        bool exists = lane < t->num_heads * t->rows && r < t->s.len_q * g;
        q_rows[lane] = exists ? (const char *)p->q.data + fa_query_offset(&p->q, &t->s, r / g, head) * bytes : NULL;
        t->row_max[lane] = -INFINITY;
        t->row_sum[lane] = 0.0f;
        t->slope[lane] = 0.0f;
        if (exists && p->alibi_slopes)
            t->slope[lane] = (float)(p->alibi_slopes[t->s.b_idx * p->alibi_stride_b + head] * LOG2_E);
    }
    WITH_DTYPE(p->dtype, pack_queries, t, q_rows);
    memset(t->o, 0, (size_t)(t->num_heads * t->rows * t->columns) * sizeof(float));
}

static void run_split(decode_task *t, int64_t begin, int64_t end, int64_t last) {
    const fa_problem *p = t->p;
    for (int64_t block = begin; block < end; block += FA_DECODE_BLOCK) {
        int64_t n = end - block < FA_DECODE_BLOCK ? end - block : FA_DECODE_BLOCK;
        int64_t next = last - block - n < t->ahead ? last - block - n : t->ahead;
        t->block = block, t->num_keys = n;
        list_rows(t, &p->k, block, n, t->stream);
        list_rows(t, &p->v, block, n, t->stream + n);
        list_rows(t, &p->k, block + n, next, t->stream + 2 * n);
        for (int64_t i = 2 * n + next; i <= 2 * n + t->ahead; i++) t->stream[i] = t->stream[i - 1]; /* nothing more */
        float alpha[DECODE_MAX_LANES];
        t->job->patches.scores(t);
        softmax_of_block(t, alpha);
        rescale_output(t, alpha);
        t->job->patches.values(t);
        for (int64_t key = 0; key < n; key++)
            if (!is_common(t, key)) add_value(t, key);
    }
}

static void close_task(decode_task *t, float *row_max, float *row_sum) {
    const int64_t rows = t->num_heads * t->rows;
    memcpy(row_max, t->row_max, (size_t)rows * sizeof(float));
    memcpy(row_sum, t->row_sum, (size_t)rows * sizeof(float));
#if WORD_ELEMS == 2
    for (float *o = t->o; o < t->o + rows * t->columns; o += 2 * LANES) {
        vec a = vec_load(o), b = vec_load(o + LANES);
        vec_in_order(&a, &b);
        vec_store(o, a);
        vec_store(o + LANES, b);
    }
#endif
}

static void run_decode_tasks(int64_t begin, int64_t end, void *ctx) {
    const decode_job *job = ctx;
    const fa_problem *p = job->p;
    vec_mode mode = vec_enter();
    for (int64_t task = begin, b_idx = 0; task < end; task++) {
        /* splits run fastest: a worker walks along its keys */
        const int64_t partial = task % job->num_partials, range = task / job->num_partials;
        if (job->first_partial[b_idx] > partial) b_idx = 0;
        while (job->first_partial[b_idx + 1] <= partial) b_idx++;
        decode_task t; /* 38 KB, and nobody reads what open_task and run_split leave alone */
        t.job = job, t.p = p, t.s = fa_sequence_at(p, b_idx), t.rows = job->rows, t.columns = job->columns;
        t.head_kv = range * job->heads_per_task;
        t.num_heads = p->h_kv - t.head_kv < job->heads_per_task ? p->h_kv - t.head_kv : job->heads_per_task;
        float *out = job->partials + partial * job->partial_floats, *stats = out + p->h_kv * t.rows * t.columns;
        t.o = out + t.head_kv * t.rows * t.columns;

        fa_decode_splits splits = fa_decode_splits_of(p, &t.s);
        int64_t first = splits.first + (partial - job->first_partial[b_idx]) * splits.length;
        open_task(&t);
        run_split(&t, first, first + splits.length < splits.end ? first + splits.length : splits.end, splits.end);
        close_task(&t, stats + t.head_kv * t.rows, stats + (p->h_kv + t.head_kv) * t.rows);
    }
    vec_leave(mode);
}

/* ---- the sum over splits ---- */

static void combine_row(const decode_job *job, const fa_sequence *s, int64_t head, int64_t i) {
    const fa_problem *p = job->p;
    const int64_t g = p->h / p->h_kv, rows = p->h_kv * job->rows, row = head / g * job->rows + i * g + head % g;
    const float *begin = job->partials + job->first_partial[s->b_idx] * job->partial_floats;
    const float *end = job->partials + job->first_partial[s->b_idx + 1] * job->partial_floats;
    float o[FA_MAX_HEAD_DIM] = {0}, largest = -INFINITY, sum = 0.0f;
    for (const float *x = begin; x < end; x += job->partial_floats)
        if (x[rows * job->columns + row] > largest) largest = x[rows * job->columns + row];
    const float reference = largest == -INFINITY ? 0.0f : largest;
    for (const float *x = begin; x < end; x += job->partial_floats) {
        const float *stats = x + rows * job->columns + row;
        vec weight = vec_exp2(vec_set(stats[0] - reference));
        float factor[LANES];
        vec_store(factor, weight);
        sum += factor[0] * stats[rows];
        for (int64_t c = 0; c < job->columns; c += LANES)
            vec_store(o + c, vec_fma(vec_load(x + row * job->columns + c), weight, vec_load(o + c)));
    }
    int64_t first, last;
    fa_visible_keys(p, s, i, &first, &last);
    const bool is_empty = first >= last;
    /* A row whose scores are all -inf has the sum 0: NaN, as 0 / 0 is. */
    float lse = sum == 0.0f ? NAN : (float)(largest * LN_2 + log(sum));
    *fa_row_stat(&p->lse, s, i, head) = is_empty ? INFINITY : lse;
    unpack_row((char *)p->o.data + fa_query_offset(&p->o, s, i, head) * DTYPE_BYTES(p->dtype), p->d, o,
               is_empty ? 0.0f : 1.0f / sum, p->dtype);
}

static void run_combine_tasks(int64_t begin, int64_t end, void *ctx) {
    const decode_job *job = ctx;
    vec_mode mode = vec_enter();
    for (int64_t task = begin; task < end; task++) {
        fa_sequence s = fa_sequence_at(job->p, task / job->p->h);
        for (int64_t i = 0; i < s.len_q && fa_decodes(job->p, &s); i++) combine_row(job, &s, task % job->p->h, i);
    }
    vec_leave(mode);
}

static void attn_decode(const fa_problem *p, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    int64_t *first_partial = workspace;
    first_partial[0] = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        first_partial[b_idx + 1] = first_partial[b_idx] + fa_decode_splits_of(p, &s).num;
    }
    decode_job job = {.p = p,
                      .patches = decode_patches_of(p->dtype, fa_decode_group_rows(p)),
                      .first_partial = first_partial,
                      .partials = (float *)((char *)workspace + fa_decode_partials_at(p)),
                      .num_partials = first_partial[p->b],
                      .rows = fa_decode_group_rows(p),
                      .columns = fa_decode_columns(p),
                      .partial_floats = fa_decode_partial_floats(p),
                      .scale = (float)(p->softcap > 0 ? p->scale / p->softcap : p->scale * LOG2_E),
                      .softcap = (float)(p->softcap * LOG2_E)};
    job.heads_per_task = fa_decode_heads_per_task(p, job.num_partials, plan->decode_threads);
    const int64_t num_tasks = job.num_partials * ((p->h_kv + job.heads_per_task - 1) / job.heads_per_task);
    if (plan->decode_threads == 1) {
        run_decode_tasks(0, num_tasks, &job);
        run_combine_tasks(0, p->b * p->h, &job);
    } else {
        pool->parallel_for(num_tasks, run_decode_tasks, &job);
        pool->parallel_for(p->b * p->h, run_combine_tasks, &job);
    }
}

#endif
