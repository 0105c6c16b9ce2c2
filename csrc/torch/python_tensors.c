/* A torch.Tensor's object contains the address of its TensorImpl, and the place of this address is a handle. */
#include "python_tensors.h"

#include <string.h>

#include "wrap.h"

static Py_ssize_t offset_of_tensor; /* place of the handle inside a torch.Tensor's object */

/* Finds the place of the TensorImpl's address inside a tensor's object. Two new tensors must agree. 0: not found. */
static Py_ssize_t find_offset(void) {
    Py_ssize_t offset = 0, size = 0;
    for (int i = 0; i < 2; i++) {
        PyObject *tensor = PyObject_CallMethod(fa_torch_module, "empty", "i", 1);
        PyObject *address = tensor ? PyObject_GetAttrString(tensor, "_cdata") : NULL;
        PyObject *basic_size = PyObject_GetAttrString(fa_tensor_type, "__basicsize__");
        void *impl = address ? PyLong_AsVoidPtr(address) : NULL;
        if (i == 0) {
            size = basic_size ? PyLong_AsSsize_t(basic_size) : 0;
            for (Py_ssize_t at = sizeof(PyObject); at + (Py_ssize_t)sizeof impl <= size && !offset; at += sizeof impl)
                if (impl && memcmp((char *)tensor + at, &impl, sizeof impl) == 0) offset = at;
        } else if (!impl || !offset || memcmp((char *)tensor + offset, &impl, sizeof impl) != 0) {
            offset = 0;
        }
        Py_XDECREF(basic_size);
        Py_XDECREF(address);
        Py_XDECREF(tensor);
    }
    return offset;
}

bool fa_find_tensors(void) {
    if (!offset_of_tensor) offset_of_tensor = find_offset();
    return offset_of_tensor && fa_torch.wrap;
}

AtenTensorHandle fa_handle_of(PyObject *tensor) { return (AtenTensorHandle)((char *)tensor + offset_of_tensor); }

PyObject *fa_object_of(AtenTensorHandle handle) { return (PyObject *)((char *)handle - offset_of_tensor); }

bool fa_is_plain(PyObject *object) {
    static PyObject *parameter;
    PyObject *type = (PyObject *)Py_TYPE(object), *module = NULL;
    if (type == fa_tensor_type) return true;
    if (!parameter) module = PyImport_ImportModule("torch.nn.parameter");
    if (module) parameter = PyObject_GetAttrString(module, "Parameter");
    Py_XDECREF(module);
    PyErr_Clear();
    return parameter && type == parameter;
}

PyObject *fa_results_of(PyObject *first, const fa_outputs *outputs) {
    const int num_before = first ? 1 : 0, num = num_before + outputs->num;
    PyObject *tensors[1 + FA_MAX_OUTPUTS] = {first}, *tuple = NULL;
    const bool are_made = fa_wrap_all(outputs->tensor, outputs->num, tensors + num_before);
    for (int i = 0; i < outputs->num; i++) fa_torch.aoti_torch_delete_tensor_object(outputs->tensor[i]);
    if (are_made && num == 1) return tensors[0];
    if (are_made) tuple = PyTuple_New(num);
    for (int i = 0; i < num; i++) {
        if (tuple)
            PyTuple_SetItem(tuple, i, tensors[i]);
        else
            Py_XDECREF(tensors[i]);
    }
    return tuple;
}
