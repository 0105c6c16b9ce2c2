/* Functions about GPU kernels for Python. They list the kernels, show their texts, and compile kernels before the first
 * call. */
#include "kernel_functions.h"

#include <stdlib.h>

#include "failures.h"
#include "gpu/driver.h"
#include "gpu/kernel_cache.h"
#include "gpu/kernel_source.h"
#include "gpu/kernels.h"
#include "plan/gpu_problem.h"
#include "system/environment.h"

static PyObject *cuda_kernels(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int family = 0; family < FA_NUM_FAMILIES; family++)
        for (int row = 0; row < fa_families[family].num_rows; row++)
            for (unsigned features = 0; list && features <= fa_families[family].knows; features++) {
                const int arch = fa_families[family].arch;
                const fa_variant variant = {(fa_family_id)family, row, features, arch, 0, NULL};
                char name[FA_VARIANT_NAME_BYTES];
                if (!fa_variant_is_chosen(variant)) continue;
                fa_variant_name(variant, name);
                PyObject *entry = Py_BuildValue("(siiIi)", name, family, row, features, arch);
                if (!entry || PyList_Append(list, entry) < 0) Py_CLEAR(list);
                Py_XDECREF(entry);
            }
    return list;
}

/* Reads four numbers. False: the arguments are something else, and there is an exception. */
static bool read_variant(PyObject *args, const char *function, fa_variant *variant) {
    if (PyTuple_Size(args) != 4) {
        PyErr_Format(PyExc_TypeError, "%s(): takes family, row, features and arch", function);
        return false;
    }
    *variant = (fa_variant){0};
    variant->family = (fa_family_id)PyLong_AsLong(PyTuple_GetItem(args, 0));
    variant->row = (int)PyLong_AsLong(PyTuple_GetItem(args, 1));
    variant->features = (unsigned)PyLong_AsLong(PyTuple_GetItem(args, 2));
    variant->arch = (int)PyLong_AsLong(PyTuple_GetItem(args, 3));
    return !PyErr_Occurred();
}

static PyObject *cuda_kernel_is_taken(PyObject *self, PyObject *args) {
    (void)self;
    fa_variant variant;
    if (!read_variant(args, "cuda_kernel_is_taken", &variant)) return NULL;
    if (!fa_variant_is_chosen(variant)) return PyErr_Format(PyExc_ValueError, "there is no such CUDA kernel");
    return PyBool_FromLong(fa_row_is_taken(variant.family, variant.row, variant.features, variant.arch));
}

static PyObject *build_cuda_kernel(PyObject *self, PyObject *args) {
    (void)self;
    fa_variant variant;
    fa_error err = {""};
    bool compiled = false;
    fa_status status;
    if (!read_variant(args, "build_cuda_kernel", &variant)) return NULL;
    fa_environment_read();
    Py_BEGIN_ALLOW_THREADS status = fa_variant_build(variant, &compiled, &err);
    Py_END_ALLOW_THREADS if (status != FA_OK) return fa_raise(status, &err);
    return PyBool_FromLong(compiled);
}

static PyObject *cuda_kernel_source(PyObject *self, PyObject *args) {
    (void)self;
    fa_variant variant;
    fa_compile_options options;
    fa_error err = {""};
    if (!read_variant(args, "cuda_kernel_source", &variant)) return NULL;
    if (!fa_variant_is_chosen(variant)) return PyErr_Format(PyExc_ValueError, "there is no such CUDA kernel");
    fa_status status = fa_variant_options(variant, &options, &err);
    PyObject *list = status == FA_OK ? PyList_New(0) : fa_raise(status, &err);
    for (int i = 0; list && i < options.num; i++) {
        PyObject *option = PyUnicode_FromString(options.list[i]);
        if (!option || PyList_Append(list, option) < 0) Py_CLEAR(list);
        Py_XDECREF(option);
    }
    fa_options_free(&options);
    return list ? Py_BuildValue("(sN)", fa_families[variant.family].files[0], list) : NULL;
}

static PyObject *cuda_kernel_key(PyObject *self, PyObject *args) {
    (void)self;
    fa_variant variant;
    fa_error err = {""};
    uint64_t key;
    if (!read_variant(args, "cuda_kernel_key", &variant)) return NULL;
    if (!fa_variant_is_chosen(variant)) return PyErr_Format(PyExc_ValueError, "there is no such CUDA kernel");
    const fa_status status = fa_variant_key(variant, &key, &err);
    return status == FA_OK ? PyLong_FromUnsignedLongLong(key) : fa_raise(status, &err);
}

