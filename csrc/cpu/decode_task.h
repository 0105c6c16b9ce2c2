/* The state of a task of the decode kernel, and the stream of rows that the task reads. The stream holds the keys of a
 * block, the values of the block, and the keys of the next block. The kernel prefetches the stream in the order of
 * memory. The algorithm: attn_decode.h. */
#ifndef FA_CPU_DECODE_TASK_H
#define FA_CPU_DECODE_TASK_H

#include <stdatomic.h>

#include "pool.h"
#include "decode_plan.h"
#include "pack.h"

/* Vectors of sums that the products of the decode kernel keep in registers, a multiple of LANES. */
#ifndef DECODE_SUMS
#define DECODE_SUMS LANES
#endif
#define DECODE_MAX_LANES   FA_DECODE_MAX_ROWS_OF_MODS
#define DECODE_MAX_Q       (DECODE_MAX_LANES * FA_MAX_HEAD_DIM) /* words; several heads have at most 4096 */
#define DECODE_MAX_AHEAD   16
#define DECODE_AHEAD_BYTES (16 * 1024) /* a third of a first-level cache */
#define DECODE_AGAIN_BYTES (4 * 1024)

struct decode_task;

/* One product of rows of Q with the keys of the block. In the backward, dO V^T is such a product, too. */
typedef struct {
    const float *q; /* [heads][columns / WORD_ELEMS / LANES][rows][LANES] words */
    int64_t d, columns;
    int64_t first;      /* the index in the stream of the first key's row */
    int64_t head_bytes; /* from the row of one head to that of the next */
    float scale;
    float *out; /* [keys][lanes] */
} decode_scores;

/* The functions that are compiled for each dtype and number of unrolled rows. */
typedef struct {
    int unrolled_rows;
    void (*scores)(struct decode_task *t, const decode_scores *x);
    void (*values)(struct decode_task *t);
    void (*value)(const struct decode_task *t, float *o, const char *const *v, const float *p_words);
} decode_patches;

typedef struct {
    const fa_problem *p;
    decode_patches patches;
    const int64_t *first_partial; /* [b + 1] */
    float *partials;
    int64_t num_partials, heads_per_task;
    int64_t rows, columns, q_columns, partial_floats; /* see decode_plan.h */
    float scale, softcap;                             /* scale of the product, and softcap in units of log2 */
    fa_isa isa;
    atomic_bool failed; /* no memory for the mods */
} decode_job;

struct decode_mods;

/* One task: heads [head_kv, head_kv + num_heads) of one split. Lane r + rows (head - head_kv) holds row r of a head. */
typedef struct decode_task {
    decode_job *job;
    const fa_problem *p;
    struct decode_mods *mods; /* NULL: none */
    fa_sequence s;
    int64_t head_kv, num_heads, rows, columns, q_columns, lanes;
    int64_t common_first, common_end; /* the keys that every row sees */
    float *o; /* [lanes][columns]; bf16 words leave the columns in the order of vec_interleave */

    /* The block's keys, then its values, then the first keys of the next block, in the order of the reads. */
    const char *stream[2 * FA_DECODE_BLOCK + DECODE_MAX_AHEAD + 1];
    int64_t block, num_keys; /* first key and number of keys of the block */
    int64_t ahead, again;    /* tokens from a load to its first prefetch, and from the first to the second prefetch */
    bool is_side_by_side;    /* the heads of a token are contiguous, and rows of K and V are equally long */
    int64_t k_head_bytes, v_head_bytes, row_bytes, v_row_bytes; /* row_bytes: a row of K */

    float row_max[DECODE_MAX_LANES], row_sum[DECODE_MAX_LANES];
    float slope[DECODE_MAX_LANES], scale[DECODE_MAX_LANES]; /* scale: of FA_E4M3, otherwise in the job */
    _Alignas(64) float q[DECODE_MAX_Q]; /* [heads][q_columns / WORD_ELEMS / LANES][rows][LANES] words */
    _Alignas(64) float scores[FA_DECODE_BLOCK * DECODE_MAX_LANES]; /* [keys][lanes] */
} decode_task;

/* Below this number of bytes one thread adds the partials, because a second meeting of the threads takes longer. A
 * meeting takes 3 us, and some ms while other programs keep the cores busy. */
static const size_t combine_alone_bytes = 64 * 1024;

static const char decode_zeros[4 * FA_MAX_HEAD_DIM_V];

/* ---- the stream ---- */

