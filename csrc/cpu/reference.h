/* The specification. */
#ifndef FA_CPU_REFERENCE_H
#define FA_CPU_REFERENCE_H

#include "flash_attn.h"
#include "pool.h"

/* Every option, double accumulators, no workspace but the row of scores. */
bool fa_reference_fwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
bool fa_reference_bwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
bool fa_reference_s_dmask(const fa_problem *problem, const fa_pool *pool);

#endif
