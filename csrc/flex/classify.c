/* A task is a group of rows of blocks of one batch and head. It looks at as many columns at a time. Bounds over such a
 * square tell most of the time that all its blocks are full or empty. In other squares the bounds of the keys of a
 * column are found once for the group. A block whose bounds do not tell is evaluated until an allowed and a masked
 * element were seen. */
#include "classify.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "evaluate.h"
#include "intervals.h"

enum { TILE = FA_FLEX_TILE, GROUP = FA_FLEX_ROW_SLOTS - 1, STRIP = 64 };

typedef struct {
    const fa_flex_bound *bound;
    const fa_flex_blocks *blocks;
    const fa_flex_tables *tables;
    uint8_t *kinds; /* [b, h, rows, columns] */
    int64_t rows, columns, groups;
    atomic_bool failed;
    atomic_int_fast64_t num_evaluated;
} work;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t blocks_of(int64_t len, int64_t block) { return len / block + (len % block != 0); }

/* What was seen of a block. */
typedef struct {
    bool allowed, masked;
} seen;

static void look(seen *s, const uint8_t *values, int64_t num) {
    uint8_t any = 0, all = 1;
    for (int64_t i = 0; i < num; i++) any |= values[i], all &= values[i];
    s->allowed = s->allowed || any;
    s->masked = s->masked || !all;
}

/* Looks at tiles of the block until both were seen. The first and the last row of a tile tell the most. */
static seen evaluate_block(fa_flex_evaluator *e, int64_t q, int64_t q_end, int64_t kv, int64_t kv_end) {
    seen s = {false, false};
    for (int64_t first = q; first < q_end; first += TILE) {
        const int rows = (int)smaller(q_end - first, TILE);
        fa_flex_start_lines(e, first, rows);
        for (int64_t key = kv; key < kv_end; key += TILE) {
            fa_flex_start_lanes(e, key, (int)smaller(kv_end - key, TILE));
            for (int i = 0; i < rows; i++) {
                const int row = i == 0 ? rows - 1 : i - 1;
                look(&s, fa_flex_line(e, row, NULL, NULL), smaller(kv_end - key, TILE));
                if (s.allowed && s.masked) return s;
            }
        }
    }
    return s;
}

/* What the mask_mod calls row 0 of a head. */
static int64_t first_query(const fa_flex_blocks *k, int64_t head) { return k->q_offset ? k->q_offset[head / k->h] : 0; }

static fa_flex_kind kind_of(work *w, fa_flex_evaluator *e, fa_flex_interval bounds, int64_t head, int64_t row,
                            int64_t column) {
    const fa_flex_blocks *k = w->blocks;
    const int64_t q = row * k->block_q, kv = column * k->block_kv, first = first_query(k, head);
    const bool is_whole = q + k->block_q <= k->len_q && kv + k->block_kv <= k->len_kv;
    seen s = {bounds.hi != 0, bounds.lo == 0};
    if (s.allowed && s.masked) {
        s = evaluate_block(e, first + q, first + smaller(q + k->block_q, k->len_q), kv,
                           smaller(kv + k->block_kv, k->len_kv));
        atomic_fetch_add(&w->num_evaluated, 1);
    }
    return !s.allowed ? FA_FLEX_EMPTY : s.masked || !is_whole ? FA_FLEX_PARTIAL : FA_FLEX_FULL;
}

/* Bounds the rows of blocks [first, first + num) in a slot. */
static void bound_rows(const work *w, fa_flex_intervals *v, int slot, int64_t head, int64_t first, int64_t num) {
    const fa_flex_blocks *k = w->blocks;
    const int64_t offset = first_query(k, head);
    fa_flex_bound_rows(v, slot, offset + first * k->block_q,
                       offset + smaller((first + num) * k->block_q, k->len_q) - 1);
}

static void bound_columns(const work *w, fa_flex_intervals *v, int64_t first, int64_t num) {
    const fa_flex_blocks *k = w->blocks;
    fa_flex_bound_keys(v, first * k->block_kv, smaller((first + num) * k->block_kv, k->len_kv) - 1);
}

static void classify_group(work *w, fa_flex_intervals *v, fa_flex_evaluator *e, int64_t head, int64_t first) {
    const int rows = (int)smaller(w->rows - first, GROUP);
    bound_rows(w, v, GROUP, head, first, rows);
    for (int i = 0; i < rows; i++) bound_rows(w, v, i, head, first + i, 1);
    for (int64_t left = 0; left < w->columns; left += GROUP) {
        const int64_t columns = smaller(w->columns - left, GROUP);
        bound_columns(w, v, left, columns);
        const fa_flex_interval square = fa_flex_bound_block(v, GROUP);
        const bool is_told = square.hi == 0 || square.lo != 0;
        for (int64_t column = left; column < left + columns; column++) {
            if (!is_told) bound_columns(w, v, column, 1);
            for (int i = 0; i < rows; i++) {
                const fa_flex_interval bounds = is_told ? square : fa_flex_bound_block(v, i);
                w->kinds[(head * w->rows + first + i) * w->columns + column] =
                    (uint8_t)kind_of(w, e, bounds, head, first + i, column);
            }
        }
    }
}

