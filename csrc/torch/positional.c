/* The five positional functions of the flash-attn 2 extension.
 *
 * Each is a row: its arguments with their types, the tensors to allocate where the caller left None, and the op it calls
 * with the same arguments in the op's order. Types are checked as a binding generator would; all other checks are the
 * op's own. */
#include "positional.h"

#include "failures.h"

#include <stdbool.h>

typedef enum { END, TENSOR, TENSOR_OR_NONE, FLOAT, BOOL, INT, GENERATOR } slot_kind;

typedef struct {
    const char *name;
    slot_kind kind;
} slot;

#define MAX_SLOTS 24
#define MAX_MADE  3

typedef struct {
    const char *name, *op;
    int num_required;
    slot slots[MAX_SLOTS];
    /* Tensors that the op writes: allocated like another argument if None, and returned before the op's own results. */
    struct {
        signed char slot, like;
    } made[MAX_MADE];
    int num_made;
    /* Argument i of the op is our argument op_slots[i]. */
    signed char op_slots[MAX_SLOTS];
    int num_op_slots;
} function;

#define Q_K_V \
    {"q", TENSOR}, {"k", TENSOR}, { "v", TENSOR }
#define SAVED \
    {"dout", TENSOR}, Q_K_V, {"out", TENSOR}, { "softmax_lse", TENSOR }
#define GRADIENTS \
    {"dq", TENSOR_OR_NONE}, {"dk", TENSOR_OR_NONE}, { "dv", TENSOR_OR_NONE }
#define CU_SEQLENS \
    {"cu_seqlens_q", TENSOR}, { "cu_seqlens_k", TENSOR }
#define ALIBI {"alibi_slopes", TENSOR_OR_NONE}
#define MAX_SEQLENS \
    {"max_seqlen_q", INT}, { "max_seqlen_k", INT }
#define DROPOUT_SCALE \
    {"p_dropout", FLOAT}, { "softmax_scale", FLOAT }
#define MASK \
    {"is_causal", BOOL}, {"window_size_left", INT}, {"window_size_right", INT}, { "softcap", FLOAT }
#define RNG_STATE    {"rng_state", TENSOR_OR_NONE}
#define NO_GENERATOR {"generator", GENERATOR}

enum { FWD, VARLEN_FWD, BWD, VARLEN_BWD, FWD_KVCACHE, NUM_FUNCTIONS };

static const function functions[NUM_FUNCTIONS] = {
    [FWD] = {"fwd",
             "fwd",
             13,
             {Q_K_V, {"out", TENSOR_OR_NONE}, ALIBI, DROPOUT_SCALE, MASK, {"return_softmax", BOOL}, NO_GENERATOR},
             {{3, 0}},
             1,
             {0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 4, 11},
             12},
    [VARLEN_FWD] = {"varlen_fwd",
                    "varlen_fwd",
                    21,
                    {Q_K_V,
                     {"out", TENSOR_OR_NONE},
                     CU_SEQLENS,
                     {"seqused_k", TENSOR_OR_NONE},
                     {"leftpad_k", TENSOR_OR_NONE},
                     {"block_table", TENSOR_OR_NONE},
                     ALIBI,
                     MAX_SEQLENS,
                     DROPOUT_SCALE,
                     {"zero_tensors", BOOL},
                     MASK,
                     {"return_softmax", BOOL},
                     NO_GENERATOR,
                     {"num_splits", INT}},
                    {{3, 0}},
                    1,
                    {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 15, 16, 17, 18, 9, 19, 8, 7, 6, 14, 21},
                    21},
    [BWD] = {"bwd",
             "_flash_attn_backward",
             19,
             {SAVED, GRADIENTS, ALIBI, DROPOUT_SCALE, MASK, {"deterministic", BOOL}, NO_GENERATOR, RNG_STATE},
             {{6, 1}, {7, 2}, {8, 3}},
             3,
             {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 9, 16, 18},
             18},
    [VARLEN_BWD] = {"varlen_bwd",
                    "_flash_attn_varlen_backward",
                    24,
                    {SAVED,
                     GRADIENTS,
                     CU_SEQLENS,
                     ALIBI,
                     MAX_SEQLENS,
                     DROPOUT_SCALE,
                     {"zero_tensors", BOOL},
                     MASK,
                     {"deterministic", BOOL},
                     NO_GENERATOR,
                     RNG_STATE},
                    {{6, 1}, {7, 2}, {8, 3}},
                    3,
                    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18, 19, 20, 11, 21, 23, 16},
                    23},
    [FWD_KVCACHE] = {"fwd_kvcache",
                     "fwd_kvcache",
                     20,
                     {{"q", TENSOR},
                      {"k_cache", TENSOR},
                      {"v_cache", TENSOR},
                      {"k", TENSOR_OR_NONE},
                      {"v", TENSOR_OR_NONE},
                      {"seqlens_k", TENSOR_OR_NONE},
                      {"rotary_cos", TENSOR_OR_NONE},
                      {"rotary_sin", TENSOR_OR_NONE},
                      {"cache_batch_idx", TENSOR_OR_NONE},
                      {"leftpad_k", TENSOR_OR_NONE},
                      {"block_table", TENSOR_OR_NONE},
                      ALIBI,
                      {"out", TENSOR_OR_NONE},
                      {"softmax_scale", FLOAT},
                      MASK,
                      {"is_rotary_interleaved", BOOL},
                      {"num_splits", INT}},
                     {{12, 0}},
                     1,
                     {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19},
                     20},
};

