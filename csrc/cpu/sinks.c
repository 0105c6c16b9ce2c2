#include "sinks.h"

static float *at_row(const fa_sink_rows *x, int64_t b, int64_t h, int64_t row) {
    return x->data + b * x->stride_b + h * x->stride_h + row * x->stride_row;
}

/* The sink beside the scores of a row. */
static double sink_of_row(const fa_sinks *s, int64_t b, int64_t h, int64_t row) {
    double sink = fa_element(s->sinks.data, s->sinks.dtype, h * s->sinks.stride);
    if (s->dtype != FA_F64) sink = (double)(float)sink;
    return s->shift.data ? sink - (double)*at_row(&s->shift, b, h, row) : sink;
}

/* The rows behind belong to no sequence. */
static int64_t used_rows(const fa_sinks *s) { return s->end && *s->end < s->rows ? *s->end : s->rows; }

/* ---- elements of each dtype -------------------------------------------------------------------------------------- */

#define SAME(x) (x)
#define SCALE(name, type, wide, load, store)                                       \
    static void scale_##name(void *data, int64_t at, int64_t num, double factor) { \
        type *x = (type *)data + at;                                               \
        const wide f = (wide)factor;                                               \
        for (int64_t i = 0; i < num; i++) x[i] = store(load(x[i]) * f);            \
    }
SCALE(f32, float, float, SAME, SAME)
SCALE(f64, double, double, SAME, SAME)
SCALE(f16, uint16_t, float, fa_f32_from_f16, fa_f16_from_f32)
SCALE(bf16, uint16_t, float, fa_f32_from_bf16, fa_bf16_from_f32)

typedef void scale_row(void *data, int64_t at, int64_t num, double factor);

static scale_row *scale_of(fa_dtype dtype) {
    return dtype == FA_F16 ? scale_f16 : dtype == FA_BF16 ? scale_bf16 : dtype == FA_F64 ? scale_f64 : scale_f32;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static void add_to_rows(int64_t begin, int64_t end, void *ctx) {
    const fa_sinks *s = ctx;
    scale_row *scale = scale_of(s->dtype);
    for (int64_t task = begin; task < end; task++)
        for (int64_t h = 0; h < s->h && task % s->rows < used_rows(s); h++) {
            const int64_t b = task / s->rows, row = task % s->rows;
            float *lse = at_row(&s->lse, b, h, row);
            if (*lse == INFINITY) *lse = -INFINITY;
            if (!s->sinks.data) continue;
            const double before = (double)*lse, sink = sink_of_row(s, b, h, row);
            const fa_row_end end = fa_end_row(before, before == -INFINITY ? 0 : 1, sink, sink - before);
            const int64_t place = b * s->out.stride_b + h * s->out.stride_h + row * s->out.stride_row;
            *lse = (float)end.lse;
            if (before != -INFINITY) scale(s->out.data, place, s->d, end.factor);
        }
}

bool fa_cpu_add_sinks(const fa_sinks *s, const fa_pool *pool) {
    return s->b * s->rows * s->h == 0 || pool->parallel_for(s->b * s->rows, add_to_rows, (void *)s);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static double probability_of(const fa_sinks *s, int64_t b, int64_t h, int64_t row) {
    if (s->probability.data) return (double)*at_row(&s->probability, b, h, row);
    const double lse = (double)*at_row(&s->lse, b, h, row);
    return isinf(lse) ? 0 : exp(sink_of_row(s, b, h, row) - lse);
}

static void add_up_heads(int64_t begin, int64_t end, void *ctx) {
    const fa_sinks *s = ctx;
    const int64_t rows = used_rows(s);
    for (int64_t h = begin; h < end; h++) {
        double sum = 0;
        for (int64_t b = 0; b < s->b; b++)
            for (int64_t row = 0; row < rows; row++) {
                const double probability = probability_of(s, b, h, row);
                if (probability != 0) sum -= probability * (double)*at_row(&s->delta, b, h, row);
            }
        fa_set_element(s->gradient, s->sinks.dtype, h, sum);
    }
}

bool fa_cpu_gradient_of_sinks(const fa_sinks *s, const fa_pool *pool) {
    return s->h == 0 || pool->parallel_for(s->h, add_up_heads, (void *)s);
}
