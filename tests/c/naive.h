/* Attention as in a tensor library, with every intermediate tensor rounded to the dtype. The tolerance of the tests is
 * relative to the error of this code: a kernel may err twice as much (see check_kernels.c).
 *
 * The code takes one sequence and one key/value head at a time. All score matrices [len_q, len_kv] are in memory. */
#ifndef FA_TEST_NAIVE_H
#define FA_TEST_NAIVE_H

#include "cases.h"
#include "cpu/dropout.h"

static float rounded(float x, fa_dtype dtype) {
    if (dtype == FA_F16) return fa_f32_from_f16(fa_f16_from_f32(x));
    if (dtype == FA_BF16) return fa_f32_from_bf16(fa_bf16_from_f32(x));
    return x;
}

/* Rows of `columns` elements times a factor, in fp32. */
static float *naive_rows(const fa_problem *p, const fa_view *view, const fa_sequence *s, int64_t rows, int64_t head,
                         bool is_key, int64_t columns, float factor) {
    float *dst = malloc((size_t)(rows * columns + 1) * sizeof *dst);
    for (int64_t i = 0; i < rows; i++) {
        int64_t offset = is_key ? fa_key_offset(p, view, s, i, head) : fa_query_offset(view, s, i, head);
        for (int64_t t = 0; t < columns; t++)
            dst[i * columns + t] = (float)fa_load_element(view->data, offset + t, p->dtype) * factor;
    }
    return dst;
}

static float naive_sum(float sum, const float *x, const float *y, int64_t n) {
    for (int64_t t = 0; t < n; t++) sum += x[t] * y[t];
    return sum;
}

static float naive_dot(const float *x, const float *y, int64_t n) { return naive_sum(0, x, y, n); }

/* Results in fp64 tensors with the shapes and strides of the problem's tensors. Absent results have data NULL. */
typedef struct {
    fa_view o, dq, dk, dv;
} naive_results;

static void naive_store(fa_dtype dtype, fa_view *view, int64_t offset, const float *row, int64_t columns,
                        float factor) {
    for (int64_t t = 0; t < columns; t++) ((double *)view->data)[offset + t] = rounded(row[t] * factor, dtype);
}

/* The factor of a tensor's rows: 1, or the descale of FA_E4M3. */
static float naive_factor(const fa_problem *p, const fa_descale *descale, int64_t b_idx, int64_t head_kv) {
    return p->dtype == FA_E4M3 ? fa_descale_of(descale, b_idx, head_kv) : 1;
}