static PyObject *op_callables[NUM_FUNCTIONS];

static int num_slots(const function *f) {
    int n = 0;
    while (n < MAX_SLOTS && f->slots[n].kind != END) n++;
    return n;
}

static PyObject *type_error(const function *f, int i, const char *allowed, PyObject *came) {
    PyObject *type = (PyObject *)Py_TYPE(came), *name = PyObject_GetAttrString(type, "__name__");
    if (name)
        PyErr_Format(PyExc_TypeError, "%s(): incompatible function arguments: argument %d (%s) must be %s, not %U",
                     f->name, i + 1, f->slots[i].name, allowed, name);
    Py_XDECREF(name);
    return NULL;
}

/* A new reference to the argument in the type that the op's schema wants, or NULL with a TypeError. */
static PyObject *convert(const function *f, int i, PyObject *value) {
    PyObject *converted = value;
    int is_tensor;
    switch (f->slots[i].kind) {
    case TENSOR_OR_NONE:
        if (value == Py_None) break;
        /* fall through */
    case TENSOR:
        is_tensor = PyObject_IsInstance(value, fa_tensor_type);
        if (is_tensor < 0) return NULL;
        if (!is_tensor)
            return type_error(f, i, f->slots[i].kind == TENSOR ? "a torch.Tensor" : "a torch.Tensor or None", value);
        break;
    case FLOAT:
        if (PyFloat_Check(value)) break;
        converted = PyUnicode_Check(value) ? NULL : PyNumber_Float(value);
        PyErr_Clear();
        return converted ? converted : type_error(f, i, "a float", value);
    case INT:
        converted = PyNumber_Index(value);
        PyErr_Clear();
        return converted ? converted : type_error(f, i, "an int", value);
    case BOOL:
        if (!PyBool_Check(value) && !PyLong_Check(value)) return type_error(f, i, "a bool", value);
        converted = PyObject_IsTrue(value) ? Py_True : Py_False;
        break;
    default: break;
    }
    Py_INCREF(converted);
    return converted;
}

static PyObject *op_callable(int which) {
    if (op_callables[which]) return op_callables[which];
    PyObject *ops = PyObject_GetAttrString(fa_torch_module, "ops");
    PyObject *space = ops ? PyObject_GetAttrString(ops, "flash_attn") : NULL;
    PyObject *packet = space ? PyObject_GetAttrString(space, functions[which].op) : NULL;
    op_callables[which] = packet ? PyObject_GetAttrString(packet, "default") : NULL;
    Py_XDECREF(ops);
    Py_XDECREF(space);
    Py_XDECREF(packet);
    return op_callables[which];
}

