/* The epilogue of learned sinks, and on the CPU the size of biases and the places of packed sequences. A function here
 * returns None if it cannot serve the call, and has done nothing then. Python does the same with torch's functions. */
#include "options.h"

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "cpu/convert.h"
#include "cpu/sinks.h"
#include "failures.h"
#include "flex_values.h"
#include "gpu/bias_shift.h"
#include "gpu/sinks.h"
#include "python_tensors.h"

static bool torch_parallel_for(int64_t n, fa_range_fn *fn, void *ctx) {
    return fa_torch.torch_parallel_for(0, n, 1, fn, ctx) == 0;
}
static const fa_pool pool = {torch_parallel_for};

/* ---- elements ---------------------------------------------------------------------------------------------------- */

static bool is_floating(const fa_tensor *t) {
    return t->dtype == fa_torch.f16 || t->dtype == fa_torch.bf16 || t->dtype == fa_torch.f32 ||
           t->dtype == fa_torch.f64;
}

static fa_dtype dtype_of(const fa_tensor *t) {
    return t->dtype == fa_torch.f16    ? FA_F16
           : t->dtype == fa_torch.bf16 ? FA_BF16
           : t->dtype == fa_torch.f64  ? FA_F64
                                       : FA_F32;
}

static double element(const void *data, fa_dtype dtype, int64_t at) {
    switch (dtype) {
    case FA_F16: return (double)fa_f32_from_f16(((const uint16_t *)data)[at]);
    case FA_BF16: return (double)fa_f32_from_bf16(((const uint16_t *)data)[at]);
    case FA_F64: return ((const double *)data)[at];
    default: return (double)((const float *)data)[at];
    }
}

static void set_element(void *data, fa_dtype dtype, int64_t at, double x) {
    switch (dtype) {
    case FA_F16: ((uint16_t *)data)[at] = fa_f16_from_f32((float)x); break;
    case FA_BF16: ((uint16_t *)data)[at] = fa_bf16_from_f32((float)x); break;
    case FA_F64: ((double *)data)[at] = x; break;
    default: ((float *)data)[at] = (float)x; break;
    }
}

/* ---- sinks ------------------------------------------------------------------------------------------------------- */

typedef struct {
    fa_flex_tensor sinks, out, lse, dout, dlse;
    double *numbers; /* owned: the sinks, then their gradient */
    fa_sinks s;
} sinks_call;

static fa_status read_on_cpu(PyObject *object, const char *name, fa_flex_tensor *t, fa_error *err) {
    TRY(fa_flex_read_tensor(object, name, t, err));
    REQUIRE(!present(&t->t) || (t->t.device_type == fa_torch.cpu && !fa_gpu_imagined()), "%s is not on the CPU", name);
    return FA_OK;
}

/* Reads out, which may lie on a GPU, and the others on its device. */
static fa_status read_beside(const fa_tensor *out, PyObject *object, const char *name, fa_flex_tensor *t,
                             fa_error *err) {
    TRY(fa_flex_read_tensor(object, name, t, err));
    REQUIRE(!present(&t->t) || (t->t.device_type == out->device_type && t->t.device_idx == out->device_idx),
            "%s is not on the device of out", name);
    return FA_OK;
}

/* Reads [b, rows, h, d], or [rows, h, d] of packed sequences. */
static fa_view view_of_rows(const fa_tensor *t) {
    const bool is_packed = t->ndim == 3;
    return (fa_view){t->data, is_packed ? 0 : t->stride[0], .stride_row = t->stride[t->ndim - 3],
                     .stride_h = t->stride[t->ndim - 2]};
}

