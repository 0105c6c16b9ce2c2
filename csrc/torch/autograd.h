/* What autograd must know of a call, and what the call must know of autograd. */
#ifndef FA_TORCH_AUTOGRAD_H
#define FA_TORCH_AUTOGRAD_H

#include "ops.h"
#include "torch_abi.h"

bool fa_requires_grad(AtenTensorHandle t);

/* Returns "" for a leaf that requires grad, "a view of " for a view of such a leaf, and otherwise NULL. */
const char *fa_leaf_in(AtenTensorHandle t);

/* Tells autograd that the tensor is written in place. */
void fa_bump_version(AtenTensorHandle t);

/* Refuses a call if a tensor of it has a tangent of forward-mode AD, which our kernels would drop without a word. */
fa_status fa_refuse_tangents(const fa_signature *signature, const fa_call *call, fa_error *err);

#endif
