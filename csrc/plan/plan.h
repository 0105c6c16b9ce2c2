/* problem -> plan. */
#ifndef FA_PLAN_PLAN_H
#define FA_PLAN_PLAN_H

#include "flash_attn.h"

/* Pure: the same problem and machine give the same plan. Lengths inside cu_seqlens and their like are read on CPU only. */
fa_status fa_plan_make(const fa_problem *problem, const fa_machine *machine, fa_plan *plan, fa_error *err);

#endif
