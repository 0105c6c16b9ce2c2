/* Sizes of the backward of few query rows: the shares of a sequence's keys, its tasks, and the memory of a worker.
 *
 * Shares follow from the sequence's own keys, never from the threads or from other sequences. So neither can change a
 * bit. The threads only decide how many heads a task has, and heads do not depend on each other. The workspace is
 *
 *   first_task [b + 1], first_partial [b + 1]     where the tasks and the partials of a sequence begin
 *   a scratch for each worker
 *   partials: dQ of a share, [h_kv][rows][columns]; only of sequences of several shares
 *   flex: copies of the sums of the gradient of a bias
 *
 * The tasks of a copy run one after the other. So with flex the tasks do not depend on the threads. */
#ifndef FA_CPU_BWD_ROWS_PLAN_H
#define FA_CPU_BWD_ROWS_PLAN_H

#include "decode_plan.h"
#include "flex_gradients.h"

#define FA_BWD_ROWS_KEYS  512 /* keys of a share, about */
#define FA_BWD_ROWS_LANES 64  /* most rows of a task, of all its heads */
/* Floats of the packed rows of a task: all rows of one head, or of several heads fewer. */
#define FA_BWD_ROWS_FLOATS     (FA_BWD_MAX_ROWS * FA_MAX_HEAD_DIM_V)
#define FA_BWD_ROWS_OF_SEVERAL 4096

/* What a worker needs beside the state of its task. */
typedef struct {
    float dout[FA_BWD_ROWS_FLOATS], dq[FA_BWD_ROWS_FLOATS];
    float q_pairs[FA_BWD_ROWS_FLOATS], dout_pairs[FA_BWD_ROWS_FLOATS]; /* words that join two rows; of bf16 words */
    float dprob[FA_DECODE_BLOCK * FA_BWD_ROWS_LANES];                  /* [keys][lanes]: dP, then dS */
    float ds_words[FA_DECODE_BLOCK * FA_BWD_ROWS_LANES / 2];           /* dS as words along the keys */
    float bias[FA_DECODE_BLOCK * FA_BWD_ROWS_LANES];                   /* flex: then its gradient */
    uint8_t hidden[FA_DECODE_BLOCK * FA_BWD_ROWS_LANES];               /* flex */
} fa_bwd_rows_scratch;

/* The rows of one key/value head, padded to a number that the products unroll. */
static inline int64_t fa_bwd_rows_of(const fa_problem *p, const fa_sequence *s, int word_elems) {
    const int64_t rows = p->h / p->h_kv * s->len_q;
    return rows <= 2 ? (rows > word_elems ? rows : word_elems) : (rows + 3) / 4 * 4;
}

/* The key/value heads of a task, if nothing but its memory counts. */
static inline int64_t fa_bwd_rows_most_heads(const fa_problem *p, int64_t rows) {
    const int64_t columns = fa_decode_columns(p), q_columns = fa_decode_q_columns(p);
    int64_t heads = FA_BWD_ROWS_OF_SEVERAL / (rows * (columns > q_columns ? columns : q_columns));
    if (heads > FA_BWD_ROWS_LANES / rows) heads = FA_BWD_ROWS_LANES / rows;
    if (heads > p->h_kv) heads = p->h_kv;
    return heads < 1 ? 1 : heads;
}

/* The same, if each of several threads shall have two tasks. num_shares: of all sequences. */
static inline int64_t fa_bwd_rows_heads(const fa_problem *p, int64_t rows, int64_t num_shares, int threads) {
    int64_t heads = fa_bwd_rows_most_heads(p, rows);
    while (threads > 1 && !fa_flex_of(p) && heads > 1 && num_shares * ((p->h_kv + heads - 1) / heads) < 2 * threads)
        heads = (heads + 1) / 2;
    return heads;
}

