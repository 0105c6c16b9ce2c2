/* Facts that the planner of the decode kernel and its launcher share. */
#ifndef FA_PLAN_GPU_DECODE_H
#define FA_PLAN_GPU_DECODE_H

#include "flash_attn.h"

/* Offsets in the workspace of attn_decode_sm90, in bytes. */
typedef struct {
    size_t q_rotated; /* the queries after rotary */
    size_t partial_o, counters;
    size_t bytes;     /* the whole workspace */
    int partial_rows; /* rows of one part */
    int64_t num_counters;
    int max_q_tiles; /* query tiles of one sequence; 0 for packed queries, whose number is unknown */
} fa_decode_layout;

/* Does attn_decode_sm90 append the new keys and rotate keys and queries? Otherwise kvcache.cu runs before it. */
bool fa_decode_appends(const fa_problem *problem, const fa_plan *plan);

/* Lays out the workspace for the plan's row and num_splits. */
fa_decode_layout fa_decode_lay_out(const fa_problem *problem, const fa_plan *plan);

#endif
