#include "flex_attend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "check.h"
#include "direct.h"
#include "execute.h"
#include "failures.h"
#include "flex/flex.h"
#include "flex_values.h"
#include "kept_walks.h"
#include "option_mods.h"
#include "options.h"
#include "outputs.h"
#include "python_tensors.h"
#include "wrap.h"

#define Q_DIMS   "(b, h, len_q, d)"
#define O_DIMS   "(b, h, len_q, d_v)"
#define K_DIMS   "(b, h_kv, len_kv, d)"
#define V_DIMS   "(b, h_kv, len_kv, d_v)"
#define LSE_DIMS "(b, h, len_q)"

/* With a block table. */
#define K_PAGES "(num_pages, h_kv, page_size, d)"
#define V_PAGES "(num_pages, h_kv, page_size, d_v)"

enum { NUM, PLACES, FULL_NUM, FULL_PLACES, NUM_LISTS };
enum { KEPT = 2 + NUM_LISTS }; /* the last of the blocks, of a mask that stays as it is (kept_walks.h) */
enum { Q_OFFSET, KV_LEN, BLOCK_TABLE, NUM_PLACES };

/* A call: the objects that came, and the problem that they become. */
typedef struct {
    PyObject *q, *k, *v, *out, *lse, *max_scores, *dout, *dlse, *dq, *dk, *dv, *softmax_d;
    PyObject *scale, *plain, *score, *mask, *blocks, *derivative, *gradients, *deterministic;
    PyObject *sequences, *sinks, *dropout;
    fa_flex_tensor tensors[14], lists[NUM_LISTS], places[NUM_PLACES], of_sinks[3];
    fa_flex_values *programs[3]; /* owned */
    void **gradient_data;        /* owned */
    /* Of a call that makes its results: */
    bool makes_results, wants_lse, wants_max, enables_gqa;
    PyObject *block_mask, *find_blocks; /* a BlockMask or None; None, or a function that returns blocks or None */
    PyObject *owned_blocks;             /* what one of both became */
    fa_outputs outputs;                 /* owned: out, lse and perhaps max_scores */
    PyObject *drawn;                    /* owned: what the function of dropout has returned */
    bool has_raised;                    /* find_blocks, or the function of dropout */
    fa_kept_of_call kept;
    fa_flex flex;
    fa_problem problem;
} flex_call;

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static fa_view view_of_heads(const fa_tensor *t) {
    return (fa_view){t->data, t->stride[0], .stride_row = t->stride[2], .stride_h = t->stride[1]};
}

/* Reads a tensor like q or k into a view of the problem. size NULL: any size of 4 dimensions. */
static fa_status read_view(flex_call *c, int idx, PyObject *object, const char *name, const int64_t *size,
                           const char *dims, fa_view *view, fa_error *err) {
    fa_flex_tensor *tensor = &c->tensors[idx];
    const fa_tensor *t = &tensor->t, *q = &c->tensors[0].t;
    TRY(fa_flex_read_tensor(object, name, tensor, err));
    if (!present(t)) return FA_OK;
    TRY(check_rank(t, 4, dims, err));
    if (size) TRY(check_shape(t, 4, size, dims, err));
    TRY(check_device(t, q, err));
    REQUIRE(t->dtype == q->dtype, "%s must have the dtype of q, %s; it is %s", name, dtype_words(q->dtype),
            dtype_words(t->dtype));
    REQUIRE(last_dim_contiguous(t), "%s must have a contiguous last dimension; its stride is %" PRId64, name,
            t->stride[3]);
    *view = view_of_heads(t);
    return FA_OK;
}

static fa_status read_stats(flex_call *c, int idx, PyObject *object, const char *name, fa_row_stats *stats,
                            fa_error *err) {
    fa_flex_tensor *tensor = &c->tensors[idx];
    const fa_tensor *t = &tensor->t;
    const int64_t size[] = {c->problem.b, c->problem.h, c->problem.len_q};
    TRY(fa_flex_read_tensor(object, name, tensor, err));
    if (!present(t)) return FA_OK;
    TRY(check_shape(t, 3, size, LSE_DIMS, err));
    TRY(check_device(t, &c->tensors[0].t, err));
    REQUIRE(t->dtype == fa_torch.f32, "%s must be fp32; it is %s", name, dtype_words(t->dtype));
    REQUIRE(last_dim_contiguous(t), "%s must have a contiguous last dimension; its stride is %" PRId64, name,
            t->stride[2]);
    *stats = (fa_row_stats){.data = t->data, .stride_b = t->stride[0], .stride_h = t->stride[1]};
    return FA_OK;
}

static fa_status read_dtype(const fa_tensor *q, fa_dtype *dtype, fa_error *err) {
    if (q->dtype == fa_torch.f16)
        *dtype = FA_F16;
    else if (q->dtype == fa_torch.bf16)
        *dtype = FA_BF16;
    else if (q->dtype == fa_torch.f32)
        *dtype = FA_F32;
    else if (q->dtype == fa_torch.f64 && !is_on_gpu(q))
        *dtype = FA_F64;
    else
        return fa_fail(err, FA_EUNSUPPORTED, "flex_attention takes fp16, bf16 and fp32, and fp64 on the CPU; q is %s",
                       dtype_words(q->dtype));
    return FA_OK;
}

