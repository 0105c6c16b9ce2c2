/* Python calls the ops here without torch's dispatcher, which takes longer than all the rest of a small call.
 *
 * A direct call is right only if its effects equal those of the op. The tensors must be plain tensors. No tracer, mode,
 * functorch transform, forward-mode AD, profiler or observer may watch the op, no foreign kernel may replace it, and
 * autocast must leave the tensors as they are.
 * In all other cases, and if an argument is wrong, a function here returns None and has done nothing. Then the caller
 * calls the op. The caller also looks for torch.compile, which must not trace into this file.
 *
 * Tensors are read through torch's table of C functions for DLPack, and before torch 2.10 through the C shim. Results
 * are torch's own tensors, made as for an op. If this torch lacks a function that is needed, a call returns None. */
#include "direct.h"

#include <string.h>

#include "check.h"
#include "dlpack.h"
#include "execute.h"
#include "failures.h"
#include "older_torch.h"
#include "ops.h"
#include "plans.h"
#include "python_tensors.h"

/* ---- objects and functions of torch, found at the first call ----------------------------------------------------- */

static const fa_dl_exchange *exchange;  /* NULL: this torch has no such table, as before 2.10 */
static PyObject *layout_name, *strided; /* of tensors that are read without the table */
static PyObject *watchers[3], *num_function_modes, *function_mode_at, *default_device;
static PyObject *autocast_is_enabled;
static PyObject *forward_ad, *forward_ad_globals, *level_name, *requires_grad_name;
static PyObject *python_kernels;     /* torch.library's set of "namespace/op/dispatch key" */
static PyObject *empty_strided_cuda; /* NULL: this torch has no such function */
static PyObject *dtype_f16, *dtype_bf16, *dtype_f32;
static enum { UNKNOWN, FOUND, MISSING } state;

/* Returns a new reference to an attribute of a module, or NULL. */
static PyObject *find(const char *module, const char *name) {
    PyObject *from = PyImport_ImportModule(module);
    PyObject *found = from ? PyObject_GetAttrString(from, name) : NULL;
    Py_XDECREF(from);
    return found;
}

/* Returns torch's table of C functions for DLPack, which lives as long as the process, or NULL. */
static const fa_dl_exchange *find_exchange(void) {
    PyObject *capsule = fa_torch_registers_ops() ? PyObject_GetAttrString(fa_tensor_type, "__dlpack_c_exchange_api__")
                                                 : NULL; /* both came with 2.10 */
    const fa_dl_exchange *table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    return table && table->major == 1 && table->from_object ? table : NULL;
}

static bool find_all(void) {
    empty_strided_cuda = find("torch._C._dynamo.guards", "_empty_strided_cuda");
    PyErr_Clear();
    exchange = find_exchange();
    PyErr_Clear();
    return fa_find_tensors() && fa_torch.has_record_callbacks && (layout_name = PyUnicode_InternFromString("layout")) &&
           (strided = find("torch", "strided")) && (python_kernels = find("torch.library", "_impls")) &&
           PyAnySet_Check(python_kernels) && (watchers[0] = find("torch._C", "_len_torch_dispatch_stack")) &&
           (watchers[1] = find("torch._C", "_are_functorch_transforms_active")) &&
           (watchers[2] = find("torch._C", "_is_tracing")) &&
           (num_function_modes = find("torch._C", "_len_torch_function_stack")) &&
           (function_mode_at = find("torch._C", "_get_function_stack_at")) &&
           (autocast_is_enabled = find("torch", "is_autocast_enabled")) &&
           (default_device = find("torch.utils._device", "DeviceContext")) && (dtype_f16 = find("torch", "float16")) &&
           (dtype_bf16 = find("torch", "bfloat16")) && (dtype_f32 = find("torch", "float32")) &&
           (forward_ad = PyImport_ImportModule("torch.autograd.forward_ad")) &&
           (forward_ad_globals = PyModule_GetDict(forward_ad)) &&
           (level_name = PyUnicode_InternFromString("_current_level")) &&
           (requires_grad_name = PyUnicode_InternFromString("requires_grad"));
}

