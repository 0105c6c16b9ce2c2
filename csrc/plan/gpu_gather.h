/* Pages that TMA does not load may be copied side by side before the forward runs (cuda/gather.cu). */
#ifndef FA_PLAN_GPU_GATHER_H
#define FA_PLAN_GPU_GATHER_H

#include "flash_attn.h"

/* May copies take the place of the pages, if attn_fwd_sm90 serves the call? Do they, because this takes less time than
 * loads of single keys? */
bool fa_may_gather(const fa_problem *problem);
bool fa_gathers(const fa_problem *problem, const fa_machine *machine);

/* The same problem with the copies in place of the pages. The workspace begins its copies at `copies`: k, v and the
 * lengths. A planner has no workspace yet: NULL. */
fa_problem fa_gathered(const fa_problem *problem, char *copies);

size_t fa_gather_bytes(const fa_problem *problem);

/* Microseconds of an H100. */
double fa_us_of_gather(const fa_problem *problem);

#endif
