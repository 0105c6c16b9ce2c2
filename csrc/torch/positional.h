/* fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache: the positional functions of the flash-attn 2 extension. */
#ifndef FA_TORCH_POSITIONAL_H
#define FA_TORCH_POSITIONAL_H

#include "python_api.h"

extern PyMethodDef fa_positional_functions[];

#endif
