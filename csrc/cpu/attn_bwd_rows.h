/* Attention backward of sequences with few query rows. The formulas: attn_bwd.h.
 *
 *   q, dq [b, len_q, h, d]      k, dk [b, len_kv, h_kv, d]      lse, softmax_d [b, h, len_q] float
 *   o, dout [b, len_q, h, d_v]  v, dv [b, len_kv, h_kv, d_v]    rows of a key/value head: len_q g, few (fa_decodes)
 *
 * Every byte of K and V serves few rows, so memory binds. The kernel reads K and V once and in place, in the order of
 * memory with all heads of a token together, as the decode kernel does (attn_decode.h). Columns of a head lie in the
 * lanes of vectors. Only Q, dO and dQ of the task's rows are packed.
 *
 *   a task is a share of the keys of a sequence, for some heads:
 *     delta of the task's rows; the first share writes softmax_d
 *     for each block of 16 to 64 keys:
 *       S = Q K^T, dP = dO V^T     tiles of the decode kernel, which prefetch the stream of K and V
 *       P, dS                      [keys][rows of all heads], the stage of the tiled backward (elementwise_bwd.h)
 *       dQ += dS K                 K comes from the cache
 *       dK = scale dS^T Q, dV = P^T dO     written to the caller's tensors, once
 *     one share: write dQ
 *   dQ = sum of the shares' dQ, in the order of the keys
 *
 * Specification: reference.c. Shares, tasks and workspace: bwd_rows_plan.h. Measurements: README.md. */
#ifndef FA_CPU_ATTN_BWD_ROWS_H
#define FA_CPU_ATTN_BWD_ROWS_H

#include "bias.h"
#include "bwd_rows_patches.h"
#include "bwd_task.h"
#include "elementwise_bwd.h"
#include "flex_bias.h"
#include "flex_step_bwd.h"

typedef struct {
    const fa_problem *p;
    const int64_t *first_task, *first_partial; /* [b + 1] */
    fa_bwd_rows_scratch *scratch;              /* of worker 0 */
    float *partials;
    int64_t num_shares, num_tasks;
    int threads;
    _Atomic int64_t next_part; /* the first task, or the first copy, that no worker has taken */
    float scale, softcap;      /* scale of the product, and softcap in units of log2 */
    fa_flex_bias bias;         /* flex */
    fa_flex_sums sums;         /* flex: of the gradient of the bias */
    double *copies;            /* [num_copies][sums.num] */
    int64_t num_copies;        /* 0: tasks write the gradient, or there is none */
} bwd_rows_job;

/* ---- open a task ---- */

/* Joins pairs of rows to words, with the rows of a head side by side. */
static void pack_row_pairs(const decode_task *t, float *words, const char *const *rows, int64_t d, int64_t columns) {
#if WORD_ELEMS == 2
    for (int64_t lane = 0; lane < t->num_heads * t->rows; lane += t->rows)
        for (int64_t elem = 0; elem < columns; elem += LANES)
            for (int64_t r = 0; r < t->rows; r += 2, words += LANES)
                vec_store(words, load_column_words(rows + lane + r, elem, d, FA_BF16));
#else
    (void)t, (void)words, (void)rows, (void)d, (void)columns;
#endif
}

/* The lane of the n-th row of the task in the order of memory: heads of a row lie together. */
static int64_t lane_in_memory(const bwd_rows_task *b, int64_t n) {
    const int64_t g = b->t.p->h / b->t.p->h_kv, heads = b->t.num_heads * g;
    return n % heads / g * b->t.rows + n / heads * g + n % g;
}

/* Sets row and head, lse and delta of a lane, and what it sees. */
static void open_lane(bwd_rows_task *b, int64_t lane, bool writes_delta) {
    decode_task *t = &b->t;
    const fa_problem *p = t->p;
    const int64_t row = b->row[lane], head = b->head[lane];
    int64_t *first = &b->first[lane], *end = &b->end[lane];
    if (contributes(p, &t->s, row, head, first, end)) {
        b->lse[lane] = (float)(*fa_row_stat(&p->lse, &t->s, row, head) * LOG2_E);
        b->delta[lane] = bwd_delta_of_row(p, &t->s, row, head);
        if (p->alibi_slopes) t->slope[lane] = slope_in_log2(p->alibi_slopes[t->s.b_idx * p->alibi_stride_b + head]);
    } else {
        *first = *end = 0;
    }
    if (writes_delta) *fa_row_stat(&p->softmax_d, &t->s, row, head) = b->delta[lane];
    if (*first > t->common_first) t->common_first = *first;
    if (*end < t->common_end) t->common_end = *end;
}

