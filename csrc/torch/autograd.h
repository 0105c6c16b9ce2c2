/* What autograd must know of tensors that a call writes. */
#ifndef FA_TORCH_AUTOGRAD_H
#define FA_TORCH_AUTOGRAD_H

#include "torch_abi.h"

/* Does the tensor require grad, and is it a leaf ("") or a view of one ("a view of ")? Otherwise NULL. */
const char *fa_leaf_in(AtenTensorHandle t);

/* Autograd shall know that the tensor is written in place. */
void fa_bump_version(AtenTensorHandle t);

#endif
