/* What autograd must know of a call, and what the call must know of autograd. If libtorch lacks a C++ function that is
 * needed, Python is asked. */
#include "autograd.h"

#include "wrap.h"

static bool is_attribute_true(PyObject *object, const char *name) {
    PyObject *value = PyObject_GetAttrString(object, name);
    const bool truth = value && PyObject_IsTrue(value) == 1;
    Py_XDECREF(value);
    return truth;
}

static const char *leaf_in_says_python(AtenTensorHandle t) {
    PyGILState_STATE state = PyGILState_Ensure();
    const char *what = NULL;
    PyObject *tensor = fa_wrap(t);
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

bool fa_requires_grad(AtenTensorHandle t) {
    if (fa_torch.knows_tensors) return fa_torch_requires_grad(t);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *tensor = fa_wrap(t);
    const bool truth = tensor && is_attribute_true(tensor, "requires_grad");
    Py_XDECREF(tensor);
    PyErr_Clear();
    PyGILState_Release(state);
    return truth;
}

const char *fa_leaf_in(AtenTensorHandle t) {
    if (!fa_torch.knows_tensors) return leaf_in_says_python(t);
    if (!fa_torch_requires_grad(t)) return NULL;
    if (fa_torch.is_leaf(t)) return "";
    return fa_torch.is_view(t) && fa_torch.is_leaf(fa_torch.base_of_view(t)) ? "a view of " : NULL;
}

static void bump_version_by_python(AtenTensorHandle t) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *tensor = fa_wrap(t), *done = NULL;
    PyObject *graph = PyImport_ImportModule("torch.autograd.graph");
    if (tensor && graph) done = PyObject_CallMethod(graph, "increment_version", "O", tensor);
    Py_XDECREF(done);
    Py_XDECREF(graph);
    Py_XDECREF(tensor);
    PyErr_Clear(); /* a tensor of inference mode has no version */
    PyGILState_Release(state);
}

void fa_bump_version(AtenTensorHandle t) {
    if (!fa_torch.knows_tensors)
        bump_version_by_python(t);
    else if (!fa_torch.is_inference(t)) /* such a tensor has no version, and no gradient needs one */
        fa_torch.bump_version(t);
}

/* torch.autograd.forward_ad, or NULL with an exception. The caller holds the GIL. */
static PyObject *forward_ad(void) {
    static PyObject *module;
    if (!module) module = PyImport_ImportModule("torch.autograd.forward_ad");
    return module;
}

bool fa_forward_ad_is_on(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *module = forward_ad(), *level = module ? PyObject_GetAttrString(module, "_current_level") : NULL;
    const bool truth = level && PyLong_AsLong(level) >= 0;
    Py_XDECREF(level);
    PyErr_Clear();
    PyGILState_Release(state);
    return truth;
}

bool fa_has_tangent(AtenTensorHandle t) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *tensor = fa_wrap(t), *module = forward_ad();
    PyObject *dual = tensor && module ? PyObject_CallMethod(module, "unpack_dual", "O", tensor) : NULL;
    PyObject *tangent = dual ? PyObject_GetAttrString(dual, "tangent") : NULL;
    const bool truth = tangent && tangent != Py_None;
    Py_XDECREF(tangent);
    Py_XDECREF(dual);
    Py_XDECREF(tensor);
    PyErr_Clear();
    PyGILState_Release(state);
    return truth;
}
