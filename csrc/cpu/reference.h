/* The specification of all kernels. */
#ifndef FA_CPU_REFERENCE_H
#define FA_CPU_REFERENCE_H

#include "flash_attn.h"
#include "pool.h"

/* The reference has every option and double accumulators, and needs no workspace. */
bool fa_reference_fwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
bool fa_reference_bwd(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
bool fa_reference_s_dmask(const fa_problem *problem, const fa_pool *pool);

#endif
