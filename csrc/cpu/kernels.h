/* The kernels of one instruction set, and the tables that the files of the instruction sets export. */
#ifndef FA_CPU_KERNELS_H
#define FA_CPU_KERNELS_H

#include "flash_attn.h"
#include "macros.h"
#include "pool.h"

/* The kernels of one instruction set. A NULL entry means that the instruction set has no such kernel. */
typedef bool fa_cpu_kernel(const fa_problem *problem, const fa_plan *plan, void *workspace, const fa_pool *pool);
typedef struct {
    fa_cpu_kernel *fwd, *bwd, *decode, *bwd_rows; /* the last two: for sequences with fa_decodes (partition.h) */
    int block_q;                                  /* query lanes of one forward tile */
    int block_q_bwd;                              /* query lanes of one backward tile; 0: as many as block_q */
    int score_buffers;                            /* score buffers of the forward (fwd_layout.h) */
} fa_cpu_kernels;

extern const fa_cpu_kernels fa_kernels_scalar;
#if FA_X86
extern const fa_cpu_kernels fa_kernels_avx2, fa_kernels_avx512, fa_kernels_avx512bf16;
#endif
#if FA_NEON
extern const fa_cpu_kernels fa_kernels_neon;
#endif
#if FA_NEON_BF16
extern const fa_cpu_kernels fa_kernels_neonbf16;
#endif
#if FA_AMX
extern const fa_cpu_kernels fa_kernels_amx;
#endif

#endif
