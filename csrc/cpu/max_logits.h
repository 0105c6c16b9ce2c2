/* The largest score of each head on the CPU (row_options.h). */
#ifndef FA_CPU_MAX_LOGITS_H
#define FA_CPU_MAX_LOGITS_H

#include "row_options.h"

void fa_cpu_max_logits(const fa_max_logits *of);

#endif
