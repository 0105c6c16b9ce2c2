/* Learned sinks: one more key for each row, of score sink[h] and value 0. Attention without sinks has come before.
 *
 *   lse' = ln (exp(lse) + exp(sink))      out' = out exp(lse - lse')
 *   gradient[h] = sum over rows of exp(sink - lse') (dlse' - dout'.out')
 *
 * A row that saw no key keeps out 0. Its lse may be -inf or +inf. */
#ifndef FA_CPU_SINKS_H
#define FA_CPU_SINKS_H

#include "flash_attn.h"
#include "pool.h"

typedef struct {
    fa_dtype dtype; /* of out and dout */
    int64_t b, h, rows, d;
    fa_view out, dout;
    int64_t dout_stride_d;
    fa_row_stats lse, dlse; /* dlse.data NULL: 0 */
    const double *sinks;    /* [h]; NULL: none */
    double *gradient;       /* [h] */
} fa_sinks;

/* Writes out' and lse'. Without sinks +inf becomes -inf in lse, and nothing else happens. false: there are no
 * threads. */
bool fa_cpu_add_sinks(const fa_sinks *s, const fa_pool *pool);

/* `lse` and `out` are those with sinks. The sums of a head have one order for any number of threads. */
bool fa_cpu_gradient_of_sinks(const fa_sinks *s, const fa_pool *pool);

#endif
