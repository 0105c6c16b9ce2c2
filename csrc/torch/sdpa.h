/* Kernels for the attention ops of torch itself. scaled_dot_product_attention and varlen_attn call these ops. */
#ifndef FA_TORCH_SDPA_H
#define FA_TORCH_SDPA_H

#include "python_api.h"

/* The table holds sdpa_override. */
extern PyMethodDef fa_sdpa_functions[];

#endif
