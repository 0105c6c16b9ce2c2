/* Registers the ops as Python functions, for a torch whose C shim cannot register ops. */
#ifndef FA_TORCH_PYTHON_OPS_H
#define FA_TORCH_PYTHON_OPS_H

#include "python_api.h"

/* Defines the ops of fa_ops and implements them for CPU and CUDA tensors, through torch.library. False: torch refuses,
 * or lacks what is needed. There is no exception then. */
bool fa_register_in_python(void);

#endif
