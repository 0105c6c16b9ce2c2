/* Functions about GPU kernels for Python. */
#ifndef FA_TORCH_KERNEL_FUNCTIONS_H
#define FA_TORCH_KERNEL_FUNCTIONS_H

#include "python_api.h"

/* The table holds cuda_kernels, build_cuda_kernel, cuda_kernel_source, cuda_kernel_folder, compile_failure,
 * imagine_gpu and asked_kernels. */
extern PyMethodDef fa_kernel_functions[];

#endif
