/* The execution of a plan on the CPU. */
#ifndef FA_CPU_RUN_H
#define FA_CPU_RUN_H

#include "flash_attn.h"
#include "pool.h"

/* Runs a checked CPU problem with its plan. The workspace has plan->workspace_bytes, is aligned to 64 bytes and need
 * not be initialised. Returns false if the pool failed. Then the outputs are invalid. */
bool fa_cpu_run(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);

/* Runs a whole call with fa_cpu_run, and also fills rows that belong to no sequence. With zero_tensors these rows of
 * outputs and gradients become zero. FA_ENOMEM: torch could not start the threads of the call. */
fa_status fa_cpu_run_call(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                          const fa_pool *pool, fa_error *err);

#endif
