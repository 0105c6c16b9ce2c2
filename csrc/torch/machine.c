/* The machine for which calls are planned. */
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/dispatch.h"
#include "plan/kernel_table.h"

fa_machine fa_this_machine;

/* ---- instruction sets -------------------------------------------------------------------------------------------- */

/* Lists all names for messages. */
static const char *all_isas(char text[128]) {
    size_t at = 0;
    for (int isa = 0; isa < FA_NUM_ISAS; isa++)
        if (fa_cpu_knows((fa_isa)isa))
            at += (size_t)snprintf(text + at, 128 - at, "%s%s", isa ? ", " : "", fa_isa_name((fa_isa)isa));
    return text;
}

static PyObject *cpu_isas(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int isa = 0; list && isa < FA_NUM_ISAS; isa++) {
        if (!fa_this_machine.isa_legal[isa]) continue;
        PyObject *name = PyUnicode_FromString(fa_isa_name((fa_isa)isa));
        if (!name || PyList_Append(list, name) < 0) Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

/* Returns the best legal instruction set that is no better than the named instruction set. NULL names the best. -1:
 * there is no such name. */
static int best_isa_up_to(const char *name) {
    int limit = FA_NUM_ISAS - 1;
    if (name)
        while (limit >= 0 && (!fa_cpu_knows((fa_isa)limit) || strcmp(name, fa_isa_name((fa_isa)limit)) != 0)) limit--;
    while (limit >= 0 && !fa_this_machine.isa_legal[limit]) limit--;
    return limit;
}

static PyObject *set_cpu_isa(PyObject *self, PyObject *name) {
    (void)self;
    PyObject *bytes = NULL;
    char names[128];
    if (name != Py_None && !PyUnicode_Check(name))
        return PyErr_Format(PyExc_TypeError, "set_cpu_isa(): name must be a str or None");
    if (name != Py_None && !(bytes = PyUnicode_AsUTF8String(name))) return NULL;
    int isa = best_isa_up_to(bytes ? PyBytes_AsString(bytes) : NULL);
    Py_XDECREF(bytes);
    if (isa < 0)
        return PyErr_Format(PyExc_ValueError, "set_cpu_isa(): unknown instruction set %R; allowed are %s", name,
                            all_isas(names));
    fa_this_machine.isa = (fa_isa)isa;
    return PyUnicode_FromString(fa_isa_name((fa_isa)isa));
}

/* ---- GPU kernels ------------------------------------------------------------------------------------------------- */

/* Replaces the words. The old words stay in memory, because a call on another thread may be reading them. */
static bool leave_cuda_kernels(const char *words) {
    const size_t bytes = words ? strlen(words) + 1 : 0;
    char *copy = bytes > 1 ? malloc(bytes) : NULL;
    if (bytes > 1 && !copy) return false;
    if (copy) memcpy(copy, words, bytes);
    fa_this_machine.gpu_kernels = copy;
    return true;
}

/* Is each of the words, which commas separate, a part of a kernel's name? An empty one is a part of every name. */
static bool are_in_names(const char *words) {
    while (words && *words) {
        const size_t length = strcspn(words, ",");
        bool is_found = false;
        for (int i = 0; i < FA_NUM_FAMILIES; i++)
            for (const char *at = fa_families[i].name; *at; at++) is_found |= strncmp(at, words, length) == 0;
        if (!is_found || length == 0 || (words[length] && !words[length + 1])) return false;
        words = words[length] ? words + length + 1 : NULL;
    }
    return true;
}

static PyObject *set_cuda_kernels(PyObject *self, PyObject *words) {
    (void)self;
    PyObject *bytes = NULL;
    if (words != Py_None && !PyUnicode_Check(words))
        return PyErr_Format(PyExc_TypeError, "set_cuda_kernels(): words must be a str or None");
    if (words != Py_None && !(bytes = PyUnicode_AsUTF8String(words))) return NULL;
    const bool done = leave_cuda_kernels(bytes ? PyBytes_AsString(bytes) : NULL);
    Py_XDECREF(bytes);
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- the environment, and what Python may call ------------------------------------------------------------------- */

bool fa_machine_load(void) {
    char names[128];
    const char *isa = getenv("FLASH_ATTN_CPU_ISA");
    fa_cpu_detect(&fa_this_machine);
    int chosen = best_isa_up_to(isa && *isa ? isa : NULL);
    if (chosen < 0) {
        PyErr_Format(PyExc_ImportError, "FLASH_ATTN_CPU_ISA is '%s'; allowed are %s", isa, all_isas(names));
        return false;
    }
    fa_this_machine.isa = (fa_isa)chosen;
    const char *kernels = getenv("FLASH_ATTN_CUDA_KERNEL");
    if (!are_in_names(kernels)) {
        PyErr_Format(PyExc_ImportError,
                     "FLASH_ATTN_CUDA_KERNEL is '%s'; each of its words must be a part of a kernel's name, such as "
                     "attn_fwd_sm90, attn_decode_sm90, attn_bwd_sm80 or attn_fwd_any",
                     kernels);
        return false;
    }
    if (!leave_cuda_kernels(kernels)) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

PyMethodDef fa_machine_functions[] = {
    {"cpu_isas", cpu_isas, METH_NOARGS, "cpu_isas() -> instruction sets that this machine can run, the weakest first"},
    {"set_cpu_isa", set_cpu_isa, METH_O,
     "set_cpu_isa(name) -> the instruction set in use from now on: the best that is no "
     "better than name; None is the best there is"},
    {"set_cuda_kernels", set_cuda_kernels, METH_O,
     "set_cuda_kernels(words): from now on only kernels with one of the words in their names, as "
     "FLASH_ATTN_CUDA_KERNEL says; "
     "None: all"},
    {NULL, NULL, 0, NULL},
};
