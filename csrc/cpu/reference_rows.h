/* What both files of the reference need: rows of elements as doubles, and the views of one query head. */
#ifndef FA_CPU_REFERENCE_ROWS_H
#define FA_CPU_REFERENCE_ROWS_H

#include "convert.h"
#include "dropout.h"
#include "sequence.h"
#include "sinks.h"
#include <float.h>
#include <math.h>
#include <string.h>

#define LN_2 0.693147180559945309

/* ---- rows of d or d_v elements in any dtype ------------------------------------------------------------------ */

typedef double row[FA_MAX_HEAD_DIM_V];

/* A loop for each dtype, so that no element asks for its dtype. */
static inline void load_row(double *dst, const void *data, int64_t offset, int64_t n, fa_dtype dtype) {
    switch (dtype) {
    case FA_F16:
        for (int64_t i = 0; i < n; i++) dst[i] = fa_load_element(data, offset + i, FA_F16);
        return;
    case FA_BF16:
        for (int64_t i = 0; i < n; i++) dst[i] = fa_load_element(data, offset + i, FA_BF16);
        return;
    case FA_F32:
        for (int64_t i = 0; i < n; i++) dst[i] = fa_load_element(data, offset + i, FA_F32);
        return;
    case FA_E4M3:
        for (int64_t i = 0; i < n; i++) dst[i] = fa_load_element(data, offset + i, FA_E4M3);
        return;
    case FA_F64: memcpy(dst, (const double *)data + offset, (size_t)n * sizeof *dst);
    }
}

static inline void store_row(void *data, int64_t offset, const row src, double factor, int64_t n, fa_dtype dtype) {
    for (int64_t i = 0; i < n; i++) fa_store_element(data, offset + i, src[i] * factor, dtype);
}

/* Four sums, because an addition waits for the one before it. */
static inline double dot(const double *x, const double *y, int64_t n) {
    double sum[4] = {0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int64_t l = 0; l < 4; l++) sum[l] += x[i + l] * y[i + l];
    for (; i < n; i++) sum[0] += x[i] * y[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline void add_scaled(row acc, double factor, const row x, int64_t n) {
    for (int64_t i = 0; i < n; i++) acc[i] += factor * x[i];
}

/* ---- one query head of one sequence -------------------------------------------------------------------------- */

typedef struct {
    const fa_problem *p;
    fa_sequence s;
    int64_t head, head_kv;
    double slope;
    double scale;     /* of the scores; FA_E4M3: times the descales of q and k */
    double v_descale; /* 1 unless the tensors are FA_E4M3 */
    uint64_t stream;  /* stream of the dropout generator */
} head_view;

/* The scale of the scores of one head. It is infinite if it overflows fp32 in the kernels' units: log2, or softcap. */
static inline double scale_at(const fa_problem *p, int64_t b_idx, int64_t head_kv) {
    if (p->dtype != FA_E4M3) return p->scale;
    const double q_descale = fa_descale_of(&p->q_descale, b_idx, head_kv);
    const double scale = p->scale * (q_descale * fa_descale_of(&p->k_descale, b_idx, head_kv));
    return fabs(scale) / (p->softcap > 0 ? p->softcap : LN_2) > FLT_MAX ? copysign(INFINITY, scale) : scale;
}

static inline head_view head_view_at(const fa_problem *p, int64_t b_idx, int64_t head) {
    const int64_t head_kv = head / (p->h / p->h_kv);
    return (head_view){.p = p,
                       .s = fa_sequence_at(p, b_idx),
                       .head = head,
                       .head_kv = head_kv,
                       .scale = scale_at(p, b_idx, head_kv),
                       .v_descale = p->dtype == FA_E4M3 ? fa_descale_of(&p->v_descale, b_idx, head_kv) : 1,
                       .slope = p->alibi_slopes ? p->alibi_slopes[b_idx * p->alibi_stride_b + head] : 0,
                       .stream = fa_dropout_stream(p->offset, b_idx, p->h, head)};
}

/* Row i of q and, behind its d elements, row i of qv if there is one. */
typedef double query_row[FA_MAX_HEAD_DIM + FA_MAX_HEAD_DIM_V];

static inline void load_query_row(row dst, const head_view *a, const fa_view *view, int64_t i, int64_t n) {
    load_row(dst, view->data, fa_query_offset(view, &a->s, i, a->head), n, a->p->dtype);
}

static inline void load_query(query_row dst, const head_view *a, int64_t i) {
    const fa_problem *p = a->p;
    load_query_row(dst, a, &p->q, i, p->d);
    if (p->qv.data) load_query_row(dst + p->d, a, &p->qv, i, p->d_v);
}

static inline void load_key(row dst, const head_view *a, int64_t j) {
    load_row(dst, a->p->k.data, fa_key_offset(a->p, &a->p->k, &a->s, j, a->head_kv), a->p->d, a->p->dtype);
}

static inline void load_value(row dst, const head_view *a, int64_t j) {
    load_row(dst, a->p->v.data, fa_key_offset(a->p, &a->p->v, &a->s, j, a->head_kv), a->p->d_v, a->p->dtype);
}

/* A score is infinite if it overflows fp32 in units of log2. */
static inline double in_range(const fa_problem *p, double s) {
    return p->dtype != FA_F64 && fabs(s) > FLT_MAX * LN_2 ? copysign(INFINITY, s) : s;
}

static inline bool is_kept(const head_view *a, int64_t i, int64_t j) {
    return fa_dropout_byte(a->p->seed, a->stream, i, j) <= a->p->keep_max;
}

/* z_ij: the factor of dropout. */
static inline double dropout_factor(const head_view *a, int64_t i, int64_t j) {
    if (a->p->dropout_p == 0) return 1;
    return is_kept(a, i, j) ? 1 / (1 - a->p->dropout_p) : 0;
}

/* exp(s - largest). If largest is -inf, the subtraction would give NaN, so s is used alone. */
static inline double weight_of(double s, double largest) { return exp(largest == -INFINITY ? s : s - largest); }

/* Stores lse, and what else a row of a forward has besides o. Returns the factor of the sum that becomes o. sum: of
 * weight_of over the keys; 0: there is no key, or no key with a score above -inf. */
static inline double end_row(const head_view *a, int64_t i, double largest, double sum) {
    const fa_problem *p = a->p;
    if (fa_has_sink(p, &a->s, i)) {
        const double sink = in_range(p, fa_sink_of_row(p, &a->s, i, a->head));
        const fa_row_end end = fa_end_row(largest, sum, sink, sink - largest);
        fa_store_row_end(p, &a->s, i, a->head, &end);
        return end.factor * a->v_descale;
    }
    fa_store_lse(p, &a->s, i, a->head, sum == 0 ? p->empty_lse : (float)(largest + log(sum)));
    return sum == 0 ? 1 : a->v_descale / sum;
}

#endif
