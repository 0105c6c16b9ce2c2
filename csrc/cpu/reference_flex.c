/* The specification of programmable attention (flex/flex.h), in plain loops with double accumulators:
 *
 *   s_ij = score_mod(scale q_i.k_j)             in a pair that is not masked
 *   p_ij = exp(s_ij) / sum_j exp(s_ij)          o_i = sum_j z_ij p_ij v_j     lse_i = ln sum_j exp(s_ij)
 *
 *   delta_i = dout_i.o_i - dlse_i               softmax_d
 *   ds_ij = derivative(p_ij (z_ij dout_i.v_j - delta_i))
 *   dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i     dv_j = sum_i z_ij p_ij dout_i
 *
 * z is that of dropout, as in reference.c.
 * The mods call query i of batch b by the name i + q_offset[b].
 * A pair is masked by its block, by the mask_mod, or by a score of -inf. A masked pair is skipped and never multiplied
 * by zero. Scores enter and leave a program as fp32, unless the tensors are fp64. Other rules: reference.c.
 *
 * A task is a batch and a key head, so threads cannot change a bit. Gradients of captures are sums over all tasks.
 * Where they are wanted, one thread runs all tasks. */
#include "reference_flex.h"
#include "flex/block_map.h"
#include "flex/evaluate.h"
#include "flex_gradients.h"
#include "reference_rows.h"
#include <stdatomic.h>
#include <stdlib.h>

enum { TILE = FA_FLEX_TILE };

typedef struct {
    const fa_problem *p;
    fa_flex_block_map map;
    fa_flex_sums sums;
    double *copy; /* the sums of gradients of captures; NULL: not wanted */
    atomic_bool failed;
} flex_job;

/* One head, and what is known of one of its rows. */
typedef struct {
    head_view a;
    const flex_job *job;
    const uint8_t *kinds;
    fa_flex_evaluator *score, *mask, *derivative;
    double *raw, *s; /* [len_kv] scores before and after the score_mod; s is -inf in a masked pair */
    double *p, *ds;  /* [len_kv] backward */
    double *dk, *dv; /* [len_kv][d], [len_kv][d_v] backward */
    fa_flex_sums_at sums[FA_FLEX_MAX_CAPTURES];
} flex_head;

/* ---- programs ---------------------------------------------------------------------------------------------------- */

/* Scores or gradients of a tile, as the programs read and write them. */
typedef union {
    float f[TILE];
    double d[TILE];
} tile_values;

static void to_values(const flex_head *x, tile_values *t, const double *from, int num) {
    for (int i = 0; i < num; i++) {
        if (x->job->p->dtype == FA_F64)
            t->d[i] = from[i];
        else
            t->f[i] = (float)from[i];
    }
}

static void from_values(const flex_head *x, double *to, const void *values, int num) {
    for (int i = 0; i < num; i++)
        to[i] = x->job->p->dtype == FA_F64 ? ((const double *)values)[i] : (double)((const float *)values)[i];
}

/* Values of keys [first, first + num) of row i. */
static const void *evaluate(fa_flex_evaluator *e, const flex_head *x, int64_t i, int64_t first, int num,
                            const tile_values *scores, const tile_values *grads) {
    fa_flex_start_head(e, x->a.s.b_idx, x->a.head);
    fa_flex_start_lines(e, i + fa_flex_first_query(x->job->p->flex, x->a.s.b_idx), 1);
    fa_flex_start_lanes(e, first, num);
    return fa_flex_line(e, 0, scores, grads);
}

static int tile_keys(const flex_head *x, int64_t first) {
    const int64_t rest = x->a.s.len_kv - first;
    return (int)(rest < TILE ? rest : TILE);
}

/* ---- one row ----------------------------------------------------------------------------------------------------- */

static void hide_masked(const flex_head *x, int64_t i, int64_t first, int num) {
    const fa_flex_block_map *m = &x->job->map;
    const int64_t row = fa_flex_mask_row(m, x->a.s.b_idx, i);
    const uint8_t *allowed = x->mask ? evaluate(x->mask, x, i, first, num, NULL, NULL) : NULL;
    for (int n = 0; n < num; n++) {
        const uint8_t kind = x->kinds[row / m->block_q * m->columns + (first + n) / m->block_kv];
        if (kind == FA_FLEX_EMPTY || (kind == FA_FLEX_PARTIAL && allowed && !allowed[n])) x->s[first + n] = -INFINITY;
    }
}

