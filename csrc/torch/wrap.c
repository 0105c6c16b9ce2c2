/* Calls THPVariable_Wrap of libtorch_python, which throws if there is no memory. */
#include "wrap.h"

typedef struct {
    const AtenTensorHandle *handles;
    PyObject **tensors;
} wrapping;

static void wrap_range(int64_t begin, int64_t end, void *ctx) {
    const wrapping *w = ctx;
    for (int64_t i = begin; i < end; i++)
        if (!(w->tensors[i] = fa_torch.wrap(w->handles[i]))) return;
}

/* Without memory, THPVariable_Wrap throws. C cannot catch a C++ exception, and an exception that is not caught ends the
 * process. torch_parallel_for calls a range of one grain in this thread, inside a try block, for 0.05 us. Before torch
 * 2.10 no function of the shim does so (older_torch.c), and the exception still ends the process. */
bool fa_wrap_all(const AtenTensorHandle *handles, int num, PyObject **tensors) {
    wrapping w = {handles, tensors};
    bool are_made = fa_torch.wrap;
    for (int i = 0; i < num; i++) tensors[i] = NULL;
    if (are_made && fa_torch.torch_parallel_for(0, num, num, wrap_range, &w) != 0 && !PyErr_Occurred())
        PyErr_NoMemory();
    for (int i = 0; i < num; i++) are_made = are_made && tensors[i];
    for (int i = 0; i < num && !are_made; i++) Py_CLEAR(tensors[i]);
    return are_made;
}

PyObject *fa_wrap(AtenTensorHandle t) {
    PyObject *tensor;
    fa_wrap_all(&t, 1, &tensor);
    return tensor;
}
