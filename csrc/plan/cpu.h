/* The part of plan.c for the CPU. */
#ifndef FA_PLAN_CPU_H
#define FA_PLAN_CPU_H

#include "flash_attn.h"

/* Does fa_plan_make's work on the CPU. Every problem has a plan. The planner reads the values inside cu_seqlens and the
 * other length tensors. */
void fa_plan_cpu(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);

#endif