/* Fills raw and s. */
static void score_row(const flex_head *x, int64_t i) {
    const fa_problem *p = x->job->p;
    query_row q;
    load_query(q, &x->a, i);
    for (int64_t j = 0; j < x->a.s.len_kv; j++) {
        row k;
        load_key(k, &x->a, j);
        double qk = dot(q, k, p->d);
        if (p->dtype != FA_F64 && fabs(qk) > FLT_MAX) qk = copysign(INFINITY, qk);
        x->raw[j] = x->a.scale * qk;
    }
    for (int64_t first = 0; first < x->a.s.len_kv; first += TILE) {
        const int num = tile_keys(x, first);
        memcpy(x->s + first, x->raw + first, (size_t)num * sizeof(double));
        if (x->score) {
            tile_values scores;
            to_values(x, &scores, x->raw + first, num);
            from_values(x, x->s + first, evaluate(x->score, x, i, first, num, &scores, NULL), num);
        }
        for (int n = 0; n < num; n++) x->s[first + n] = in_range(p, x->s[first + n]);
        hide_masked(x, i, first, num);
    }
}

static void forward_row(const flex_head *x, int64_t i) {
    const fa_problem *p = x->job->p;
    const head_view *a = &x->a;
    row o = {0}, v;
    double largest = -INFINITY, sum = 0;
    score_row(x, i);
    for (int64_t j = 0; j < a->s.len_kv; j++)
        if (x->s[j] > largest) largest = x->s[j];
    for (int64_t j = 0; j < a->s.len_kv; j++) {
        if (x->s[j] == -INFINITY) continue;
        const double weight = weight_of(x->s[j], largest);
        sum += weight;
        load_value(v, a, j);
        add_scaled(o, weight * dropout_factor(a, i, j), v, p->d_v);
    }
    const double factor = end_row(a, i, largest, sum);
    store_row(p->o.data, fa_query_offset(&p->o, &a->s, i, a->head), o, factor, p->d_v, fa_output_dtype(p->dtype));
    if (p->flex->max_scores.data) {
        const bool has_nan = isnan(sum) && largest < INFINITY; /* no comparison is true of NaN */
        *fa_row_stat(&p->flex->max_scores, &a->s, i, a->head) = (float)(has_nan ? sum : largest);
    }
}

/* Turns ds, the gradient of the score, into the gradient of the score before the score_mod. */
static void differentiate(const flex_head *x, int64_t i) {
    for (int64_t first = 0; first < x->a.s.len_kv; first += TILE) {
        const int num = tile_keys(x, first);
        tile_values scores = {.d = {0}}, grads = {.d = {0}};
        to_values(x, &scores, x->raw + first, num);
        to_values(x, &grads, x->ds + first, num);
        from_values(x, x->ds + first, evaluate(x->derivative, x, i, first, num, &scores, &grads), num);
    }
}

static void backward_row(const flex_head *x, int64_t i) {
    const fa_problem *p = x->job->p;
    const head_view *a = &x->a;
    query_row q;
    row o, dout, k, v, dq = {0};
    const float lse = *fa_row_stat(&p->lse, &a->s, i, a->head);
    const bool is_empty = isinf(lse);
    load_query(q, a, i);
    load_query_row(o, a, &p->o, i, p->d_v);
    load_query_row(dout, a, &p->dout, i, p->d_v);
    const fa_row_stats *dlse = &p->flex->dlse;
    const float delta =
        is_empty ? 0 : (float)(dot(dout, o, p->d_v) - (dlse->data ? *fa_row_stat(dlse, &a->s, i, a->head) : 0));
    *fa_row_stat(&p->softmax_d, &a->s, i, a->head) = delta;
    if (!is_empty) score_row(x, i);
    for (int64_t j = 0; j < a->s.len_kv && !is_empty; j++) {
        x->p[j] = x->ds[j] = 0;
        if (x->s[j] == -INFINITY) continue;
        load_value(v, a, j);
        const double prob = exp(x->s[j] - lse), z = dropout_factor(a, i, j);
        x->p[j] = prob * z;
        x->ds[j] = prob * (z * dot(dout, v, p->d_v) - delta);
    }
    if (!is_empty && x->derivative) differentiate(x, i);
    for (int64_t j = 0; j < a->s.len_kv && !is_empty; j++) {
        if (x->s[j] == -INFINITY) continue;
        load_key(k, a, j);
        add_scaled(dq, x->ds[j], k, p->d);
        add_scaled(x->dk + j * p->d, x->ds[j], q, p->d);
        add_scaled(x->dv + j * p->d_v, x->p[j], dout, p->d_v);
    }
    if (p->dq.data) store_row(p->dq.data, fa_query_offset(&p->dq, &a->s, i, a->head), dq, p->scale, p->d, p->dtype);
}

