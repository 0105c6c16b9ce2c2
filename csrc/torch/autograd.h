/* What autograd must know of a call, and what the call must know of autograd. */
#ifndef FA_TORCH_AUTOGRAD_H
#define FA_TORCH_AUTOGRAD_H

#include "torch_abi.h"

bool fa_requires_grad(AtenTensorHandle t);

/* Returns "" for a leaf that requires grad, "a view of " for a view of such a leaf, and otherwise NULL. */
const char *fa_leaf_in(AtenTensorHandle t);

/* Tells autograd that the tensor is written in place. */
void fa_bump_version(AtenTensorHandle t);

/* Does the process differentiate in forward mode at the moment? */
bool fa_forward_ad_is_on(void);

/* Has the tensor a tangent of forward-mode AD? Our kernels would drop it without a word. */
bool fa_has_tangent(AtenTensorHandle t);

#endif
