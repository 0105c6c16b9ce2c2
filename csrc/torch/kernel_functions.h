/* GPU kernels for Python. */
#ifndef FA_TORCH_KERNEL_FUNCTIONS_H
#define FA_TORCH_KERNEL_FUNCTIONS_H

#include "python_api.h"

/* cuda_kernels, build_cuda_kernel, cuda_kernel_source */
extern PyMethodDef fa_kernel_functions[];

#endif
