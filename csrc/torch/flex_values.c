#include "flex_values.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "failures.h"
#include "python_tensors.h"

#define FA_FLEX_DTYPE(enumerator, name, type, bytes) #name,
const char *const fa_flex_dtype_names[FA_FLEX_NUM_DTYPES] = {FA_FLEX_DTYPES(FA_FLEX_DTYPE)};
#undef FA_FLEX_DTYPE

const char *const fa_flex_result_names[FA_FLEX_NUM_TYPES] = {"bool", "int64", "float32", "float64"};

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* An at::Tensor is a pointer to its TensorImpl, and a handle of the C shim points to an at::Tensor. */
/* The TensorImpl of any tensor, as Python says it. NULL: there is none. */
static void *impl_of(PyObject *tensor) {
    static PyObject *cdata;
    if (!cdata) cdata = PyUnicode_InternFromString("_cdata");
    PyObject *address = cdata ? PyObject_GetAttr(tensor, cdata) : NULL;
    void *impl = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    PyErr_Clear();
    return impl;
}

fa_status fa_flex_read_tensor(PyObject *object, const char *name, fa_flex_tensor *to, fa_error *err) {
    *to = (fa_flex_tensor){.t = {.name = name}};
    if (object == Py_None) return FA_OK;
    if (fa_is_plain(object) && fa_find_tensors()) {
        to->impl = *(void **)fa_handle_of(object);
    } else {
        REQUIRE(PyObject_IsInstance(object, fa_tensor_type) == 1, "%s must be a torch.Tensor", name);
        to->impl = impl_of(object);
    }
    REQUIRE(to->impl, "%s is a tensor without memory of its own", name);
    fa_tensor_read((AtenTensorHandle)&to->impl, &to->t);
    REQUIRE(to->t.ndim == 0 || (to->t.size && to->t.stride), "%s is a nested tensor, which has no sizes", name);
    REQUIRE(to->t.device_type == fa_torch.cpu || to->t.device_type == fa_torch.cuda,
            "%s must be on the CPU or on CUDA; it is on another kind of device", name);
    REQUIRE(!fa_torch.knows_tensors || !fa_torch.is_negative(to->t.handle),
            "%s has the negative bit: call resolve_neg()", name);
    const void *data = NULL;
    REQUIRE(fa_torch.torch_get_const_data_ptr(to->t.handle, &data) == 0, "%s is a tensor without memory of its own",
            name);
    to->t.data = (void *)data;
    return check_memory(&to->t, err);
}

bool fa_flex_has_memory(PyObject *object) {
    fa_tensor t = {.name = ""};
    fa_error err;
    const void *data = NULL;
    if (object == Py_None) return true;
    if (!fa_is_plain(object) || !fa_find_tensors()) return false;
    void *impl = *(void **)fa_handle_of(object);
    if (!impl) return false;
    fa_tensor_read((AtenTensorHandle)&impl, &t);
    if (t.ndim > 0 && (!t.size || !t.stride)) return false;
    if (fa_torch.torch_get_const_data_ptr(t.handle, &data) != 0) return false;
    t.data = (void *)data;
    return check_memory(&t, &err) == FA_OK;
}

/* ---- programs ---------------------------------------------------------------------------------------------------- */

/* What is known of torch's dtype of a name. */
typedef struct {
    const char *name; /* a literal of the tables above */
    PyObject *object;
    int32_t code; /* in the C shim; INT32_MIN until the first tensor of the dtype came */
} known_dtype;

/* Looks a dtype up once for each of the few names. NULL: there is none. */
static known_dtype *dtype_of(const char *name) {
    enum { MOST = FA_FLEX_NUM_DTYPES + FA_FLEX_NUM_TYPES };
    static known_dtype known[MOST];
    int i = 0;
    while (i < MOST && known[i].name && known[i].name != name) i++;
    if (i == MOST) return NULL;
    if (known[i].name) return &known[i];
    PyObject *object = PyObject_GetAttrString(fa_torch_module, name);
    if (object) known[i] = (known_dtype){name, object, INT32_MIN};
    return object ? &known[i] : NULL;
}

