/* fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache: the positional functions of the flash-attn 2 extension. */
#ifndef FA_TORCH_POSITIONAL_H
#define FA_TORCH_POSITIONAL_H

#include "flash_attn.h"
#include "python_api.h"

/* Finds the ops' arguments by their names, once the ops are registered. */
fa_status fa_positional_load(fa_error *err);

extern PyMethodDef fa_positional_functions[];

#endif