/* k and v are the rows of the head's keys. */
static void naive_head(const fa_problem *p, const fa_sequence *s, int64_t head, const float *k, const float *v,
                       naive_results *out, float *dk_sum, float *dv_sum) {
    int64_t n_q = s->len_q, n_kv = s->len_kv, d = p->d, d_v = p->d_v, head_kv = head / (p->h / p->h_kv);
    fa_dtype dtype = fa_output_dtype(p->dtype);
    bool backward = p->pass == FA_BWD;
    float *q = naive_rows(p, &p->q, s, n_q, head, false, d, naive_factor(p, &p->q_descale, s->b_idx, head_kv));
    float *qv = p->qv.data ? naive_rows(p, &p->qv, s, n_q, head, false, d_v, 1) : NULL;
    float *dout = backward ? naive_rows(p, &p->dout, s, n_q, head, false, d_v, 1) : NULL;
    float *prob = malloc((size_t)(n_kv + 1) * sizeof *prob), *slope_tanh = malloc((size_t)(n_kv + 1) * sizeof *prob);
    float *dk = calloc((size_t)(n_kv * d + 1), sizeof *dk), *dv = calloc((size_t)(n_kv * d_v + 1), sizeof *dv);
    float slope = p->alibi_slopes ? p->alibi_slopes[s->b_idx * p->alibi_stride_b + head] : 0;
    float keep_factor = p->dropout_p > 0 ? (float)(1 / (1 - p->dropout_p)) : 1;
    uint64_t stream = fa_dropout_stream(p->offset, s->b_idx, p->h, head);

    for (int64_t i = 0; i < n_q; i++) {
        int64_t first, end;
        float row[FA_MAX_HEAD_DIM_V] = {0}, largest = -INFINITY, sum = 0, delta = 0;
        fa_visible_keys(p, s, i, &first, &end);
        for (int64_t j = first; j < end; j++) {
            float dot = naive_dot(q + i * d, k + j * d, d);
            if (qv) dot = naive_sum(dot, qv + i * d_v, v + j * d_v, d_v);
            float x = rounded((float)p->scale * rounded(dot, dtype), dtype);
            slope_tanh[j] = 0;
            if (p->softcap > 0) {
                slope_tanh[j] = tanhf(x / (float)p->softcap);
                x = rounded((float)p->softcap * slope_tanh[j], dtype);
            }
            if (p->alibi_slopes) x = rounded(x - slope * fabsf((float)(i + n_kv - n_q - j)), dtype);
            prob[j] = x;
            if (x > largest) largest = x;
        }
        for (int64_t j = first; j < end; j++) sum += prob[j] = expf(prob[j] - largest);
        for (int64_t j = first; j < end; j++) prob[j] = rounded(prob[j] / sum, dtype);
        for (int64_t j = first; j < end; j++) {
            bool keep = p->dropout_p == 0 || fa_dropout_byte(p->seed, stream, i, j) <= p->keep_max;
            float weight = keep ? rounded(prob[j] * keep_factor, dtype) : 0;
            for (int64_t t = 0; t < d_v; t++) row[t] += weight * v[j * d_v + t];
        }
        if (out->o.data) naive_store(dtype, &out->o, fa_query_offset(&out->o, s, i, head), row, d_v, 1);
        if (!backward) continue;
        float dq[FA_MAX_HEAD_DIM] = {0};
        for (int64_t t = 0; t < d_v && first < end; t++) delta += dout[i * d_v + t] * rounded(row[t], dtype);
        for (int64_t j = first; j < end; j++) {
            bool keep = p->dropout_p == 0 || fa_dropout_byte(p->seed, stream, i, j) <= p->keep_max;
            float z = keep ? keep_factor : 0, weight = rounded(prob[j] * z, dtype);
            float dprob = rounded(z * rounded(naive_dot(dout + i * d_v, v + j * d_v, d_v), dtype), dtype);
            float ds = rounded(prob[j] * (dprob - delta), dtype);
            ds = rounded(ds * (1 - slope_tanh[j] * slope_tanh[j]), dtype);
            for (int64_t t = 0; t < d; t++) {
                dq[t] += ds * k[j * d + t];
                dk[j * d + t] += ds * q[i * d + t];
            }
            for (int64_t t = 0; t < d_v; t++) dv[j * d_v + t] += weight * dout[i * d_v + t];
        }
        naive_store(dtype, &out->dq, fa_query_offset(&out->dq, s, i, head), dq, d, (float)p->scale);
    }
    for (int64_t i = 0; i < n_kv * d && backward; i++) dk_sum[i] += rounded(dk[i] * (float)p->scale, dtype);
    for (int64_t i = 0; i < n_kv * d_v && backward; i++) dv_sum[i] += rounded(dv[i], dtype);
    float *all[] = {q, qv, dout, prob, slope_tanh, dk, dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void naive_attention(const fa_problem *p, naive_results *out) {
    int64_t g = p->h / p->h_kv;
    for (int64_t b_idx = 0; b_idx < p->b; b_idx++) {
        fa_sequence s = fa_sequence_at(p, b_idx);
        for (int64_t head_kv = 0; head_kv < p->h_kv; head_kv++) {
            float *dk = calloc((size_t)(s.len_kv * p->d + 1), sizeof *dk);
            float *dv = calloc((size_t)(s.len_kv * p->d_v + 1), sizeof *dv);
            const float of_k = naive_factor(p, &p->k_descale, b_idx, head_kv);
            const float of_v = naive_factor(p, &p->v_descale, b_idx, head_kv);
            float *k = naive_rows(p, &p->k, &s, s.len_kv, head_kv, true, p->d, of_k);
            float *v = naive_rows(p, &p->v, &s, s.len_kv, head_kv, true, p->d_v, of_v);
            for (int64_t i = 0; i < g; i++) naive_head(p, &s, head_kv * g + i, k, v, out, dk, dv);
            for (int64_t j = 0; j < s.len_kv && p->pass == FA_BWD; j++) {
                naive_store(p->dtype, &out->dk, fa_key_offset(p, &out->dk, &s, j, head_kv), dk + j * p->d, p->d, 1);
                naive_store(p->dtype, &out->dv, fa_key_offset(p, &out->dv, &s, j, head_kv), dv + j * p->d_v, p->d_v, 1);
            }
            free(k), free(v), free(dk), free(dv);
        }
    }
}

#endif
