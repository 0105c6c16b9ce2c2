/* The CPython module flash_attn_2_cuda.
 *
 * The module holds the five functions of positional.c, the ops as plain functions (direct.c), and diagnostics. Other
 * functions compile GPU kernels before their first call. The import registers the ops of namespace flash_attn. */
#include "direct.h"
#include "failures.h"
#include "flex.h"
#include "kernel_functions.h"
#include "machine.h"
#include "module.h"
#include "options.h"
#include "plans.h"
#include "positional.h"
#include "sdpa.h"

static int exec_module(PyObject *module) {
    static PyMethodDef *const functions[] = {
        fa_positional_functions, fa_direct_functions,  fa_failure_functions,
        fa_plan_functions,       fa_machine_functions, fa_flex_functions,
        fa_sdpa_functions,       fa_options_functions, NULL,
    };
    return fa_module_exec(module, functions, fa_positional_load);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)exec_module}, {0, NULL}};

/* The functions about GPU kernels exist before exec_module runs, because a build calls them without torch. */
static PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                 "flash_attn_2_cuda",
                                 "Attention ops of flash_attn for CPU and CUDA tensors.",
                                 0,
                                 fa_kernel_functions,
                                 module_slots,
                                 NULL,
                                 NULL,
                                 NULL};

PyMODINIT_FUNC PyInit_flash_attn_2_cuda(void) { return PyModuleDef_Init(&module_def); }
