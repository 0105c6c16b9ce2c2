/* The part of plan.c for GPUs. */
#ifndef FA_PLAN_CUDA_H
#define FA_PLAN_CUDA_H

#include "flash_attn.h"

/* As fa_plan_make. Of the machine only the GPU's members are read. */
fa_status fa_plan_cuda(const fa_problem *problem, const fa_machine *machine, fa_plan *plan, fa_error *err);

/* ---- between the files of this part ----------------------------------------------------------------------------- */

/* One kernel's offer: NULL, and the plan says how (family, row, features, block sizes, splits, workspace); or why it
 * cannot serve the problem, in words that live as long as the program. The plan comes with pass and device set. */
typedef const char *fa_cuda_planner(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);
fa_cuda_planner fa_plan_decode_sm90, fa_plan_fwd_sm90, fa_plan_bwd_sm90, fa_plan_fwd_any, fa_plan_bwd_any;

/* What of kernels.h' features the problem asks for, its dtype among them. */
unsigned fa_cuda_features(const fa_problem *problem);

/* Hopper's backward, plan_cuda_order.c: any_order, converts and group_heads of a plan that says all else. ctas: that run at
 * a time, or clusters where these share a tile. head_pieces: of a key head whose tiles are cut, bwd_workspace.h. */
void fa_plan_bwd_order(const fa_problem *problem, int64_t ctas, int64_t head_pieces, fa_plan *plan);

void fa_rule_out(fa_plan *plan, const char *kernel, const char *reason);

/* Can TMA walk over the tensor? It steps by 16 bytes. num_rows: of all sequences; packed: their rows lie in one row. */
bool fa_suits_tma(const fa_problem *problem, const fa_view *tensor, int64_t num_rows, int64_t num_heads, bool packed);

#endif