/* Opens all lanes, in the order of memory, and prefetches rows of later lanes. Padding lanes see no key. */
static void open_lanes(bwd_rows_task *b, bool writes_delta) {
    decode_task *t = &b->t;
    const fa_problem *p = t->p;
    const int64_t g = p->h / p->h_kv, num = t->num_heads * g * t->s.len_q, ahead = 8;
    t->common_first = 0, t->common_end = INT64_MAX;
    for (int64_t lane = 0; lane < t->lanes; lane++) {
        const bool exists = lane < t->num_heads * t->rows && lane % t->rows < t->s.len_q * g;
        b->row[lane] = exists ? lane % t->rows / g : 0;
        b->head[lane] = (t->head_kv + (exists ? lane / t->rows : 0)) * g + (exists ? lane % t->rows % g : 0);
        b->first[lane] = b->end[lane] = 0;
        b->lse[lane] = INFINITY;
        b->delta[lane] = t->slope[lane] = 0.0f;
    }
    for (int64_t n = 0; n < num; n++) {
        const int64_t later = lane_in_memory(b, n + ahead < num ? n + ahead : n);
        const char *soon[] = {bwd_query_row(p, &t->s, &p->dout, b->row[later], b->head[later]),
                              bwd_query_row(p, &t->s, &p->o, b->row[later], b->head[later]),
                              bwd_query_row(p, &t->s, &p->q, b->row[later], b->head[later])};
        fetch_now(soon, 2, t->v_row_bytes);
        fetch_now(soon + 2, 1, t->row_bytes);
        open_lane(b, lane_in_memory(b, n), writes_delta);
    }
}

/* Finds the keys of the share that some row sees. Heads do not matter, so a task of other heads has the same blocks. */
static void find_keys_of_share(bwd_rows_task *b) {
    const fa_sequence *s = &b->t.s;
    b->first_key = b->end_key = 0;
    if (s->len_q > 0) fa_rows_keys(b->t.p, s, 0, s->len_q, &b->first_key, &b->end_key);
    if (b->first_key < b->keys_begin) b->first_key = b->keys_begin;
    if (b->end_key > b->keys_end) b->end_key = b->keys_end;
    if (b->first_key >= b->end_key) b->first_key = b->end_key = b->keys_begin;
}

static void open_rows(bwd_rows_task *b, bool writes_delta) {
    decode_task *t = &b->t;
    const fa_problem *p = t->p;
    const char *q_rows[FA_BWD_ROWS_LANES], *dout_rows[FA_BWD_ROWS_LANES];
    open_stream(t);
    open_lanes(b, writes_delta);
    for (int64_t lane = 0; lane < t->lanes; lane++) { /* rows that contribute nothing may hold any values */
        const bool is_empty = b->first[lane] >= b->end[lane];
        q_rows[lane] = is_empty ? NULL : bwd_query_row(p, &t->s, &p->q, b->row[lane], b->head[lane]);
        dout_rows[lane] = is_empty ? NULL : bwd_query_row(p, &t->s, &p->dout, b->row[lane], b->head[lane]);
    }
    WITH_DTYPE(p->dtype, pack_queries, t, t->q, q_rows, p->d, t->q_columns);
    WITH_DTYPE(p->dtype, pack_queries, t, b->scratch->dout, dout_rows, p->d_v, t->columns);
    pack_row_pairs(t, b->scratch->q_pairs, q_rows, p->d, t->q_columns);
    pack_row_pairs(t, b->scratch->dout_pairs, dout_rows, p->d_v, t->columns);
    b->q_words = WORD_ELEMS == 2 ? b->scratch->q_pairs : t->q;
    b->dout_words = WORD_ELEMS == 2 ? b->scratch->dout_pairs : b->scratch->dout;
    b->ds_words = WORD_ELEMS == 2 ? b->scratch->ds_words : b->scratch->dprob;
    if (p->dq.data) memset(b->dq, 0, (size_t)(t->num_heads * t->rows * t->q_columns) * sizeof(float));
}