/* Reads [b, h, rows], or [h, rows]. */
static fa_status read_stats(const sinks_call *c, const fa_tensor *t, fa_row_stats *stats, fa_error *err) {
    const int64_t size[] = {c->s.b, c->s.h, c->s.rows}, is_packed = c->out.t.ndim == 3;
    if (!present(t)) return FA_OK;
    TRY(check_shape(t, 3 - is_packed, size + is_packed, "(b, h, rows)", err));
    REQUIRE(t->dtype == fa_torch.f32, "%s must be fp32", t->name);
    *stats = (fa_row_stats){.data = t->data,
                            .stride_b = is_packed ? 0 : t->stride[0],
                            .stride_h = t->stride[t->ndim - 2],
                            .stride_row = t->stride[t->ndim - 1]};
    REQUIRE(stats->stride_row > 0 || c->s.rows <= 1, "%s repeats its rows", t->name);
    return FA_OK;
}

/* Everything but the values of the sinks. */
static fa_status read_shapes(sinks_call *c, PyObject *sinks, PyObject *out, PyObject *lse, fa_error *err) {
    const fa_tensor *o = &c->out.t, *x = &c->sinks.t;
    TRY(fa_flex_read_tensor(out, "out", &c->out, err));
    TRY(read_beside(o, lse, "softmax_lse", &c->lse, err));
    TRY(read_beside(o, sinks, "sinks", &c->sinks, err));
    REQUIRE(present(o) && present(&c->lse.t) && is_floating(o) && (o->ndim == 3 || o->ndim == 4) &&
                (last_dim_contiguous(o) || is_empty(o)),
            "out must be floating, with heads and contiguous rows");
    c->s = (fa_sinks){.dtype = dtype_of(o),
                      .b = o->ndim == 4 ? o->size[0] : 1,
                      .h = o->size[o->ndim - 2],
                      .rows = o->size[o->ndim - 3],
                      .d = o->size[o->ndim - 1],
                      .out = view_of_rows(o)};
    TRY(read_stats(c, &c->lse.t, &c->s.lse, err));
    REQUIRE(!present(x) || (is_floating(x) && x->ndim == 1 && x->size[0] == c->s.h),
            "sinks must have a floating number for each head");
    return FA_OK;
}

static fa_status read_sinks(sinks_call *c, PyObject *sinks, PyObject *out, PyObject *lse, fa_error *err) {
    const fa_tensor *x = &c->sinks.t;
    TRY(read_shapes(c, sinks, out, lse, err));
    REQUIRE(c->out.t.device_type == fa_torch.cpu && !fa_gpu_imagined(), "out is not on the CPU");
    if (!present(x)) return FA_OK;
    c->numbers = malloc(sizeof(double) * (size_t)(2 * c->s.h + 1));
    if (!c->numbers) return fa_fail(err, FA_ENOMEM, "no memory for sinks");
    for (int64_t h = 0; h < c->s.h; h++) c->numbers[h] = (double)(float)element(x->data, dtype_of(x), h * x->stride[0]);
    c->s.sinks = c->numbers, c->s.gradient = c->numbers + c->s.h;
    return FA_OK;
}

static PyObject *add_sinks_on_gpu(const sinks_call *c) {
    const fa_tensor *x = &c->sinks.t;
    const fa_cuda_sinks s = {.device_idx = c->out.t.device_idx,
                             .dtype = c->s.dtype,
                             .sinks_dtype = present(x) ? dtype_of(x) : FA_F32,
                             .b = c->s.b,
                             .h = c->s.h,
                             .rows = c->s.rows,
                             .d = c->s.d,
                             .out = c->s.out,
                             .lse = c->s.lse,
                             .sinks = present(x) && !is_empty(x) ? x->data : NULL,
                             .sinks_stride = present(x) ? x->stride[0] : 0};
    fa_error err = {""};
    fa_status status;
    if (s.dtype == FA_F64) Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS status = fa_cuda_add_sinks(&s, &err);
    Py_END_ALLOW_THREADS if (status != FA_OK) return fa_raise(status, &err);
    Py_RETURN_TRUE;
}

