/* The import of a Python module. */
#ifndef FA_TORCH_MODULE_H
#define FA_TORCH_MODULE_H

#include "flash_attn.h"
#include "python_api.h"

/* Finds libtorch, registers the ops, calls `load` (NULL: nothing), and adds the tables of functions up to NULL. Returns
 * -1 after a failure. Then there is an exception. */
int fa_module_exec(PyObject *module, PyMethodDef *const *functions, fa_status (*load)(fa_error *err));

#endif
