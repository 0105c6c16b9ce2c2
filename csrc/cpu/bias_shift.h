/* The shift of rows of attn_bias on the CPU (row_options.h). */
#ifndef FA_CPU_BIAS_SHIFT_H
#define FA_CPU_BIAS_SHIFT_H

#include "row_options.h"

/* Is every shift 0? The function reads hardly anything of a usual bias. It may answer false where every shift is 0. */
bool fa_cpu_biases_are_high(const fa_bias_shift *of);

void fa_cpu_bias_shift(const fa_bias_shift *of);

#endif