static PyObject *cuda_kernel_folder(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    char path[FA_PATH_BYTES];
    fa_environment_read();
    if (!fa_cache_folder(path)) Py_RETURN_NONE;
    return PyUnicode_DecodeFSDefault(path);
}

static PyObject *compile_failure(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    char *log, *mods;
    fa_compile_failure(&log, &mods);
    PyObject *texts = Py_BuildValue("(zz)", log, mods);
    free(log);
    free(mods);
    return texts;
}

static PyObject *imagine_gpu(PyObject *self, PyObject *args) {
    (void)self;
    if (PyTuple_Size(args) != 3)
        return PyErr_Format(PyExc_TypeError, "imagine_gpu(): takes a compute capability, multiprocessors and a number");
    const long capability = PyLong_AsLong(PyTuple_GetItem(args, 0)), num_sms = PyLong_AsLong(PyTuple_GetItem(args, 1));
    const long absent = PyLong_AsLong(PyTuple_GetItem(args, 2));
    if (PyErr_Occurred()) return NULL;
    if (capability < 0 || capability > 255 || num_sms < 0 || num_sms > INT16_MAX)
        return PyErr_Format(PyExc_ValueError, "imagine_gpu(): there is no GPU of capability %ld with %ld SMs",
                            capability, num_sms);
    fa_environment_read();
    fa_gpu_imagine((int)capability, (int)num_sms);
    if (capability > 0) fa_asked_kernels_reset((fa_absent_kernels)absent);
    Py_RETURN_NONE;
}

static PyObject *asked_kernels(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    int num;
    const fa_asked_kernel *kernels = fa_asked_kernels(&num);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < num; i++) {
        const fa_asked_kernel *k = &kernels[i];
        PyObject *entry = Py_BuildValue("(siKOO)", k->name, k->arch, (unsigned long long)k->key,
                                        k->is_absent ? Py_False : Py_True, k->is_compiled ? Py_True : Py_False);
        if (!entry || PyList_Append(list, entry) < 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    fa_asked_kernels_reset(FA_ABSENT_NOTED);
    return list;
}

static PyObject *compile_pending_kernel(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    bool was_pending;
    fa_environment_read();
    Py_BEGIN_ALLOW_THREADS was_pending = fa_kernel_compile_pending();
    Py_END_ALLOW_THREADS return PyBool_FromLong(was_pending);
}

PyMethodDef fa_kernel_functions[] = {
    {"cuda_kernels", cuda_kernels, METH_NOARGS,
     "cuda_kernels() -> (name, family, row, features, arch) of every GPU kernel that a call can ask for; arch 0: any"},
    {"cuda_kernel_is_taken", cuda_kernel_is_taken, METH_VARARGS,
     "cuda_kernel_is_taken(family, row, features, arch) -> can a call on such a GPU ask for the kernel? Not if its "
     "tile "
     "does not fit there, or a better one does"},
    {"build_cuda_kernel", build_cuda_kernel, METH_VARARGS,
     "build_cuda_kernel(family, row, features, arch) -> True if the kernel had to be compiled, False if the disk cache "
     "has it"},
    {"cuda_kernel_source", cuda_kernel_source, METH_VARARGS,
     "cuda_kernel_source(family, row, features, arch) -> (file in csrc/cuda, the compiler's options)"},
    {"cuda_kernel_key", cuda_kernel_key, METH_VARARGS,
     "cuda_kernel_key(family, row, features, arch) -> the hash of source and options in the names of files"},
    {"cuda_kernel_folder", cuda_kernel_folder, METH_NOARGS,
     "cuda_kernel_folder() -> the folder that keeps compiled GPU kernels, None without a home folder"},
    {"compile_failure", compile_failure, METH_NOARGS,
     "compile_failure() -> the compiler's log and the text of the mods, of the last kernel that did not compile on "
     "this "
     "thread; None: there is none since the last call"},
    {"imagine_gpu", imagine_gpu, METH_VARARGS,
     "imagine_gpu(capability, num_sms, absent): from now on calls of this thread are those of a GPU that need not be "
     "here; they run nothing, and kernels that the disk cache lacks are noted (0), compiled into it (1), or noted and "
     "pending (2); capability 0: no more"},
    {"compile_pending_kernel", compile_pending_kernel, METH_NOARGS,
     "compile_pending_kernel() -> compiles a kernel that is pending into the disk cache; False: there was none"},
    {"asked_kernels", asked_kernels, METH_NOARGS,
     "asked_kernels() -> (name, arch, key, whether it was there, whether it was compiled) of the kernels that calls on "
     "the imagined GPU asked for since the last call"},
    {NULL, NULL, 0, NULL},
};
