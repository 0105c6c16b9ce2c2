/* The CPython module flash_attn_2_cuda.
 *
 * Importing it finds libtorch, registers the ops of namespace flash_attn and looks at the processor. It holds the five
 * functions of positional.c, the ops as plain functions (direct.c), diagnostics (plans, instruction sets), and the
 * compilation of GPU kernels ahead. */
#include "python_api.h"

#include <stdlib.h>
#include <string.h>

#include "direct.h"
#include "failures.h"
#include "gpu_host.h"
#include "gpu_values.h"
#include "kernel_functions.h"
#include "machine.h"
#include "ops.h"
#include "plans.h"
#include "positional.h"
#include "system/environment.h"
#include "torch_abi.h"

static PyMethodDef *const functions[] = {
    fa_positional_functions, fa_direct_functions, fa_failure_functions, fa_plan_functions, fa_machine_functions,
};

/* Variables that are read once. */
static void read_environment(void) {
    const char *log = getenv("FLASH_ATTN_LOG"), *check = getenv("FLASH_ATTN_CHECK");
    fa_logs_plans = log && strcmp(log, "plan") == 0;
    fa_checks_values_on_gpu = check && *check && strcmp(check, "0") != 0;
    fa_environment_read();
}

static int exec_module(PyObject *module) {
    static bool is_registered; /* by the first import of this process that came so far */
    fa_error err = {""};
    if (!fa_python_load() || !fa_machine_load()) return -1;
    read_environment();
    if (!is_registered &&
        (fa_torch_load(&err) != FA_OK || fa_register_ops(&err) != FA_OK || fa_positional_load(&err) != FA_OK)) {
        PyErr_SetString(PyExc_ImportError, err.text);
        return -1;
    }
    is_registered = true;
    fa_gpu_host_load();
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (PyModule_AddFunctions(module, functions[i]) < 0) return -1;
    return PyModule_AddIntConstant(module, "__torch_abi__", (long)(FA_TORCH_ABI_VERSION >> 48));
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)exec_module}, {0, NULL}};

/* The functions about GPU kernels are there before exec_module runs: a build calls them without torch. */
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
