#include "kept_walks.h"

#include <string.h>

#include "call.h"
#include "wrap.h"

enum { FIRST_LIST = 2, NUM_LISTS = 4, KEPT = FIRST_LIST + NUM_LISTS };
enum { MOST_BYTES = 2 }; /* behind the two entries of a list */

/* An entry as a tuple of Python's objects. Its tensors stay alive, so no other tensor gets their addresses. */
enum { MEMORY, ADDRESS, KEY, VERSIONS, LISTS, OF_MASK, NUM_PARTS };

/* Returns whether PyTorch counts the changes of all tensors of a tuple. Some may be None. */
static bool read_versions(fa_kept_of_call *call, PyObject *tensors) {
    static PyObject *name;
    const Py_ssize_t num = PyTuple_Size(tensors);
    if (!name) name = PyUnicode_InternFromString("_version");
    for (Py_ssize_t i = 0; i < num; i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i), *version = NULL;
        if (tensor != Py_None && name) version = PyObject_GetAttr(tensor, name);
        call->versions[call->num_versions++] = version ? PyLong_AsLongLong(version) : -1;
        Py_XDECREF(version);
        if (PyErr_Occurred()) return false;
    }
    return name;
}

static bool holds(PyObject *bytes, const void *data, size_t size) {
    return PyBytes_Check(bytes) && (size_t)PyBytes_Size(bytes) == size &&
           memcmp(PyBytes_AsString(bytes), data, size) == 0;
}

/* Reads the entry that another call of this pass has left. */
static void read_entry(fa_kept_of_call *call) {
    PyObject *entry = PyList_GetItem(call->list, call->pass == FA_BWD);
    if (!entry || !PyTuple_Check(entry) || PyTuple_Size(entry) != NUM_PARTS) return;
    if (!holds(PyTuple_GetItem(entry, VERSIONS), call->versions, call->num_versions * sizeof *call->versions)) return;
    PyObject *key = PyTuple_GetItem(entry, KEY);
    if (!PyBytes_Check(key) || (size_t)PyBytes_Size(key) > sizeof call->walks.key) return;
    memcpy(call->walks.key, PyBytes_AsString(key), (size_t)PyBytes_Size(key));
    call->walks.num_key = (size_t)PyBytes_Size(key) / sizeof *call->walks.key;
    call->walks.data = PyLong_AsVoidPtr(PyTuple_GetItem(entry, ADDRESS));
    Py_INCREF(entry); /* another thread may replace it meanwhile */
    call->entry = entry;
}

fa_kept_walks *fa_offer_kept_walks(fa_kept_of_call *call, PyObject *blocks, PyObject *mask, fa_pass pass) {
    PyObject *list = PyTuple_GetItem(blocks, KEPT), *of_mask = mask == Py_None ? Py_None : PyTuple_GetItem(mask, 1);
    if (!PyList_Check(list) || PyList_Size(list) != MOST_BYTES + 1) return NULL;
    *call = (fa_kept_of_call){.pass = pass, .list = list, .of_mask = of_mask};
    call->walks.most_bytes = PyLong_AsSize_t(PyList_GetItem(list, MOST_BYTES));
    call->lists = PyTuple_GetSlice(blocks, FIRST_LIST, KEPT);
    if (call->lists && read_versions(call, call->lists) && (of_mask == Py_None || read_versions(call, of_mask))) {
        read_entry(call);
        if (!PyErr_Occurred()) return &call->walks;
    }
    PyErr_Clear();
    fa_settle_kept_walks(call, FA_EINVAL);
    return NULL;
}

static PyObject *new_entry(const fa_kept_of_call *call) {
    const fa_kept_walks *w = &call->walks;
    PyObject *const parts[] = {
        fa_wrap(w->owner),
        PyLong_FromVoidPtr(w->data),
        PyBytes_FromStringAndSize((const char *)w->key, (Py_ssize_t)(w->num_key * sizeof *w->key)),
        PyBytes_FromStringAndSize((const char *)call->versions,
                                  (Py_ssize_t)(call->num_versions * sizeof *call->versions)),
    };
    PyObject *entry = NULL;
    if (parts[MEMORY] && parts[ADDRESS] && parts[KEY] && parts[VERSIONS])
        entry = PyTuple_Pack(NUM_PARTS, parts[MEMORY], parts[ADDRESS], parts[KEY], parts[VERSIONS], call->lists,
                             call->of_mask);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) Py_XDECREF(parts[i]);
    return entry;
}

void fa_settle_kept_walks(fa_kept_of_call *call, fa_status status) {
    PyObject *entry = status == FA_OK && call->walks.owner ? new_entry(call) : NULL;
    if (entry) PyList_SetItem(call->list, call->pass == FA_BWD, entry);
    PyErr_Clear(); /* without an entry the next call makes its walks itself */
    if (call->walks.owner) fa_torch.aoti_torch_delete_tensor_object(call->walks.owner);
    call->walks.owner = NULL;
    Py_CLEAR(call->lists);
    Py_CLEAR(call->entry);
}
