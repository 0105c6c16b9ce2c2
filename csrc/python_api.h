/* CPython's limited API of 3.9, and what module.c and positional.c share of Python's objects. */
#ifndef FA_PYTHON_API_H
#define FA_PYTHON_API_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x03090000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "flash_attn.h"

extern PyObject *fa_torch_module, *fa_tensor_type; /* torch and torch.Tensor, from the module's import on */

/* positional.c: fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache. */
extern PyMethodDef fa_positional_functions[];

/* module.c: a failure as the exception that it is; NULL, to be returned. */
PyObject *fa_raise(fa_status status, const fa_error *err);

/* module.c: the dispatcher made a RuntimeError of every failure of an op. If the pending exception is one that was something
 * else, that takes its place. */
void fa_mend_exception(void);

/* direct.c: ops without torch's dispatcher, where nobody would notice. */
extern PyMethodDef fa_direct_functions[];

#endif
