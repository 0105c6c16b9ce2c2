#include "sinks.h"

#include <math.h>

#include "convert.h"

static float *stat_of(const fa_row_stats *s, int64_t b, int64_t h, int64_t row) {
    return s->data + b * s->stride_b + h * s->stride_h + row * (s->stride_row ? s->stride_row : 1);
}

static int64_t place_of(const fa_view *v, int64_t b, int64_t h, int64_t row) {
    return b * v->stride_b + h * v->stride_h + row * v->stride_row;
}

/* ---- elements of each dtype -------------------------------------------------------------------------------------- */

#define SAME(x) (x)
#define SCALE(name, type, wide, load, store)                                                                        \
    static void scale_##name(void *data, int64_t at, int64_t num, double factor) {                                  \
        type *x = (type *)data + at;                                                                                \
        const wide f = (wide)factor;                                                                                \
        for (int64_t i = 0; i < num; i++) x[i] = store(load(x[i]) * f);                                             \
    }                                                                                                               \
    static double dot_##name(const void *a, int64_t at_a, const void *b, int64_t at_b, int64_t step, int64_t num) { \
        const type *x = (const type *)a + at_a, *y = (const type *)b + at_b;                                        \
        double sum = 0;                                                                                             \
        for (int64_t i = 0; i < num; i++) sum += (double)load(x[i]) * (double)load(y[i * step]);                    \
        return sum;                                                                                                 \
    }
SCALE(f32, float, float, SAME, SAME)
SCALE(f64, double, double, SAME, SAME)
SCALE(f16, uint16_t, float, fa_f32_from_f16, fa_f16_from_f32)
SCALE(bf16, uint16_t, float, fa_f32_from_bf16, fa_bf16_from_f32)

typedef struct {
    void (*scale)(void *data, int64_t at, int64_t num, double factor);
    double (*dot)(const void *a, int64_t at_a, const void *b, int64_t at_b, int64_t step, int64_t num);
} elements;

static elements elements_of(fa_dtype dtype) {
    switch (dtype) {
    case FA_F16: return (elements){scale_f16, dot_f16};
    case FA_BF16: return (elements){scale_bf16, dot_bf16};
    case FA_F64: return (elements){scale_f64, dot_f64};
    default: return (elements){scale_f32, dot_f32};
    }
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static double log_of_sum(double a, double b) {
    const double high = a > b ? a : b, low = a > b ? b : a;
    if (isnan(a) || isnan(b)) return a + b;
    return isinf(high) ? high : high + log1p(exp(low - high));
}

static void add_to_rows(int64_t begin, int64_t end, void *ctx) {
    const fa_sinks *s = ctx;
    const elements of = elements_of(s->dtype);
    for (int64_t task = begin; task < end; task++)
        for (int64_t h = 0; h < s->h; h++) {
            const int64_t b = task / s->rows, row = task % s->rows;
            float *lse = stat_of(&s->lse, b, h, row);
            if (*lse == INFINITY) *lse = -INFINITY;
            if (!s->sinks) continue;
            const float before = *lse, after = (float)log_of_sum((double)before, s->sinks[h]);
            *lse = after;
            if (before != -INFINITY)
                of.scale(s->out.data, place_of(&s->out, b, h, row), s->d, (double)expf(before - after));
        }
}

bool fa_cpu_add_sinks(const fa_sinks *s, const fa_pool *pool) {
    return s->b * s->rows * s->h == 0 || pool->parallel_for(s->b * s->rows, add_to_rows, (void *)s);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static void add_up_heads(int64_t begin, int64_t end, void *ctx) {
    const fa_sinks *s = ctx;
    const elements of = elements_of(s->dtype);
    for (int64_t h = begin; h < end; h++) {
        double sum = 0;
        for (int64_t b = 0; b < s->b; b++)
            for (int64_t row = 0; row < s->rows; row++) {
                const double lse = (double)*stat_of(&s->lse, b, h, row);
                const double probability = isinf(lse) ? 0 : exp(s->sinks[h] - lse);
                if (probability == 0) continue;
                double addend = -of.dot(s->out.data, place_of(&s->out, b, h, row), s->dout.data,
                                        place_of(&s->dout, b, h, row), s->dout_stride_d, s->d);
                if (s->dlse.data) addend += (double)*stat_of(&s->dlse, b, h, row);
                sum += probability * addend;
            }
        s->gradient[h] = sum;
    }
}

bool fa_cpu_gradient_of_sinks(const fa_sinks *s, const fa_pool *pool) {
    return s->h == 0 || pool->parallel_for(s->h, add_up_heads, (void *)s);
}
