/* Detection of the machine, and the kernels of each instruction set. */
#ifndef FA_CPU_DISPATCH_H
#define FA_CPU_DISPATCH_H

#include "kernels.h"

/* Reads the instruction sets and the cache sizes from cpuid or from the system. The function does not look at the
 * environment. */
void fa_cpu_detect(fa_machine *machine);

/* Whether processors of this architecture may have the instruction set. Nobody is told about the others. */
bool fa_cpu_knows(fa_isa isa);

/* The kernels of an instruction set for a dtype. If there are none, every entry is NULL. */
const fa_cpu_kernels *fa_cpu_kernels_of(fa_isa isa, fa_dtype dtype);

#endif
