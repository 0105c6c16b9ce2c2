/* What the options of flash_attn_func need besides kernels, on the CPU: flash_attn/_extended.py. */
#ifndef FA_TORCH_OPTIONS_H
#define FA_TORCH_OPTIONS_H

#include "python_api.h"

extern PyMethodDef fa_options_functions[];

#endif