/* ---- where sequences lie ----------------------------------------------------------------------------------------- */

static fa_status read_block_table(const flex_call *c, fa_problem *p, fa_error *err) {
    const fa_tensor *t = &c->places[BLOCK_TABLE].t;
    if (!present(t)) return FA_OK;
    TRY(check_index(t, &c->tensors[0].t, err));
    TRY(check_rank(t, 2, "(b, pages of a sequence)", err));
    REQUIRE(t->size[0] == p->b, "block_table must have a row for each of the %" PRId64 " sequences; it has %" PRId64,
            p->b, t->size[0]);
    REQUIRE(last_dim_contiguous(t), "block_table must have a contiguous last dimension; its stride is %" PRId64,
            t->stride[1]);
    p->paged = true;
    p->num_pages = c->tensors[1].t.size[0];
    p->page_size = p->len_kv;
    REQUIRE(p->page_size >= 1, "pages must have at least one key; k has pages of 0");
    REQUIRE((double)t->size[1] * (double)p->page_size < 0x1p31,
            "block_table has %" PRId64 " columns of pages of %" PRId64 " keys; a sequence must have fewer than 2^31",
            t->size[1], p->page_size);
    p->block_table = t->size[0] * t->size[1] > 0 ? t->data : NULL;
    p->block_table_cols = t->size[1];
    p->block_table_stride = t->size[0] > 1 && t->size[1] > 0 ? t->stride[0] : 0;
    p->len_kv = p->block_table_cols * p->page_size;
    return FA_OK;
}

/* On the CPU: after this check every key of a sequence lies in the tensors, and every query in the block mask. */
static fa_status check_sequences(const flex_call *c, const fa_problem *p, fa_error *err) {
    const fa_flex *f = &c->flex;
    for (int64_t i = 0; i < p->b && p->device == FA_CPU; i++) {
        const int64_t len = p->seqused_k ? p->seqused_k[i] : p->len_kv;
        REQUIRE(len >= 0 && len <= p->len_kv,
                "kv_len must be from 0 to the %" PRId64 " keys that there are; element %" PRId64 " is %" PRId64,
                p->len_kv, i, len);
        for (int64_t page = 0; p->paged && page * p->page_size < len; page++) {
            const int32_t number = p->block_table[i * p->block_table_stride + page];
            REQUIRE(number >= 0 && number < p->num_pages,
                    "block_table must name pages below %" PRId64 "; entry (%" PRId64 ", %" PRId64 ") is %d",
                    p->num_pages, i, page, number);
        }
        if (f->blocks_have_offset && f->q_offset && f->block_q > 0)
            REQUIRE(f->q_offset[i] + p->len_q <= f->rows * f->block_q,
                    "q_offset must leave the queries in the %" PRId64 " rows of the block mask; element %" PRId64
                    " is %d, and there are %" PRId64 " queries",
                    f->rows * f->block_q, i, f->q_offset[i], p->len_q);
    }
    return FA_OK;
}

