/* The shim's handles as torch.Tensor objects of Python. */
#ifndef FA_TORCH_WRAP_H
#define FA_TORCH_WRAP_H

#include "python_api.h" /* CPython wants to be the first */

#include "torch_abi.h"

/* Returns a new reference to a torch.Tensor that shares the tensor with the handle. NULL: there is an exception, or
 * this torch has no such function. The caller holds the GIL. */
PyObject *fa_wrap(AtenTensorHandle t);

/* The same of several tensors. False: all objects are NULL. */
bool fa_wrap_all(const AtenTensorHandle *handles, int num, PyObject **tensors);

#endif