/* ---- a block of keys ---- */

/* Finds the heads of which some element of K, V, Q or dO is not finite. Such an element leaves a score that is not
 * finite: a product of it is infinite or NaN, and so is every sum with that product. */
static void find_exact_heads(bwd_rows_task *b) {
    const decode_task *t = &b->t;
    float poison[FA_BWD_ROWS_LANES];
    b->exact = 0;
    for (int64_t lane = 0; lane < t->lanes; lane += LANES) {
        vec sum = vec_set(0.0f);
        for (int64_t at = lane; at < t->num_keys * t->lanes; at += t->lanes) {
            sum = vec_fma(vec_load(t->scores + at), vec_set(0.0f), sum);
            sum = vec_fma(vec_load(b->scratch->dprob + at), vec_set(0.0f), sum);
        }
        vec_store(poison + lane, sum);
    }
    for (int64_t lane = 0; lane < t->num_heads * t->rows; lane++)
        if (poison[lane] != 0.0f) b->exact |= UINT64_C(1) << lane / t->rows;
}

/* Flex: S and dP become P and dS, with a bias and its gradient. */
static void bias_gradients_of_block(const bwd_rows_job *job, bwd_rows_task *b, const fa_flex_sums_at *sums) {
    decode_task *t = &b->t;
    const fa_flex_bias *bias = &job->bias;
    const int64_t n = t->num_keys, even = round_up(n, 2), lanes = t->lanes;
    float *values = b->scratch->bias;
    int64_t at[FA_BWD_ROWS_LANES];
    fa_flex_lines lines = {.at = at, .stride = lanes, .num_lanes = (int)lanes, .num_lines = (int)n};
    for (int64_t lane = 0; lane < lanes; lane++)
        at[lane] = fa_flex_place_of(&bias->of_value, t->s.b_idx, b->head[lane], b->row[lane], t->block);
    lines.along = bias->of_value.kv;
    bias->operations->load_bias(&lines, bias->data, bias->dtype, values);
    for (int64_t i = n * lanes; i < even * lanes; i++) { /* a key behind the last one, which no row sees */
        values[i] = -INFINITY;
        t->scores[i] = b->scratch->dprob[i] = 0.0f;
    }
    const float scale = (float)t->p->scale;
    for (int64_t i = 0; i < n * lanes && b->exact; i++)
        b->scratch->hidden[i] = t->scores[i] * scale + values[i] == -INFINITY;
    b->hides = b->exact;
    flex_bias_gradients(&(gradient_args){.scores = t->scores,
                                         .dprob = b->scratch->dprob,
                                         .p_rows = t->scores,
                                         .ds_rows = b->scratch->dprob,
                                         .row_stride = lanes,
                                         .ds_words = b->scratch->ds_words,
                                         .lanes = lanes,
                                         .num_keys = even,
                                         .lse = b->lse,
                                         .delta = b->delta,
                                         .scale = scale,
                                         .kept = 1.0f},
                        NULL, values);
    if (!sums->fp64 && !sums->fp32) return;
    for (int64_t lane = 0; lane < lanes; lane++)
        at[lane] = fa_flex_place_of(&bias->of_sum, t->s.b_idx, b->head[lane], b->row[lane], t->block);
    lines.along = bias->of_sum.kv;
    bias->operations->add_to_bias(&lines, *sums, values);
}