/* Reads q_offset, kv_len and block_table. len_kv is that of a page before, and that of the longest sequence after. */
static fa_status read_sequences(flex_call *c, fa_error *err) {
    static const char *const names[] = {"q_offset", "kv_len", "block_table"};
    fa_problem *p = &c->problem;
    p->cache_rows = c->tensors[1].t.size[0];
    if (c->sequences == Py_None) return FA_OK;
    REQUIRE(PyTuple_Check(c->sequences) && PyTuple_Size(c->sequences) == NUM_PLACES + 1,
            "sequences must be None or q_offset, kv_len, block_table and a bool");
    for (int i = 0; i < NUM_PLACES; i++)
        TRY(fa_flex_read_tensor(PyTuple_GetItem(c->sequences, i), names[i], &c->places[i], err));
    c->flex.blocks_have_offset = PyTuple_GetItem(c->sequences, NUM_PLACES) == Py_True;
    const fa_tensor *q = &c->tensors[0].t;
    TRY(check_q_offset(&c->places[Q_OFFSET].t, q, p->b, p->len_q, err));
    TRY(check_index_per_batch(&c->places[KV_LEN].t, q, p->b, err));
    TRY(read_block_table(c, p, err));
    if (p->paged) p->cache_rows = p->b;
    c->flex.q_offset = c->places[Q_OFFSET].t.data;
    p->seqused_k = c->places[KV_LEN].t.data;
    if (p->pass == FA_BWD && (p->paged || p->seqused_k))
        return fa_fail(err, FA_EUNSUPPORTED, "flex_attention has no backward with %s",
                       p->paged ? "block_table" : "kv_len");
    return FA_OK;
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

/* Strides of a dense tensor of q's lengths with the order of q's strides, but for the last dimension. */
static void strides_of_out(const fa_tensor *q, int64_t columns, int64_t stride[4]) {
    int inner_last[3] = {0, 1, 2};
    for (int i = 1; i < 3; i++) /* insertion sort; equal strides keep their order */
        for (int j = i; j > 0 && q->stride[inner_last[j - 1]] < q->stride[inner_last[j]]; j--) {
            const int swap = inner_last[j];
            inner_last[j] = inner_last[j - 1], inner_last[j - 1] = swap;
        }
    int64_t step = columns;
    stride[3] = 1;
    for (int i = 2; i >= 0; i--) {
        stride[inner_last[i]] = step;
        step *= q->size[inner_last[i]] > 1 ? q->size[inner_last[i]] : 1;
    }
}

static fa_status make_results(flex_call *c, fa_error *err) {
    fa_problem *p = &c->problem;
    const fa_tensor *q = &c->tensors[0].t;
    const int64_t size[] = {p->b, p->h, p->len_q, p->d_v}, rows = p->len_q > 1 ? p->len_q : 1,
                  of_stats[] = {(p->h > 1 ? p->h : 1) * rows, rows, 1};
    int64_t stride[4];
    void *data = NULL;
    strides_of_out(q, p->d_v, stride);
    TRY(fa_make_output(&c->outputs, q, 4, size, stride, q->dtype, &data, err));
    p->o = (fa_view){data, stride[0], .stride_row = stride[2], .stride_h = stride[1]};
    p->lse = (fa_row_stats){.stride_b = of_stats[0], .stride_h = of_stats[1]};
    if (c->wants_lse) TRY(fa_make_output(&c->outputs, q, 3, size, of_stats, fa_torch.f32, (void **)&p->lse.data, err));
    if (!c->wants_max) return FA_OK;
    TRY(fa_make_output(&c->outputs, q, 3, size, of_stats, fa_torch.f32, &data, err));
    c->flex.max_scores = (fa_row_stats){.data = data, .stride_b = of_stats[0], .stride_h = of_stats[1]};
    return FA_OK;
}

static fa_status read_tensors(flex_call *c, fa_pass pass, fa_error *err) {
    fa_problem *p = &c->problem;
    const fa_tensor *q = &c->tensors[0].t, *k = &c->tensors[1].t, *v = &c->tensors[2].t;
    *p = (fa_problem){.pass = pass, .window_left = -1, .window_right = -1, .empty_lse = -INFINITY, .keep_max = 255};
    TRY(fa_flex_read_tensor(c->q, "q", &c->tensors[0], err));
    REQUIRE(present(q), "q must be a torch.Tensor");
    TRY(read_dtype(q, &p->dtype, err));
    TRY(read_view(c, 0, c->q, "q", NULL, Q_DIMS, &p->q, err));
    TRY(read_view(c, 1, c->k, "k", NULL, K_DIMS, &p->k, err));
    TRY(read_view(c, 2, c->v, "v", NULL, V_DIMS, &p->v, err));
    REQUIRE(present(k) && present(v), "k and v must be torch.Tensors");
    p->device = is_on_gpu(q) ? FA_CUDA : FA_CPU;
    p->device_idx = q->device_idx;
    p->b = q->size[0], p->h = q->size[1], p->len_q = q->size[2], p->d = q->size[3];
    p->h_kv = k->size[1], p->len_kv = k->size[2], p->d_v = v->size[3];
    const int64_t batches = k->size[0], rows = p->len_kv; /* of k and v, which may be pages */
    TRY(read_sequences(c, err));
    p->total_q = p->b * p->len_q, p->total_kv = p->b * p->len_kv;
    const int64_t q_size[] = {p->b, p->h, p->len_q, p->d}, o_size[] = {p->b, p->h, p->len_q, p->d_v},
                  k_size[] = {p->paged ? batches : p->b, p->h_kv, rows, p->d},
                  v_size[] = {k_size[0], p->h_kv, rows, p->d_v};
    TRY(check_shape(k, 4, k_size, p->paged ? K_PAGES : K_DIMS, err));
    TRY(check_shape(v, 4, v_size, p->paged ? V_PAGES : V_DIMS, err));
    REQUIRE(p->h_kv >= 1 ? p->h % p->h_kv == 0 : p->h == 0,
            "the heads of q must be a multiple of those of k; q has %" PRId64 ", k has %" PRId64, p->h, p->h_kv);
    const int64_t most_v = pass == FA_BWD ? FA_MAX_HEAD_DIM : FA_MAX_HEAD_DIM_V;
    if (p->d > FA_MAX_HEAD_DIM || p->d_v > most_v)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flex_attention takes an embedding dimension of at most %d for query and key, and of at most %d "
                       "(backward: %d) for value; got E=%" PRId64 " and Ev=%" PRId64,
                       FA_MAX_HEAD_DIM, FA_MAX_HEAD_DIM_V, FA_MAX_HEAD_DIM, p->d, p->d_v);
    REQUIRE((double)p->b * (double)p->h * (double)p->len_q < 0x1p31 && (double)p->len_kv < 0x1p31,
            "b * h * len_q and len_kv must be below 2^31");
    if (c->makes_results) {
        REQUIRE(c->enables_gqa || p->h == p->h_kv, "q has more heads than k, but enable_gqa is not set");
        return make_results(c, err);
    }
    TRY(read_view(c, 3, c->out, "out", o_size, O_DIMS, &p->o, err));
    TRY(read_stats(c, 4, c->lse, "lse", &p->lse, err));
    if (pass == FA_FWD) return read_stats(c, 5, c->max_scores, "max_scores", &c->flex.max_scores, err);
    TRY(read_view(c, 5, c->dout, "dout", o_size, O_DIMS, &p->dout, err));
    TRY(read_stats(c, 6, c->dlse, "dlse", &c->flex.dlse, err));
    TRY(read_view(c, 7, c->dq, "dq", q_size, Q_DIMS, &p->dq, err));
    TRY(read_view(c, 8, c->dk, "dk", k_size, K_DIMS, &p->dk, err));
    TRY(read_view(c, 9, c->dv, "dv", v_size, V_DIMS, &p->dv, err));
    return read_stats(c, 10, c->softmax_d, "softmax_d", &p->softmax_d, err);
}

