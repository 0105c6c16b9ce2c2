/* Calls with learned sinks, sinks behind a call and their gradient, the largest score of each head, the shift of low
 * biases, and on the CPU the places of packed sequences. A function of Python's here returns None if it cannot serve
 * the call, and has done nothing then. Python does the same with torch's functions. */
#include "options.h"

#include "check.h"
#include "cpu/bias_shift.h"
#include "cpu/max_logits.h"
#include "cpu/sinks.h"
#include "execute.h"
#include "failures.h"
#include "flex_values.h"
#include "gpu/bias_shift.h"
#include "gpu/max_logits.h"
#include "gpu/sinks.h"
#include "overlap.h"
#include "python_tensors.h"

static bool torch_parallel_for(int64_t n, fa_range_fn *fn, void *ctx) {
    return fa_torch.torch_parallel_for(0, n, 1, fn, ctx) == 0;
}
static const fa_pool pool = {torch_parallel_for};

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

static fa_status read_beside(const fa_tensor *like, PyObject *object, const char *name, fa_flex_tensor *t,
                             fa_error *err) {
    TRY(fa_flex_read_tensor(object, name, t, err));
    REQUIRE(!present(&t->t) || (t->t.device_type == like->device_type && t->t.device_idx == like->device_idx),
            "%s must be on the device of %s", name, like->name);
    return FA_OK;
}

/* ---- sinks in a call --------------------------------------------------------------------------------------------- */
/* Reads a number for each of the heads, if there are sinks. */
static fa_status read_values(const fa_tensor *t, int64_t h, fa_sink_values *values, fa_error *err) {
    if (!present(t)) return FA_OK;
    REQUIRE(is_floating(t) && t->ndim == 1 && t->size[0] == h, "sinks must have a floating number for each head");
    *values = (fa_sink_values){is_empty(t) ? NULL : t->data, t->stride[0], dtype_of(t)};
    return FA_OK;
}

static fa_status read_ends(const fa_tensor *t, const int32_t **end, fa_error *err) {
    if (!present(t)) return FA_OK;
    REQUIRE(t->dtype == fa_torch.i32 && t->ndim == 1 && t->size[0] >= 1 && contiguous(t),
            "cu_seqlens_q must be running sums");
    *end = (const int32_t *)t->data + (t->size[0] - 1);
    return FA_OK;
}

/* Reads [b, h, rows], or [h, rows] of packed sequences. There may be rows behind the call's. With repeats 1 stands for
 * any size. */
static fa_status read_rows(const int64_t of_call[3], const fa_tensor *t, bool repeats, fa_sink_rows *rows,
                           fa_error *err) {
    int64_t stride[3] = {0};
    if (!present(t)) return FA_OK;
    REQUIRE(t->dtype == fa_torch.f32 && (t->ndim == 3 || (t->ndim == 2 && of_call[0] == 1)),
            "%s must be fp32 [b, h, rows]", t->name);
    for (int i = 0; i < 3; i++) {
        const int64_t dim = i - (3 - t->ndim), size = dim < 0 ? 1 : t->size[dim];
        REQUIRE(size == of_call[i] || (i == 2 && size > of_call[i]) || (repeats && size == 1),
                "%s must have a number for each row", t->name);
        stride[i] = size > 1 ? t->stride[dim] : 0;
    }
    *rows = (fa_sink_rows){t->data, stride[0], stride[1], stride[2]};
    return FA_OK;
}

fa_status fa_read_sinks(const fa_sinks_of_call *of, const fa_tensor *q, fa_flex_tensor tensors[3], fa_problem *p,
                        fa_error *err) {
    const int64_t of_call[] = {p->cu_seqlens_q ? 1 : p->b, p->h, p->cu_seqlens_q ? p->total_q : p->len_q};
    TRY(read_beside(q, of->sinks, "sinks", &tensors[0], err));
    TRY(read_beside(q, of->shift, "the shift", &tensors[1], err));
    TRY(read_beside(q, of->ends, "cu_seqlens_q", &tensors[2], err));
    TRY(read_values(&tensors[0].t, p->h, &p->sinks, err));
    TRY(read_rows(of_call, &tensors[1].t, true, &p->sink_shift, err));
    return p->device == FA_CPU ? read_ends(&tensors[2].t, &p->sink_end, err) : FA_OK;
}

