/* Sizes of the decode kernel: the splits of a sequence's keys, and the layout of their results.
 *
 * The length of a split follows from its own sequence and num_splits alone. So neither the thread count nor another
 * sequence of the batch can change a bit. The result of a split is a partial: O before the division, with the
 * maximum and the sum of every row. The workspace is
 *
 *   first_partial [b + 1]                      sequence i owns partials first_partial[i] ... first_partial[i + 1] - 1
 *   partials: O [rows][columns], row_max [rows], row_sum [rows]        rows in the order [h_kv][group_rows] */
#ifndef FA_CPU_DECODE_PLAN_H
#define FA_CPU_DECODE_PLAN_H

#include "partition.h"

#define FA_DECODE_BLOCK 64 /* keys of one softmax step */

/* The longest split. A split adds its keys to O one after the other in fp32. A sum of 2^24 equal numbers would stop to
 * grow, and the error of such a chain grows with its length. The splits are added afterwards, so their number adds
 * little to the error. */
#define FA_DECODE_MOST_KEYS 8192

static inline int64_t fa_num_decodes(const fa_problem *p) {
    int64_t num = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        num += fa_decodes(p, &s);
    }
    return num;
}

/* The largest number of rows of one key/value head, padded to a number that the kernel unrolls: 1, 2 or a multiple of
 * 4. */
static inline int64_t fa_decode_group_rows(const fa_problem *p) {
    int64_t g = p->h / p->h_kv, rows = p->len_q * g;
    if (rows > fa_decode_max_rows(p)) rows = fa_decode_max_rows(p) / g * g;
    return rows <= 2 ? (rows > 1 ? rows : 1) : (rows + 3) / 4 * 4;
}

/* Columns of O, and of the packed rows of Q. */
static inline int64_t fa_decode_columns(const fa_problem *p) { return (p->d_v + 31) / 32 * 32; }
static inline int64_t fa_decode_q_columns(const fa_problem *p) { return (p->d + 31) / 32 * 32; }

typedef struct {
    int64_t first, end; /* the keys that some row of the sequence sees */
    int64_t length;     /* keys of a split; the last split may be shorter */
    int64_t num;
} fa_decode_splits;

/* All splits of a sequence have the same length of about 512 keys. num_splits, if given, limits the number of splits,
 * as long as a split does not become longer than FA_DECODE_MOST_KEYS. */
static inline fa_decode_splits fa_decode_splits_of(const fa_problem *p, const fa_sequence *s) {
    fa_decode_splits r = {.length = FA_DECODE_BLOCK};
    if (s->len_q == 0 || !fa_decodes(p, s)) return r;
    fa_rows_keys(p, s, 0, s->len_q, &r.first, &r.end);
    int64_t keys = r.end - r.first, num = (keys + 511) / 512;
    const int64_t fewest = (keys + FA_DECODE_MOST_KEYS - 1) / FA_DECODE_MOST_KEYS;
    if (p->num_splits > 0 && num > p->num_splits) num = p->num_splits > fewest ? p->num_splits : fewest;
    if (num == 0) return r;
    r.length = (keys + num * FA_DECODE_BLOCK - 1) / (num * FA_DECODE_BLOCK) * FA_DECODE_BLOCK;
    r.num = (keys + r.length - 1) / r.length;
    return r;
}

static inline int64_t fa_decode_num_partials(const fa_problem *p) {
    int64_t num = 0;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        num += fa_decode_splits_of(p, &s).num;
    }
    return num;
}

/* The key/value heads of one task. Their O and Q stay in the first-level cache, and every thread gets a task. The
 * choice changes no bit, because heads are independent. */
static inline int64_t fa_decode_heads_per_task(const fa_problem *p, int64_t num_partials, int threads) {
    const int64_t columns = fa_decode_columns(p), q_columns = fa_decode_q_columns(p);
    int64_t rows = fa_decode_group_rows(p),
            heads = 16 * 1024 / (rows * (columns > q_columns ? columns : q_columns) * 4);
    if (heads > 64 / rows) heads = 64 / rows;
    if (heads > p->h_kv) heads = p->h_kv;
    if (heads < 1) heads = 1;
    while (heads > 1 && num_partials * ((p->h_kv + heads - 1) / heads) < 2 * threads) heads = (heads + 1) / 2;
    return heads;
}

static inline int64_t fa_decode_partial_floats(const fa_problem *p) {
    int64_t rows = p->h_kv * fa_decode_group_rows(p);
    return (rows * (fa_decode_columns(p) + 2) + 15) / 16 * 16;
}

static inline size_t fa_decode_partials_at(const fa_problem *p) {
    return ((size_t)(p->b + 1) * sizeof(int64_t) + 63) / 64 * 64;
}

static inline size_t fa_decode_workspace_bytes(const fa_problem *p) {
    return fa_decode_partials_at(p) + (size_t)(fa_decode_num_partials(p) * fa_decode_partial_floats(p)) * sizeof(float);
}

#endif
