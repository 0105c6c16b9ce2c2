/* Tells autograd which tensors a call writes. */
#ifndef FA_TORCH_AUTOGRAD_H
#define FA_TORCH_AUTOGRAD_H

#include "torch_abi.h"

bool fa_requires_grad(AtenTensorHandle t);

/* Returns "" for a leaf that requires grad, "a view of " for a view of such a leaf, and otherwise NULL. */
const char *fa_leaf_in(AtenTensorHandle t);

/* Tells autograd that the tensor is written in place. */
void fa_bump_version(AtenTensorHandle t);

#endif
