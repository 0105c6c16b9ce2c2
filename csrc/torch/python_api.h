/* CPython's limited API of 3.9, and two objects of torch. */
#ifndef FA_TORCH_PYTHON_API_H
#define FA_TORCH_PYTHON_API_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x03090000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

extern PyObject *fa_torch_module, *fa_tensor_type; /* torch and torch.Tensor, from the module's import on */

/* Imports torch. False, and an exception: that failed. */
bool fa_python_load(void);

#endif
