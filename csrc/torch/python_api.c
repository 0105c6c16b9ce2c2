/* The two objects of python_api.h. */
#include "python_api.h"

PyObject *fa_torch_module, *fa_tensor_type;

bool fa_python_load(void) {
    fa_torch_module = PyImport_ImportModule("torch");
    if (fa_torch_module) fa_tensor_type = PyObject_GetAttrString(fa_torch_module, "Tensor");
    return fa_torch_module && fa_tensor_type;
}
