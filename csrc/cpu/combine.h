/* Combines partial attention results on the CPU. */
#ifndef FA_CPU_COMBINE_H
#define FA_CPU_COMBINE_H

#include "combination.h"
#include "pool.h"

/* Returns false if the pool failed. */
bool fa_cpu_combine(const fa_combination *combination, const fa_pool *pool);

#endif
