/* The five positional functions of the flash-attn 2 extension.
 *
 * Each function is a row of a table. The row holds the arguments with their types, the op, and the tensors to allocate
 * if the caller passes None. The op's arguments are found by their names. Types are checked as a binding generator
 * would check them. The op does all other checks. */
#include "positional.h"

#include <string.h>

#include "failures.h"
#include "ops.h"

typedef enum { END, TENSOR, TENSOR_OR_NONE, FLOAT, BOOL, INT, GENERATOR } slot_kind;

typedef struct {
    const char *name;
    slot_kind kind;
    const char *op_name; /* name of the op's argument; NULL: the same name */
} slot;

#define MAX_SLOTS 24
#define MAX_MADE  3

typedef struct {
    const char *name, *op;
    int num_required;
    slot slots[MAX_SLOTS];
    /* Tensors that the op writes. If None, the tensor is allocated like the argument `like`. These tensors are returned
     * before the op's results. */
    struct {
        const char *name, *like;
    } made[MAX_MADE];
} function;

/* Arguments that several functions share. clang-format mistakes their braces for blocks. */
/* clang-format off */
#define Q_K_V         {"q", TENSOR, NULL}, {"k", TENSOR, NULL}, {"v", TENSOR, NULL}
#define OUT_OR_NONE   {"out", TENSOR_OR_NONE, NULL}
#define SAVED         {"dout", TENSOR, NULL}, Q_K_V, {"out", TENSOR, NULL}, {"softmax_lse", TENSOR, NULL}
#define GRADIENTS     {"dq", TENSOR_OR_NONE, NULL}, {"dk", TENSOR_OR_NONE, NULL}, {"dv", TENSOR_OR_NONE, NULL}
#define CU_SEQLENS    {"cu_seqlens_q", TENSOR, NULL}, {"cu_seqlens_k", TENSOR, NULL}
#define MAX_SEQLENS   {"max_seqlen_q", INT, NULL}, {"max_seqlen_k", INT, NULL}
#define CACHE_OPTIONS {"leftpad_k", TENSOR_OR_NONE, NULL}, {"block_table", TENSOR_OR_NONE, NULL}
#define ALIBI         {"alibi_slopes", TENSOR_OR_NONE, NULL}
#define DROPOUT_SCALE {"p_dropout", FLOAT, "dropout_p"}, {"softmax_scale", FLOAT, NULL}
#define MASK          {"is_causal", BOOL, "causal"}, {"window_size_left", INT, NULL}, \
                      {"window_size_right", INT, NULL}, {"softcap", FLOAT, NULL}
#define NO_GENERATOR  {"generator", GENERATOR, NULL}

enum { FWD, VARLEN_FWD, BWD, VARLEN_BWD, FWD_KVCACHE, NUM_FUNCTIONS };

static const function functions[NUM_FUNCTIONS] = {
    [FWD] = {"fwd", "fwd", 13,
             {Q_K_V, OUT_OR_NONE, ALIBI, DROPOUT_SCALE, MASK, {"return_softmax", BOOL, NULL}, NO_GENERATOR},
             {{"out", "q"}}},
    [VARLEN_FWD] = {"varlen_fwd", "varlen_fwd", 21,
                    {Q_K_V, OUT_OR_NONE, CU_SEQLENS, {"seqused_k", TENSOR_OR_NONE, NULL}, CACHE_OPTIONS, ALIBI,
                     MAX_SEQLENS, DROPOUT_SCALE, {"zero_tensors", BOOL, NULL}, MASK, {"return_softmax", BOOL, NULL},
                     NO_GENERATOR, {"num_splits", INT, NULL}},
                    {{"out", "q"}}},
    [BWD] = {"bwd", "_flash_attn_backward", 19,
             {SAVED, GRADIENTS, ALIBI, DROPOUT_SCALE, MASK, {"deterministic", BOOL, NULL}, NO_GENERATOR,
              {"rng_state", TENSOR_OR_NONE, NULL}},
             {{"dq", "q"}, {"dk", "k"}, {"dv", "v"}}},
    [VARLEN_BWD] = {"varlen_bwd", "_flash_attn_varlen_backward", 24,
                    {SAVED, GRADIENTS, CU_SEQLENS, ALIBI, MAX_SEQLENS, DROPOUT_SCALE, {"zero_tensors", BOOL, NULL},
                     MASK, {"deterministic", BOOL, NULL}, NO_GENERATOR, {"rng_state", TENSOR_OR_NONE, NULL}},
                    {{"dq", "q"}, {"dk", "k"}, {"dv", "v"}}},
    [FWD_KVCACHE] = {"fwd_kvcache", "fwd_kvcache", 20,
                     {{"q", TENSOR, NULL}, {"k_cache", TENSOR, NULL}, {"v_cache", TENSOR, NULL},
                      {"k", TENSOR_OR_NONE, NULL}, {"v", TENSOR_OR_NONE, NULL},
                      {"seqlens_k", TENSOR_OR_NONE, "cache_seqlens"},
                      {"rotary_cos", TENSOR_OR_NONE, NULL}, {"rotary_sin", TENSOR_OR_NONE, NULL},
                      {"cache_batch_idx", TENSOR_OR_NONE, NULL}, {"leftpad_k", TENSOR_OR_NONE, "cache_leftpad"},
                      {"block_table", TENSOR_OR_NONE, NULL}, ALIBI, OUT_OR_NONE,
                      {"softmax_scale", FLOAT, NULL}, MASK, {"is_rotary_interleaved", BOOL, "rotary_interleaved"},
                      {"num_splits", INT, NULL}},
                     {{"out", "q"}}},
};
/* clang-format on */