/* S and dP become P and dS. */
static void gradients_of_block(const bwd_rows_job *job, bwd_rows_task *b) {
    decode_task *t = &b->t;
    const fa_problem *p = t->p;
    const int64_t n = t->num_keys, even = round_up(n, 2), lanes = t->lanes;
    float first[FA_BWD_ROWS_LANES], end[FA_BWD_ROWS_LANES], diagonal[FA_BWD_ROWS_LANES];
    for (int64_t lane = 0; lane < lanes; lane++) {
        const int64_t from = b->first[lane] - t->block, to = b->end[lane] - t->block;
        first[lane] = (float)(from < 0 ? 0 : from > n ? n : from);
        end[lane] = (float)(to < 0 ? 0 : to > n ? n : to);
        diagonal[lane] = (float)(b->row[lane] + t->s.len_kv - t->s.len_q - t->block);
    }
    if (p->bias.data)
        bias_tile(b->scratch->bias, &p->bias, t->s.b_idx, b->row, b->head, lanes, t->s.kv_row + t->block, n);
    if (even > n) { /* a key behind the last one, which no row sees */
        memset(t->scores + n * lanes, 0, (size_t)lanes * sizeof(float));
        memset(b->scratch->dprob + n * lanes, 0, (size_t)lanes * sizeof(float));
        memset(b->scratch->bias + n * lanes, 0, (size_t)lanes * sizeof(float));
    }
    /* Without a mask the bias of another row, which may be NaN, would reach padding lanes. */
    const bool is_padded = t->rows > t->s.len_q * (p->h / p->h_kv);
    const bool is_partial = t->common_first > t->block || t->common_end < t->block + n;
    gradient_step(&(gradient_args){.scores = t->scores,
                                   .dprob = b->scratch->dprob,
                                   .p_rows = t->scores,
                                   .ds_rows = b->scratch->dprob,
                                   .row_stride = lanes,
                                   .ds_words = b->scratch->ds_words,
                                   .lanes = lanes,
                                   .num_keys = even,
                                   .lse = b->lse,
                                   .delta = b->delta,
                                   .scale = job->scale,
                                   .kept = 1.0f,
                                   .options = {.softcap = job->softcap,
                                               .slope = p->alibi_slopes ? t->slope : NULL,
                                               .diagonal = diagonal,
                                               .bias = p->bias.data ? b->scratch->bias : NULL,
                                               .first = first,
                                               .end = end,
                                               .masked = is_partial || is_padded || even > n}});
}

/* Writes dK or dV of the block. */
static void write_block(const bwd_rows_task *b, const fa_view *grad, const fa_view *view, const float *rows,
                        const float *weights, int64_t d, int64_t columns, float factor) {
    const decode_task *t = &b->t;
    bwd_rows_gradient x = {.view = view,
                           .rows = rows,
                           .weights = weights,
                           .d = d,
                           .columns = columns,
                           .head_bytes = grad->stride_h * DTYPE_BYTES(t->p->dtype),
                           .factor = factor};
    if (!grad->data) return;
    list_rows(t, grad, t->block, t->num_keys, (const char **)x.out);
    write_keys(b, &x);
}

static void run_block(const bwd_rows_job *job, bwd_rows_task *b, const fa_flex_sums_at *sums, int64_t block,
                      int64_t n) {
    decode_task *t = &b->t;
    const fa_problem *p = t->p;
    void (*const scores)(decode_task *, const decode_scores *) = decode_patches_of(p->dtype, t->rows).scores;
    list_stream(t, block, n, b->end_key);
    scores(t, &(decode_scores){.q = t->q,
                               .d = p->d,
                               .columns = t->q_columns,
                               .head_bytes = t->k_head_bytes,
                               .scale = 1,
                               .out = t->scores});
    scores(t, &(decode_scores){.q = b->scratch->dout,
                               .d = p->d_v,
                               .columns = t->columns,
                               .first = n,
                               .head_bytes = t->v_head_bytes,
                               .scale = 1,
                               .out = b->scratch->dprob});
    find_exact_heads(b);
    if (fa_flex_of(p))
        bias_gradients_of_block(job, b, sums);
    else
        gradients_of_block(job, b);
    for (int64_t head = 0; head < t->num_heads && p->dq.data; head++) add_queries(b, head);
    write_block(b, &p->dk, &p->q, b->q_words, b->scratch->dprob, p->d, t->q_columns, (float)p->scale);
    write_block(b, &p->dv, &p->dout, b->dout_words, t->scores, p->d_v, t->columns, 1.0f);
}

/* ---- close a task ---- */

/* dK = dV = 0 of keys [begin, end), which no row sees. */
static void write_no_gradient(const bwd_rows_task *b, int64_t begin, int64_t end) {
    const fa_problem *p = b->t.p;
    const fa_view *grads[] = {&p->dk, &p->dv};
    for (int i = 0; i < 2; i++) {
        const size_t bytes = (size_t)((i ? p->d_v : p->d) * DTYPE_BYTES(p->dtype));
        for (int64_t key = begin; key < end && grads[i]->data; key++)
            for (int64_t head = b->t.head_kv; head < b->t.head_kv + b->t.num_heads; head++)
                memset((char *)grads[i]->data + fa_key_offset(p, grads[i], &b->t.s, key, head) * DTYPE_BYTES(p->dtype),
                       0, bytes);
    }
}

