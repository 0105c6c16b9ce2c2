/* The part of plan.c for the CPU. */
#ifndef FA_PLAN_CPU_H
#define FA_PLAN_CPU_H

#include "flash_attn.h"

/* As fa_plan_make; there is a plan for every problem. Lengths inside cu_seqlens and their like are read. */
void fa_plan_cpu(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);

#endif