fa_status fa_execute_with_options(const fa_call *call, PyObject *const *options, fa_outputs *outputs, fa_error *err) {
    const fa_tensor *q = &call->q;
    fa_flex_tensor sinks;
    fa_call own = *call;
    fa_status status = FA_OK;
    REQUIRE(q->ndim >= 3, "q must have heads");
    REQUIRE(options[0] == Py_None || fa_is_plain(options[0]), "sinks must be a torch.Tensor");
    TRY(read_beside(q, options[0], "sinks", &sinks, err));
    TRY(read_values(&sinks.t, q->size[q->ndim - 2], &own.sinks, err));
    own.sinks_tensor = sinks.t;
    own.has_options = true, own.only_out = options[1] != Py_True;
    own.wants_sink_probability = present(&sinks.t) && options[2] == Py_True;
    Py_BEGIN_ALLOW_THREADS status = fa_execute(&own, outputs, err);
    Py_END_ALLOW_THREADS return status;
}

/* ---- sinks behind a call ----------------------------------------------------------------------------------------- */

typedef struct {
    fa_flex_tensor sinks, out, lse, delta, shift, ends, probability;
    fa_sinks s;
} sinks_call;

static fa_status read_forward(sinks_call *c, PyObject *const *objects, fa_error *err) {
    const fa_tensor *o = &c->out.t, *lse = &c->lse.t;
    TRY(fa_flex_read_tensor(objects[0], "out", &c->out, err));
    TRY(read_beside(o, objects[1], "softmax_lse", &c->lse, err));
    TRY(read_beside(o, objects[2], "sinks", &c->sinks, err));
    REQUIRE(present(o) && present(lse) && is_floating(o) && (o->ndim == 3 || o->ndim == 4) &&
                (last_dim_contiguous(o) || is_empty(o)),
            "out must be floating, with heads and contiguous rows");
    const bool is_packed = o->ndim == 3;
    c->s = (fa_sinks){.device_idx = o->device_idx,
                      .dtype = dtype_of(o),
                      .b = is_packed ? 1 : o->size[0],
                      .h = o->size[o->ndim - 2],
                      .rows = o->size[o->ndim - 3],
                      .d = o->size[o->ndim - 1],
                      .out = {o->data, is_packed ? 0 : o->stride[0], .stride_row = o->stride[o->ndim - 3],
                              .stride_h = o->stride[o->ndim - 2]}};
    REQUIRE(lse->ndim == o->ndim - 1 && lse->size[lse->ndim - 1] == c->s.rows, "softmax_lse must have the rows of out");
    TRY(read_rows((int64_t[]){c->s.b, c->s.h, c->s.rows}, lse, false, &c->s.lse, err));
    REQUIRE(c->s.lse.stride_row > 0 || c->s.rows <= 1, "softmax_lse must have memory for each row");
    return read_values(&c->sinks.t, c->s.h, &c->s.sinks, err);
}

static PyObject *add_sinks(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *objects[3];
    sinks_call c = {.s = {.b = 0}};
    fa_error err = {""};
    bool done = false;
    if (!PyArg_UnpackTuple(args, "add_sinks", 3, 3, &objects[0], &objects[1], &objects[2])) return NULL;
    fa_status status = read_forward(&c, objects, &err);
    const bool on_gpu = status == FA_OK && is_on_gpu(&c.out.t);
    if (on_gpu && c.s.dtype == FA_F64) Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS if (on_gpu) status = fa_cuda_add_sinks(&c.s, &err);
    done = status == FA_OK && (on_gpu || fa_cpu_add_sinks(&c.s, &pool));
    Py_END_ALLOW_THREADS if (on_gpu && !done) return fa_raise(status, &err);
    PyErr_Clear();
    if (done) Py_RETURN_TRUE;
    Py_RETURN_NONE;
}

