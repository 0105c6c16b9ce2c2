/* The specification: attention forward and backward in plain loops with double accumulators.
 *
 *   s_ij = scale (q_i.k_j + qv_i.v_j)           softcap > 0: s = softcap tanh(s / softcap)
 *   s_ij -= slope |i + len_kv - len_q - j|      ALiBi
 *   p_ij = exp(s_ij) / sum_j exp(s_ij)          over the keys that row i sees, and no others
 *   o_i  = sum_j z_ij p_ij v_j                  z = 1 / (1 - dropout_p) where kept, 0 where dropped; else 1
 *   lse_i = ln sum_j exp(s_ij)                  a sink is one more key of the row, whose v is 0
 *
 *   delta_i = dout_i.o_i                        softmax_d
 *   ds_ij = p_ij (z_ij dout_i.v_j - delta_i)    with softcap also times 1 - tanh^2
 *   dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i     dv_j = sum_i z_ij p_ij dout_i
 *
 * A masked pair is skipped and never multiplied by zero, because NaN may lie there. All other pairs are plain
 * arithmetic:
 *
 *   every visible score is -inf      the row counts as a row that sees no key: o 0, lse empty_lse, no gradient
 *   some visible score is finite     a score of -inf has p = 0; 0 times an infinite element of k, v, q or dout is NaN
 *   some score is +inf or NaN        o and lse are NaN, and everything that the backward adds for the row is NaN
 *
 * FA_E4M3: q.k and the sum over v are those of the stored numbers. The score is (scale q_descale k_descale) q.k, with
 * one scale in brackets. The factor of o_i is v_descale / sum_j exp(s_ij). So nothing overflows unless the scale, a
 * score or o_i does. o is bf16. There is no qv and no backward.
 *
 * If tensors are not fp64, the kernels hold scores as fp32 in units of log2. A score that overflows fp32 in these units
 * is infinite in the reference, too. So is the scale of FA_E4M3.
 *
 * Sums over rows run over all g query heads of the key's head. No intermediate result is stored, so scores are computed
 * twice, and a few rows on the stack are all the memory. One call of one task computes an output row, so the threads
 * cannot change a bit. */
#include "reference.h"
#include "reference_flex.h"
#include "reference_rows.h"

static double bias_of(const head_view *a, int64_t i, int64_t j) {
    const fa_scores *bias = &a->p->bias;
    const int64_t at = a->s.b_idx * bias->stride_b + a->head * bias->stride_h + i * bias->stride_row +
                       (a->s.kv_row + j) * bias->stride_key;
    return bias->dtype == FA_F64 ? ((const double *)bias->data)[at] : fa_load_element(bias->data, at, bias->dtype);
}

/* The score of row i and key j; *capped receives tanh(s / softcap) for the derivative. v is read if there is qv. */
static double score(const head_view *a, const query_row q, const row k, const row v, int64_t i, int64_t j,
                    double *capped) {
    const fa_problem *p = a->p;
    double qk = dot(q, k, p->d), s;
    if (p->qv.data) qk += dot(q + p->d, v, p->d_v);
    if (p->dtype != FA_F64 && fabs(qk) > FLT_MAX) qk = copysign(INFINITY, qk);
    s = a->scale * qk;
    *capped = 0;
    if (p->softcap > 0) {
        *capped = tanh(s / p->softcap);
        s = p->softcap * *capped;
    }
    if (p->alibi_slopes) s -= a->slope * fabs((double)(i + a->s.len_kv - a->s.len_q - j));
    s = in_range(p, s);
    return p->bias.data ? s + bias_of(a, i, j) : s;
}

/* The largest score of row i over keys [first, end). NaN never is the largest, but reaches o and lse through the
 * sum. */
static double row_max(const head_view *a, const query_row q, int64_t i, int64_t first, int64_t end) {
    double largest = -INFINITY, capped;
    for (int64_t j = first; j < end; j++) {
        row k, v;
        load_key(k, a, j);
        if (a->p->qv.data) load_value(v, a, j);
        double s = score(a, q, k, v, i, j, &capped);
        if (s > largest) largest = s;
    }
    return largest;
}

