/* Distribution of tasks over workers. Tasks are sorted by descending cost, and a free worker takes the next task. Costs
 * are exact (visible keys), but cores are not equal: a core beside a busy neighbour runs at half speed. A task's result
 * does not depend on its worker, so the output bits are the same for any number of threads. */
#ifndef FA_CPU_PARTITION_H
#define FA_CPU_PARTITION_H

#include "flex/flex.h"
#include "flex_bias.h"
#include "sequence.h"

#include <stdatomic.h>

typedef struct {
    int64_t cost;
    int64_t begin, end; /* tiles of the forward, ranges of keys of the backward */
    int32_t b_idx, head_kv;
} fa_task;

/* Sorts tasks by descending cost. Tasks of equal cost keep the order of memory. */
void fa_sort_tasks(fa_task *tasks, int64_t num_tasks);

/* The tasks of a call, and the index of the first task that no worker has taken. */
typedef struct {
    const fa_task *tasks;
    int64_t num_tasks;
    _Atomic int64_t next;
} fa_task_list;

/* Takes the next task. Returns NULL when no task is left. */
static inline const fa_task *fa_take_task(fa_task_list *list) {
    int64_t idx = atomic_fetch_add_explicit(&list->next, 1, memory_order_relaxed);
    return idx < list->num_tasks ? &list->tasks[idx] : NULL;
}

/* The task that a worker would take now, as a guess at this worker's next task. NULL: no task is left. */
static inline const fa_task *fa_next_task(const fa_task_list *list) {
    int64_t idx = atomic_load_explicit(&list->next, memory_order_relaxed);
    return idx < list->num_tasks ? &list->tasks[idx] : NULL;
}

/* ---- tiles of the forward ----
 *
 * A tile is block_q lanes of one (sequence, key/value head). Each lane is a (row, head of the group) pair, and heads
 * vary fastest. So one query row of a group of 8 heads fills 8 lanes, and a tile of a causal mask covers few rows. With
 * dropout a tile holds rows of one head, because the generator serves patches of 16 rows. So it does with flex, because
 * programs run over the rows of one head. */

/* The decode kernel serves sequences of few query rows, except short prompts, queries with qv, and flex with a block
 * mask or max_scores. The tiled kernel packs the keys of a short prompt once and takes a third of the time (bf16, 16
 * tokens). The sequence's own lengths decide, not the longest of the batch. So a sequence has the same bits in every
 * batch. A row is a query of one head of a key/value head. With flex a tile holds the few rows of one head, and the
 * lanes of programs are these rows. In the decode kernel they are keys, so with several heads it takes more rows. */
#define FA_DECODE_MAX_ROWS            16
#define FA_DECODE_MAX_ROWS_OF_MODS    64
#define FA_DECODE_MAX_QUERIES_OF_MODS 8
/* A backward of few rows without dropout has its own kernel (attn_bwd_rows.h). A bias is the only mod that it knows.
 * With 32 rows a tile of queries is as fast. A multiple of 4, because products unroll 4 rows. */
#define FA_BWD_MAX_ROWS 24
static inline bool fa_has_few_rows(const fa_problem *p, const fa_sequence *s) {
    return p->dtype != FA_F64 && p->dropout_p == 0 && p->h / p->h_kv * s->len_q <= FA_BWD_MAX_ROWS &&
           (!fa_flex_of(p) || fa_flex_is_for_few_rows(p));
}

static inline int64_t fa_decode_max_rows(const fa_problem *p) {
    return fa_flex_of(p) && p->h > p->h_kv ? FA_DECODE_MAX_ROWS_OF_MODS : FA_DECODE_MAX_ROWS;
}
static inline bool fa_decodes(const fa_problem *p, const fa_sequence *s) {
    if (p->pass == FA_BWD) return fa_has_few_rows(p, s);
    const fa_flex *flex = fa_flex_of(p);
    const int64_t g = p->h / p->h_kv, most_queries = flex && g > 1 ? FA_DECODE_MAX_QUERIES_OF_MODS : FA_DECODE_MAX_ROWS;
    return p->pass == FA_FWD && p->dtype != FA_F64 && p->dropout_p == 0 && !p->qv.data &&
           !(flex && (flex->block_q > 0 || flex->max_scores.data)) && s->len_q <= most_queries &&
           s->len_q * g <= fa_decode_max_rows(p) && (s->len_q <= 4 || s->len_kv > 128);
}

static inline bool fa_stacks_heads(const fa_problem *p) { return p->dropout_p == 0 && !fa_flex_of(p); }

static inline int64_t fa_num_tiles(const fa_problem *p, const fa_sequence *s, int block_q) {
    int64_t g = p->h / p->h_kv;
    if (fa_decodes(p, s)) return 0;
    return fa_stacks_heads(p) ? (g * s->len_q + block_q - 1) / block_q : g * ((s->len_q + block_q - 1) / block_q);
}

/* The rows [row_first, row_end) that tiles [begin, end) touch. */
static inline void fa_tile_rows(const fa_problem *p, const fa_sequence *s, int block_q, int64_t begin, int64_t end,
                                int64_t *row_first, int64_t *row_end) {
    int64_t g = p->h / p->h_kv;
    *row_first = fa_stacks_heads(p) ? begin * block_q / g : begin / g * block_q;
    *row_end = fa_stacks_heads(p) ? (end * block_q + g - 1) / g : ((end - 1) / g + 1) * block_q;
    if (*row_end > s->len_q) *row_end = s->len_q;
}

/* The keys that some row of [row_first, row_end) sees. Both bounds of a row grow with the row. */
static inline void fa_rows_keys(const fa_problem *p, const fa_sequence *s, int64_t row_first, int64_t row_end,
                                int64_t *first, int64_t *end) {
    int64_t ignored;
    fa_visible_keys(p, s, row_first, first, &ignored);
    fa_visible_keys(p, s, row_end - 1, &ignored, end);
    if (*end < *first) *end = *first;
}

/* Writes the tasks of the forward, with at most tiles_per_task tiles each, and returns their number. With tasks NULL
 * the function only counts. */
int64_t fa_fwd_tasks(const fa_problem *problem, int block_q, int tiles_per_task, fa_task *tasks);

#endif