/* Puts the columns of dQ into their natural order. */
static void order_columns(const bwd_rows_task *b) {
#if WORD_ELEMS == 2
    const decode_task *t = &b->t;
    for (float *dq = b->dq; dq < b->dq + t->num_heads * t->rows * t->q_columns; dq += 2 * LANES) {
        vec x = vec_load(dq), y = vec_load(dq + LANES);
        vec_in_order(&x, &y);
        vec_store(dq, x);
        vec_store(dq + LANES, y);
    }
#else
    (void)b;
#endif
}

static void write_queries(const bwd_rows_task *b) {
    const decode_task *t = &b->t;
    const fa_problem *p = t->p;
    for (int64_t n = 0; n < t->num_heads * (p->h / p->h_kv) * t->s.len_q; n++) {
        const int64_t lane = lane_in_memory(b, n);
        unpack_row(bwd_query_row(p, &t->s, &p->dq, b->row[lane], b->head[lane]), p->d, b->dq + lane * t->q_columns,
                   (float)p->scale, p->dtype);
    }
}

/* sums: where the gradient of a bias is added. */
static void run_rows_task(const bwd_rows_job *job, bwd_rows_task *b, const fa_flex_sums_at *sums, int64_t b_idx,
                          int64_t idx) {
    const fa_problem *p = job->p;
    decode_task *t = &b->t;
    t->p = p, t->s = fa_sequence_at(p, b_idx), t->rows = fa_bwd_rows_of(p, &t->s, WORD_ELEMS);
    t->columns = fa_decode_columns(p), t->q_columns = fa_decode_q_columns(p);
    const int64_t heads = fa_bwd_rows_heads(p, t->rows, job->num_shares, job->threads);
    const int64_t num_ranges = (p->h_kv + heads - 1) / heads, share = idx / num_ranges;
    const int64_t block_keys = fa_bwd_rows_block(p, t->rows);
    const bool is_alone = fa_bwd_rows_num_shares(&t->s) == 1;
    b->hides = false;
    t->head_kv = idx % num_ranges * heads;
    t->num_heads = p->h_kv - t->head_kv < heads ? p->h_kv - t->head_kv : heads;
    b->dq = is_alone
                ? b->scratch->dq
                : job->partials + job->first_partial[b_idx] + (share * p->h_kv + t->head_kv) * t->rows * t->q_columns;
    fa_bwd_rows_share(&t->s, share, &b->keys_begin, &b->keys_end);
    open_rows(b, share == 0);
    find_keys_of_share(b);
    write_no_gradient(b, b->keys_begin, b->first_key);
    for (int64_t block = b->first_key; block < b->end_key; block += block_keys)
        run_block(job, b, sums, block, b->end_key - block < block_keys ? b->end_key - block : block_keys);
    write_no_gradient(b, b->end_key, b->keys_end);
    if (!p->dq.data) return;
    order_columns(b);
    if (is_alone) write_queries(b);
}

/* Where the gradient of the bias is added, in a copy of the sums. */
static fa_flex_sums_at sums_of_rows(const bwd_rows_job *job, double *copy) {
    fa_flex_sums_at places[FA_FLEX_MAX_CAPTURES];
    if (!fa_flex_of(job->p) || !job->sums.is_wanted || job->bias.capture < 0) return (fa_flex_sums_at){NULL, NULL};
    fa_flex_point_at_sums(fa_flex_of(job->p), &job->sums, copy, places);
    return places[job->bias.capture];
}

/* Workers take tasks, or copies of the sums with the tasks of a copy. */
static void run_rows_workers(int64_t begin, int64_t end, void *ctx) {
    bwd_rows_job *job = ctx;
    const int64_t num_parts = job->num_copies > 0 ? job->num_copies : job->num_tasks;
    vec_mode mode = vec_enter();
    for (int64_t w = begin; w < end; w++) {
        bwd_rows_task b; /* 90 KB; only what the steps write is read */
        b.scratch = job->scratch + w;
        for (int64_t part, b_idx = 0;
             (part = atomic_fetch_add_explicit(&job->next_part, 1, memory_order_relaxed)) < num_parts;) {
            double *const copy = job->num_copies > 0 ? job->copies + part * job->sums.num : NULL;
            const fa_flex_sums_at sums = sums_of_rows(job, copy);
            if (copy) memset(copy, 0, (size_t)job->sums.num * sizeof *copy);
            const int64_t task_end = job->num_tasks * (part + 1) / num_parts;
            for (int64_t task = job->num_tasks * part / num_parts; task < task_end; task++) {
                while (job->first_task[b_idx + 1] <= task) b_idx++;
                run_rows_task(job, &b, &sums, b_idx, task - job->first_task[b_idx]);
            }
        }
    }
    vec_leave(mode);
}