/* Keys of a block: K of the block takes 64 KiB. */
static inline int64_t fa_bwd_rows_block(const fa_problem *p, int64_t rows) {
    const int64_t token_bytes = fa_bwd_rows_most_heads(p, rows) * p->d * (int64_t)fa_dtype_bytes(p->dtype);
    const int64_t keys = 64 * 1024 / token_bytes / 16 * 16;
    return keys < 16 ? 16 : keys < FA_DECODE_BLOCK ? keys : FA_DECODE_BLOCK;
}

/* Sequences without keys have a share, too, which writes dQ = 0 and softmax_d = 0. */
static inline int64_t fa_bwd_rows_num_shares(const fa_sequence *s) {
    const int64_t num = (s->len_kv + FA_BWD_ROWS_KEYS - 1) / FA_BWD_ROWS_KEYS;
    return num < 1 ? 1 : num;
}

/* The keys [*begin, *end) of a share. All but the last share have as many, a multiple of 16. */
static inline void fa_bwd_rows_share(const fa_sequence *s, int64_t share, int64_t *begin, int64_t *end) {
    const int64_t num = fa_bwd_rows_num_shares(s), length = (s->len_kv + num * 16 - 1) / (num * 16) * 16;
    *begin = share * length < s->len_kv ? share * length : s->len_kv;
    *end = *begin + length < s->len_kv ? *begin + length : s->len_kv;
}

/* Floats of the partials of a sequence. */
static inline int64_t fa_bwd_rows_partial_floats(const fa_problem *p, const fa_sequence *s, int word_elems) {
    const int64_t num = fa_bwd_rows_num_shares(s);
    return num > 1 && p->dq.data ? num * p->h_kv * fa_bwd_rows_of(p, s, word_elems) * fa_decode_q_columns(p) : 0;
}

_Static_assert(FA_BWD_MAX_ROWS % 4 == 0 && FA_BWD_MAX_ROWS <= FA_BWD_ROWS_LANES, "padded rows of a head fit a task");

typedef struct {
    int64_t num_shares, num_tasks, partial_floats;
} fa_bwd_rows_sizes;

/* Counts, and fills both lists if they are not NULL. */
static inline fa_bwd_rows_sizes fa_bwd_rows_count(const fa_problem *p, int word_elems, int threads, int64_t *first_task,
                                                  int64_t *first_partial) {
    fa_bwd_rows_sizes r = {0};
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        const fa_sequence s = fa_sequence_at(p, b_idx);
        if (fa_decodes(p, &s)) r.num_shares += fa_bwd_rows_num_shares(&s);
    }
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        const fa_sequence s = fa_sequence_at(p, b_idx);
        if (first_task) first_task[b_idx] = r.num_tasks, first_partial[b_idx] = r.partial_floats;
        if (!fa_decodes(p, &s)) continue;
        const int64_t heads = fa_bwd_rows_heads(p, fa_bwd_rows_of(p, &s, word_elems), r.num_shares, threads);
        r.num_tasks += fa_bwd_rows_num_shares(&s) * ((p->h_kv + heads - 1) / heads);
        r.partial_floats += fa_bwd_rows_partial_floats(p, &s, word_elems);
    }
    if (first_task) first_task[p->b] = r.num_tasks, first_partial[p->b] = r.partial_floats;
    return r;
}

/* The copies of the sums of gradients. Each takes tasks that lie side by side. 0: there are no sums. */
static inline int64_t fa_bwd_rows_num_copies(const fa_flex_sums *sums, int64_t num_tasks) {
    const int64_t tasks_of_copy = 4;
    return sums->num == 0 ? 0 : fa_flex_num_copies(sums, num_tasks / tasks_of_copy, 1);
}

static inline size_t fa_bwd_rows_copies_bytes(const fa_problem *p, int64_t num_tasks) {
    if (!fa_flex_of(p)) return 0;
    const fa_flex_sums sums = fa_flex_sums_of(p, true);
    return (size_t)(fa_bwd_rows_num_copies(&sums, num_tasks) * sums.num) * sizeof(double);
}

/* Where the scratch begins. */
static inline size_t fa_bwd_rows_scratch_at(const fa_problem *p) {
    return (2 * (size_t)(p->b + 1) * sizeof(int64_t) + 63) / 64 * 64;
}

#endif
