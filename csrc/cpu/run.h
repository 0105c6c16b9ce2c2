/* A plan for the CPU is executed. */
#ifndef FA_CPU_RUN_H
#define FA_CPU_RUN_H

#include "flash_attn.h"
#include "pool.h"

/* Runs a checked CPU problem with its plan. workspace: plan->workspace_bytes, aligned to 64 bytes, uninitialised.
 * false: the pool failed, and what is written is worth nothing. */
bool fa_cpu_run(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);

/* The same for a call as a whole: rows that belong to no sequence are filled, too. zero_tensors: those of outputs and
 * gradients become zero. FA_ENOMEM: torch could not start the threads of the call. */
fa_status fa_cpu_run_call(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                          const fa_pool *pool, fa_error *err);

#endif
