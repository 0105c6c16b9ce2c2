/* The order in which Hopper's backward walks over key tiles. */
#ifndef FA_PLAN_GPU_BWD_ORDER_H
#define FA_PLAN_GPU_BWD_ORDER_H

#include "flash_attn.h"

/* Chooses any_order, converts, group_heads and follows_rows of a plan that is otherwise complete.
 * ctas: the CTAs that run at a time, or the clusters if CTAs of a cluster share a tile.
 * head_pieces: the pieces into which tiles of a key head are cut (bwd_workspace.h). */
void fa_plan_bwd_order(const fa_problem *problem, int64_t ctas, int64_t head_pieces, fa_plan *plan);

#endif
