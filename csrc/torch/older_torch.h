/* Functions of the C shim that came with torch 2.10, made of the functions that older releases have. */
#ifndef FA_TORCH_OLDER_TORCH_H
#define FA_TORCH_OLDER_TORCH_H

#include "torch_abi.h"

/* Fills the members of fa_torch that fa_torch_load has not found and that calls need. FA_EUNSUPPORTED means that this
 * platform's libtorch lacks a function, and what would replace it. */
fa_status fa_torch_replace(fa_error *err);

/* Does this torch register boxed C functions as ops (2.10)? Otherwise python_ops.c registers the ops. */
static inline bool fa_torch_registers_ops(void) {
    return fa_torch.aoti_torch_library_init_def && fa_torch.aoti_torch_library_init_impl &&
           fa_torch.aoti_torch_library_def && fa_torch.torch_library_impl;
}

#endif
