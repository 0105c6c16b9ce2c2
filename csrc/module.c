/* The CPython module flash_attn_2_cuda.
 *
 * Importing it finds libtorch, registers the ops of namespace flash_attn and looks at the processor. It holds the five
 * functions of positional.c, diagnostics (plans, instruction sets), and the compilation of GPU kernels ahead. */
#include "python_api.h"

#include "call.h"
#include "cpu/cpu.h"
#include "environment.h"
#include "kernels.h"
#include "lock.h"
#include "module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

PyObject *fa_torch_module, *fa_tensor_type;

/* ---- failures -------------------------------------------------------------------------------------------------------- */

/* The last failure of an op on this thread, and with FA_EPYTHON the exception, which is ours. */
static THREAD_LOCAL struct {
    fa_status status;
    fa_error err;
    PyObject *type, *value, *traceback;
} failure;

static void drop_exception(void) {
    Py_CLEAR(failure.type);
    Py_CLEAR(failure.value);
    Py_CLEAR(failure.traceback);
}

/* Takes the pending exception, so that C code and the dispatcher can go on to where it is raised. */
static void keep_exception(void) {
    drop_exception();
    PyErr_Fetch(&failure.type, &failure.value, &failure.traceback);
}

PyObject *fa_raise(fa_status status, const fa_error *err) {
    if (status == FA_EPYTHON && failure.type) {
        PyErr_Restore(failure.type, failure.value, failure.traceback);
        failure.type = failure.value = failure.traceback = NULL;
        return NULL;
    }
    if (status == FA_ENOMEM_GPU) {
        PyObject *type = PyObject_GetAttrString(fa_torch_module, "OutOfMemoryError");
        if (type) PyErr_SetString(type, err->text);
        Py_XDECREF(type);
        return NULL;
    }
    PyErr_SetString(status == FA_ENOMEM         ? PyExc_MemoryError
                    : status == FA_EUNSUPPORTED ? PyExc_NotImplementedError
                                                : PyExc_RuntimeError,
                    err->text);
    return NULL;
}

void fa_note_failure(fa_status status, const fa_error *err) {
    failure.status = status;
    if (status != FA_OK) failure.err = *err;
}

