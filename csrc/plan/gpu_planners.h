/* One planner for each kernel family that a plan can name. Each is defined in the file of its name. */
#ifndef FA_PLAN_GPU_PLANNERS_H
#define FA_PLAN_GPU_PLANNERS_H

#include "flash_attn.h"

/* One kernel's offer: NULL, and the plan says how (family, row, features, block sizes, splits, workspace); or why it
 * cannot serve the problem, in words that live as long as the program. The plan comes with pass and device set. */
typedef const char *fa_cuda_planner(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);
fa_cuda_planner fa_plan_decode_sm90, fa_plan_fwd_sm90, fa_plan_bwd_sm90, fa_plan_fwd_any, fa_plan_bwd_any;

#endif