bool fa_flex_has_dtype(PyObject *tensor, const fa_tensor *t, const char *dtype) {
    static PyObject *name;
    known_dtype *wanted = dtype_of(dtype);
    if (wanted && wanted->code == t->dtype) return true;
    if (!name) name = PyUnicode_InternFromString("dtype");
    PyObject *has = name ? PyObject_GetAttr(tensor, name) : NULL;
    const bool fits = has && wanted && has == wanted->object;
    if (fits) wanted->code = t->dtype;
    Py_XDECREF(has);
    PyErr_Clear();
    return fits;
}

static fa_status check_place(const fa_tensor *t, const fa_flex_values *v, const char *what, fa_error *err) {
    words here, there;
    REQUIRE(t->device_type == v->device_type && (t->device_type == fa_torch.cpu || t->device_idx == v->device_idx),
            "%s must be on %s; it is on %s", what, device_words(v->device_type, v->device_idx, &there),
            device_words(t->device_type, t->device_idx, &here));
    return FA_OK;
}

/* The sizes and strides of a tensor as a capture of this rank has them. A tensor of more dimensions loses those of size
 * 1, which a program does not name. Returns whether so many dimensions are left. */
static bool fit_rank(const fa_tensor *t, int64_t rank, int64_t *size, int64_t *stride) {
    int64_t num = 0;
    for (int64_t dim = 0; dim < t->ndim; dim++) {
        if (t->ndim > rank && t->size[dim] == 1) continue;
        if (num == rank) return false;
        size[num] = t->size[dim], stride[num++] = t->stride[dim];
    }
    return num == rank;
}

static fa_status read_capture(fa_flex_values *v, PyObject *object, int i, fa_error *err) {
    fa_flex_tensor tensor;
    fa_flex_capture *c = &v->captures[i];
    const char *dtype = fa_flex_dtype_names[v->program.captures[i].dtype];
    TRY(fa_flex_read_tensor(object, "a capture", &tensor, err));
    REQUIRE(present(&tensor.t) && fa_flex_has_dtype(object, &tensor.t, dtype), "a capture must be a tensor of dtype %s",
            dtype);
    REQUIRE(fit_rank(&tensor.t, v->program.captures[i].rank, c->size, c->stride),
            "a capture must have %d dimensions, besides those of size 1; it has %" PRId64, v->program.captures[i].rank,
            tensor.t.ndim);
    v->ndim[i] = (uint8_t)tensor.t.ndim;
    TRY(check_place(&tensor.t, v, "a capture", err));
    c->data = is_empty(&tensor.t) ? NULL : tensor.t.data;
    return FA_OK;
}

static bool bind_param(fa_flex_values *v, PyObject *number, int i) {
    if (!number) return false;
    if (v->program.params[i] == FA_FLEX_BOOL)
        v->params[i].b = PyObject_IsTrue(number) == 1;
    else if (v->program.params[i] == FA_FLEX_I64)
        v->params[i].i = PyLong_AsLongLong(number);
    else
        v->params[i].d = PyFloat_AsDouble(number);
    if (!PyErr_Occurred()) return true;
    if (PyErr_ExceptionMatches(PyExc_OverflowError))
        PyErr_SetString(PyExc_OverflowError, "a mod cannot use an integer of more than 64 bits; write a float");
    return false;
}

/* Decoding a text takes longer than reading its values, and the next call mostly has the same text. So the last values
 * are kept with their program. The interpreter's lock guards them. */
enum { KEPT = 8 };
static fa_flex_values *kept_values[KEPT];

static void drop(fa_flex_values *values) {
    if (!values) return;
    fa_flex_free(&values->program);
    Py_DECREF(values->text);
    free(values);
}

void fa_flex_unbind(fa_flex_values *values) {
    static unsigned place;
    if (!values) return;
    fa_flex_values **kept = &kept_values[place++ % KEPT], *before = *kept;
    *kept = values;
    drop(before);
}