void fa_mend_exception(void) {
    PyObject *type, *value, *traceback;
    if (failure.status == FA_OK || failure.status == FA_EINVAL || !PyErr_ExceptionMatches(PyExc_RuntimeError)) return;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *words = value ? PyObject_Str(value) : NULL, *ours = PyUnicode_FromString(failure.err.text);
    const bool is_ours = words && ours && PyUnicode_Contains(words, ours) == 1;
    Py_XDECREF(words);
    Py_XDECREF(ours);
    PyErr_Clear();
    if (!is_ours) {
        PyErr_Restore(type, value, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    fa_raise(failure.status, &failure.err);
    failure.status = FA_OK;
}

/* Python's try .. except around an op: what the exception is. */
static PyObject *mended_exception(PyObject *self, PyObject *exception) {
    PyObject *type, *value, *traceback;
    (void)self;
    PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    fa_mend_exception();
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* ---- dropout seed ---------------------------------------------------------------------------------------------------- */

/* Ops run without the interpreter lock; drawing is Python's business because generators have no C interface. */

/* torch.randint(0, 2^63 - 1, ..) of num integers, or of one where num is 0. */
static PyObject *randint(const char *device, int num) {
    PyObject *function = PyObject_GetAttrString(fa_torch_module, "randint"), *drawn = NULL;
    PyObject *int64 = PyObject_GetAttrString(fa_torch_module, "int64");
    PyObject *shape = num > 0 ? Py_BuildValue("(i)", num) : PyTuple_New(0);
    PyObject *args = shape ? Py_BuildValue("(LLO)", 0LL, 0x7fffffffffffffffLL, shape) : NULL;
    PyObject *options = int64 ? Py_BuildValue("{s:O,s:s}", "dtype", int64, "device", device) : NULL;
    if (function && args && options) drawn = PyObject_Call(function, args, options);
    Py_XDECREF(function);
    Py_XDECREF(int64);
    Py_XDECREF(shape);
    Py_XDECREF(args);
    Py_XDECREF(options);
    return drawn;
}

static uint64_t as_number(PyObject *number) {
    const uint64_t value = number ? PyLong_AsUnsignedLongLongMask(number) : 0;
    Py_XDECREF(number);
    return value;
}

static fa_status drawn_or_not(const char *what, fa_error *err) {
    if (!PyErr_Occurred()) return FA_OK;
    keep_exception();
    return fa_fail(err, FA_EPYTHON, "%s could not draw the dropout seed", what);
}

fa_status fa_draw_seed(uint64_t *seed, fa_error *err) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *drawn = randint("cpu", 0);
    if (drawn) *seed = as_number(PyObject_CallMethod(drawn, "item", NULL));
    Py_XDECREF(drawn);
    fa_status status = drawn_or_not("torch.randint", err);
    PyGILState_Release(state);
    return status;
}

/* Between reading the offset and writing it Python must not run another thread, which would draw the same numbers. So all
 * that both need is made before: in between only integers are, for which Python collects no garbage and lets nobody in.
 * NOTE: torch's own operators advance the offset under a lock that only C++ can take. One that draws on another thread at
 * the very moment may still meet this. */
static void advance(PyObject *generator, uint64_t steps, uint64_t state[2]) {
    PyObject *seed = PyObject_GetAttrString(generator, "initial_seed");
    PyObject *get = PyObject_GetAttrString(generator, "get_offset");
    PyObject *set = PyObject_GetAttrString(generator, "set_offset");
    PyObject *nothing = PyTuple_New(0), *offset = PyTuple_New(1), *done = NULL;
    if (seed && get && set && nothing && offset) {
        state[0] = as_number(PyObject_Call(seed, nothing, NULL));
        state[1] = as_number(PyObject_Call(get, nothing, NULL));
        PyObject *next = PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(state[1] + steps);
        if (next && PyTuple_SetItem(offset, 0, next) == 0) done = PyObject_Call(set, offset, NULL);
    }
    PyObject *all[] = {seed, get, set, nothing, offset, done};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) Py_XDECREF(all[i]);
}

fa_status fa_advance_gpu_generator(int device_idx, uint64_t steps, uint64_t state[2], fa_error *err) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *cuda = PyObject_GetAttrString(fa_torch_module, "cuda"), *generator = NULL;
    PyObject *generators = cuda ? PyObject_GetAttrString(cuda, "default_generators") : NULL;
    if (generators) generator = PySequence_GetItem(generators, device_idx);
    if (generator) advance(generator, steps, state);
    Py_XDECREF(cuda);
    Py_XDECREF(generators);
    Py_XDECREF(generator);
    fa_status status = drawn_or_not("torch.cuda's generator", err);
    PyGILState_Release(gil);
    return status;
}

fa_status fa_draw_on_gpu(int device_idx, uint64_t *address, void **owner, fa_error *err) {
    PyGILState_STATE state = PyGILState_Ensure();
    char device[24];
    snprintf(device, sizeof device, "cuda:%d", device_idx);
    PyObject *drawn = randint(device, 2);
    if (drawn) *address = as_number(PyObject_CallMethod(drawn, "data_ptr", NULL));
    fa_status status = drawn_or_not("torch.randint", err);
    if (status != FA_OK) Py_CLEAR(drawn);
    *owner = drawn;
    PyGILState_Release(state);
    return status;
}

void fa_release_drawn(void *owner) {
    PyGILState_STATE state = PyGILState_Ensure();
    Py_XDECREF((PyObject *)owner);
    PyGILState_Release(state);
}

/* ---- tensors that are written ------------------------------------------------------------------------------------------ */

/* Each asks Python where libtorch has no C++ function that tells. */

static bool is_attribute_true(PyObject *object, const char *name) {
    PyObject *value = PyObject_GetAttrString(object, name);
    const bool truth = value && PyObject_IsTrue(value) == 1;
    Py_XDECREF(value);
    return truth;
}

