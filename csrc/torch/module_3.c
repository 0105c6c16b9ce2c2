/* The CPython module flash_attn_3._C.
 *
 * The module holds the ops as plain functions (direct.c), and diagnostics. Other functions compile GPU kernels before
 * their first call. The import registers the ops of namespace flash_attn_3. */
#include "direct.h"
#include "failures.h"
#include "kernel_functions.h"
#include "machine.h"
#include "module.h"
#include "plans.h"

static int exec_module(PyObject *module) {
    static PyMethodDef *const functions[] = {fa_direct_functions, fa_failure_functions, fa_plan_functions,
                                             fa_machine_functions, NULL};
    return fa_module_exec(module, functions, NULL);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)exec_module}, {0, NULL}};

/* The functions about GPU kernels exist before exec_module runs, because a build calls them without torch. */
static PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                 "_C",
                                 "Attention ops of flash_attn_3 for CPU and CUDA tensors.",
                                 0,
                                 fa_kernel_functions,
                                 module_slots,
                                 NULL,
                                 NULL,
                                 NULL};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&module_def); }