/* ---- tasks ------------------------------------------------------------------------------------------------------- */

static void free_head(flex_head *x) {
    fa_flex_evaluator_free(x->score);
    fa_flex_evaluator_free(x->mask);
    fa_flex_evaluator_free(x->derivative);
    free(x->raw);
}

/* false: no memory. */
static bool make_head(flex_head *x, const flex_job *job) {
    const fa_problem *p = job->p;
    const fa_flex *f = p->flex;
    const size_t len = (size_t)p->len_kv;
    const bool backward = p->pass == FA_BWD;
    *x = (flex_head){.job = job, .raw = calloc(len * (backward ? (size_t)(p->d + p->d_v) + 4 : 2) + 1, sizeof(double))};
    bool done = x->raw != NULL;
    if (f->score) done = (x->score = fa_flex_evaluator_new(f->score, FA_ISA_REFERENCE, true)) && done;
    if (f->mask) done = (x->mask = fa_flex_evaluator_new(f->mask, FA_ISA_REFERENCE, true)) && done;
    if (backward && f->derivative)
        done = (x->derivative = fa_flex_evaluator_new(f->derivative, FA_ISA_REFERENCE, true)) && done;
    if (!done) return false;
    x->s = x->raw + len, x->p = x->s + len, x->ds = x->p + len, x->dk = x->ds + len;
    x->dv = x->dk + len * (size_t)p->d;
    if (job->copy) {
        fa_flex_point_at_sums(f, &job->sums, job->copy, x->sums);
        fa_flex_scatter_to(x->derivative, x->sums);
    }
    return true;
}

static void run_key_head(flex_head *x, int64_t b_idx, int64_t head_kv) {
    const fa_problem *p = x->job->p;
    const int64_t g = p->h / p->h_kv;
    if (p->pass == FA_BWD) memset(x->dk, 0, (size_t)(p->len_kv * (p->d + p->d_v)) * sizeof(double));
    for (int64_t head = head_kv * g; head < (head_kv + 1) * g; head++) {
        x->a = head_view_at(p, b_idx, head);
        x->kinds = fa_flex_kinds_of(&x->job->map, b_idx, head);
        for (int64_t i = 0; i < x->a.s.len_q; i++) {
            if (p->pass == FA_FWD)
                forward_row(x, i);
            else
                backward_row(x, i);
        }
    }
    if (x->job->copy) fa_flex_add_waiting(x->derivative);
    const fa_sequence s = fa_sequence_at(p, b_idx);
    for (int64_t j = 0; j < p->len_kv && p->pass == FA_BWD; j++) {
        if (p->dk.data)
            store_row(p->dk.data, fa_key_offset(p, &p->dk, &s, j, head_kv), x->dk + j * p->d, p->scale, p->d, p->dtype);
        if (p->dv.data)
            store_row(p->dv.data, fa_key_offset(p, &p->dv, &s, j, head_kv), x->dv + j * p->d_v, 1, p->d_v, p->dtype);
    }
}

static void run_tasks(int64_t begin, int64_t end, void *ctx) {
    flex_job *job = ctx;
    flex_head x;
    if (make_head(&x, job))
        for (int64_t task = begin; task < end; task++) run_key_head(&x, task / job->p->h_kv, task % job->p->h_kv);
    else
        atomic_store(&job->failed, true);
    free_head(&x);
}

bool fa_reference_flex_fwd(const fa_problem *p, void *workspace, const fa_pool *pool) {
    flex_job job = {.p = p, .map = fa_flex_block_map_of(p)};
    job.map.kinds = workspace;
    fa_flex_fill_block_map(&job.map, p->flex);
    return pool->parallel_for(p->b * p->h_kv, run_tasks, &job) && !job.failed;
}

bool fa_reference_flex_bwd(const fa_problem *p, void *workspace, const fa_pool *pool) {
    flex_job job = {.p = p, .map = fa_flex_block_map_of(p), .sums = fa_flex_sums_of(p, false)};
    job.map.kinds = workspace;
    fa_flex_fill_block_map(&job.map, p->flex);
    if (job.sums.num == 0) return pool->parallel_for(p->b * p->h_kv, run_tasks, &job) && !job.failed;
    job.copy = calloc((size_t)job.sums.num, sizeof *job.copy);
    if (!job.copy) return false;
    run_tasks(0, p->b * p->h_kv, &job);
    fa_flex_add_sums(p->flex, &job.sums, job.copy, 1, 0, job.sums.num);
    free(job.copy);
    return !job.failed;
}
