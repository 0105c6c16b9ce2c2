/* The ops for torch before 2.10. Its C shim has no, or another, function that registers boxed C functions. So
 * torch.library gets Python functions that are written in C, and the dispatcher gives them Python objects.
 *
 * Everything above the ops is the same as with a new torch: fakes, gradients, torch.compile. An op's call costs more.
 * Plain eager calls do not come here, because they take the direct door (direct.c). */
#include "python_ops.h"

#include "execute.h"
#include "failures.h"
#include "ops.h"
#include "python_tensors.h"

/* torch's number of a torch.dtype. -1: there is an exception. */
static int64_t number_of_dtype(PyObject *dtype) {
    PyObject *empty = PyObject_GetAttrString(fa_torch_module, "empty"), *args = Py_BuildValue("(i)", 0);
    PyObject *options = Py_BuildValue("{s:O}", "dtype", dtype), *tensor = NULL;
    int32_t number = -1;
    if (empty && args && options) tensor = PyObject_Call(empty, args, options);
    if (tensor) fa_torch.aoti_torch_get_dtype(fa_handle_of(tensor), &number);
    Py_XDECREF(empty);
    Py_XDECREF(args);
    Py_XDECREF(options);
    Py_XDECREF(tensor);
    return number;
}

/* Reads an argument that the dispatcher has already held against the schema. */
static fa_status read_argument(const fa_slot *s, PyObject *object, void *place, fa_error *err) {
    switch (s->kind) {
    case FA_SLOT_TENSOR: return fa_take_tensor(s, fa_handle_of(object), place, err);
    case FA_SLOT_BOOL: *(bool *)place = PyObject_IsTrue(object) == 1; break;
    case FA_SLOT_FLOAT: *(double *)place = PyFloat_AsDouble(object); break;
    case FA_SLOT_INT:
        *(int64_t *)place = PyIndex_Check(object) ? PyLong_AsLongLong(object) : number_of_dtype(object);
        break;
    }
    if (!PyErr_Occurred()) return FA_OK;
    fa_keep_exception();
    return fa_fail(err, FA_EPYTHON, "%s could not be read", s->name);
}

/* The dispatcher leaves out the last arguments if they have the defaults of the schema. */
static fa_status read_arguments(const fa_signature *signature, PyObject *args, fa_call *call, fa_error *err) {
    const Py_ssize_t num = PyTuple_Size(args);
    fa_begin_call(signature, call);
    for (int i = 0; i < signature->num_slots; i++) {
        const fa_slot *s = &signature->slots[i];
        PyObject *object = i < num ? PyTuple_GetItem(args, i) : Py_None;
        if (object == Py_None && s->kind == FA_SLOT_TENSOR && !s->is_optional)
            return fa_fail(err, FA_EINVAL, "%s must be a tensor; it is None", s->name);
        if (object == Py_None) {
            if (s->is_optional && s->kind == FA_SLOT_FLOAT) call->default_scale = true; /* the only optional float */
            continue;
        }
        fa_status status = read_argument(s, object, (char *)call + s->place, err);
        if (status != FA_OK) return status;
    }
    fa_open_caches(call);
    return FA_OK;
}

static PyObject *call_op(PyObject *op_idx, PyObject *args) {
    const long idx = PyLong_AsLong(op_idx);
    fa_call call;
    fa_outputs outputs = {.num = 0};
    fa_error err = {""};
    fa_status status = read_arguments(&fa_ops.signatures[idx], args, &call, &err);
    if (status == FA_OK) status = fa_refuse_tangents(&fa_ops.signatures[idx], &call, &err);
    Py_BEGIN_ALLOW_THREADS if (status == FA_OK) status = fa_ops.ops[idx].execute(&call, &outputs, &err);
    Py_END_ALLOW_THREADS if (status != FA_OK) return fa_raise(status, &err);
    if (outputs.num == 0) Py_RETURN_NONE;
    return fa_results_of(NULL, &outputs);
}

/* Defines an op and gives it a function. torch.library notes the function as foreign, and direct.c avoids foreign
 * functions. So the note is removed. */
static bool register_op(PyObject *library, PyObject *notes, int op_idx) {
    static PyMethodDef method = {"call_op", call_op, METH_VARARGS, "An op of flash_attn."};
    static const char *const keys[] = {"CPU", "CUDA"};
    const fa_op *op = &fa_ops.ops[op_idx];
    char schema[FA_MAX_SCHEMA];
    fa_write_schema(op, schema, sizeof schema);
    PyObject *number = PyLong_FromLong(op_idx), *function = number ? PyCFunction_New(&method, number) : NULL;
    PyObject *done = function ? PyObject_CallMethod(library, "define", "s", schema) : NULL;
    for (int k = 0; k < 2 && done; k++) {
        Py_DECREF(done);
        done = PyObject_CallMethod(library, "impl", "sOs", op->name, function, keys[k]);
        PyObject *note = PyUnicode_FromFormat("%s/%s/%s", fa_ops.name_space, op->name, keys[k]);
        if (note) PySet_Discard(notes, note);
        Py_XDECREF(note);
    }
    const bool is_done = done != NULL;
    Py_XDECREF(done);
    Py_XDECREF(function);
    Py_XDECREF(number);
    return is_done;
}

bool fa_register_in_python(void) {
    /* The library lives as long as the process, because Python may call the ops at any time. */
    PyObject *module = fa_find_tensors() ? PyImport_ImportModule("torch.library") : NULL;
    PyObject *notes = module ? PyObject_GetAttrString(module, "_impls") : NULL;
    PyObject *library =
        notes && PyAnySet_Check(notes) ? PyObject_CallMethod(module, "Library", "ss", fa_ops.name_space, "DEF") : NULL;
    bool is_done = library != NULL;
    for (int i = 0; i < fa_ops.num && is_done; i++)
        if (fa_ops.ops[i].results) is_done = register_op(library, notes, i);
    Py_XDECREF(module);
    Py_XDECREF(notes);
    PyErr_Clear();
    return is_done;
}