static bool is_possible(void) {
    if (state == UNKNOWN) state = find_all() ? FOUND : MISSING;
    return state == FOUND;
}

static bool is_true(PyObject *object) {
    const bool truth = !object || PyObject_IsTrue(object) != 0; /* a failure counts as true */
    Py_XDECREF(object);
    return truth;
}

/* Does a __torch_function__ mode look at ops? The mode of a default device looks only at factory functions. */
static bool has_function_mode(long num) {
    for (long i = 0; i < num; i++) {
        PyObject *mode = PyObject_CallFunction(function_mode_at, "l", i);
        const bool looks = !mode || (PyObject *)Py_TYPE(mode) != default_device;
        Py_XDECREF(mode);
        if (looks) return true;
    }
    return false;
}

/* Asks through Python, which takes 0.8 us of a call of 11 us on an H100's host. */
static bool is_watched_says_python(void) {
    for (size_t i = 0; i < sizeof watchers / sizeof *watchers; i++)
        if (is_true(PyObject_CallObject(watchers[i], NULL))) return true;
    PyObject *number = PyObject_CallObject(num_function_modes, NULL);
    const long num = number ? PyLong_AsLong(number) : 1;
    Py_XDECREF(number);
    return has_function_mode(num);
}

static bool has_key_of_ours(void) {
    PyObject *keys = PySequence_List(python_kernels), *name = PyUnicode_FromFormat("%s/", fa_ops.name_space);
    bool found = !keys || !name;
    for (Py_ssize_t i = 0; !found && i < PyList_Size(keys); i++)
        found = PyUnicode_Tailmatch(PyList_GetItem(keys, i), name, 0, PY_SSIZE_T_MAX, -1) != 0; /* -1: failed */
    Py_XDECREF(keys);
    Py_XDECREF(name);
    return found;
}

/* Has foreign code given torch.library a kernel for one of our ops? flash_attn removes its own kernels from the set.
 * The set has thousands of members, so it is searched only when their number changes. If one kernel replaces another,
 * the number stays. The new kernel is still found if it serves the call's op and device. */
static bool is_overridden(PyObject *key) {
    static Py_ssize_t looked_through = -1;
    static bool has_ours;
    const Py_ssize_t size = PySet_Size(python_kernels);
    if (size != looked_through) has_ours = has_key_of_ours(), looked_through = size;
    return has_ours || PySet_Contains(python_kernels, key) != 0;
}

static bool is_watched(void) {
    const fa_torch_abi *t = &fa_torch;
    if (t->has_record_callbacks()) return true;
    if (!t->tells_states) {
        if (is_watched_says_python()) return true;
    } else {
        const void *const *layers = t->functorch_layers();
        if (t->num_dispatch_modes() > 0 || layers[0] != layers[1] || *t->tracing_state() ||
            has_function_mode((long)t->num_function_modes()))
            return true;
    }
    PyObject *level = PyDict_GetItemWithError(forward_ad_globals, level_name); /* borrowed */
    return !level || PyLong_AsLong(level) >= 0;
}

/* Does autocast cast tensors of this device? */
static bool is_autocast_enabled(int32_t device_type) {
    if (fa_torch.is_autocast_enabled) return fa_torch.is_autocast_enabled((int8_t)device_type);
    return is_true(PyObject_CallFunction(autocast_is_enabled, "s", device_type == fa_torch.cuda ? "cuda" : "cpu"));
}

