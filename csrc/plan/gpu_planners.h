/* One planner for each kernel family that a plan can name. Each is defined in the file of its name. */
#ifndef FA_PLAN_GPU_PLANNERS_H
#define FA_PLAN_GPU_PLANNERS_H

#include "flash_attn.h"
#include "kernel_table.h"

/* A planner returns NULL if its kernel serves the problem. Then the planner has set the plan's family, row, features,
 * block sizes, splits and workspace. Otherwise it returns the reason, as text that lives as long as the program.
 * The caller has set the plan's pass and device. */
typedef const char *fa_cuda_planner(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);
fa_cuda_planner fa_plan_decode_sm90, fa_plan_fwd_sm90, fa_plan_fwd_fp8_sm90, fa_plan_bwd_sm90, fa_plan_fwd_any,
    fa_plan_decode_sm80, fa_plan_fwd_sm80, fa_plan_bwd_sm80, fa_plan_bwd_any, fa_plan_fwd_short, fa_plan_bwd_short;

/* Microseconds of an H100 for few queries over many keys, with the row of attn_fwd_sm90 that suits the call best. If
 * num_splits is given, of an SM for a key of one key head. HUGE_VAL: there is no row. */
double fa_us_of_fwd_sm90(const fa_problem *problem, int sms);
/* The first row of attn_fwd_sm90 that has room for the columns of a cache, and loads its pages. NULL: there is none. */
const fa_fwd_sm90_columns *fa_fwd_sm90_row_of_cache(const fa_problem *problem);
double fa_us_of_a_pair(const fa_fwd_sm90_columns *tile); /* of an SM, for a row and a key */
double fa_us_of_cache(const fa_problem *problem);        /* to read all keys of the cache once */

/* The order in which the persistent CTAs of a forward on Hopper take their work tiles. The plan has its block_q. */
void fa_plan_fwd_order(const fa_problem *problem, int64_t ctas, fa_plan *plan);

#endif
