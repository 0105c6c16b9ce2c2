/* Planners of the CPU kernels' sizes. Each planner is defined in the file of its name. */
#ifndef FA_PLAN_CPU_PLANNERS_H
#define FA_PLAN_CPU_PLANNERS_H

#include "flash_attn.h"

/* Below this number of FLOPs a second thread costs more than it saves: the work takes 10 us, and waking a thread takes
 * a few us. */
#define FA_INLINE_FLOPS 2e6

/* Chooses tiles, workers and workspace for plan->cpu.isa, which is not the reference. */
typedef void fa_cpu_planner(const fa_problem *problem, const fa_machine *machine, fa_plan *plan);
fa_cpu_planner fa_cpu_plan_fwd, fa_cpu_plan_bwd, fa_cpu_plan_decode, fa_cpu_plan_bwd_rows;

#endif