static void add_rows_copies(int64_t begin, int64_t end, void *ctx) {
    const bwd_rows_job *job = ctx;
    for (int64_t w = begin; w < end; w++)
        fa_flex_add_sums(fa_flex_of(job->p), &job->sums, job->copies, job->num_copies, job->sums.num * w / job->threads,
                         job->sums.num * (w + 1) / job->threads);
}

/* ---- the sum over shares ---- */

static void sum_rows_shares(int64_t begin, int64_t end, void *ctx) {
    const bwd_rows_job *job = ctx;
    const fa_problem *p = job->p;
    const int64_t g = p->h / p->h_kv, columns = fa_decode_q_columns(p);
    vec_mode mode = vec_enter();
    for (int64_t task = begin; task < end; task++) {
        const int64_t b_idx = task / p->h, head = task % p->h;
        if (job->first_partial[b_idx] == job->first_partial[b_idx + 1]) continue;
        const fa_sequence s = fa_sequence_at(p, b_idx);
        const int64_t rows = fa_bwd_rows_of(p, &s, WORD_ELEMS), distance = p->h_kv * rows * columns;
        for (int64_t i = 0; i < s.len_q; i++) {
            const float *first =
                job->partials + job->first_partial[b_idx] + (head / g * rows + i * g + head % g) * columns;
            float sum[FA_MAX_HEAD_DIM];
            memcpy(sum, first, (size_t)columns * sizeof(float));
            for (int64_t share = 1; share < fa_bwd_rows_num_shares(&s); share++)
                for (int64_t c = 0; c < columns; c += LANES)
                    vec_store(sum + c, vec_add(vec_load(sum + c), vec_load(first + share * distance + c)));
            unpack_row(bwd_query_row(p, &s, &p->dq, i, head), p->d, sum, (float)p->scale, p->dtype);
        }
    }
    vec_leave(mode);
}

static bool attn_bwd_rows(const fa_problem *p, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    const int threads = plan->cpu.decode_threads;
    int64_t *first_task = workspace, *first_partial = first_task + p->b + 1;
    const fa_bwd_rows_sizes sizes = fa_bwd_rows_count(p, WORD_ELEMS, threads, first_task, first_partial);
    bwd_rows_job job = {.p = p,
                        .first_task = first_task,
                        .first_partial = first_partial,
                        .scratch = (fa_bwd_rows_scratch *)((char *)workspace + fa_bwd_rows_scratch_at(p)),
                        .num_shares = sizes.num_shares,
                        .num_tasks = sizes.num_tasks,
                        .threads = threads,
                        .scale = score_scale(p, 0, 0),
                        .softcap = (float)(p->softcap * LOG2_E)};
    job.partials = (float *)(job.scratch + threads);
    if (fa_flex_of(p)) {
        fa_flex_bias_of(p, plan->cpu.isa, &job.bias);
        job.sums = fa_flex_sums_of(p, true);
        job.copies = (double *)(job.partials + sizes.partial_floats);
        job.num_copies = fa_bwd_rows_num_copies(&job.sums, sizes.num_tasks);
    }
    if (threads <= 1)
        run_rows_workers(0, 1, &job);
    else if (!pool->parallel_for(threads, run_rows_workers, &job))
        return false;
    if (job.num_copies > 0 && threads <= 1)
        add_rows_copies(0, 1, &job);
    else if (job.num_copies > 0 && !pool->parallel_for(threads, add_rows_copies, &job))
        return false;
    if (sizes.partial_floats == 0) return true;
    if (threads > 1 && (size_t)sizes.partial_floats * sizeof(float) > combine_alone_bytes)
        return pool->parallel_for(p->b * p->h, sum_rows_shares, &job);
    sum_rows_shares(0, p->b * p->h, &job);
    return true;
}

#endif
