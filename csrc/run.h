/* plan -> run. */
#ifndef FA_RUN_H
#define FA_RUN_H

#include "cpu/cpu.h"

/* Executes a plan. workspace: plan->workspace_bytes on the problem's device, aligned to 64 bytes. */
fa_status fa_run(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                 const fa_pool *pool, fa_error *err);

#endif
