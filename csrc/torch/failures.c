/* Failures become exceptions. */
#include "failures.h"

#include "system/lock.h"

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

void fa_keep_exception(void) {
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

PyMethodDef fa_failure_functions[] = {
    {"mended_exception", mended_exception, METH_O,
     "mended_exception(error) -> the exception that an op's failure is, of which the dispatcher made a RuntimeError"},
    {NULL, NULL, 0, NULL},
};