static const char *leaf_in_says_python(AtenTensorHandle t) {
    PyGILState_STATE state = PyGILState_Ensure();
    const char *what = NULL;
    PyObject *tensor = fa_torch.wrap ? fa_torch.wrap(t) : NULL;
    PyObject *base = tensor ? PyObject_GetAttrString(tensor, "_base") : NULL;
    if (base && is_attribute_true(tensor, "requires_grad")) {
        if (is_attribute_true(tensor, "is_leaf"))
            what = "";
        else if (base != Py_None && is_attribute_true(base, "is_leaf"))
            what = "a view of ";
    }
    Py_XDECREF(base);
    Py_XDECREF(tensor);
    PyErr_Clear();
    PyGILState_Release(state);
    return what;
}

const char *fa_leaf_in(AtenTensorHandle t) {
    if (!fa_torch.knows_tensors) return leaf_in_says_python(t);
    if (!fa_torch_requires_grad(t)) return NULL;
    if (fa_torch.is_leaf(t)) return "";
    return fa_torch.is_view(t) && fa_torch.is_leaf(fa_torch.base_of_view(t)) ? "a view of " : NULL;
}

static void bump_version_by_python(AtenTensorHandle t) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *tensor = fa_torch.wrap ? fa_torch.wrap(t) : NULL, *done = NULL;
    PyObject *graph = PyImport_ImportModule("torch.autograd.graph");
    if (tensor && graph) done = PyObject_CallMethod(graph, "increment_version", "O", tensor);
    Py_XDECREF(done);
    Py_XDECREF(graph);
    Py_XDECREF(tensor);
    PyErr_Clear(); /* a tensor made in inference mode has no version */
    PyGILState_Release(state);
}

void fa_bump_version(AtenTensorHandle t) {
    if (!fa_torch.knows_tensors)
        bump_version_by_python(t);
    else if (!fa_torch.is_inference(t)) /* it has no version, and no gradient can ask for one */
        fa_torch.bump_version(t);
}

/* ---- plans ----------------------------------------------------------------------------------------------------------- */

#define MAX_PLANS 8
enum { PLAN_TEXT_BYTES = 4096 }; /* all that can be ruled out, in words */
static THREAD_LOCAL struct {
    bool only;
    int num;
    fa_plan plans[MAX_PLANS]; /* the first ones since take_plans */
} collected;

static bool log_plans;
bool fa_checks_values_on_gpu;

bool fa_plan_only(void) { return collected.only; }

void fa_note_plan(const fa_plan *plan) {
    if (log_plans) {
        char text[PLAN_TEXT_BYTES];
        fa_plan_print(plan, text, sizeof text);
        fprintf(stderr, "flash_attn: %s\n", text);
    }
    if (collected.only && collected.num < MAX_PLANS) collected.plans[collected.num++] = *plan;
}

static PyObject *plan_only(PyObject *self, PyObject *on) {
    (void)self;
    int truth = PyObject_IsTrue(on);
    if (truth < 0) return NULL;
    collected.only = truth != 0;
    collected.num = 0;
    Py_RETURN_NONE;
}

static PyObject *plan_as_dict(const fa_plan *plan) {
    char text[PLAN_TEXT_BYTES];
    PyObject *ruled_out = PyList_New(0);
    for (int i = 0; ruled_out && i < plan->num_ruled_out; i++) {
        PyObject *pair = Py_BuildValue("(ss)", plan->ruled_out[i].kernel, plan->ruled_out[i].reason);
        if (!pair || PyList_Append(ruled_out, pair) < 0) Py_CLEAR(ruled_out);
        Py_XDECREF(pair);
    }
    if (!ruled_out) return NULL;
    fa_plan_print(plan, text, sizeof text);
    return Py_BuildValue("{s:s,s:s,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:n,s:O,s:N,s:s}", "pass",
                         plan->pass == FA_FWD ? "fwd" : "bwd", "device", plan->device == FA_CPU ? "cpu" : "cuda",
                         "kernel", plan->kernel, "isa", plan->device == FA_CPU ? fa_isa_name(plan->isa) : "", "block_q",
                         plan->block_q, "block_kv", plan->block_kv, "tiles_per_task", plan->tiles_per_task, "threads",
                         plan->threads, "num_splits", plan->num_splits, "cluster", plan->cluster, "workspace_bytes",
                         (Py_ssize_t)plan->workspace_bytes, "any_order", plan->any_order ? Py_True : Py_False,
                         "ruled_out", ruled_out, "text", text);
}