static PyObject *call_function(int which, PyObject *args) {
    const function *f = &functions[which];
    const int room = num_slots(f);
    const Py_ssize_t came = PyTuple_Size(args);
    PyObject *values[MAX_SLOTS] = {NULL}, *op_args = NULL, *result = NULL, *list = NULL;

    if (came < f->num_required || came > room)
        return PyErr_Format(
            PyExc_TypeError,
            "%s(): incompatible function arguments: it takes %d%s positional arguments, but %zd were given", f->name,
            f->num_required, room > f->num_required ? " or 1 more" : "", came);
    for (int i = 0; i < came; i++)
        if (f->slots[i].kind == GENERATOR && PyTuple_GetItem(args, i) != Py_None)
            return PyErr_Format(
                PyExc_RuntimeError,
                "%s(): the `generator` argument is no longer supported and must be None; seeds come from "
                "torch's default generator",
                f->name);
    for (int i = 0; i < came; i++)
        if (!(values[i] = convert(f, i, PyTuple_GetItem(args, i)))) goto cleanup;
    for (int i = (int)came; i < room; i++) /* the only argument that may be left out is num_splits */
        if (!(values[i] = PyLong_FromLong(0))) goto cleanup;
    for (int m = 0; m < f->num_made; m++) {
        PyObject **made = &values[(int)f->made[m].slot];
        if (*made != Py_None) continue;
        PyObject *fresh = PyObject_CallMethod(fa_torch_module, "empty_like", "O", values[(int)f->made[m].like]);
        if (!fresh) goto cleanup;
        Py_DECREF(*made);
        *made = fresh;
    }

    if (!op_callable(which) || !(op_args = PyTuple_New(f->num_op_slots))) goto cleanup;
    for (int i = 0; i < f->num_op_slots; i++) {
        Py_INCREF(values[(int)f->op_slots[i]]);
        PyTuple_SetItem(op_args, i, values[(int)f->op_slots[i]]);
    }
    if (!(result = PyObject_Call(op_callables[which], op_args, NULL))) fa_mend_exception();
    if (!result || !(list = PyList_New(0))) goto cleanup;
    for (int m = 0; m < f->num_made; m++)
        if (PyList_Append(list, values[(int)f->made[m].slot]) < 0) goto failed;
    if (PyTuple_Check(result)) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(result); i++)
            if (PyList_Append(list, PyTuple_GetItem(result, i)) < 0) goto failed;
    } else if (PyList_Append(list, result) < 0) {
        goto failed;
    }
    goto cleanup;
failed:
    Py_CLEAR(list);
cleanup:
    for (int i = 0; i < room; i++) Py_XDECREF(values[i]);
    Py_XDECREF(op_args);
    Py_XDECREF(result);
    return list;
}

#define FUNCTION(which)                                             \
    static PyObject *call_##which(PyObject *self, PyObject *args) { \
        (void)self;                                                 \
        return call_function(which, args);                          \
    }
FUNCTION(FWD)
FUNCTION(VARLEN_FWD)
FUNCTION(BWD)
FUNCTION(VARLEN_BWD)
FUNCTION(FWD_KVCACHE)

PyMethodDef fa_positional_functions[] = {
    {"fwd", call_FWD, METH_VARARGS,
     "fwd(q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left, "
     "window_size_right, softcap, return_softmax, generator) -> [out, softmax_lse, S_dmask, rng_state]"},
    {"varlen_fwd", call_VARLEN_FWD, METH_VARARGS,
     "varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, "
     "block_table, alibi_slopes, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, "
     "window_size_left, window_size_right, softcap, return_softmax, generator, num_splits=0) -> [out, softmax_lse, "
     "S_dmask, "
     "rng_state]"},
    {"bwd", call_BWD, METH_VARARGS,
     "bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, "
     "is_causal, window_size_left, window_size_right, softcap, deterministic, generator, rng_state) -> [dq, dk, dv, "
     "softmax_d]"},
    {"varlen_bwd", call_VARLEN_BWD, METH_VARARGS,
     "varlen_bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, "
     "cu_seqlens_k, alibi_slopes, max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, "
     "window_size_left, window_size_right, softcap, deterministic, generator, rng_state) -> [dq, dk, dv, softmax_d]"},
    {"fwd_kvcache", call_FWD_KVCACHE, METH_VARARGS,
     "fwd_kvcache(q, k_cache, v_cache, k, v, seqlens_k, rotary_cos, rotary_sin, "
     "cache_batch_idx, leftpad_k, block_table, alibi_slopes, out, softmax_scale, is_causal, window_size_left, "
     "window_size_right, softcap, is_rotary_interleaved, num_splits) -> [out, softmax_lse]"},
    {NULL, NULL, 0, NULL},
};
