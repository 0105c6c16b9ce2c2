/* The sizes of each CPU kernel. Each planner is defined in the file of its name. */
#ifndef FA_PLAN_CPU_PLANNERS_H
#define FA_PLAN_CPU_PLANNERS_H

#include "flash_attn.h"

/* Tiles, workers and workspace of plan->cpu.isa, which is not the reference. */
typedef void fa_cpu_planner(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);
fa_cpu_planner fa_cpu_plan_fwd, fa_cpu_plan_bwd, fa_cpu_plan_decode;

#endif
