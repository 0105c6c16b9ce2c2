/* Attention forward for few queries against a long cache:  O = softmax(scale Q K^T + bias + mask) V,  lse.
 *
 *   q [b, len_q, h, d]    k [b, len_kv, h_kv, d], v [.., d_v] or pages    o [b, len_q, h, d_v]    lse [b, h, len_q]
 *   len_q g <= 16
 *
 * Every byte of K and V serves g len_q rows and is never needed again. So memory binds, and the order of reading
 * decides the speed. The kernel reads tokens in ascending order, with all heads of a token together. In the layout of a
 * cache this order is one sequential stream.
 *
 *   first pass, one task for each (sequence, split of its keys, range of heads):
 *       for each block of 64 keys:
 *           S = Q K^T     tiles of a few tokens of a head: dot products in registers, all sums by one shuffle tree
 *           mods          programmable attention: score_mod and mask_mod on S (decode_mods.h)
 *           softmax       S is [keys][rows of all heads], a row in each lane, as in attn_fwd.h
 *           O += P V      a few tokens of one head at a time, accumulators in registers
 *   second pass, one task for each (sequence, head):
 *       O = sum of the splits' O, each times exp2(the split's maximum - the largest maximum), in the order of the keys
 *
 * The kernel prefetches the stream a fixed distance ahead, in the order of memory and across the borders of K, V,
 * blocks and splits. Each cache line that the arithmetic loads comes with one prefetched line. With the hardware
 * prefetchers alone the processor reads half as fast. Specification: reference.c. Splits and workspace: decode_plan.h.
 * Measurements: README.md. */
#ifndef FA_CPU_ATTN_DECODE_H
#define FA_CPU_ATTN_DECODE_H

#include "bias.h"
#include "decode_mods.h"
#include "decode_patches.h"
#include "elementwise.h"
#include "sinks.h"

/* ---- softmax ---- */

/* FA_E4M3: the products come without their scale, which contains the descales of their head. */
static void scale_by_heads(decode_task *t) {
    for (int64_t at = 0; at < t->num_keys * t->lanes; at += LANES)
        vec_store(t->scores + at, vec_mul(vec_load(t->scores + at), vec_load(t->scale + at % t->lanes)));
}