/* ---- mods -------------------------------------------------------------------------------------------------------- */

static bool read_program(flex_call *c, int idx, PyObject *object, const fa_flex_bound **bound) {
    PyObject *text, *tensors, *numbers;
    const fa_tensor *q = &c->tensors[0].t;
    if (object == Py_None) return true;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a mod is None or a tuple of a program, tensors and numbers");
        return false;
    }
    if (!PyArg_UnpackTuple(object, "mod", 3, 3, &text, &tensors, &numbers)) return false;
    c->programs[idx] = fa_flex_bind(text, tensors, numbers, q->device_type, q->device_idx);
    if (!c->programs[idx]) return false;
    *bound = &c->programs[idx]->bound;
    return true;
}

static fa_status read_gradients(flex_call *c, fa_error *err) {
    const fa_flex_values *v = c->programs[2];
    if (!v || c->gradients == Py_None) return FA_OK;
    c->gradient_data = calloc((size_t)v->program.num_captures + 1, sizeof *c->gradient_data);
    if (!c->gradient_data) return fa_fail(err, FA_ENOMEM, "no memory for a list of gradients");
    c->flex.gradients = c->gradient_data;
    return fa_flex_read_gradients(v, c->gradients, c->gradient_data, err);
}

/* ---- block masks ------------------------------------------------------------------------------------------------- */

static fa_status read_list(flex_call *c, PyObject *const *objects, int first, fa_flex_list *list, fa_error *err) {
    fa_flex_tensor *num = &c->lists[first], *places = &c->lists[first + 1];
    TRY(fa_flex_read_tensor(objects[first], "the numbers of blocks", num, err));
    TRY(fa_flex_read_tensor(objects[first + 1], "the places of blocks", places, err));
    REQUIRE(present(&num->t) == present(&places->t) && (present(&num->t) || first == FULL_NUM),
            "a list of blocks needs the numbers and the places");
    if (!present(&num->t)) return FA_OK;
    const fa_tensor *of = &c->lists[0].t; /* the partial list gives the sizes */
    TRY(check_rank(&num->t, 3, "(b, h, rows of blocks)", err));
    TRY(check_rank(&places->t, 4, "(b, h, rows of blocks, columns of blocks)", err));
    const int64_t size[] = {of->size[0], of->size[1], of->size[2], c->lists[1].t.size[3]};
    TRY(check_shape(&num->t, 3, size, "(b, h, rows of blocks)", err));
    TRY(check_shape(&places->t, 4, size, "(b, h, rows of blocks, columns of blocks)", err));
    TRY(check_device(&num->t, &c->tensors[0].t, err));
    TRY(check_device(&places->t, &c->tensors[0].t, err));
    REQUIRE(num->t.dtype == fa_torch.i32 && places->t.dtype == fa_torch.i32, "lists of blocks must be int32");
    *list = (fa_flex_list){.num = num->t.data, .blocks = places->t.data};
    memcpy(list->num_stride, num->t.stride, sizeof list->num_stride);
    memcpy(list->blocks_stride, places->t.stride, sizeof list->blocks_stride);
    return FA_OK;
}

