/* One task of the decode kernel at work, and the stream of rows that it reads: keys of a block, its values, keys of the next
 * block, fetched ahead in the order of memory. What it is all for: attn_decode.h. */
#ifndef FA_CPU_DECODE_TASK_H
#define FA_CPU_DECODE_TASK_H

#include "pool.h"
#include "decode_plan.h"
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

/* ---- the stream ---- */

/* Addresses of n rows of k or v from key `first` on. */
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

#endif