static PyObject *add_sinks(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *out, *lse, *sinks;
    sinks_call c = {.numbers = NULL};
    fa_error err = {""};
    bool done = false;
    if (!PyArg_UnpackTuple(args, "add_sinks", 3, 3, &out, &lse, &sinks)) return NULL;
    fa_status status = read_shapes(&c, sinks, out, lse, &err);
    if (status == FA_OK && is_on_gpu(&c.out.t)) return add_sinks_on_gpu(&c);
    if (status == FA_OK) status = read_sinks(&c, sinks, out, lse, &err);
    Py_BEGIN_ALLOW_THREADS done = status == FA_OK && fa_cpu_add_sinks(&c.s, &pool);
    Py_END_ALLOW_THREADS free(c.numbers);
    PyErr_Clear();
    if (done) Py_RETURN_TRUE;
    Py_RETURN_NONE;
}

static fa_status read_gradients(sinks_call *c, PyObject *dout, PyObject *dlse, fa_error *err) {
    const fa_tensor *t = &c->dout.t, *o = &c->out.t;
    TRY(read_on_cpu(dout, "dout", &c->dout, err));
    TRY(read_on_cpu(dlse, "dlse", &c->dlse, err));
    REQUIRE(present(t) && c->s.sinks && t->dtype == o->dtype, "dout must have the dtype of out");
    TRY(check_shape(t, o->ndim, o->size, "that of out", err));
    c->s.dout = view_of_rows(t), c->s.dout_stride_d = t->stride[t->ndim - 1];
    return read_stats(c, &c->dlse.t, &c->s.dlse, err);
}

static PyObject *gradient_of_sinks(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *sinks, *out, *lse, *dout, *dlse;
    sinks_call c = {.numbers = NULL};
    fa_error err = {""};
    fa_outputs outputs = {.num = 0};
    void *data = NULL;
    bool done = false;
    if (!PyArg_UnpackTuple(args, "gradient_of_sinks", 5, 5, &sinks, &out, &lse, &dout, &dlse)) return NULL;
    fa_status status = fa_torch.wrap ? read_sinks(&c, sinks, out, lse, &err) : FA_EINVAL;
    if (status == FA_OK) status = read_gradients(&c, dout, dlse, &err);
    if (status == FA_OK)
        status = fa_make_output(&outputs, &c.sinks.t, 1, &c.s.h, (int64_t[]){1}, c.sinks.t.dtype, &data, &err);
    Py_BEGIN_ALLOW_THREADS done = status == FA_OK && fa_cpu_gradient_of_sinks(&c.s, &pool);
    Py_END_ALLOW_THREADS for (int64_t h = 0; done && h < c.s.h; h++)
        set_element(data, dtype_of(&c.sinks.t), h, c.s.gradient[h]);
    free(c.numbers);
    PyErr_Clear();
    if (done) return fa_results_of(NULL, &outputs);
    fa_drop_outputs(&outputs);
    Py_RETURN_NONE;
}

/* ---- low biases -------------------------------------------------------------------------------------------------- */

/* Is the largest bias of every row at least `least`, or -inf? With any_prefix: of all first keys of a row, however many
 * they are, because a causal mask may cut a bias of keys alone. A NaN may make it false. */
static bool is_high(const fa_tensor *t, double least, bool any_prefix) {
    const fa_dtype dtype = dtype_of(t);
    const int64_t keys = t->size[t->ndim - 1];
    int64_t at[4] = {0}, place = 0;
    for (;;) {
        double largest = -INFINITY;
        for (int64_t j = 0; j < keys && !(largest >= least); j++) {
            const double x = element(t->data, dtype, place + j * t->stride[t->ndim - 1]);
            if (isnan(x)) return false;
            if (x > largest) largest = x;
            if (any_prefix && largest < least && largest != -INFINITY) return false;
        }
        if (largest < least && largest != -INFINITY) return false;
        int64_t dim = t->ndim - 2;
        while (dim >= 0) {
            place += t->stride[dim];
            if (++at[dim] < t->size[dim]) break;
            place -= at[dim] * t->stride[dim];
            at[dim--] = 0;
        }
        if (dim < 0) return true;
    }
}

