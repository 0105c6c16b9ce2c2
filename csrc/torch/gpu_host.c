/* torch and Python as the GPU part sees them (gpu/host.h). Calls run without Python's lock. */
#include "gpu_host.h"

#include <string.h>

#include "gpu/host.h"
#include "python_api.h"
#include "system/environment.h"
#include "torch_abi.h"

/* NOTE: of every GPU, as torch offers it. What fails changes nothing: then there was nothing to give back. */
static void empty_cache(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *cuda = PyObject_GetAttrString(fa_torch_module, "cuda");
    PyObject *done = cuda ? PyObject_CallMethod(cuda, "empty_cache", NULL) : NULL;
    Py_XDECREF(cuda);
    Py_XDECREF(done);
    PyErr_Clear();
    PyGILState_Release(state);
}

static void read_environment(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    fa_environment_read();
    PyGILState_Release(state);
}

void fa_gpu_host_load(void) {
    const void *library;
    memcpy(&library, &fa_torch.aoti_torch_get_dim, sizeof library); /* ISO C has no cast from a function to void * */
    fa_host = (fa_gpu_host){.current_stream = fa_torch_current_stream,
                            .empty_cache = empty_cache,
                            .read_environment = read_environment,
                            .library = library};
}