static PyObject *take_plans(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < collected.num; i++) {
        PyObject *dict = plan_as_dict(&collected.plans[i]);
        if (!dict || PyList_Append(list, dict) < 0) Py_CLEAR(list);
        Py_XDECREF(dict);
    }
    collected.num = 0;
    return list;
}

/* ---- instruction sets ------------------------------------------------------------------------------------------------ */

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

/* The best legal instruction set that is no better than the named one; NULL names the best. -1: no such name. */
static int best_isa_up_to(const char *name) {
    int limit = FA_NUM_ISAS - 1;
    if (name)
        while (limit >= 0 && strcmp(name, fa_isa_name((fa_isa)limit)) != 0) limit--;
    while (limit >= 0 && !fa_this_machine.isa_legal[limit]) limit--;
    return limit;
}

static PyObject *set_cpu_isa(PyObject *self, PyObject *name) {
    (void)self;
    PyObject *bytes = NULL;
    if (name != Py_None && !PyUnicode_Check(name))
        return PyErr_Format(PyExc_TypeError, "set_cpu_isa(): name must be a str or None");
    if (name != Py_None && !(bytes = PyUnicode_AsUTF8String(name))) return NULL;
    int isa = best_isa_up_to(bytes ? PyBytes_AsString(bytes) : NULL);
    Py_XDECREF(bytes);
    if (isa < 0)
        return PyErr_Format(PyExc_ValueError,
                            "set_cpu_isa(): unknown instruction set %R; allowed are reference, scalar, "
                            "avx2, avx512, avx512bf16, amx",
                            name);
    fa_this_machine.isa = (fa_isa)isa;
    return PyUnicode_FromString(fa_isa_name((fa_isa)isa));
}

/* ---- GPU kernels ----------------------------------------------------------------------------------------------------- */

static PyObject *cuda_kernels(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int family = 0; family < FA_NUM_FAMILIES; family++)
        for (int row = 0; row < fa_families[family].num_rows; row++)
            for (unsigned features = 0; list && features <= fa_families[family].knows; features++) {
                const int arch = fa_families[family].arch;
                const fa_variant variant = {(fa_family_id)family, row, features, arch};
                char name[FA_VARIANT_NAME_BYTES];
                if (!fa_variant_is_chosen(variant)) continue;
                fa_variant_name(variant, name);
                PyObject *entry = Py_BuildValue("(siiIi)", name, family, row, features, arch);
                if (!entry || PyList_Append(list, entry) < 0) Py_CLEAR(list);
                Py_XDECREF(entry);
            }
    return list;
}

