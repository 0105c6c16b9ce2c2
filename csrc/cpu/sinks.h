/* Learned sinks on the CPU (row_options.h). A forward adds them where it ends a row, because the maximum and the sum of
 * the row have digits that lse has lost: |lse| / 2^24 in fp32. The functions for results of other calls return false if
 * there are no threads. */
#ifndef FA_CPU_SINKS_H
#define FA_CPU_SINKS_H

#include <math.h>

#include "element.h"
#include "pool.h"
#include "row_options.h"
#include "sequence.h"

/* ---- a forward ends a row ---- */

static inline bool fa_has_sink(const fa_problem *p, const fa_sequence *s, int64_t i) {
    return p->sinks.data && !(p->sink_end && s->q_row + i >= *p->sink_end);
}

/* The sink beside the scores of row i, without what was subtracted from them. Beside scores in fp32 it is fp32. */
static inline double fa_sink_of_row(const fa_problem *p, const fa_sequence *s, int64_t i, int64_t head) {
    const fa_sink_rows *shift = &p->sink_shift;
    double sink = fa_element(p->sinks.data, p->sinks.dtype, head * p->sinks.stride);
    if (p->dtype != FA_F64) sink = (double)(float)sink;
    if (shift->data)
        sink -=
            (double)
                shift->data[s->b_idx * shift->stride_b + head * shift->stride_h + (s->q_row + i) * shift->stride_row];
    return p->dtype == FA_F64 ? sink : (double)(float)sink;
}

typedef struct {
    double lse, probability; /* of the row with its sink; of the sink */
    double factor;           /* times the sum of exp(score - largest) v it is the output */
} fa_row_end;

/* Ends a row with a sink. sum: of exp(score - largest) over the keys; 0: there is none. above: how far the sink lies
 * above `largest`, whose value is `reference`; both in natural units. */
static inline fa_row_end fa_end_row(double reference, double sum, double sink, double above) {
    fa_row_end end;
    if (sum == 0) above = sink == -INFINITY ? -INFINITY : INFINITY;
    if (above <= 0) {
        const double low = exp(above), total = sum + low;
        end = (fa_row_end){.lse = total == 0 ? -INFINITY : reference + log(total),
                           .probability = total == 0 ? 0 : low / total,
                           .factor = total == 0 ? 0 : 1 / total};
    } else {
        const double low = exp(-above), total = sum * low + 1;
        end = (fa_row_end){.lse = sink + log(total), .probability = 1 / total, .factor = low / total};
    }
    if (isinf(end.lse)) end.probability = 0;
    return end;
}

/* Stores what a row with a sink has besides out. */
static inline void fa_store_row_end(const fa_problem *p, const fa_sequence *s, int64_t i, int64_t head,
                                    const fa_row_end *end) {
    *fa_row_stat(&p->lse, s, i, head) = (float)end->lse;
    if (p->sink_probability.data) *fa_row_stat(&p->sink_probability, s, i, head) = (float)end->probability;
}

/* The same for a row that has none. */
static inline void fa_store_lse(const fa_problem *p, const fa_sequence *s, int64_t i, int64_t head, float lse) {
    *fa_row_stat(&p->lse, s, i, head) = lse;
    if (p->sink_probability.data) *fa_row_stat(&p->sink_probability, s, i, head) = 0;
}

/* ---- sinks behind a call ---- */

/* Writes out' and lse'. Without sinks +inf becomes -inf in lse, and nothing else happens. */
bool fa_cpu_add_sinks(const fa_sinks *s, const fa_pool *pool);

/* The sums of a head have one order for any number of threads. */
bool fa_cpu_gradient_of_sinks(const fa_sinks *s, const fa_pool *pool);

#endif
