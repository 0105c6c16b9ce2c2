/* Ops without torch's dispatcher, where nobody would notice. */
#ifndef FA_TORCH_DIRECT_H
#define FA_TORCH_DIRECT_H

#include "python_api.h"

extern PyMethodDef fa_direct_functions[];

#endif
