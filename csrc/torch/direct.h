/* Calls of ops without torch's dispatcher, if the effects are the same. */
#ifndef FA_TORCH_DIRECT_H
#define FA_TORCH_DIRECT_H

#include "python_api.h"

extern PyMethodDef fa_direct_functions[];

#endif
