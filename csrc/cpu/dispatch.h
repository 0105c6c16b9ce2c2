/* Detection of the machine, and the kernels of each instruction set. */
#ifndef FA_CPU_DISPATCH_H
#define FA_CPU_DISPATCH_H

#include "kernels.h"

/* Reads the instruction sets and the cache sizes from cpuid or its like. The function does not look at the
 * environment. */
void fa_cpu_detect(fa_machine *machine);

/* The kernels of an instruction set for a dtype. If there are none, every entry is NULL. */
const fa_cpu_kernels *fa_cpu_kernels_of(fa_isa isa, fa_dtype dtype);

#endif