/* False, and an exception: not four numbers. */
static bool read_variant(PyObject *args, const char *function, fa_variant *variant) {
    if (PyTuple_Size(args) != 4) {
        PyErr_Format(PyExc_TypeError, "%s(): takes family, row, features and arch", function);
        return false;
    }
    variant->family = (fa_family_id)PyLong_AsLong(PyTuple_GetItem(args, 0));
    variant->row = (int)PyLong_AsLong(PyTuple_GetItem(args, 1));
    variant->features = (unsigned)PyLong_AsLong(PyTuple_GetItem(args, 2));
    variant->arch = (int)PyLong_AsLong(PyTuple_GetItem(args, 3));
    return !PyErr_Occurred();
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

/* Words that are left stay in memory: a call on another thread may be reading them. */
static bool leave_cuda_kernels(const char *words) {
    const size_t bytes = words ? strlen(words) + 1 : 0;
    char *copy = bytes > 1 ? malloc(bytes) : NULL;
    if (bytes > 1 && !copy) return false;
    if (copy) memcpy(copy, words, bytes);
    fa_this_machine.gpu_kernels = copy;
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

static PyObject *cuda_kernel_source(PyObject *self, PyObject *args) {
    (void)self;
    fa_variant variant;
    fa_compile_options options;
    if (!read_variant(args, "cuda_kernel_source", &variant)) return NULL;
    if (!fa_variant_is_chosen(variant)) return PyErr_Format(PyExc_ValueError, "there is no such CUDA kernel");
    fa_variant_options(variant, &options);
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < options.num; i++) {
        PyObject *option = PyUnicode_FromString(options.list[i]);
        if (!option || PyList_Append(list, option) < 0) Py_CLEAR(list);
        Py_XDECREF(option);
    }
    return list ? Py_BuildValue("(sN)", fa_families[variant.family].files[0], list) : NULL;
}

/* ---- the module ------------------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"cpu_isas", cpu_isas, METH_NOARGS, "cpu_isas() -> instruction sets that this machine can run, the weakest first"},
    {"set_cpu_isa", set_cpu_isa, METH_O,
     "set_cpu_isa(name) -> the instruction set in use from now on: the best that is no "
     "better than name; None is the best there is"},
    {"mended_exception", mended_exception, METH_O,
     "mended_exception(error) -> the exception that an op's failure is, of which the dispatcher made a RuntimeError"},
    {"plan_only", plan_only, METH_O, "plan_only(on): while on, calls of this thread are planned but not run"},
    {"take_plans", take_plans, METH_NOARGS,
     "take_plans() -> the plans collected on this thread since the last call, as dicts"},
    {"cuda_kernels", cuda_kernels, METH_NOARGS,
     "cuda_kernels() -> (name, family, row, features, arch) of every GPU kernel that a call can ask for; arch 0: any"},
    {"build_cuda_kernel", build_cuda_kernel, METH_VARARGS,
     "build_cuda_kernel(family, row, features, arch) -> True if the kernel had to be compiled, False if the disk cache "
     "has it"},
    {"set_cuda_kernels", set_cuda_kernels, METH_O,
     "set_cuda_kernels(words): from now on only kernels with the words in their names, as FLASH_ATTN_CUDA_KERNEL says; "
     "None: all"},
    {"cuda_kernel_source", cuda_kernel_source, METH_VARARGS,
     "cuda_kernel_source(family, row, features, arch) -> (file in csrc/cuda, the compiler's options)"},
    {NULL, NULL, 0, NULL},
};

/* False, and an exception: a variable says what it may not. */
static bool read_environment(void) {
    const char *log = getenv("FLASH_ATTN_LOG"), *isa = getenv("FLASH_ATTN_CPU_ISA");
    const char *check = getenv("FLASH_ATTN_CHECK");
    log_plans = log && strcmp(log, "plan") == 0;
    fa_checks_values_on_gpu = check && *check && strcmp(check, "0") != 0;
    int chosen = best_isa_up_to(isa && *isa ? isa : NULL);
    if (chosen < 0) {
        PyErr_Format(PyExc_ImportError,
                     "FLASH_ATTN_CPU_ISA is '%s'; allowed are reference, scalar, avx2, avx512, avx512bf16, amx", isa);
        return false;
    }
    fa_this_machine.isa = (fa_isa)chosen;
    fa_environment_read();
    if (!leave_cuda_kernels(getenv("FLASH_ATTN_CUDA_KERNEL"))) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

static int exec_module(PyObject *module) {
    static bool is_registered; /* by the first import of this process that came so far */
    fa_error err = {""};
    if (!(fa_torch_module = PyImport_ImportModule("torch"))) return -1;
    if (!(fa_tensor_type = PyObject_GetAttrString(fa_torch_module, "Tensor"))) return -1;
    fa_cpu_detect(&fa_this_machine);
    if (!read_environment()) return -1;
    if (!is_registered && (fa_torch_load(&err) != FA_OK || fa_register_ops(&err) != FA_OK)) {
        PyErr_SetString(PyExc_ImportError, err.text);
        return -1;
    }
    is_registered = true;
    if (PyModule_AddFunctions(module, fa_positional_functions) < 0) return -1;
    if (PyModule_AddFunctions(module, fa_direct_functions) < 0) return -1;
    return PyModule_AddIntConstant(module, "__torch_abi__", (long)(FA_TORCH_ABI_VERSION >> 48));
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)exec_module}, {0, NULL}};

static PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                 "flash_attn_2_cuda",
                                 "Attention ops of flash_attn for CPU and CUDA tensors.",
                                 0,
                                 methods,
                                 module_slots,
                                 NULL,
                                 NULL,
                                 NULL};

PyMODINIT_FUNC PyInit_flash_attn_2_cuda(void) { return PyModuleDef_Init(&module_def); }
