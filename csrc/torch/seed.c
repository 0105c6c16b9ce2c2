/* Seeds of dropout come from torch's generators. */
#include "seed.h"

#include <stdio.h>

#include "failures.h"

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
    fa_keep_exception();
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