static PyObject *biases_are_high(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *bias, *least, *any_prefix;
    fa_flex_tensor t;
    fa_error err = {""};
    bool found = false;
    if (!PyArg_UnpackTuple(args, "biases_are_high", 3, 3, &bias, &least, &any_prefix)) return NULL;
    const double bound = PyFloat_AsDouble(least);
    const fa_status status = read_on_cpu(bias, "attn_bias", &t, &err);
    Py_BEGIN_ALLOW_THREADS found = status == FA_OK && present(&t.t) && is_floating(&t.t) && t.t.ndim >= 1 &&
                                   t.t.ndim <= 4 && (is_empty(&t.t) || is_high(&t.t, bound, any_prefix == Py_True));
    Py_END_ALLOW_THREADS PyErr_Clear();
    return PyBool_FromLong(found);
}

/* Returns the shift of each row, [b, h, rows], or 1 in place of a size, for a bias on a GPU. */
static PyObject *shift_of_biases(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *bias, *least;
    fa_flex_tensor t;
    fa_error err = {""};
    fa_outputs outputs = {.num = 0};
    void *data = NULL;
    if (!PyArg_UnpackTuple(args, "shift_of_biases", 2, 2, &bias, &least)) return NULL;
    fa_bias_shift of = {.least = (float)PyFloat_AsDouble(least), .size = {1, 1, 1, 1}};
    fa_status status = fa_torch.wrap ? fa_flex_read_tensor(bias, "attn_bias", &t, &err) : FA_EINVAL;
    if (status != FA_OK || !present(&t.t) || !is_on_gpu(&t.t) || !is_floating(&t.t) || t.t.ndim > 4 ||
        t.t.dtype == fa_torch.f64) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    for (int64_t i = 0; i < t.t.ndim; i++) {
        of.size[4 - t.t.ndim + i] = t.t.size[i];
        of.stride[4 - t.t.ndim + i] = t.t.stride[i];
    }
    of.device_idx = t.t.device_idx, of.dtype = dtype_of(&t.t), of.bias = t.t.data;
    status = fa_make_output(&outputs, &t.t, 3, of.size, (int64_t[]){of.size[1] * of.size[2], of.size[2], 1},
                            fa_torch.f32, &data, &err);
    of.shift = data;
    Py_BEGIN_ALLOW_THREADS if (status == FA_OK) status = fa_cuda_bias_shift(&of, &err);
    Py_END_ALLOW_THREADS if (status == FA_OK) return fa_results_of(NULL, &outputs);
    fa_drop_outputs(&outputs);
    return fa_raise(status, &err);
}

/* ---- packed sequences -------------------------------------------------------------------------------------------- */

/* For each row: the first and the last key that it sees, the key beside it, its sequence, its place there, and the
 * first key of the sequence. Rows behind the last sequence see nothing. */
enum { FIRST, LAST, BESIDE, SEQUENCE, LOCAL, START_K, NUM_PLACES };

