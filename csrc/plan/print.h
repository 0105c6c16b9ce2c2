/* Prints a plan in words. */
#ifndef FA_PLAN_PRINT_H
#define FA_PLAN_PRINT_H

#include "flash_attn.h"

/* Writes one line of words. The line is cut off after `room` bytes. */
void fa_plan_print(const fa_plan *plan, char *text, size_t room);

#endif
