/* What the machine offers, and the kernels of each instruction set. */
#ifndef FA_CPU_DISPATCH_H
#define FA_CPU_DISPATCH_H

#include "kernels.h"

/* cpuid (or its like) and cache sizes. Does not look at the environment. */
void fa_cpu_detect(fa_machine *machine);

/* The kernels of an instruction set for a dtype. Without any, every entry is NULL. */
const fa_cpu_kernels *fa_cpu_kernels_of(fa_isa isa, fa_dtype dtype);

#endif