bool fa_is_unseen(void) {
    const bool is_unseen =
        is_possible() && !is_watched() && !is_autocast_enabled(fa_torch.cpu) && !is_autocast_enabled(fa_torch.cuda);
    PyErr_Clear();
    return is_unseen;
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static int32_t dtype_of(const fa_dl_tensor *t) {
    if (t->dtype_lanes != 1) return -1;
    switch (t->dtype_code << 8 | t->dtype_bits) {
    case FA_DL_FLOAT << 8 | 16: return fa_torch.f16;
    case FA_DL_BFLOAT << 8 | 16: return fa_torch.bf16;
    case FA_DL_FLOAT << 8 | 32: return fa_torch.f32;
    case FA_DL_FLOAT << 8 | 64: return fa_torch.f64;
    case FA_DL_E4M3 << 8 | 8: return fa_torch.e4m3;
    case FA_DL_INT << 8 | 32: return fa_torch.i32;
    case FA_DL_INT << 8 | 64: return fa_torch.i64;
    default: return -1;
    }
}

static bool read_by_dlpack(PyObject *object, fa_tensor *t) {
    fa_dl_tensor dl;
    if (exchange->from_object(object, &dl) != 0) return false;
    const bool on_gpu = dl.device_type == FA_DL_CUDA;
    if (!on_gpu && dl.device_type != FA_DL_CPU) return false;
    t->handle = fa_handle_of(object);
    t->data = (char *)dl.data + dl.byte_offset;
    t->ndim = dl.ndim;
    t->size = dl.shape;
    t->stride = dl.strides;
    t->dtype = dtype_of(&dl);
    t->device_type = on_gpu ? fa_torch.cuda : fa_torch.cpu;
    t->device_idx = on_gpu ? dl.device_idx : -1;
    return t->dtype >= 0;
}

/* The shim prints a line if it is asked for strides or memory that a tensor does not have. So sparse tensors and those
 * of other devices are refused before. */
static bool read_by_shim(PyObject *object, fa_tensor *t) {
    PyObject *layout = PyObject_GetAttr(object, layout_name);
    const bool has_strides = layout == strided;
    Py_XDECREF(layout);
    if (!has_strides) return false;
    fa_tensor_read(fa_handle_of(object), t);
    return (t->device_type == fa_torch.cpu || t->device_type == fa_torch.cuda) &&
           fa_torch.torch_get_const_data_ptr(t->handle, (const void **)&t->data) == 0;
}

/* Reads a torch.Tensor. Subclasses are refused, because a subclass may want to see the op. A tensor with the negative
 * flag is refused too: its values are the negatives of its memory.
 * NOTE: some torch releases do not tell this flag. The imaginary part of a conjugate is such a tensor. Its columns do
 * not lie side by side, and the checks refuse such columns. This function refuses tensors of one column.
 * torch._neg_view can make other such tensors. Autograd's zero tensors have no memory, and the checks refuse them. */
static bool read_tensor(PyObject *object, fa_tensor *t) {
    if ((PyObject *)Py_TYPE(object) != fa_tensor_type) return false;
    if (!(exchange ? read_by_dlpack(object, t) : read_by_shim(object, t))) return false;
    const bool is_index = t->dtype == fa_torch.i32 || t->dtype == fa_torch.i64;
    if (!is_index && t->ndim > 0 && t->size[t->ndim - 1] == 1) return false;
    return !(fa_torch.knows_tensors && fa_torch.is_negative(t->handle));
}

static bool read_number(PyObject *object, double *number) {
    if (!PyFloat_CheckExact(object) && !PyLong_CheckExact(object)) return false;
    *number = PyFloat_AsDouble(object);
    return !PyErr_Occurred();
}

static bool read_integer(PyObject *object, int64_t *number) {
    if (!object || !PyLong_CheckExact(object)) return false;
    *number = PyLong_AsLongLong(object);
    return !PyErr_Occurred();
}

/* Reads the first `num` arguments in the order of the op's schema. A forward gets no out. The sides of a window may
 * come as one tuple. The lengths may come as one number. *length is this number, or stays -1. */
static bool read_arguments(const fa_signature *signature, PyObject *args, Py_ssize_t num, fa_call *call,
                           int64_t *length) {
    Py_ssize_t at = 0;
    for (int i = 0; i < signature->num_slots; i++) {
        const fa_slot *s = &signature->slots[i];
        void *place = (char *)call + s->place;
        if (place == &call->out && signature->pass == FA_FWD) continue;
        if (at == num) return false;
        PyObject *object = PyTuple_GetItem(args, at++);
        if (object == Py_None && (place == &call->k || place == &call->v)) continue; /* split_parts asks for it */
        if (s->is_optional && object == Py_None) {
            if (s->kind == FA_SLOT_FLOAT) call->default_scale = true;
            continue;
        }
        switch (s->kind) {
        case FA_SLOT_TENSOR:
            if (place == &call->seqused_k && PyLong_CheckExact(object)) {
                if (!read_integer(object, length) || *length < 0 || *length > INT32_MAX) return false;
            } else if (!read_tensor(object, place)) {
                return false;
            }
            break;
        case FA_SLOT_FLOAT:
            if (!read_number(object, place)) return false;
            break;
        case FA_SLOT_BOOL:
            if (!PyBool_Check(object)) return false;
            *(bool *)place = object == Py_True;
            break;
        case FA_SLOT_INT:
            if (place == &call->window_left && PyTuple_CheckExact(object)) {
                if (PyTuple_Size(object) != 2 || !read_integer(PyTuple_GetItem(object, 0), &call->window_left) ||
                    !read_integer(PyTuple_GetItem(object, 1), &call->window_right))
                    return false;
                i++; /* window_right */
            } else if (!read_integer(object, place)) {
                return false;
            }
            break;
        }
    }
    return at == num;
}

enum { MAX_NDIM = 4 };

/* The sizes and strides of q, k or v in a tensor that packs them. */
typedef struct {
    int64_t size[MAX_NDIM], stride[MAX_NDIM];
} part_layout;

/* Makes k and v, and perhaps q, of the one tensor that packs them: q is [.., 3, h, d] and k and v are absent, or k is
 * [.., 2, h_kv, d] and v is absent. No views are made, which would take torch 2 us. Returns whether q, k and v are
 * there now. */
static bool split_parts(fa_call *call, part_layout *layout) {
    fa_tensor *const parts[] = {&call->q, &call->k, &call->v};
    const int first = present(&call->k) ? 1 : 0;
    const fa_tensor whole = *parts[first];
    const int64_t dim = call->layout == FA_OP_VARLEN ? 1 : 2;
    fa_error unused;
    if (present(&call->v)) return present(&call->k);
    if (call->pass != FA_FWD || (call->layout != FA_OP_VARLEN && call->layout != FA_OP_DENSE)) return false;
    if (whole.ndim != dim + 3 || whole.size[dim] != 3 - first) return false;
    if (check_memory(&whole, &unused) != FA_OK)
        return false; /* otherwise the checks of the parts see the same storage */
    for (int64_t i = 0; i < dim + 2; i++) {
        layout->size[i] = whole.size[i < dim ? i : i + 1];
        layout->stride[i] = whole.stride[i < dim ? i : i + 1];
    }
    const int64_t step = whole.stride[dim] * bytes_of_dtype(whole.dtype);
    for (int i = first; i < 3; i++) {
        const char *name = parts[i]->name;
        *parts[i] = whole;
        parts[i]->name = name;
        if (whole.data) parts[i]->data = (char *)whole.data + (i - first) * step;
        parts[i]->ndim = whole.ndim - 1;
        parts[i]->size = layout->size, parts[i]->stride = layout->stride;
    }
    return true;
}

static bool requires_grad(const fa_tensor *t) {
    if (!t->handle) return false;
    if (fa_torch.knows_tensors) return fa_torch_requires_grad(t->handle);
    return is_true(PyObject_GetAttr(fa_object_of(t->handle), requires_grad_name));
}

static bool wants_gradients(const fa_call *call) {
    return fa_torch.aoti_torch_grad_mode_is_enabled() &&
           (requires_grad(&call->q) || requires_grad(&call->k) || requires_grad(&call->v) ||
            requires_grad(&call->k_new) || requires_grad(&call->v_new) || requires_grad(&call->qv));
}

/* Does a call whose op drops all gradients drop that of a table or factor? Python warns of it. */
static bool drops_gradients(const fa_call *call) {
    if (!fa_torch.aoti_torch_grad_mode_is_enabled()) return false;
    const bool is_fp8 = call->q.dtype == fa_torch.e4m3; /* other dtypes ignore the descales */
    return requires_grad(&call->rotary_cos) || requires_grad(&call->rotary_sin) || requires_grad(&call->alibi_slopes) ||
           (is_fp8 &&
            (requires_grad(&call->q_descale) || requires_grad(&call->k_descale) || requires_grad(&call->v_descale)));
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

/* Returns (sizes, strides, dtype) of a contiguous tensor, as Python's functions take them. The last tuple is kept. The
 * reference is borrowed. NULL: there is an exception. */
static PyObject *contiguous_layout(const fa_tensor *t, PyObject *dtype) {
    static int64_t last_ndim, last_size[MAX_NDIM];
    static PyObject *last_dtype, *last;
    const size_t bytes = (size_t)t->ndim * sizeof *t->size;
    if (last && dtype == last_dtype && t->ndim == last_ndim && memcmp(t->size, last_size, bytes) == 0) return last;
    PyObject *sizes = PyTuple_New(t->ndim), *strides = PyTuple_New(t->ndim);
    for (int64_t i = t->ndim - 1; i >= 0 && sizes && strides; i--) {
        PyTuple_SetItem(sizes, i, PyLong_FromLongLong(t->size[i]));
        PyTuple_SetItem(strides, i, PyLong_FromLongLong(t->stride[i]));
    }
    Py_CLEAR(last);
    if (sizes && strides && !PyErr_Occurred()) last = PyTuple_Pack(3, sizes, strides, dtype);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    last_dtype = dtype, last_ndim = t->ndim;
    memcpy(last_size, t->size, bytes);
    return last;
}

static bool is_contiguous(const fa_tensor *t) {
    int64_t step = 1;
    for (int64_t i = t->ndim - 1; i >= 0; i--) {
        if (t->stride[i] != step) return false;
        step *= t->size[i] > 1 ? t->size[i] : 1;
    }
    return true;
}

static bool has_columns_of(const fa_tensor *v, const fa_tensor *q) {
    return v->ndim > 0 && q->ndim > 0 && v->size[v->ndim - 1] == q->size[q->ndim - 1];
}

/* Makes the call's out if q is contiguous and lies on the current GPU. Inductor's code calls the same function, which
 * avoids the dispatcher and saves 0.4 us. In all other cases, and after a failure, outputs.c makes out. Returns a new
 * reference, or NULL. */
static PyObject *bring_out(const fa_tensor *q, fa_call *call) {
    PyObject *dtype = q->dtype == fa_torch.bf16  ? dtype_bf16
                      : q->dtype == fa_torch.f16 ? dtype_f16
                      : q->dtype == fa_torch.f32 ? dtype_f32
                                                 : NULL;
    PyObject *layout, *out = NULL;
    fa_tensor t = call->out;
    if (!empty_strided_cuda || call->pass != FA_FWD || q->device_type != fa_torch.cuda || !dtype ||
        q->ndim > MAX_NDIM || !is_contiguous(q) || !has_columns_of(&call->v, q))
        return NULL;
    if ((layout = contiguous_layout(q, dtype))) out = PyObject_Call(empty_strided_cuda, layout, NULL);
    if (out && read_tensor(out, &t) && t.device_type == q->device_type && t.device_idx == q->device_idx) {
        call->out = t, call->fresh_out = true;
    } else {
        PyErr_Clear();
        Py_CLEAR(out);
    }
    return out;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

/* Returns the key that a kernel of the function's op has in torch.library's set. The reference is borrowed. NULL: there
 * is an exception. */
static PyObject *kernel_key(fa_direct_function *f, bool on_gpu) {
    PyObject **key = &f->keys[on_gpu];
    if (!*key) *key = PyUnicode_FromFormat("%s/%s/%s", fa_ops.name_space, f->instead_of, on_gpu ? "CUDA" : "CPU");
    return *key;
}

/* Does a forward without the results of dropout get dropout? The op serves the call. */
static bool wants_dropout(const fa_call *call) {
    return call->pass == FA_FWD && !call->has_dropout && (call->dropout_p != 0 || call->return_softmax);
}

/* Does autocast give a forward's tensors another dtype? Only Python casts. The ops of flash-attn 3 ignore autocast. */
static bool is_cast(const fa_signature *signature, const fa_call *call) {
    const int32_t device_type = call->q.device_type;
    if (signature->pass == FA_BWD || call->layout == FA_OP_3) return false;
    return is_autocast_enabled(device_type) &&
           !(fa_torch.autocast_dtype && fa_torch.autocast_dtype((int8_t)device_type) == call->q.dtype);
}

PyObject *fa_call_directly(fa_direct_function *f, PyObject *args) { return fa_call_directly_with(f, args, 0, NULL); }

PyObject *fa_call_directly_with(fa_direct_function *f, PyObject *args, int num_further, fa_direct_execute *execute) {
    if (!f->signature) f->signature = fa_find_op(f->op);
    const fa_signature *signature = f->signature;
    fa_call call;
    part_layout layout;
    fa_outputs outputs = {.num = 0};
    fa_error err = {""};
    fa_status status = FA_OK;
    int64_t length = -1;
    const Py_ssize_t num = PyTuple_Size(args) - num_further;
    PyObject *out = NULL, *further[FA_MOST_FURTHER];
    if (!is_possible() || num < 0) goto refuse;
    for (int i = 0; i < num_further; i++) further[i] = PyTuple_GetItem(args, num + i);
    fa_begin_call(signature, &call);
    call.only_out = f->only_out;
    call.num_results = 0; /* only the results that are read */
    if (is_watched() || !read_arguments(signature, args, num, &call, &length)) goto refuse;
    const bool is_packed = !present(&call.v);
    if (!split_parts(&call, &layout)) goto refuse;
    PyObject *key = kernel_key(f, call.q.device_type == fa_torch.cuda);
    if (!key || is_overridden(key) || wants_dropout(&call) || is_cast(signature, &call)) goto refuse;
    const bool drops_all = f->gradients == FA_GRADIENTS_OF_THE_OP;
    if (f->gradients != FA_GRADIENTS_IGNORED && (wants_gradients(&call) || (drops_all && drops_gradients(&call)))) {
        if (drops_all || is_packed || PyErr_Occurred()) goto refuse; /* the gradient of a tensor comes in one piece */
        call.only_out = false;
    }
    out = bring_out(&call.q, &call);
    if (length >= 0) status = fa_repeat_length((int32_t)length, &call, &err);
    if (status == FA_OK && execute) {
        status = execute(&call, further, &outputs, &err);
    } else if (status == FA_OK) {
        Py_BEGIN_ALLOW_THREADS status = fa_execute(&call, &outputs, &err);
        Py_END_ALLOW_THREADS
    }
    if (length >= 0 && call.seqused_k.handle) fa_torch.aoti_torch_delete_tensor_object(call.seqused_k.handle);
    if (status == FA_OK) return fa_results_of(out, &outputs);
    if (status != FA_EINVAL) { /* the op would fail in the same way, and might write a second time */
        Py_XDECREF(out);
        return fa_raise(status, &err);
    }
refuse:
    Py_XDECREF(out);
    PyErr_Clear();
    Py_RETURN_NONE;
}