/* Prepares the stream of the task's heads and rows. */
static void open_stream(decode_task *t) {
    const fa_problem *p = t->p;
    const int64_t bytes = DTYPE_BYTES(p->dtype);
    t->lanes = round_up(t->num_heads * t->rows, LANES);
    t->row_bytes = p->d * bytes, t->v_row_bytes = p->d_v * bytes;
    t->k_head_bytes = p->k.stride_h * bytes, t->v_head_bytes = p->v.stride_h * bytes;
    t->ahead = DECODE_AHEAD_BYTES / (t->row_bytes * t->num_heads) / 2 * 2;
    if (t->ahead < 4) t->ahead = 4;
    if (t->ahead > DECODE_MAX_AHEAD) t->ahead = DECODE_MAX_AHEAD;
    t->again = DECODE_AGAIN_BYTES / (t->row_bytes * t->num_heads);
    if (t->again < 1) t->again = 1;
    if (t->again > t->ahead) t->again = t->ahead;
    t->is_side_by_side =
        t->k_head_bytes == t->row_bytes && t->v_head_bytes == t->row_bytes && t->v_row_bytes == t->row_bytes;
}

/* Lists the addresses of n rows of k or v from key `first` on. */
static void list_rows(const decode_task *t, const fa_view *view, int64_t first, int64_t n, const char **rows) {
    const fa_problem *p = t->p;
    const int64_t bytes = DTYPE_BYTES(p->dtype);
    for (int64_t j = 0; j < n;) {
        int64_t run = n - j, in_page = p->page_size - (t->s.kv_row + first + j) % (p->page_size ? p->page_size : 1);
        if (p->paged && in_page < run) run = in_page;
        const char *row = (const char *)view->data + fa_key_offset(p, view, &t->s, first + j, t->head_kv) * bytes;
        for (int64_t end = j + run; j < end; j++, row += view->stride_row * bytes) rows[j] = row;
    }
}

/* Lists the stream of a block of n keys, and of the keys behind it, up to `end`. */
static void list_stream(decode_task *t, int64_t block, int64_t n, int64_t end) {
    const int64_t next = end - block - n < t->ahead ? end - block - n : t->ahead;
    t->block = block, t->num_keys = n;
    list_rows(t, &t->p->k, block, n, t->stream);
    list_rows(t, &t->p->v, block, n, t->stream + n);
    list_rows(t, &t->p->k, block + n, next, t->stream + 2 * n);
    /* Behind its last row the stream repeats that row. */
    for (int64_t i = 2 * n + next; i <= 2 * n + t->ahead; i++) t->stream[i] = t->stream[i - 1];
}

/* The position of the prefetch. `left` rows of `token` lie side by side from `row` on, and `token` is an index of the
 * stream. */
typedef struct {
    int64_t token, left, back;
    const char *row;
} decode_cursor;

/* The lines to prefetch while the arithmetic loads: lines of `row`, and a second time the lines `back` bytes before. A
 * processor drops prefetches when its queue of misses is full. The second prefetch finds most lines in the first-level
 * cache. */
typedef struct {
    const char *row;
    int64_t back;
} decode_ahead;

INLINE decode_cursor cursor_at(const decode_task *t, int64_t token) {
    const char *row = t->stream[token];
    return (decode_cursor){.token = token, .left = t->num_heads, .back = row - t->stream[token - t->again], .row = row};
}

/* Returns the next num_rows rows of the stream. Rows that do not lie side by side are prefetched at once, and the
 * function returns an address in the first-level cache instead. */
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
        for (int64_t at = 0; at < (is_value ? t->v_row_bytes : t->row_bytes); at += 64) PREFETCH(c->row + at);
        c->row += is_value ? t->v_head_bytes : t->k_head_bytes;
        if (--c->left == 0) *c = cursor_at(t, c->token + 1);
    }
    return found;
}

INLINE void fetch_ahead(decode_ahead ahead, int64_t at, fa_dtype DTYPE) {
    if ((DTYPE == FA_E4M3 || DECODE_SUMS > LANES) && at % 64) return; /* loads of 8 or 16 bytes share a line */
    PREFETCH(ahead.row + at);
    if (DTYPE != FA_F16 && DTYPE != FA_E4M3) PREFETCH(ahead.row + at - ahead.back);
}

/* ---- Q ---- */

/* Packs rows of d elements into vectors, with the rows of a head side by side. A NULL row reads as zeros. */
INLINE void pack_queries(const decode_task *t, float *q, const char *const *rows, int64_t d, int64_t columns,
                         fa_dtype DTYPE) {
    const int64_t step = LANES * WORD_ELEMS, head_words = t->rows * columns / WORD_ELEMS;
    for (int64_t lane = 0; lane < t->num_heads * t->rows; lane++) {
        float *at = q + lane / t->rows * head_words + lane % t->rows * LANES;
        for (int64_t elem = 0; elem < d; elem += step, at += t->rows * LANES)
            vec_store(at, load_row_words(rows[lane], elem, d, DTYPE));
    }
}

#endif