/* Takes the kept values of a text, or decodes the text. */
static fa_status take_values(PyObject *text, fa_flex_values **values, fa_error *err) {
    for (int i = 0; i < KEPT; i++)
        if (kept_values[i] && kept_values[i]->text == text) {
            *values = kept_values[i];
            kept_values[i] = NULL;
            return FA_OK;
        }
    fa_flex_values *v = malloc(sizeof *v); /* 26 KB, of which a program fills little */
    if (!v) return fa_fail(err, FA_ENOMEM, "no memory for the values of a program");
    const fa_status status = fa_flex_decode(PyBytes_AsString(text), (size_t)PyBytes_Size(text), &v->program, err);
    if (status != FA_OK) return free(v), status;
    Py_INCREF(text);
    v->text = text;
    *values = v;
    return FA_OK;
}

fa_flex_values *fa_flex_bind(PyObject *text, PyObject *tensors, PyObject *numbers, int32_t device_type,
                             int32_t device_idx) {
    fa_error err = {""};
    if (!PyBytes_Check(text) || !PyTuple_Check(tensors) || !PyTuple_Check(numbers)) {
        PyErr_SetString(PyExc_TypeError, "a program is bytes, with a tuple of tensors and a tuple of numbers");
        return NULL;
    }
    fa_flex_values *v = NULL;
    fa_status status = take_values(text, &v, &err);
    if (status != FA_OK) return fa_raise(status, &err), NULL;
    if (PyTuple_Size(tensors) != v->program.num_captures || PyTuple_Size(numbers) != v->program.num_params)
        status = fa_fail(&err, FA_EINVAL, "the program needs %d tensors and %d numbers; it got %d and %d",
                         v->program.num_captures, v->program.num_params, (int)PyTuple_Size(tensors),
                         (int)PyTuple_Size(numbers));
    v->device_type = device_type, v->device_idx = device_idx;
    for (int i = 0; status == FA_OK && i < v->program.num_captures; i++)
        status = read_capture(v, PyTuple_GetItem(tensors, i), i, &err);
    bool done = status == FA_OK;
    for (int i = 0; done && i < v->program.num_params; i++) done = bind_param(v, PyTuple_GetItem(numbers, i), i);
    v->bound = (fa_flex_bound){&v->program, v->captures, v->params};
    if (done) return v;
    fa_flex_unbind(v);
    if (status != FA_OK) fa_raise(status, &err);
    return NULL;
}

static fa_status read_gradient(const fa_flex_values *v, PyObject *object, int i, void **data, fa_error *err) {
    fa_flex_tensor tensor;
    const int64_t rank = v->program.captures[i].rank;
    int64_t size[FA_FLEX_MAX_RANK], stride[FA_FLEX_MAX_RANK];
    const fa_flex_type type = fa_flex_type_of(v->program.captures[i].dtype);
    TRY(fa_flex_read_tensor(object, "a gradient", &tensor, err));
    if (!present(&tensor.t)) return FA_OK;
    TRY(check_place(&tensor.t, v, "a gradient", err));
    REQUIRE(tensor.t.ndim == v->ndim[i] && fit_rank(&tensor.t, rank, size, stride) &&
                memcmp(size, v->captures[i].size, (size_t)rank * sizeof *size) == 0,
            "a gradient must have the shape of its capture");
    REQUIRE(type >= FA_FLEX_F32 && fa_flex_has_dtype(object, &tensor.t, fa_flex_result_names[type]) &&
                contiguous(&tensor.t),
            "the gradient of a capture must be contiguous and of dtype %s", fa_flex_result_names[type]);
    *data = is_empty(&tensor.t) ? NULL : tensor.t.data;
    return FA_OK;
}

fa_status fa_flex_read_gradients(const fa_flex_values *v, PyObject *tensors, void **data, fa_error *err) {
    if (tensors == Py_None) return FA_OK;
    REQUIRE(PyTuple_Check(tensors) && PyTuple_Size(tensors) == v->program.num_captures,
            "gradients must be a tuple of as many tensors as the derivative has: %d", v->program.num_captures);
    for (int i = 0; i < v->program.num_captures; i++)
        TRY(read_gradient(v, PyTuple_GetItem(tensors, i), i, &data[i], err));
    return FA_OK;
}

fa_flex_type fa_flex_type_of_score(const fa_flex_program *p) {
    for (int32_t i = 0; i < p->num_instructions; i++)
        if (p->instructions[i].op == FA_FLEX_score) return (fa_flex_type)p->instructions[i].type;
    return FA_FLEX_NUM_TYPES;
}
