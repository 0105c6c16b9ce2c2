/* The tables that the files of the instruction sets export. */
#ifndef FA_KERNELS_H
#define FA_KERNELS_H

#include "cpu.h"
#include "macros.h"

extern const fa_cpu_kernels fa_kernels_scalar;
#if FA_X86
extern const fa_cpu_kernels fa_kernels_avx2, fa_kernels_avx512, fa_kernels_avx512bf16;
#endif
#if FA_AMX
extern const fa_cpu_kernels fa_kernels_amx;
#endif

#endif
