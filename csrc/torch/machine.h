/* The machine as the planner sees it. The user can lower the instruction set and rule out kernels. */
#ifndef FA_TORCH_MACHINE_H
#define FA_TORCH_MACHINE_H

#include "flash_attn.h"
#include "python_api.h"

/* Each call copies this struct. The call fills in torch's thread count and, on a GPU, the GPU's members. */
extern fa_machine fa_this_machine;

/* Reads the processor's features, FLASH_ATTN_CPU_ISA and FLASH_ATTN_CUDA_KERNEL. False: a variable has a forbidden
 * value, and there is an exception. */
bool fa_machine_load(void);

/* The table holds cpu_isas, set_cpu_isa and set_cuda_kernels. */
extern PyMethodDef fa_machine_functions[];

#endif
