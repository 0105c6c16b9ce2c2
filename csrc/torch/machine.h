/* The machine as the planner sees it, as far as the user has not lowered it. */
#ifndef FA_TORCH_MACHINE_H
#define FA_TORCH_MACHINE_H

#include "flash_attn.h"
#include "python_api.h"

/* The thread count is torch's at the time of a call; the GPU's members are filled in for a call on a GPU. */
extern fa_machine fa_this_machine;

/* Looks at the processor, and at FLASH_ATTN_CPU_ISA and FLASH_ATTN_CUDA_KERNEL. False, and an exception: a variable has a
 * value that is not allowed. */
bool fa_machine_load(void);

/* cpu_isas, set_cpu_isa, set_cuda_kernels */
extern PyMethodDef fa_machine_functions[];

#endif
