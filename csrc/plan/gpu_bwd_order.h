/* The order in which Hopper's backward walks over key tiles. */
#ifndef FA_PLAN_GPU_BWD_ORDER_H
#define FA_PLAN_GPU_BWD_ORDER_H

#include "flash_attn.h"

/* Chooses any_order, converts and group_heads of a plan that says all else. ctas: that run at
 * a time, or clusters where these share a tile. head_pieces: of a key head whose tiles are cut, bwd_workspace.h. */
void fa_plan_bwd_order(const fa_problem *problem, int64_t ctas, int64_t head_pieces, fa_plan *plan);

#endif