static void classify_tasks(int64_t begin, int64_t end, void *ctx) {
    work *w = ctx;
    fa_flex_intervals *v = fa_flex_intervals_new(w->bound, w->tables);
    fa_flex_evaluator *e = fa_flex_evaluator_new(w->bound, FA_ISA_SCALAR, true);
    if (!v || !e) atomic_store(&w->failed, true);
    for (int64_t task = begin; v && e && task < end; task++) {
        const int64_t head = task / w->groups, first = task % w->groups * GROUP;
        fa_flex_bound_head(v, head / w->blocks->h, head % w->blocks->h);
        fa_flex_start_head(e, head / w->blocks->h, head % w->blocks->h);
        classify_group(w, v, e, head, first);
    }
    fa_flex_intervals_free(v);
    fa_flex_evaluator_free(e);
}

/* ---- lists ------------------------------------------------------------------------------------------------------- */

/* Lists the blocks of a row. */
static void list_row(const uint8_t *kinds, int64_t num, uint8_t kind, int32_t *count, int32_t *places) {
    int64_t listed = 0, rest;
    for (int64_t i = 0; i < num; i++) listed += kinds[i] == kind;
    *count = (int32_t)listed;
    rest = listed;
    listed = 0;
    for (int64_t i = 0; i < num; i++) {
        const bool is_listed = kinds[i] == kind;
        places[is_listed ? listed : rest] = (int32_t)i;
        listed += is_listed, rest += !is_listed;
    }
}

/* Lists the blocks of up to STRIP columns that lie side by side. */
static void list_columns(const uint8_t *kinds, int64_t rows, int64_t columns, int num, uint8_t kind, int32_t *count,
                         int32_t *places) {
    int32_t listed[STRIP] = {0}, rest[STRIP];
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < num; c++) listed[c] += kinds[row * columns + c] == kind;
    for (int c = 0; c < num; c++) count[c] = rest[c] = listed[c], listed[c] = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int c = 0; c < num; c++) {
            const bool is_listed = kinds[row * columns + c] == kind;
            places[c * rows + (is_listed ? listed[c] : rest[c])] = (int32_t)row;
            listed[c] += is_listed, rest[c] += !is_listed;
        }
}

static int64_t lists_of_head(const work *w) {
    return w->rows + (w->blocks->partial.num_q ? blocks_of(w->columns, STRIP) : 0);
}

/* A task lists a row, or a strip of columns. */
static void list_tasks(int64_t begin, int64_t end, void *ctx) {
    const work *w = ctx;
    const int64_t rows = w->rows, columns = w->columns, tasks = lists_of_head(w);
    for (int64_t task = begin; task < end; task++) {
        const int64_t head = task / tasks, row = task % tasks, left = (row - rows) * STRIP;
        const uint8_t *kinds = w->kinds + head * rows * columns;
        for (int i = 0; i < 2; i++) {
            const fa_flex_lists *l = i ? &w->blocks->full : &w->blocks->partial;
            const uint8_t kind = i ? FA_FLEX_FULL : FA_FLEX_PARTIAL;
            if (row < rows)
                list_row(kinds + row * columns, columns, kind, &l->num_kv[head * rows + row],
                         l->kv + (head * rows + row) * columns);
            else
                list_columns(kinds + left, rows, columns, (int)smaller(columns - left, STRIP), kind,
                             &l->num_q[head * columns + left], l->q + (head * columns + left) * rows);
        }
    }
}

fa_status fa_flex_classify(const fa_flex_bound *bound, fa_flex_blocks *blocks, const fa_pool *pool, fa_error *err) {
    work w = {.bound = bound,
              .blocks = blocks,
              .rows = blocks_of(blocks->len_q, blocks->block_q),
              .columns = blocks_of(blocks->len_kv, blocks->block_kv)};
    const int64_t heads = blocks->b * blocks->h;
    bool is_done = false;
    w.groups = blocks_of(w.rows, GROUP);
    w.tables = fa_flex_tables_new(bound);
    w.kinds = malloc((size_t)(heads * w.rows * w.columns) + 1);
    if (w.tables && w.kinds)
        is_done = pool->parallel_for(heads * w.groups, classify_tasks, &w) && !w.failed &&
                  pool->parallel_for(heads * lists_of_head(&w), list_tasks, &w);
    blocks->num_evaluated = w.num_evaluated;
    free(w.kinds);
    fa_flex_tables_free((fa_flex_tables *)w.tables);
    return is_done ? FA_OK : fa_fail(err, FA_ENOMEM, "no memory or no threads to find the blocks of a mask");
}