/* The sizes and lists of a BlockMask as a tuple, if its lengths are those of the call. NULL: they are not. */
static PyObject *tuple_of_block_mask(PyObject *block_mask, const int64_t lengths[2], bool on_gpu) {
    static const char *const names[] = {"seq_lengths", "BLOCK_SIZE",         "kv_num_blocks",
                                        "kv_indices",  "full_kv_num_blocks", "full_kv_indices"};
    enum { NUM_NAMES = sizeof names / sizeof *names };
    static PyObject *name_of_kept;
    static PyObject *interned[NUM_NAMES];
    PyObject *found[NUM_NAMES] = {NULL}, *tuple = NULL;
    bool fits = true;
    for (int i = 0; fits && i < NUM_NAMES; i++) {
        if (!interned[i]) interned[i] = PyUnicode_InternFromString(names[i]);
        fits = interned[i] && (found[i] = PyObject_GetAttr(block_mask, interned[i]));
    }
    for (int i = 0; fits && i < 2; i++) fits = PyTuple_CheckExact(found[i]) && PyTuple_Size(found[i]) == 2;
    for (int i = 0; fits && i < 2; i++) {
        PyObject *length = PyTuple_GetItem(found[0], i);
        fits = PyLong_CheckExact(length) && PyLong_AsLongLong(length) == lengths[i];
    }
    if (!name_of_kept) name_of_kept = PyUnicode_InternFromString("kept_walks");
    PyObject *kept = fits && on_gpu && name_of_kept ? PyObject_GetAttr(block_mask, name_of_kept) : NULL;
    if (!kept) PyErr_Clear();
    if (fits)
        tuple = PyTuple_Pack(kept ? KEPT + 1 : KEPT, PyTuple_GetItem(found[1], 0), PyTuple_GetItem(found[1], 1),
                             found[2], found[3], found[4], found[5], kept);
    for (int i = 0; i < NUM_NAMES; i++) Py_XDECREF(found[i]);
    Py_XDECREF(kept);
    return tuple;
}

/* A plain kernel needs no blocks, which were only to be checked. */
static void drop_blocks(flex_call *c) {
    c->flex.partial = c->flex.full = (fa_flex_list){0};
    c->blocks = Py_None;
}

static fa_status read_blocks(flex_call *c, fa_error *err) {
    fa_flex *f = &c->flex;
    const fa_problem *p = &c->problem;
    PyObject *objects[2 + NUM_LISTS];
    if (c->block_mask && c->block_mask != Py_None) {
        c->owned_blocks = tuple_of_block_mask(c->block_mask, (int64_t[]){p->len_q, p->len_kv}, p->device == FA_CUDA);
        REQUIRE(c->owned_blocks, "block_mask must be a BlockMask of the lengths of the call");
        c->blocks = c->owned_blocks;
    } else if (c->find_blocks && c->find_blocks != Py_None) {
        c->owned_blocks = PyObject_CallFunctionObjArgs(c->find_blocks, NULL);
        if (!c->owned_blocks) return c->has_raised = true, fa_keep_exception(), FA_EPYTHON;
        c->blocks = c->owned_blocks;
    }
    if (c->blocks == Py_None) return FA_OK;
    if (PyTuple_Check(c->blocks) && PyTuple_Size(c->blocks) == 2) return FA_OK; /* an op was to find the lists */
    REQUIRE(PyTuple_Check(c->blocks) && (PyTuple_Size(c->blocks) == KEPT || PyTuple_Size(c->blocks) == KEPT + 1),
            "blocks must be None or two sizes, four lists, and perhaps what is kept");
    for (int i = 0; i < 2 + NUM_LISTS; i++) objects[i] = PyTuple_GetItem(c->blocks, i);
    f->block_q = PyLong_AsLongLong(objects[0]), f->block_kv = PyLong_AsLongLong(objects[1]);
    if (PyErr_Occurred()) PyErr_Clear(), f->block_q = 0;
    REQUIRE(f->block_q >= 1 && f->block_kv >= 1, "the sizes of a block must be positive integers");
    TRY(read_list(c, objects + 2, NUM, &f->partial, err));
    TRY(read_list(c, objects + 2, FULL_NUM, &f->full, err));
    const fa_tensor *places = &c->lists[PLACES].t;
    const int64_t most = (int64_t)1 << 31; /* more than any length */
    f->block_q = f->block_q < most ? f->block_q : most, f->block_kv = f->block_kv < most ? f->block_kv : most;
    f->mask_b = places->size[0], f->mask_h = places->size[1], f->rows = places->size[2], f->columns = places->size[3];
    REQUIRE(p->b * p->h == 0 || (f->mask_b >= 1 && f->mask_h >= 1), "the lists of blocks must have a batch and a head");
    REQUIRE((double)f->rows * (double)f->block_q >= (double)p->len_q &&
                (double)f->columns * (double)f->block_kv >= (double)p->len_kv,
            "the lists of blocks must cover %" PRId64 " queries and %" PRId64 " keys; they cover %" PRId64 " blocks of "
            "%" PRId64 " and %" PRId64 " of %" PRId64,
            p->len_q, p->len_kv, f->rows, f->block_q, f->columns, f->block_kv);
    return FA_OK;
}

/* ---- calls without mods ------------------------------------------------------------------------------------------ */

