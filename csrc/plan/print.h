/* A plan in words. */
#ifndef FA_PLAN_PRINT_H
#define FA_PLAN_PRINT_H

#include "flash_attn.h"

/* One line of words; cut off where room ends. */
void fa_plan_print(const fa_plan *plan, char *text, size_t room);

#endif
