/* torch.Tensor objects of Python as the C shim's handles, and back. */
#ifndef FA_TORCH_PYTHON_TENSORS_H
#define FA_TORCH_PYTHON_TENSORS_H

#include "python_api.h" /* CPython wants to be the first */

#include "outputs.h"
#include "torch_abi.h"

/* Finds out where an object keeps its tensor. Looks only once. False: handles cannot be had from objects, or objects
 * from handles, and there may be an exception. */
bool fa_find_tensors(void);

/* The handle of a torch.Tensor or of a subclass, and the object of such a handle. Both are borrowed. They need
 * fa_find_tensors. */
AtenTensorHandle fa_handle_of(PyObject *tensor);
PyObject *fa_object_of(AtenTensorHandle handle);

/* Is the object a torch.Tensor or a Parameter? A tensor of another class makes results of its class. */
bool fa_is_plain(PyObject *object);

/* Returns one tensor, or a tuple of several. `first` comes first if it is not NULL. The outputs of a call follow. This
 * function takes all references. NULL: there is an exception. */
PyObject *fa_results_of(PyObject *first, const fa_outputs *outputs);

#endif