/* ---- forward ------------------------------------------------------------------------------------------------- */

static void forward_row(const head_view *a, int64_t i) {
    const fa_problem *p = a->p;
    query_row q;
    row o = {0};
    int64_t first, end;
    fa_visible_keys(p, &a->s, i, &first, &end);
    load_query(q, a, i);

    double largest = row_max(a, q, i, first, end), sum = 0, capped;
    for (int64_t j = first; j < end; j++) {
        row k, v;
        load_key(k, a, j);
        load_value(v, a, j);
        double weight = weight_of(score(a, q, k, v, i, j, &capped), largest);
        sum += weight; /* dropout comes after the normalisation */
        add_scaled(o, weight * dropout_factor(a, i, j), v, p->d_v);
    }
    bool is_empty = sum == 0; /* no key, or no key with a score above -inf */
    if (is_empty) memset(o, 0, sizeof o);
    const double factor = end_row(a, i, largest, sum);
    store_row(p->o.data, fa_query_offset(&p->o, &a->s, i, a->head), o, factor, p->d_v, fa_output_dtype(p->dtype));
}

static void forward_heads(int64_t begin, int64_t end, void *ctx) {
    const fa_problem *p = ctx;
    for (int64_t task = begin; task < end; task++) {
        head_view a = head_view_at(p, task / p->h, task % p->h);
        for (int64_t i = 0; i < a.s.len_q; i++) forward_row(&a, i);
    }
}

bool fa_reference_fwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    (void)plan;
    if (problem->flex) return fa_reference_flex_fwd(problem, workspace, pool);
    return pool->parallel_for(problem->b * problem->h, forward_heads, (void *)problem);
}

/* ---- s_dmask ------------------------------------------------------------------------------------------------- */

static void s_dmask_heads(int64_t begin, int64_t end, void *ctx) {
    const fa_problem *p = ctx;
    int64_t cols = p->s_dmask_cols;
    for (int64_t task = begin; task < end; task++) {
        head_view a = head_view_at(p, task / p->h, task % p->h);
        for (int64_t i = 0; i < p->s_dmask_rows; i++) {
            int64_t offset = (task * p->s_dmask_rows + i) * cols, first, last;
            for (int64_t j = 0; j < cols; j++) fa_store_element(p->s_dmask, offset + j, 0, p->dtype);
            if (i >= a.s.len_q) continue;
            query_row q;
            load_query(q, &a, i);
            fa_visible_keys(p, &a.s, i, &first, &last);
            double largest = row_max(&a, q, i, first, last), capped;
            for (int64_t j = first; j < last; j++) {
                row k, v;
                load_key(k, &a, j);
                if (p->qv.data) load_value(v, &a, j);
                double weight = weight_of(score(&a, q, k, v, i, j, &capped), largest);
                bool is_dropped = p->dropout_p > 0 && !is_kept(&a, i, j);
                fa_store_element(p->s_dmask, offset + j, is_dropped ? -weight : weight, p->dtype);
            }
        }
    }
}

