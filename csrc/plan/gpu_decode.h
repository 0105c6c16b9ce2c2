/* What the planner of the decode kernel and its launcher must agree on. */
#ifndef FA_PLAN_GPU_DECODE_H
#define FA_PLAN_GPU_DECODE_H

#include "flash_attn.h"

/* Where things lie in the workspace of attn_decode_sm90, in bytes. */
typedef struct {
    size_t q_rotated; /* the queries after rotary */
    size_t partial_o, counters;
    size_t bytes;     /* in all */
    int partial_rows; /* of one part */
    int64_t num_counters;
    int max_q_tiles; /* of one sequence; packed queries: unknown, 0 */
} fa_decode_layout;

/* attn_decode_sm90 appends the new keys and turns keys and queries; otherwise kvcache.cu does, in front of it. */
bool fa_decode_appends(const fa_problem *problem, const fa_plan *plan);

/* By the plan's row and num_splits. */
fa_decode_layout fa_decode_lay_out(const fa_problem *problem, const fa_plan *plan);

#endif
