/* Combines partial attention results. One task owns one row: a sequence, a head and a query. Sums are doubles. */
#include "combine.h"

#include <math.h>

#include "convert.h"

/* Fills the weight of every part and returns the row's lse. */
static double weigh(const fa_combination *c, const float *lse, double *weights) {
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < c->num_parts; i++) {
        const float part = lse[i * c->lse_stride_part];
        if (part > max && part < INFINITY) max = part;
    }
    for (int64_t i = 0; i < c->num_parts; i++) {
        const float part = lse[i * c->lse_stride_part];
        weights[i] = isinf(part) ? -1 : exp(part - max); /* -1: it sees no key, and is not read */
        if (!(weights[i] < 0)) sum += weights[i];
    }
    for (int64_t i = 0; i < c->num_parts && sum != 0; i++)
        if (!(weights[i] < 0)) weights[i] /= sum;
    return sum == 0 ? c->empty_lse : max + log(sum);
}

static void combine_row(const fa_combination *c, int64_t b_idx, int64_t head, int64_t row) {
    double weights[FA_MAX_PARTS];
    const float *lse = c->lse_partial + b_idx * c->lse_stride_b + head * c->lse_stride_h + row;
    const float *from = c->out_partial + b_idx * c->stride_b + row * c->stride_row + head * c->stride_h;
    const int64_t to = b_idx * c->out.stride_b + row * c->out.stride_row + head * c->out.stride_h;
    c->lse.data[b_idx * c->lse.stride_b + head * c->lse.stride_h + row] = (float)weigh(c, lse, weights);
    for (int64_t col = 0; col < c->d; col++) {
        double sum = 0;
        for (int64_t i = 0; i < c->num_parts; i++)
            if (!(weights[i] < 0)) sum += weights[i] * from[i * c->stride_part + col];
        fa_store_element(c->out.data, to + col, sum, c->dtype);
    }
}

static void combine_rows(int64_t begin, int64_t end, void *ctx) {
    const fa_combination *c = ctx;
    for (int64_t at = begin; at < end; at++) combine_row(c, at / c->len / c->h, at / c->len % c->h, at % c->len);
}

bool fa_cpu_combine(const fa_combination *c, const fa_pool *pool) {
    const int64_t rows = c->b * c->h * c->len;
    return rows == 0 || pool->parallel_for(rows, combine_rows, (void *)c);
}