static fa_status read_backward(sinks_call *c, PyObject *const *objects, fa_error *err) {
    const fa_tensor *lse = &c->lse.t;
    TRY(fa_flex_read_tensor(objects[1], "softmax_lse", &c->lse, err));
    REQUIRE(present(lse) && (lse->ndim == 2 || lse->ndim == 3), "softmax_lse must have heads and rows");
    TRY(read_beside(lse, objects[0], "sinks", &c->sinks, err));
    TRY(read_beside(lse, objects[2], "softmax_d", &c->delta, err));
    TRY(read_beside(lse, objects[3], "the shift", &c->shift, err));
    TRY(read_beside(lse, objects[4], "cu_seqlens_q", &c->ends, err));
    TRY(read_beside(lse, objects[5], "the probability of sinks", &c->probability, err));
    c->s = (fa_sinks){.device_idx = lse->device_idx,
                      .b = lse->ndim == 3 ? lse->size[0] : 1,
                      .h = lse->size[lse->ndim - 2],
                      .rows = lse->size[lse->ndim - 1]};
    REQUIRE(present(&c->sinks.t) && present(&c->delta.t), "sinks and softmax_d must be tensors");
    TRY(read_rows((int64_t[]){c->s.b, c->s.h, c->s.rows}, lse, false, &c->s.lse, err));
    TRY(read_rows((int64_t[]){c->s.b, c->s.h, c->s.rows}, &c->delta.t, false, &c->s.delta, err));
    TRY(read_rows((int64_t[]){c->s.b, c->s.h, c->s.rows}, &c->shift.t, true, &c->s.shift, err));
    TRY(read_rows((int64_t[]){c->s.b, c->s.h, c->s.rows}, &c->probability.t, false, &c->s.probability, err));
    REQUIRE(!present(&c->probability.t) || !is_on_gpu(lse), "on a GPU the probability of sinks follows from lse");
    TRY(read_values(&c->sinks.t, c->s.h, &c->s.sinks, err));
    return read_ends(&c->ends.t, &c->s.end, err);
}

