/* Turns a problem into a plan. */
#ifndef FA_PLAN_PLAN_H
#define FA_PLAN_PLAN_H

#include "flash_attn.h"

/* A pure function: the same problem and machine give the same plan. The planner reads the values inside cu_seqlens and
 * the other length tensors on the CPU only. */
fa_status fa_plan_make(const fa_problem *problem, const fa_machine *machine, fa_plan *plan, fa_error *err);

#endif
