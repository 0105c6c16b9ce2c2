/* Shows the plans of this thread's calls to people. */
#ifndef FA_TORCH_PLANS_H
#define FA_TORCH_PLANS_H

#include "flash_attn.h"
#include "python_api.h"

/* FLASH_ATTN_LOG=plan sets this variable. */
extern bool fa_logs_plans;

/* Does this thread only collect plans? Then no kernel may run, and no seed may be drawn. */
bool fa_plan_only(void);

/* Keeps a plan for take_plans() if this thread collects plans. Otherwise prints the plan if fa_logs_plans is
 * set. */
void fa_note_plan(const fa_plan *plan);

/* Notes that torch's own kernel computes a call, and the reason. */
void fa_note_torch(fa_pass pass, fa_device device, const char *reason);

/* The table holds plan_only and take_plans. */
extern PyMethodDef fa_plan_functions[];

#endif
