/* Learned sinks on the CPU (row_options.h). The functions return false if there are no threads. */
#ifndef FA_CPU_SINKS_H
#define FA_CPU_SINKS_H

#include "pool.h"
#include "row_options.h"

/* Writes out' and lse'. Without sinks +inf becomes -inf in lse, and nothing else happens. */
bool fa_cpu_add_sinks(const fa_sinks *s, const fa_pool *pool);

/* The sums of a head have one order for any number of threads. */
bool fa_cpu_gradient_of_sinks(const fa_sinks *s, const fa_pool *pool);

#endif