static PyObject *gradient_of_sinks(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *objects[6] = {NULL, NULL, NULL, NULL, NULL, Py_None};
    sinks_call c = {.s = {.b = 0}};
    fa_error err = {""};
    fa_outputs outputs = {.num = 0};
    bool done = false;
    if (!PyArg_UnpackTuple(args, "gradient_of_sinks", 5, 6, &objects[0], &objects[1], &objects[2], &objects[3],
                           &objects[4], &objects[5]))
        return NULL;
    fa_status status = fa_torch.wrap ? read_backward(&c, objects, &err) : FA_EINVAL;
    const bool on_gpu = status == FA_OK && is_on_gpu(&c.lse.t);
    if (status == FA_OK)
        status = fa_make_output(&outputs, &c.sinks.t, 1, &c.s.h, (int64_t[]){1}, c.sinks.t.dtype, &c.s.gradient, &err);
    Py_BEGIN_ALLOW_THREADS if (on_gpu && status == FA_OK) status = fa_cuda_gradient_of_sinks(&c.s, &err);
    done = status == FA_OK && (on_gpu || fa_cpu_gradient_of_sinks(&c.s, &pool));
    Py_END_ALLOW_THREADS if (done) return fa_results_of(NULL, &outputs);
    fa_drop_outputs(&outputs);
    if (on_gpu) return fa_raise(status, &err);
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* ---- memory of sinks --------------------------------------------------------------------------------------------- */

/* Tensors without memory of their own, such as fakes, share none. */
static PyObject *tensors_share_memory(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *objects[2];
    fa_flex_tensor x, y;
    fa_error err = {""};
    if (!PyArg_UnpackTuple(args, "share_memory", 2, 2, &objects[0], &objects[1])) return NULL;
    const bool are_read = fa_flex_read_tensor(objects[0], "x", &x, &err) == FA_OK &&
                          fa_flex_read_tensor(objects[1], "y", &y, &err) == FA_OK;
    PyErr_Clear();
    return PyBool_FromLong(are_read && share_memory(&x.t, &y.t));
}

/* ---- largest scores ---------------------------------------------------------------------------------------------- */

fa_status fa_make_max_logits(fa_max_logits *of, const fa_tensor *like, fa_outputs *outputs, fa_error *err) {
    TRY(fa_make_output(outputs, like, 1, &of->h, (int64_t[]){1}, fa_torch.f32, (void **)&of->largest, err));
    if (is_on_gpu(like)) return fa_cuda_max_logits(of, err);
    return fa_cpu_max_logits(of), FA_OK;
}

static fa_status read_scores(PyObject *object, fa_flex_tensor *scores, fa_max_logits *of, fa_error *err) {
    const fa_tensor *t = &scores->t;
    TRY(fa_flex_read_tensor(object, "scores", scores, err));
    REQUIRE(present(t) && t->ndim == 3, "scores must be fp32 [b, h, rows]");
    of->device_idx = t->device_idx, of->b = t->size[0], of->h = t->size[1], of->rows = t->size[2];
    return read_rows(t->size, t, false, &of->scores, err);
}

static PyObject *max_logits(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *object;
    fa_flex_tensor scores;
    fa_max_logits of = {.b = 0};
    fa_error err = {""};
    fa_outputs outputs = {.num = 0};
    if (!PyArg_UnpackTuple(args, "max_logits", 1, 1, &object)) return NULL;
    fa_status status = fa_torch.wrap ? read_scores(object, &scores, &of, &err) : FA_EINVAL;
    const bool is_read = status == FA_OK;
    Py_BEGIN_ALLOW_THREADS if (is_read) status = fa_make_max_logits(&of, &scores.t, &outputs, &err);
    Py_END_ALLOW_THREADS if (status == FA_OK) return fa_results_of(NULL, &outputs);
    fa_drop_outputs(&outputs);
    if (is_read) return fa_raise(status, &err);
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* ---- low biases -------------------------------------------------------------------------------------------------- */

static fa_status read_bias(PyObject *object, fa_flex_tensor *bias, fa_bias_shift *of, fa_error *err) {
    const fa_tensor *t = &bias->t;
    TRY(fa_flex_read_tensor(object, "attn_bias", bias, err));
    REQUIRE(present(t) && is_floating(t) && t->ndim <= 4, "attn_bias must be floating, of at most 4 dimensions");
    of->device_idx = t->device_idx, of->dtype = dtype_of(t), of->bias = t->data;
    for (int i = 0; i < 4; i++) {
        const int64_t dim = i - (4 - t->ndim);
        of->size[i] = dim < 0 ? 1 : t->size[dim], of->stride[i] = dim < 0 ? 0 : t->stride[dim];
    }
    return FA_OK;
}

static bool is_high(const fa_flex_tensor *bias, const fa_bias_shift *of) {
    return !is_on_gpu(&bias->t) && (is_empty(&bias->t) || fa_cpu_biases_are_high(of));
}

fa_status fa_biases_are_high(const fa_shift_request *r, bool *are_high, fa_error *err) {
    fa_flex_tensor bias;
    fa_bias_shift of = {.least = r->least, .is_cut = r->is_cut};
    TRY(read_bias(r->bias, &bias, &of, err));
    Py_BEGIN_ALLOW_THREADS *are_high = is_high(&bias, &of);
    Py_END_ALLOW_THREADS return FA_OK;
}

/* Reads where the bias of each row lies: of packed sequences, or of rows that a causal mask cuts. */
static fa_status read_places(const fa_shift_request *r, const fa_tensor *bias, fa_flex_tensor places[2],
                             fa_bias_shift *of, fa_error *err) {
    TRY(read_beside(bias, r->sequence, "the sequences of rows", &places[0], err));
    TRY(read_beside(bias, r->row, "the places of rows", &places[1], err));
    const fa_tensor *t = &places[0].t, *row = &places[1].t;
    if (!present(t)) return FA_OK;
    REQUIRE(present(row) && t->ndim == 1 && row->ndim == 1 && t->size[0] == row->size[0] && t->dtype == fa_torch.i64 &&
                row->dtype == fa_torch.i64 && contiguous(t) && contiguous(row),
            "the places of packed rows must be two lists of int64");
    of->sequence = t->data, of->row = row->data;
    of->of_shift[0] = 1, of->of_shift[2] = t->size[0];
    return FA_OK;
}

static fa_status read_shift(const fa_shift_request *r, fa_flex_tensor tensors[4], fa_bias_shift *of, fa_error *err) {
    const fa_tensor *bias = &tensors[0].t, *sinks = &tensors[1].t;
    TRY(read_bias(r->bias, &tensors[0], of, err));
    REQUIRE(!is_empty(bias) && !(is_on_gpu(bias) && of->dtype == FA_F64), "no kernel serves this bias");
    TRY(read_beside(bias, r->sinks, "sinks", &tensors[1], err));
    const int64_t h = present(sinks) && sinks->ndim == 1 ? sinks->size[0] : of->size[1];
    REQUIRE(of->size[1] == 1 || of->size[1] == h, "attn_bias must have the heads of sinks");
    TRY(read_values(sinks, h, &of->sinks, err));
    of->of_shift[0] = of->size[0], of->of_shift[1] = h, of->of_shift[2] = of->size[2];
    if (r->is_cut) {
        REQUIRE(r->rows >= 0, "rows must be at least 0");
        of->is_cut = true, of->of_shift[2] = r->rows, of->last = r->last;
    }
    return read_places(r, bias, &tensors[2], of, err);
}

fa_status fa_make_shift(const fa_shift_request *r, fa_outputs *outputs, fa_error *err) {
    fa_flex_tensor tensors[4];
    fa_bias_shift of = {.least = r->least};
    fa_status status = FA_OK;
    if (!fa_torch.wrap) return fa_fail(err, FA_EINVAL, "this torch makes no tensors for Python");
    TRY(read_shift(r, tensors, &of, err));
    const bool on_gpu = is_on_gpu(&tensors[0].t);
    const int64_t *n = of.of_shift, stride[] = {n[1] * n[2], n[2], 1};
    TRY(fa_make_output(outputs, &tensors[0].t, 3, n, stride, of.dtype == FA_F64 ? fa_torch.f64 : fa_torch.f32,
                       &of.shift, err));
    Py_BEGIN_ALLOW_THREADS if (on_gpu) status = fa_cuda_bias_shift(&of, err);
    if (!on_gpu) fa_cpu_bias_shift(&of);
    Py_END_ALLOW_THREADS return status;
}

static PyObject *shift_of_biases(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *least, *rows, *last;
    fa_shift_request r = {.is_cut = false};
    fa_error err = {""};
    fa_outputs outputs = {.num = 0};
    if (!PyArg_UnpackTuple(args, "shift_of_biases", 7, 7, &r.bias, &least, &r.sinks, &rows, &last, &r.sequence, &r.row))
        return NULL;
    r.least = PyFloat_AsDouble(least), r.is_cut = rows != Py_None;
    if (r.is_cut) r.rows = PyLong_AsLongLong(rows), r.last = PyLong_AsLongLong(last);
    const fa_status status = PyErr_Occurred() ? FA_EINVAL : fa_make_shift(&r, &outputs, &err);
    if (status == FA_OK) return fa_results_of(NULL, &outputs);
    fa_drop_outputs(&outputs);
    if (status != FA_EINVAL) return fa_raise(status, &err);
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* ---- packed sequences -------------------------------------------------------------------------------------------- */

enum { NUM_PLACES = FA_NUM_PLACES };

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

static fa_status check_sums(const fa_tensor *t, int64_t num, fa_error *err) {
    REQUIRE(present(t) && !is_on_gpu(t) && t->dtype == fa_torch.i32 && t->ndim == 1 && t->size[0] >= 2 &&
                contiguous(t) && (num < 0 || t->size[0] == num),
            "%s must be running sums", t->name);
    return FA_OK;
}

fa_status fa_make_packed_places(const fa_call *call, int64_t right, unsigned wanted, fa_outputs *outputs,
                                fa_error *err) {
    const fa_tensor *cu_q = &call->cu_seqlens_q, *cu_k = &call->cu_seqlens_k;
    const int64_t n[] = {call->q.size[0], call->k.size[0], call->window_left, right};
    int64_t *of[NUM_PLACES] = {NULL};
    TRY(check_sums(cu_q, -1, err));
    TRY(check_sums(cu_k, cu_q->size[0], err));
    for (int i = 0; i < NUM_PLACES; i++)
        if (wanted >> i & 1)
            TRY(fa_make_output(outputs, cu_q, 1, n, (int64_t[]){1}, fa_torch.i64, (void **)&of[i], err));
    fill_places(cu_q->data, cu_k->data, cu_q->size[0] - 1, n, of);
    return FA_OK;
}

PyMethodDef fa_options_functions[] = {
    {"add_sinks", add_sinks, METH_VARARGS,
     "add_sinks(out, softmax_lse, sinks) -> True: out and softmax_lse were written. sinks None: +inf becomes -inf in "
     "softmax_lse"},
    {"gradient_of_sinks", gradient_of_sinks, METH_VARARGS,
     "gradient_of_sinks(sinks, softmax_lse, softmax_d, shift, cu_seqlens_q, probability=None) -> the gradient of "
     "sinks. "
     "softmax_lse is that with sinks, and softmax_d is what the backward wrote. With cu_seqlens_q rows behind the last "
     "sequence do not count. probability: of the sink in each row, on the CPU; None: it follows from softmax_lse"},
    {"share_memory", tensors_share_memory, METH_VARARGS, "share_memory(x, y) -> is there a byte in both tensors?"},
    {"max_logits", max_logits, METH_VARARGS,
     "max_logits(scores) -> the largest score of each head, fp32 [h], of fp32 [b, h, rows]"},
    {"shift_of_biases", shift_of_biases, METH_VARARGS,
     "shift_of_biases(attn_bias, least, sinks, rows, last, sequence, row) -> the shift of each row, [b, h, rows], or 1 "
     "in "
     "place of a size: the largest bias of a row if it is finite and below least, and the sink is not far above it, "
     "else "
     "0. rows and last: row i of so many sees the keys up to i + last. sequence and row: where the bias of each row of "
     "packed sequences lies. All but two may be None. The shift is fp32, or fp64 for a bias of fp64"},
    {NULL, NULL, 0, NULL},
};
