/* Functions of the C shim that came with torch 2.10, made of the functions that older releases have. */
#ifndef FA_TORCH_OLDER_TORCH_H
#define FA_TORCH_OLDER_TORCH_H

#include "torch_abi.h"

/* Fills the members of `found` that are still NULL and that calls need. `library` is libtorch. FA_EUNSUPPORTED means
 * that this platform's libtorch lacks the function, and what would replace it. */
fa_status fa_torch_replace(void *library, fa_torch_abi *found, fa_error *err);

/* Fills `wrap` if it is still NULL and `python`, which is libtorch_python or NULL, has an older function. */
void fa_torch_replace_wrap(void *python, fa_torch_abi *found);

/* Does this torch register boxed C functions as ops (2.10)? Otherwise python_ops.c registers the ops. */
static inline bool fa_torch_registers_ops(void) {
    return fa_torch.aoti_torch_library_init_def && fa_torch.aoti_torch_library_init_impl &&
           fa_torch.aoti_torch_library_def && fa_torch.torch_library_impl;
}

#endif