static fa_status read_plain(flex_call *c, fa_error *err) {
    PyObject *of[3] = {NULL};
    if (c->plain == Py_None) return FA_OK;
    REQUIRE(PyTuple_Check(c->plain) && PyTuple_Size(c->plain) == 3,
            "the window and the softcap must be a tuple of three numbers");
    for (int i = 0; i < 3; i++) of[i] = PyTuple_GetItem(c->plain, i);
    c->problem.window_left = PyLong_AsLongLong(of[0]), c->problem.window_right = PyLong_AsLongLong(of[1]);
    c->problem.softcap = PyFloat_AsDouble(of[2]);
    if (PyErr_Occurred()) return fa_keep_exception(), FA_EPYTHON;
    const double softcap = c->problem.softcap;
    REQUIRE(softcap == 0 || (softcap >= 1e-30 && softcap <= 1e30 && fabs(c->problem.scale) <= 1e30 * softcap),
            "softcap must be 0 or between 1e-30 and 1e30; it is %g", softcap);
    return FA_OK;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static fa_status read_sinks(flex_call *c, fa_error *err) {
    PyObject *of[4];
    if (!c->sinks || c->sinks == Py_None) return FA_OK;
    REQUIRE(PyTuple_Check(c->sinks) && PyTuple_Size(c->sinks) == 4,
            "sinks must be None or sinks, shift, cu_seqlens_q and probability");
    for (int i = 0; i < 4; i++) of[i] = PyTuple_GetItem(c->sinks, i);
    const fa_sinks_of_call of_call = {of[0], of[1], of[2]};
    TRY(fa_read_sinks(&of_call, &c->tensors[0].t, c->of_sinks, &c->problem, err));
    return read_stats(c, 12, of[3], "the probability of sinks", &c->problem.sink_probability, err);
}

static fa_status read_dropout(flex_call *c, fa_error *err) {
    fa_flex_tensor *state = &c->tensors[13];
    if (!c->dropout || c->dropout == Py_None) return FA_OK;
    REQUIRE(PyTuple_Check(c->dropout) && PyTuple_Size(c->dropout) == 2,
            "dropout must be None or a probability and rng_state");
    const double dropout_p = PyFloat_AsDouble(PyTuple_GetItem(c->dropout, 0));
    if (PyErr_Occurred()) return fa_keep_exception(), FA_EPYTHON;
    TRY(fa_read_dropout_p(dropout_p, &c->problem, err));
    PyObject *given = PyTuple_GetItem(c->dropout, 1);
    if (PyCallable_Check(given)) {
        given = c->drawn = PyObject_CallObject(given, NULL);
        if (!given) return c->has_raised = true, FA_EPYTHON;
    }
    TRY(fa_flex_read_tensor(given, "rng_state", state, err));
    REQUIRE(present(&state->t), "rng_state must be given with dropout; it is None");
    return fa_read_rng_state(&state->t, &c->tensors[0].t, &c->problem, err);
}

/* The kernels leave what they walk through to the next call, if the blocks have a place for it. */
static void offer_kept_walks(flex_call *c, fa_pass pass) {
    if (c->flex.partial.num && PyTuple_Size(c->blocks) > KEPT && c->problem.device == FA_CUDA)
        c->flex.kept = fa_offer_kept_walks(&c->kept, c->blocks, c->mask, pass);
}

static fa_status attend(flex_call *c, fa_pass pass, fa_error *err) {
    fa_status status = FA_OK;
    TRY(read_tensors(c, pass, err));
    const int64_t d = c->problem.d;
    c->problem.scale = c->scale == Py_None ? 1 / sqrt(d > 1 ? (double)d : 1) : PyFloat_AsDouble(c->scale);
    if (PyErr_Occurred()) return fa_keep_exception(), FA_EPYTHON;
    REQUIRE(fabs(c->problem.scale) <= 1e30, "scale must be between -1e30 and 1e30; it is %g", c->problem.scale);
    TRY(read_plain(c, err));
    if (!read_program(c, 0, c->score, &c->flex.score) || !read_program(c, 1, c->mask, &c->flex.mask) ||
        (pass == FA_BWD && !read_program(c, 2, c->derivative, &c->flex.derivative)))
        return fa_keep_exception(), FA_EPYTHON;
    TRY(read_blocks(c, err));
    if (c->makes_results && c->plain != Py_None) drop_blocks(c);
    TRY(check_sequences(c, &c->problem, err));
    TRY(read_sinks(c, err));
    TRY(read_dropout(c, err));
    if (pass == FA_BWD) {
        for (int i = 7; i < 10 && c->problem.device == FA_CPU; i++) fa_ask_for_gradient(&c->tensors[i].t);
        TRY(read_gradients(c, err));
        c->problem.deterministic = PyObject_IsTrue(c->deterministic) == 1;
    }
    const fa_flex *f = &c->flex;
    if (f->score || f->mask || f->partial.num || f->max_scores.data || f->dlse.data) {
        REQUIRE(c->problem.softcap == 0 && c->problem.window_left < 0 && c->problem.window_right < 0,
                "a call with mods has no window and no softcap besides");
        c->problem.flex = f;
    }
    if (c->problem.h_kv == 0) return FA_OK; /* no tensor has an element */
    const bool only_out = c->makes_results && !c->wants_lse;
    offer_kept_walks(c, pass);
    Py_BEGIN_ALLOW_THREADS status = fa_execute_problem(&c->problem, only_out, err);
    Py_END_ALLOW_THREADS if (c->flex.kept) fa_settle_kept_walks(&c->kept, status);
    return status;
}

static PyObject *finish(flex_call *c, fa_pass pass) {
    fa_error err = {""};
    const fa_status status = attend(c, pass, &err);
    for (int i = 0; i < 3; i++) fa_flex_unbind(c->programs[i]);
    free(c->gradient_data);
    if (status != FA_OK) return fa_raise(status, &err);
    Py_RETURN_NONE;
}

/* ---- calls of the plain ops with mods ---------------------------------------------------------------------------- */

/* The problem of a plain call as one with mods. Its mods know the window, the softcap and the slopes, and where packed
 * sequences lie, which are one sequence here. */
static void leave_to_mods(fa_problem *p) {
    p->window_left = p->window_right = -1;
    p->softcap = 0;
    p->alibi_slopes = NULL;
    p->empty_lse = -INFINITY;
    if (!p->cu_seqlens_q) return;
    if (p->device == FA_CPU) p->sink_end = p->cu_seqlens_q + p->b;
    p->cu_seqlens_q = p->cu_seqlens_k = NULL;
    p->b = 1, p->len_q = p->total_q, p->len_kv = p->total_kv;
    p->cache_rows = 1;
}

/* Makes the largest score of each head of max_scores, the last result, and puts it in the place of max_scores. */
static fa_status find_max_logits(const flex_call *c, const fa_tensor *q, fa_outputs *outputs, fa_error *err) {
    const fa_problem *p = &c->problem;
    const fa_row_stats *scores = &c->flex.max_scores;
    fa_max_logits of = {.device_idx = p->device_idx,
                        .b = p->b,
                        .h = p->h,
                        .rows = p->len_q,
                        .scores = {scores->data, scores->stride_b, scores->stride_h, 1},
                        .shift = p->sink_shift};
    const int last = outputs->num - 1;
    TRY(fa_make_max_logits(&of, q, outputs, err));
    fa_torch.aoti_torch_delete_tensor_object(outputs->tensor[last]);
    outputs->tensor[last] = outputs->tensor[--outputs->num];
    return FA_OK;
}

static fa_status execute_with_mods(flex_call *c, fa_option_mods *m, bool wants_probability, const fa_call *call,
                                   fa_outputs *outputs, fa_error *err) {
    fa_problem *p = &c->problem;
    fa_call own = *call;
    fa_status status = FA_OK;
    void *data = NULL;
    TRY(fa_check_call(call, p, err));
    REQUIRE(!p->paged, "a call with mods has no pages");
    c->tensors[0].t = call->q;
    TRY(fa_make_option_mods(call, p, m, err));
    c->blocks = m->made_blocks;
    if (!read_program(c, 0, m->score, &c->flex.score) || !read_program(c, 1, m->mask, &c->flex.mask)) return FA_EINVAL;
    own.only_out = m->record == Py_None;
    own.wants_sink_probability = m->sinks != Py_None && !own.only_out && wants_probability;
    TRY(fa_make_outputs(&own, false, p, outputs, err));
    leave_to_mods(p);
    PyObject *shift = m->of_rows && (c->wants_max || m->sinks != Py_None) ? m->of_rows : Py_None;
    const fa_sinks_of_call of_call = {m->sinks, shift, Py_None};
    TRY(fa_read_sinks(&of_call, &call->q, c->of_sinks, p, err));
    TRY(read_blocks(c, err));
    if (c->wants_max) {
        const int64_t size[] = {p->b, p->h, p->len_q}, rows = p->len_q > 1 ? p->len_q : 1,
                      stride[] = {(p->h > 1 ? p->h : 1) * rows, rows, 1};
        TRY(fa_make_output(outputs, &call->q, 3, size, stride, fa_torch.f32, &data, err));
        c->flex.max_scores = (fa_row_stats){.data = data, .stride_b = stride[0], .stride_h = stride[1]};
    }
    TRY(read_dropout(c, err)); /* nothing else refuses the call, which would draw again then */
    p->flex = &c->flex;
    const bool has_elements = p->h_kv > 0;
    c->mask = m->mask;
    if (has_elements) offer_kept_walks(c, FA_FWD);
    Py_BEGIN_ALLOW_THREADS if (has_elements) status = fa_execute_problem(p, own.only_out, err);
    if (status == FA_OK && c->wants_max) status = find_max_logits(c, &call->q, outputs, err);
    Py_END_ALLOW_THREADS if (c->flex.kept) fa_settle_kept_walks(&c->kept, status);
    return status;
}

fa_status fa_flex_execute(const fa_call *call, PyObject *const *further, fa_outputs *outputs, fa_error *err) {
    fa_option_mods m = {.kind_of = further[0],
                        .attn_bias = further[1],
                        .attn_mask = further[2],
                        .sinks = further[3],
                        .places = further[4],
                        .blocks = further[5],
                        .on_cpu = further[7] == Py_True,
                        .least = PyFloat_AsDouble(further[8]),
                        .given_shift = further[9],
                        .record = further[10]};
    flex_call c = {.wants_max = further[6] == Py_True, .dropout = further[12]};
    const fa_status status = execute_with_mods(&c, &m, further[11] == Py_True, call, outputs, err);
    for (int i = 0; i < 2; i++) fa_flex_unbind(c.programs[i]);
    fa_drop_option_mods(&m);
    Py_XDECREF(c.drawn);
    if (status == FA_OK) return FA_OK;
    fa_drop_outputs(outputs);
    if (m.has_raised || c.has_raised) return fa_keep_exception(), FA_EPYTHON;
    return FA_EINVAL; /* whatever it was, the long way says it in the caller's words */
}

/* ---- calls that make their results ------------------------------------------------------------------------------- */

/* Returns (out, lse or None, max_scores or None, blocks or None), or NULL. */
static PyObject *results_of(flex_call *c) {
    const bool is_made[] = {true, c->wants_lse, c->wants_max};
    PyObject *tuple = PyTuple_New(4);
    for (int i = 0, made = 0; tuple && i < 3; i++) {
        PyObject *result = is_made[i] ? fa_wrap(c->outputs.tensor[made++]) : Py_None;
        if (result == Py_None) Py_INCREF(Py_None);
        if (!result || PyTuple_SetItem(tuple, i, result) < 0) Py_CLEAR(tuple);
    }
    if (!tuple) return NULL;
    Py_INCREF(c->blocks);
    PyTuple_SetItem(tuple, 3, c->blocks);
    return tuple;
}

static bool are_plain(PyObject *sequences) {
    for (int i = 0; sequences != Py_None && i < NUM_PLACES; i++) {
        PyObject *of = PyTuple_Check(sequences) && i < PyTuple_Size(sequences) ? PyTuple_GetItem(sequences, i) : NULL;
        if (!of || (of != Py_None && !fa_is_plain(of))) return false;
    }
    return true;
}

PyObject *fa_flex_direct(PyObject *self, PyObject *args) {
    (void)self;
    flex_call c = {.makes_results = true, .blocks = Py_None};
    fa_error err = {""};
    PyObject *enable_gqa, *wants_lse, *wants_max, *results = NULL;
    if (!PyArg_UnpackTuple(args, "flex_direct", 13, 13, &c.q, &c.k, &c.v, &c.scale, &enable_gqa, &c.plain, &c.score,
                           &c.mask, &c.block_mask, &c.find_blocks, &c.sequences, &wants_lse, &wants_max))
        return NULL;
    if (!fa_torch.wrap || fa_gpu_imagined() || !fa_is_unseen() || !fa_is_plain(c.q) || !fa_is_plain(c.k) ||
        !fa_is_plain(c.v) || !are_plain(c.sequences))
        Py_RETURN_NONE;
    c.wants_lse = wants_lse == Py_True;
    c.wants_max = wants_max == Py_True;
    c.enables_gqa = enable_gqa == Py_True;
    const fa_status status = attend(&c, FA_FWD, &err);
    for (int i = 0; i < 2; i++) fa_flex_unbind(c.programs[i]);
    if (status == FA_OK) results = results_of(&c);
    fa_drop_outputs(&c.outputs);
    Py_XDECREF(c.owned_blocks);
    if (results) return results;
    if (status != FA_OK) fa_raise(status, &err); /* so that no exception is kept */
    if (c.has_raised) return NULL;               /* out of memory, or interrupted */
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyObject *fa_flex_forward(PyObject *self, PyObject *args) {
    (void)self;
    flex_call c = {0};
    return PyArg_UnpackTuple(args, "flex_forward", 12, 14, &c.q, &c.k, &c.v, &c.out, &c.lse, &c.max_scores, &c.scale,
                             &c.plain, &c.score, &c.mask, &c.blocks, &c.sequences, &c.sinks, &c.dropout)
               ? finish(&c, FA_FWD)
               : NULL;
}

PyObject *fa_flex_backward(PyObject *self, PyObject *args) {
    (void)self;
    flex_call c = {0};
    return PyArg_UnpackTuple(args, "flex_backward", 20, 21, &c.q, &c.k, &c.v, &c.out, &c.lse, &c.dout, &c.dlse, &c.dq,
                             &c.dk, &c.dv, &c.softmax_d, &c.scale, &c.plain, &c.score, &c.mask, &c.blocks,
                             &c.derivative, &c.gradients, &c.deterministic, &c.sequences, &c.dropout)
               ? finish(&c, FA_BWD)
               : NULL;
}