bool fa_reference_s_dmask(const fa_problem *problem, const fa_pool *pool) {
    return pool->parallel_for(problem->b * problem->h, s_dmask_heads, (void *)problem);
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

/* pz is p_ij z_ij, the weight of dout_i in dv_j. ds is ds_ij before the scale. An infinite lse of either sign means
 * that the row saw no key. */
typedef struct {
    double pz, ds;
} pair;

static pair pair_at(const head_view *a, const query_row q, const row dout, const row k, const row v, int64_t i,
                    int64_t j) {
    const fa_problem *p = a->p;
    double capped, s = score(a, q, k, v, i, j, &capped), z = dropout_factor(a, i, j);
    double prob = exp(s - *fa_row_stat(&p->lse, &a->s, i, a->head));
    double delta = *fa_row_stat(&p->softmax_d, &a->s, i, a->head);
    return (pair){.pz = prob * z, .ds = prob * (z * dot(dout, v, p->d_v) - delta) * (1 - capped * capped)};
}

static bool sees_nothing(const head_view *a, int64_t i, int64_t *first, int64_t *end) {
    fa_visible_keys(a->p, &a->s, i, first, end);
    return *first >= *end || fa_is_empty_row(a->p, *fa_row_stat(&a->p->lse, &a->s, i, a->head));
}

static void backward_query_row(const head_view *a, int64_t i) {
    const fa_problem *p = a->p;
    query_row q;
    row o, dout, dq = {0};
    int64_t first, end;
    bool is_empty = sees_nothing(a, i, &first, &end);
    load_query(q, a, i);
    load_query_row(o, a, &p->o, i, p->d_v);
    load_query_row(dout, a, &p->dout, i, p->d_v);
    *fa_row_stat(&p->softmax_d, &a->s, i, a->head) = is_empty ? 0 : (float)dot(dout, o, p->d_v);
    if (!p->dq.data) return;
    for (int64_t j = first; j < end && !is_empty; j++) {
        row k, v;
        load_key(k, a, j);
        load_value(v, a, j);
        add_scaled(dq, pair_at(a, q, dout, k, v, i, j).ds, k, p->d);
    }
    store_row(p->dq.data, fa_query_offset(&p->dq, &a->s, i, a->head), dq, p->scale, p->d, p->dtype);
}

static void backward_query_heads(int64_t begin, int64_t end, void *ctx) {
    const fa_problem *p = ctx;
    for (int64_t task = begin; task < end; task++) {
        head_view a = head_view_at(p, task / p->h, task % p->h);
        for (int64_t i = 0; i < a.s.len_q; i++) backward_query_row(&a, i);
    }
}

static void backward_key_row(const fa_problem *p, int64_t b_idx, int64_t head_kv, int64_t j) {
    row k, v, dk = {0}, dv = {0};
    int64_t g = p->h / p->h_kv, first, end;
    head_view a = head_view_at(p, b_idx, head_kv * g);
    load_key(k, &a, j);
    load_value(v, &a, j);
    for (int64_t head = head_kv * g; head < (head_kv + 1) * g; head++) {
        a = head_view_at(p, b_idx, head);
        for (int64_t i = 0; i < a.s.len_q; i++) {
            if (sees_nothing(&a, i, &first, &end) || j < first || j >= end) continue;
            query_row q;
            row dout;
            load_query(q, &a, i);
            load_query_row(dout, &a, &p->dout, i, p->d_v);
            pair x = pair_at(&a, q, dout, k, v, i, j);
            add_scaled(dk, x.ds, q, p->d);
            add_scaled(dv, x.pz, dout, p->d_v);
        }
    }
    if (p->dk.data) store_row(p->dk.data, fa_key_offset(p, &p->dk, &a.s, j, head_kv), dk, p->scale, p->d, p->dtype);
    if (p->dv.data) store_row(p->dv.data, fa_key_offset(p, &p->dv, &a.s, j, head_kv), dv, 1, p->d_v, p->dtype);
}

static void backward_key_heads(int64_t begin, int64_t end, void *ctx) {
    const fa_problem *p = ctx;
    for (int64_t task = begin; task < end; task++) {
        fa_sequence s = fa_sequence_at(p, task / p->h_kv);
        for (int64_t j = 0; j < s.len_kv; j++) backward_key_row(p, task / p->h_kv, task % p->h_kv, j);
    }
}

bool fa_reference_bwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool) {
    (void)plan;
    if (problem->flex) return fa_reference_flex_bwd(problem, workspace, pool);
    if (!pool->parallel_for(problem->b * problem->h, backward_query_heads, (void *)problem)) return false;
    if (!problem->dk.data && !problem->dv.data) return true;
    return pool->parallel_for(problem->b * problem->h_kv, backward_key_heads, (void *)problem);
}
