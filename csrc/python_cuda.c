/* What calls on a GPU ask of Python. They run without its lock, and hold none of ours when they come here. */
#include "python_api.h"

#include "cuda_memory.h"
#include "environment.h"

/* NOTE: of every GPU, as torch offers it. What fails changes nothing: then there was nothing to give back. */
void fa_empty_torch_cache(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *cuda = PyObject_GetAttrString(fa_torch_module, "cuda");
    PyObject *done = cuda ? PyObject_CallMethod(cuda, "empty_cache", NULL) : NULL;
    Py_XDECREF(cuda);
    Py_XDECREF(done);
    PyErr_Clear();
    PyGILState_Release(state);
}

void fa_read_environment_in_python(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    fa_environment_read();
    PyGILState_Release(state);
}