static int64_t clamped(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

/* Lengths that are wrong give wrong places. The call's checks refuse them afterwards. */
static void fill_places(const int32_t *cu_q, const int32_t *cu_k, int64_t b, const int64_t n[4],
                        int64_t *const of[NUM_PLACES]) {
    const int64_t rows = n[0], keys = n[1], left = n[2], right = n[3];
    int64_t sequence = 0;
    for (int64_t row = 0; row < rows; row++) {
        while (sequence < b && cu_q[sequence + 1] <= row) sequence++;
        const bool is_used = sequence < b;
        const int64_t at = is_used ? sequence : b - 1;
        const int64_t start_k = clamped(cu_k[at], keys), end_k = clamped(cu_k[at + 1], keys);
        const int64_t beside = end_k + row - cu_q[at + 1];
        int64_t first = start_k, last = end_k - 1;
        if (left >= 0 && beside - left > first) first = beside - left;
        if (right >= 0 && beside + right < last) last = beside + right;
        const int64_t places[NUM_PLACES] = {first, is_used ? last : -1, beside, at, row - cu_q[at], start_k};
        for (int i = 0; i < NUM_PLACES; i++)
            if (of[i]) of[i][row] = places[i];
    }
}

static fa_status read_sums(PyObject *object, const char *name, int64_t num, fa_flex_tensor *t, fa_error *err) {
    TRY(read_on_cpu(object, name, t, err));
    REQUIRE(present(&t->t) && t->t.dtype == fa_torch.i32 && t->t.ndim == 1 && t->t.size[0] >= 2 && contiguous(&t->t) &&
                (num < 0 || t->t.size[0] == num),
            "%s must be running sums", name);
    return FA_OK;
}

static PyObject *packed_places(PyObject *self, PyObject *args) {
    (void)self;
    enum { NUM_NUMBERS = 5 };
    PyObject *cu_q, *cu_k, *numbers[NUM_NUMBERS], *list = NULL;
    fa_flex_tensor q, k;
    fa_outputs outputs = {.num = 0};
    fa_error err = {""};
    int64_t n[NUM_NUMBERS], *of[NUM_PLACES] = {NULL};
    if (!PyArg_UnpackTuple(args, "packed_places", 7, 7, &cu_q, &cu_k, &numbers[0], &numbers[1], &numbers[2],
                           &numbers[3], &numbers[4]))
        return NULL;
    for (int i = 0; i < NUM_NUMBERS; i++) n[i] = PyLong_AsLongLong(numbers[i]);
    fa_status status = !PyErr_Occurred() && fa_torch.wrap && n[0] >= 0 && n[1] >= 0 ? FA_OK : FA_EINVAL;
    if (status == FA_OK) status = read_sums(cu_q, "cu_seqlens_q", -1, &q, &err);
    if (status == FA_OK) status = read_sums(cu_k, "cu_seqlens_k", q.t.size[0], &k, &err);
    for (int i = 0; i < NUM_PLACES && status == FA_OK; i++)
        if (n[4] >> i & 1)
            status = fa_make_output(&outputs, &q.t, 1, &n[0], (int64_t[]){1}, fa_torch.i64, (void **)&of[i], &err);
    if (status == FA_OK) fill_places(q.t.data, k.t.data, q.t.size[0] - 1, n, of);
    if (status == FA_OK) list = PyList_New(NUM_PLACES);
    for (int i = 0, made = 0; list && i < NUM_PLACES; i++) {
        PyObject *place = Py_None;
        if (n[4] >> i & 1)
            place = fa_torch.wrap(outputs.tensor[made++]);
        else
            Py_INCREF(place);
        if (!place || PyList_SetItem(list, i, place) < 0) Py_CLEAR(list);
    }
    fa_drop_outputs(&outputs);
    if (list) return list;
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyMethodDef fa_options_functions[] = {
    {"add_sinks", add_sinks, METH_VARARGS,
     "add_sinks(out, softmax_lse, sinks) -> True: both tensors of the CPU were written. sinks None: +inf becomes -inf "
     "in softmax_lse"},
    {"gradient_of_sinks", gradient_of_sinks, METH_VARARGS,
     "gradient_of_sinks(sinks, out, softmax_lse, dout, dlse) -> the gradient of sinks on the CPU"},
    {"shift_of_biases", shift_of_biases, METH_VARARGS,
     "shift_of_biases(attn_bias, least) -> the shift of each row of a bias on a GPU, fp32 [b, h, rows]: the largest "
     "bias of a row if it is finite and below least, else 0"},
    {"biases_are_high", biases_are_high, METH_VARARGS,
     "biases_are_high(attn_bias, least, any_prefix) -> is the largest bias of every row on the CPU at least this "
     "number, "
     "or infinite? any_prefix: of all first keys, too. False: perhaps not"},
    {"packed_places", packed_places, METH_VARARGS,
     "packed_places(cu_seqlens_q, cu_seqlens_k, total_q, total_kv, left, right, wanted) -> six tensors int64 [total_q] "
     "of the CPU, or None where a bit of wanted is 0: the first and the last key that a row sees, the key beside it, "
     "its "
     "sequence, its place there, and the first key of the sequence"},
    {NULL, NULL, 0, NULL},
};