/* Argument i of a function's op is the function's argument op_slots[i]. */
static struct {
    int op_slots[FA_MAX_ARGUMENTS], num_op_slots;
} maps[NUM_FUNCTIONS];

static PyObject *op_callables[NUM_FUNCTIONS];

static int num_slots(const function *f) {
    int n = 0;
    while (n < MAX_SLOTS && f->slots[n].kind != END) n++;
    return n;
}

/* Returns the index of the argument with this name, or -1. */
static int slot_of(const function *f, const char *name, bool of_the_op) {
    for (int i = 0; i < num_slots(f); i++)
        if (strcmp(of_the_op && f->slots[i].op_name ? f->slots[i].op_name : f->slots[i].name, name) == 0) return i;
    return -1;
}

fa_status fa_positional_load(fa_error *err) {
    for (int which = 0; which < NUM_FUNCTIONS; which++) {
        const function *f = &functions[which];
        const fa_signature *signature = fa_find_op(f->op);
        maps[which].num_op_slots = signature->num_slots;
        for (int i = 0; i < signature->num_slots; i++) {
            maps[which].op_slots[i] = slot_of(f, signature->slots[i].name, true);
            if (maps[which].op_slots[i] < 0)
                return fa_fail(err, FA_EFAILED, "%s() has no argument %s, which its op wants", f->name,
                               signature->slots[i].name);
        }
    }
    return FA_OK;
}

static PyObject *type_error(const function *f, int i, const char *allowed, PyObject *came) {
    PyObject *type = (PyObject *)Py_TYPE(came), *name = PyObject_GetAttrString(type, "__name__");
    if (name)
        PyErr_Format(PyExc_TypeError, "%s(): incompatible function arguments: argument %d (%s) must be %s, not %U",
                     f->name, i + 1, f->slots[i].name, allowed, name);
    Py_XDECREF(name);
    return NULL;
}

/* Converts an argument to the type of the op's schema. Returns a new reference, or NULL with a TypeError. */
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
    for (int m = 0; m < MAX_MADE && f->made[m].name; m++) {
        PyObject **made = &values[slot_of(f, f->made[m].name, false)];
        if (*made != Py_None) continue;
        PyObject *fresh =
            PyObject_CallMethod(fa_torch_module, "empty_like", "O", values[slot_of(f, f->made[m].like, false)]);
        if (!fresh) goto cleanup;
        Py_DECREF(*made);
        *made = fresh;
    }

    if (!op_callable(which) || !(op_args = PyTuple_New(maps[which].num_op_slots))) goto cleanup;
    for (int i = 0; i < maps[which].num_op_slots; i++) {
        PyObject *value = values[maps[which].op_slots[i]];
        Py_INCREF(value);
        PyTuple_SetItem(op_args, i, value);
    }
    if (!(result = PyObject_Call(op_callables[which], op_args, NULL))) fa_mend_exception();
    if (!result || !(list = PyList_New(0))) goto cleanup;
    for (int m = 0; m < MAX_MADE && f->made[m].name; m++)
        if (PyList_Append(list, values[slot_of(f, f->made[m].name, false)]) < 0) goto failed;
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