/* Adds the bias to the scores of the block, which are in units of log2. */
static void add_bias(decode_task *t) {
    enum { STEP = 16 };
    const fa_problem *p = t->p;
    const int64_t g = p->h / p->h_kv;
    int64_t row[DECODE_MAX_LANES], head[DECODE_MAX_LANES];
    float bias[STEP * DECODE_MAX_LANES];
    for (int64_t lane = 0; lane < t->lanes; lane++) {
        const int64_t r = lane % t->rows;
        const bool exists = lane < t->num_heads * t->rows && r < t->s.len_q * g;
        row[lane] = exists ? r / g : 0;
        head[lane] = exists ? (t->head_kv + lane / t->rows) * g + r % g : t->head_kv * g;
    }
    for (int64_t key = 0; key < t->num_keys; key += STEP) {
        const int64_t n = t->num_keys - key < STEP ? t->num_keys - key : STEP;
        bias_tile(bias, &p->bias, t->s.b_idx, row, head, t->lanes, t->s.kv_row + t->block + key, n);
        for (int64_t i = 0; i < n * t->lanes; i += LANES) {
            float *at = t->scores + key * t->lanes + i;
            vec_store(at, vec_add(vec_load(at), vec_load(bias + i)));
        }
    }
}

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
    if (p->bias.data) add_bias(t);
    memcpy(new_max, t->row_max, sizeof new_max);
    if (t->mods)
        decode_adjust(t->mods, t, new_max);
    else
        scores_adjust(t->scores, t->lanes, t->lanes, 0, n, &options, new_max);
    softmax_step(&(softmax_args){.scores = t->scores,
                                 .p = t->scores,
                                 .stride = t->lanes,
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

/* Adds a key that only some rows see, or that the products of some heads did not take. The products took this key as a
 * row of zeros, because NaN times P = 0 would be NaN in the rows that do not see the key. */
static void add_value(decode_task *t, int64_t key) {
    for (int64_t head = 0; head < t->num_heads; head++) {
        if (t->mods ? !(t->mods->of_some[head] >> key & 1) : is_common(t, head, key)) continue;
        const char *v[WORD_ELEMS];
        for (int e = 0; e < WORD_ELEMS; e++)
            v[e] = e == key % WORD_ELEMS ? t->stream[t->num_keys + key] + head * t->v_head_bytes : decode_zeros;
        for (int64_t r = 0; r < t->s.len_q * (t->p->h / t->p->h_kv); r++) {
            int64_t first, end, lane = head * t->rows + r;
            fa_visible_keys(t->p, &t->s, r / (t->p->h / t->p->h_kv), &first, &end);
            if (t->block + key < first || t->block + key >= end) continue;
            if (t->mods && !(t->mods->seen[lane] >> key & 1)) continue;
            t->job->patches.value(t, t->o + lane * t->columns, v, t->scores + key / WORD_ELEMS * t->lanes + lane);
        }
    }
}

/* ---- a task ---- */

static void open_task(decode_task *t) {
    const fa_problem *p = t->p;
    const int64_t g = p->h / p->h_kv, bytes = DTYPE_BYTES(p->dtype);
    const char *q_rows[DECODE_MAX_LANES];
    open_stream(t);

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
        t->scale[lane] = exists && p->dtype == FA_E4M3 ? score_scale(p, t->s.b_idx, head / g) : 1.0f;
        if (exists && p->alibi_slopes)
            t->slope[lane] = slope_in_log2(p->alibi_slopes[t->s.b_idx * p->alibi_stride_b + head]);
    }
    WITH_INPUT_DTYPE(p->dtype, pack_queries, t, t->q, q_rows, p->d, t->q_columns);
    memset(t->o, 0, (size_t)(t->num_heads * t->rows * t->columns) * sizeof(float));
}

static void run_split(decode_task *t, int64_t begin, int64_t end, int64_t last) {
    const fa_problem *p = t->p;
    for (int64_t block = begin; block < end; block += FA_DECODE_BLOCK) {
        int64_t n = end - block < FA_DECODE_BLOCK ? end - block : FA_DECODE_BLOCK;
        if (t->mods && !decode_looks(t->mods, t, block, n)) continue;
        list_stream(t, block, n, last);
        float alpha[DECODE_MAX_LANES];
        t->job->patches.scores(t, &(decode_scores){.q = t->q,
                                                   .d = p->d,
                                                   .columns = t->q_columns,
                                                   .head_bytes = t->k_head_bytes,
                                                   .scale = t->job->scale,
                                                   .out = t->scores});
        if (p->dtype == FA_E4M3) scale_by_heads(t);
        softmax_of_block(t, alpha);
        rescale_output(t, alpha);
        t->job->patches.values(t);
        for (int64_t key = 0; key < n; key++)
            if (t->mods || !is_common(t, 0, key)) add_value(t, key);
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
    decode_job *job = ctx;
    const fa_problem *p = job->p;
    decode_mods mods;
    if (fa_flex_of(p) && !decode_make_mods(&mods, p, job->isa)) {
        atomic_store(&job->failed, true);
        return;
    }
    vec_mode mode = vec_enter();
    for (int64_t task = begin, b_idx = 0; task < end; task++) {
        /* splits vary fastest, so a worker walks along its keys */
        const int64_t partial = task % job->num_partials, range = task / job->num_partials;
        if (job->first_partial[b_idx] > partial) b_idx = 0;
        while (job->first_partial[b_idx + 1] <= partial) b_idx++;
        decode_task t; /* 86 KB; only what open_task and run_split write is read */
        t.job = job, t.p = p, t.s = fa_sequence_at(p, b_idx), t.rows = job->rows;
        t.mods = fa_flex_of(p) ? &mods : NULL;
        t.columns = job->columns, t.q_columns = job->q_columns;
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
    if (fa_flex_of(p)) fa_flex_free_programs(&mods.programs);
}

/* ---- the sum over splits ---- */

static void combine_row(const decode_job *job, const fa_sequence *s, int64_t head, int64_t i) {
    const fa_problem *p = job->p;
    const int64_t g = p->h / p->h_kv, rows = p->h_kv * job->rows, row = head / g * job->rows + i * g + head % g;
    const float *begin = job->partials + job->first_partial[s->b_idx] * job->partial_floats;
    const float *end = job->partials + job->first_partial[s->b_idx + 1] * job->partial_floats;
    float o[FA_MAX_HEAD_DIM_V] = {0}, largest = -INFINITY, sum = 0.0f;
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
    const bool is_empty = sum == 0.0f; /* no key, or only scores of -inf: a finite score adds 1 or more */
    const float v_descale = p->dtype == FA_E4M3 ? fa_descale_of(&p->v_descale, s->b_idx, head / g) : 1.0f;
    float factor = is_empty ? 0.0f : v_descale / sum;
    if (fa_has_sink(p, s, i)) {
        const double sink = fa_sink_of_row(p, s, i, head), in_log2 = sink_in_log2(sink, largest, true);
        const fa_row_end end = fa_end_row(largest * LN_2, sum, sink, (in_log2 - (double)largest) * LN_2);
        fa_store_row_end(p, s, i, head, &end);
        factor = v_descale * (float)end.factor;
    } else {
        fa_store_lse(p, s, i, head, is_empty ? p->empty_lse : (float)(largest * LN_2 + log(sum)));
    }
    if (is_empty) memset(o, 0, sizeof o); /* 0 times inf has left NaN */
    const fa_dtype dtype = fa_output_dtype(p->dtype);
    unpack_row((char *)p->o.data + fa_query_offset(&p->o, s, i, head) * DTYPE_BYTES(dtype), p->d_v, o, factor, dtype);
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

static bool attn_decode(const fa_problem *p, const fa_plan *plan, void *workspace, const fa_pool *pool) {
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
                      .q_columns = fa_decode_q_columns(p),
                      .partial_floats = fa_decode_partial_floats(p),
                      .scale = p->dtype == FA_E4M3 ? 1.0f : score_scale(p, 0, 0),
                      .softcap = (float)(p->softcap * LOG2_E),
                      .isa = plan->cpu.isa};
    if (fa_flex_of(p) && p->flex->score) job.scale = (float)p->scale; /* in the units of the score_mod */
    job.heads_per_task = fa_decode_heads_per_task(p, job.num_partials, plan->cpu.decode_threads);
    const int64_t num_tasks = job.num_partials * ((p->h_kv + job.heads_per_task - 1) / job.heads_per_task);
    const size_t partial_bytes = (size_t)(job.num_partials * job.partial_floats) * sizeof(float);
    if (plan->cpu.decode_threads <= 1)
        run_decode_tasks(0, num_tasks, &job);
    else if (!pool->parallel_for(num_tasks, run_decode_tasks, &job))
        return false;
    if (job.failed) return false;
    if (plan->cpu.decode_threads > 1 && partial_bytes > combine_alone_bytes)
        return pool->parallel_for(p->b * p->h, run_combine_tasks, &job);
    run_combine_tasks(0, p->b * p->h, &job);
    return true;
}

#endif
