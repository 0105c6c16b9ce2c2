/* The reference of programmable attention. `workspace` has room for the map of the blocks (flex/block_map.h). false: no
 * memory or no threads. */
#ifndef FA_CPU_REFERENCE_FLEX_H
#define FA_CPU_REFERENCE_FLEX_H

#include "flash_attn.h"
#include "pool.h"

bool fa_reference_flex_fwd(const fa_problem *problem, void *workspace, const fa_pool *pool);
bool fa_reference_flex_bwd(const fa_problem *problem, void *workspace, const fa_pool *pool);

#endif
