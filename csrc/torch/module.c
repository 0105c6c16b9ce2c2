/* What both Python modules do when they are imported: they find libtorch, register the ops and read the processor's
 * features. The modules themselves are module_2.c and module_3.c. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

#include "gpu_host.h"
#include "gpu_values.h"
#include "machine.h"
#include "older_torch.h"
#include "ops.h"
#include "plans.h"
#include "python_ops.h"
#include "system/environment.h"
#include "torch_abi.h"

/* Reads the environment variables that are read once. */
static bool read_environment(void) {
    const char *log = getenv("FLASH_ATTN_LOG"), *check = getenv("FLASH_ATTN_CHECK");
    if (log && *log && strcmp(log, "plan") != 0 && strcmp(log, "0") != 0) {
        PyErr_Format(PyExc_ImportError, "FLASH_ATTN_LOG is '%s'; allowed are plan, and 0 or nothing", log);
        return false;
    }
    if (check && *check && strcmp(check, "1") != 0 && strcmp(check, "0") != 0) {
        PyErr_Format(PyExc_ImportError, "FLASH_ATTN_CHECK is '%s'; allowed are 1, and 0 or nothing", check);
        return false;
    }
    const char *too_long = fa_environment_too_long();
    if (too_long) {
        PyErr_Format(PyExc_ImportError, "%s is a path of %zd bytes; allowed are at most 1023", too_long,
                     (Py_ssize_t)strlen(getenv(too_long)));
        return false;
    }
    const char *shim = getenv("FLASH_ATTN_TORCH_SHIM");
    if (shim && *shim && (strncmp(shim, "2.", 2) != 0 || !shim[2] || shim[2 + strspn(shim + 2, "0123456789")])) {
        PyErr_Format(PyExc_ImportError, "FLASH_ATTN_TORCH_SHIM is '%s'; allowed are releases of PyTorch 2, such as 2.4",
                     shim);
        return false;
    }
    fa_logs_plans = log && strcmp(log, "plan") == 0;
    fa_checks_values_on_gpu = check && *check && strcmp(check, "0") != 0;
    fa_environment_read();
    return true;
}

int fa_module_exec(PyObject *module, PyMethodDef *const *functions, fa_status (*load)(fa_error *err)) {
    static bool is_registered; /* an earlier import of this process has registered the ops */
    fa_error err = {""};
    if (!fa_python_load() || !fa_machine_load() || !read_environment()) return -1;
    if (!is_registered && (fa_torch_load(&err) != FA_OK || fa_torch_replace(&err) != FA_OK ||
                           fa_register_ops(fa_register_in_python, &err) != FA_OK || (load && load(&err) != FA_OK))) {
        PyErr_SetString(PyExc_ImportError, err.text);
        return -1;
    }
    is_registered = true;
    fa_gpu_host_load();
    for (; *functions; functions++)
        if (PyModule_AddFunctions(module, *functions) < 0) return -1;
    return PyModule_AddIntConstant(module, "__torch_abi__", (long)(FA_TORCH_ABI_VERSION >> 48));
}
