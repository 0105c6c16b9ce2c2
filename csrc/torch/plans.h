/* Plans of this thread's calls, for people to look at. */
#ifndef FA_TORCH_PLANS_H
#define FA_TORCH_PLANS_H

#include "flash_attn.h"
#include "python_api.h"

/* FLASH_ATTN_LOG=plan */
extern bool fa_logs_plans;

/* Is this thread only collecting plans? Then nothing may run, and no seed may be drawn. */
bool fa_plan_only(void);

/* Keeps a plan for take_plans() while collecting, and prints it if fa_logs_plans. */
void fa_note_plan(const fa_plan *plan);

/* plan_only, take_plans */
extern PyMethodDef fa_plan_functions[];

#endif
