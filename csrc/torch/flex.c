/* Python calls programs of mods through the functions here. */
#include "flex.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "failures.h"
#include "flex/classify.h"
#include "flex/dense.h"
#include "flex/source.h"
#include "flex/source_words.h"
#include "flex/wide.h"
#include "flex_attend.h"
#include "flex_values.h"
#include "gpu/flex_classify.h"

static bool torch_parallel_for(int64_t n, fa_range_fn *fn, void *ctx) {
    return fa_torch.torch_parallel_for(0, n, 1, fn, ctx) == 0;
}

/* ---- the tables that programs are built from ------------------------------------------------------------------- */

/* Puts a number under a name. Returns false after a failure. */
static bool put(PyObject *dict, const char *name, long number) {
    PyObject *value = PyLong_FromLong(number);
    const bool done = value && PyDict_SetItemString(dict, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

static PyObject *flex_tables(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    PyObject *ops = PyDict_New(), *dtypes = PyDict_New(), *limits = PyDict_New();
    bool done = ops && dtypes && limits;
    for (int code = 0; done && code < FA_FLEX_NUM_CODES; code++)
        if (fa_flex_ops[code].name) done = put(ops, fa_flex_ops[code].name, code);
    for (int dtype = 0; done && dtype < FA_FLEX_NUM_DTYPES; dtype++)
        done = put(dtypes, fa_flex_dtype_names[dtype], dtype);
    done = done && put(limits, "magic", FA_FLEX_MAGIC) && put(limits, "rank", FA_FLEX_MAX_RANK) &&
           put(limits, "captures", FA_FLEX_MAX_CAPTURES) && put(limits, "params", FA_FLEX_MAX_PARAMS) &&
           put(limits, "instructions", FA_FLEX_MAX_INSTRUCTIONS);
    PyObject *tables = done ? PyTuple_Pack(3, ops, dtypes, limits) : NULL;
    Py_XDECREF(ops);
    Py_XDECREF(dtypes);
    Py_XDECREF(limits);
    return tables;
}

/* ---- functions --------------------------------------------------------------------------------------------------- */

static PyObject *flex_check(PyObject *self, PyObject *text) {
    (void)self;
    fa_error err = {""};
    fa_flex_program program;
    if (!PyBytes_Check(text)) return PyErr_Format(PyExc_TypeError, "flex_check(): the program must be bytes");
    const fa_status status = fa_flex_decode(PyBytes_AsString(text), (size_t)PyBytes_Size(text), &program, &err);
    if (status != FA_OK) return fa_raise(status, &err);
    const char *name = fa_flex_result_names[fa_flex_result(&program)];
    fa_flex_free(&program);
    return PyUnicode_FromString(name);
}

/* Reads a contiguous CPU tensor of four dimensions. */
static fa_status read_plane(PyObject *object, const char *name, fa_flex_type type, fa_flex_tensor *to, fa_error *err) {
    TRY(fa_flex_read_tensor(object, name, to, err));
    REQUIRE(present(&to->t) && to->t.device_type == fa_torch.cpu &&
                fa_flex_has_dtype(object, &to->t, fa_flex_result_names[type]),
            "%s must be a CPU tensor of dtype %s", name, fa_flex_result_names[type]);
    TRY(check_rank(&to->t, 4, "(b, h, len_q, len_kv)", err));
    REQUIRE(contiguous(&to->t), "out and scores must be contiguous and have the same shape");
    return FA_OK;
}

/* Only a backward runs a derivative. */
static fa_status refuse_derivative(const fa_flex_program *p, const char *function, fa_error *err) {
    for (int32_t i = 0; i < p->num_instructions; i++)
        REQUIRE(p->instructions[i].op != FA_FLEX_grad && p->instructions[i].op != FA_FLEX_scatter,
                "%s(): the program is a derivative, which has the op %s", function,
                fa_flex_ops[p->instructions[i].op].name);
    return FA_OK;
}

/* Fills the pointers of the grid, and its sizes from `out`. */
static fa_status read_grid(const fa_flex_values *v, PyObject *out, PyObject *scores, fa_flex_grid *grid,
                           fa_error *err) {
    fa_flex_tensor to, from;
    const fa_flex_type score = fa_flex_type_of_score(&v->program);
    TRY(refuse_derivative(&v->program, "flex_evaluate", err));
    TRY(read_plane(out, "out", fa_flex_result(&v->program), &to, err));
    if (score != FA_FLEX_NUM_TYPES) {
        TRY(read_plane(scores, "scores", score, &from, err));
        REQUIRE(memcmp(to.t.size, from.t.size, 4 * sizeof *to.t.size) == 0,
                "out and scores must be contiguous and have the same shape");
        grid->scores = from.t.data;
    }
    grid->b = to.t.size[0], grid->h = to.t.size[1], grid->len_q = to.t.size[2], grid->len_kv = to.t.size[3];
    grid->out = is_empty(&to.t) ? NULL : to.t.data;
    return FA_OK;
}

static PyObject *flex_evaluate(PyObject *self, PyObject *args) {
    (void)self;
    static const fa_pool pool = {torch_parallel_for};
    PyObject *text, *tensors, *numbers, *out, *scores = Py_None, *first_q = NULL, *first_kv = NULL;
    fa_flex_grid grid = {0};
    fa_error err = {""};
    if (!PyArg_UnpackTuple(args, "flex_evaluate", 4, 7, &text, &tensors, &numbers, &out, &scores, &first_q, &first_kv))
        return NULL;
    grid.first_q = first_q ? PyLong_AsLongLong(first_q) : 0;
    grid.first_kv = first_kv ? PyLong_AsLongLong(first_kv) : 0;
    if (PyErr_Occurred()) return NULL;
    fa_flex_values *v = fa_flex_bind(text, tensors, numbers, fa_torch.cpu, -1);
    if (!v) return NULL;
    fa_status status = read_grid(v, out, scores, &grid, &err);
    Py_BEGIN_ALLOW_THREADS if (status == FA_OK && grid.out) status = fa_flex_evaluate(&v->bound, &grid, &pool, &err);
    Py_END_ALLOW_THREADS fa_flex_unbind(v);
    if (status != FA_OK) return fa_raise(status, &err);
    Py_RETURN_NONE;
}

/* Finds the device of eight tensors, which is that of the first. */
static fa_status find_device(PyObject *tensors, int32_t *device_type, int32_t *device_idx, fa_error *err) {
    fa_flex_tensor first;
    REQUIRE(PyTuple_Check(tensors) && PyTuple_Size(tensors) == 8, "the lists must be a tuple of eight tensors");
    TRY(fa_flex_read_tensor(PyTuple_GetItem(tensors, 0), "a list of blocks", &first, err));
    REQUIRE(present(&first.t), "a list of blocks must be a torch.Tensor");
    *device_type = first.t.device_type, *device_idx = first.t.device_idx;
    return FA_OK;
}

/* Finds the memory of one kind's lists in four tensors of int32, which lie where the captures of `v` lie. The lists of
 * the columns may be None. */
static fa_status read_lists(const fa_flex_values *v, PyObject *tensors, int first, const int64_t *lines,
                            fa_flex_lists *lists, fa_error *err) {
    int32_t **const to[] = {&lists->num_kv, &lists->kv, &lists->num_q, &lists->q};
    for (int i = 0; i < 4; i++) {
        fa_flex_tensor list;
        const int64_t want[] = {lines[0], lines[1], lines[2 + i / 2], lines[3 - i / 2]};
        TRY(fa_flex_read_tensor(PyTuple_GetItem(tensors, first + i), "a list of blocks", &list, err));
        if (i >= 2 && !present(&list.t)) continue;
        REQUIRE(present(&list.t) && list.t.dtype == fa_torch.i32, "a list of blocks must be a tensor of dtype int32");
        REQUIRE(list.t.device_type == v->device_type &&
                    (v->device_type == fa_torch.cpu || list.t.device_idx == v->device_idx),
                "all lists of blocks must be on the same device");
        TRY(check_shape(&list.t, i % 2 ? 4 : 3, want, "(b, h, lines) or (b, h, lines, places)", err));
        REQUIRE(contiguous(&list.t), "a list of blocks must be contiguous");
        *to[i] = list.t.data;
    }
    REQUIRE(!lists->num_q == !lists->q, "lists of columns must be two tensors, or None");
    return FA_OK;
}

static fa_status check_mask(const fa_flex_values *v, fa_error *err) {
    TRY(refuse_derivative(&v->program, "flex_classify", err));
    REQUIRE(fa_flex_result(&v->program) == FA_FLEX_BOOL && fa_flex_type_of_score(&v->program) == FA_FLEX_NUM_TYPES,
            "flex_classify(): the program must be that of a mask");
    return FA_OK;
}

/* num_evaluated becomes -1, because the host does not wait for the GPU. */
static fa_status classify_on_gpu(const fa_flex_values *v, fa_flex_blocks *blocks, fa_error *err) {
    AtenTensorHandle workspace = NULL;
    void *data = NULL;
    const int64_t bytes = (int64_t)fa_cuda_flex_classify_workspace(blocks), one = 1;
    fa_status status = FA_OK;
    if (fa_torch.aoti_torch_empty_strided(1, &bytes, &one, fa_torch.u8, v->device_type, v->device_idx, &workspace) !=
            0 ||
        fa_torch.torch_get_mutable_data_ptr(workspace, &data) != 0)
        status = fa_fail(err, FA_ENOMEM_GPU, "CUDA out of memory: the kinds of blocks need %" PRId64 " bytes", bytes);
    blocks->num_evaluated = -1;
    if (status == FA_OK) status = fa_cuda_flex_classify(&v->bound, blocks, v->device_idx, data, err);
    if (workspace) fa_torch.aoti_torch_delete_tensor_object(workspace);
    return status;
}

static fa_status classify(const fa_flex_values *v, fa_flex_blocks *blocks, fa_error *err) {
    static const fa_pool pool = {torch_parallel_for};
    return v->device_type == fa_torch.cuda || fa_gpu_imagined() ? classify_on_gpu(v, blocks, err)
                                                                : fa_flex_classify(&v->bound, blocks, &pool, err);
}

/* On the CPU only: a kernel classifies the rows from 0 on. */
static fa_status check_offset(const fa_flex_values *v, const fa_tensor *t, int64_t b, int64_t len_q, fa_error *err) {
    if (!present(t)) return FA_OK;
    REQUIRE(v->device_type == fa_torch.cpu && t->device_type == fa_torch.cpu,
            "flex_classify(): q_offset and the program must be on the CPU");
    return check_q_offset(t, t, b, len_q, err);
}

static PyObject *flex_classify(PyObject *self, PyObject *args) {
    (void)self;
    int32_t device_type = 0, device_idx = 0;
    PyObject *text, *tensors, *numbers, *lists, *sizes[6], *offset = Py_None;
    fa_flex_tensor q_offset;
    long long n[6];
    fa_flex_blocks blocks = {0};
    fa_error err = {""};
    if (!PyArg_UnpackTuple(args, "flex_classify", 10, 11, &text, &tensors, &numbers, &lists, &sizes[0], &sizes[1],
                           &sizes[2], &sizes[3], &sizes[4], &sizes[5], &offset))
        return NULL;
    for (int i = 0; i < 6; i++) {
        n[i] = PyLong_AsLongLong(sizes[i]);
        if (PyErr_Occurred()) return NULL;
        if (n[i] < 1 || n[i] > INT32_MAX)
            return PyErr_Format(PyExc_RuntimeError, "flex_classify(): sizes must be 1 to %d; got %lld", INT32_MAX,
                                n[i]);
    }
    blocks = (fa_flex_blocks){.b = n[0], .h = n[1], .len_q = n[2], .len_kv = n[3], .block_q = n[4], .block_kv = n[5]};
    const int64_t lines[] = {n[0], n[1], (n[2] + n[4] - 1) / n[4], (n[3] + n[5] - 1) / n[5]};
    fa_status status = find_device(lists, &device_type, &device_idx, &err);
    if (status != FA_OK) return fa_raise(status, &err);
    fa_flex_values *v = fa_flex_bind(text, tensors, numbers, device_type, device_idx);
    if (!v) return NULL;
    status = check_mask(v, &err);
    if (status == FA_OK) status = fa_flex_read_tensor(offset, "q_offset", &q_offset, &err);
    if (status == FA_OK) status = check_offset(v, &q_offset.t, n[0], n[2], &err);
    if (status == FA_OK) blocks.q_offset = q_offset.t.data;
    if (status == FA_OK) status = read_lists(v, lists, 0, lines, &blocks.partial, &err);
    if (status == FA_OK) status = read_lists(v, lists, 4, lines, &blocks.full, &err);
    if (status == FA_OK && !blocks.partial.num_q != !blocks.full.num_q)
        status = fa_fail(&err, FA_EINVAL, "the columns must be listed for both kinds, or for none");
    Py_BEGIN_ALLOW_THREADS if (status == FA_OK) status = classify(v, &blocks, &err);
    Py_END_ALLOW_THREADS fa_flex_unbind(v);
    if (status != FA_OK) return fa_raise(status, &err);
    return PyLong_FromLongLong(blocks.num_evaluated);
}

/* Reads a program with its values, or None. Returns false after a failure. */
static bool bind_part(PyObject *part, fa_flex_values **v) {
    *v = NULL;
    if (part == Py_None) return true;
    if (!PyTuple_Check(part) || PyTuple_Size(part) != 3) {
        PyErr_SetString(PyExc_TypeError, "flex_source(): a program comes as a tuple: program, tensors, numbers");
        return false;
    }
    *v = fa_flex_bind(PyTuple_GetItem(part, 0), PyTuple_GetItem(part, 1), PyTuple_GetItem(part, 2), fa_torch.cpu, -1);
    return *v != NULL;
}

static PyObject *flex_source(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *parts[3], *tensors = Py_None, *result = NULL;
    fa_flex_values *v[3] = {NULL};
    void *gradients[FA_FLEX_MAX_CAPTURES] = {NULL}, *values = NULL;
    char *text = NULL;
    fa_error err = {""};
    if (!PyArg_UnpackTuple(args, "flex_source", 3, 4, &parts[0], &parts[1], &parts[2], &tensors)) return NULL;
    bool done = true;
    for (int i = 0; done && i < 3; i++) done = bind_part(parts[i], &v[i]);
    if (done) {
        const fa_flex_program *p[3];
        const fa_flex_bound *bounds[3];
        bool is_wide = false;
        for (int i = 0; i < 3; i++) p[i] = v[i] ? &v[i]->program : NULL, bounds[i] = v[i] ? &v[i]->bound : NULL;
        for (int i = 0; i < 3; i++) is_wide |= bounds[i] && fa_flex_is_wide(bounds[i], 0);
        const size_t bytes = fa_flex_values_bytes(p[0], p[1], p[2]);
        fa_status status = v[2] ? fa_flex_read_gradients(v[2], tensors, gradients, &err) : FA_OK;
        const fa_flex_text of = {.is_wide = is_wide, .has_exponent = true};
        if (status == FA_OK) status = fa_flex_source(p[0], p[1], p[2], of, &text, &err);
        values = malloc(bytes);
        if (status == FA_OK && !values) status = fa_fail(&err, FA_ENOMEM, "no memory for the values of a program");
        if (status == FA_OK) {
            fa_flex_fill_values(bounds[0], bounds[1], bounds[2], gradients, values);
            result = Py_BuildValue("sy#", text, (const char *)values, (Py_ssize_t)bytes);
        } else {
            fa_raise(status, &err);
        }
    }
    free(text);
    free(values);
    for (int i = 0; i < 3; i++) fa_flex_unbind(v[i]);
    return result;
}

static PyObject *have_memory(PyObject *self, PyObject *tensors) {
    (void)self;
    bool have = PyTuple_Check(tensors);
    for (Py_ssize_t i = 0; have && i < PyTuple_Size(tensors); i++)
        have = fa_flex_has_memory(PyTuple_GetItem(tensors, i));
    return PyBool_FromLong(have);
}

PyMethodDef fa_flex_functions[] = {
    {"have_memory", have_memory, METH_O,
     "have_memory(tensors) -> are all of a tuple None, or plain tensors whose storages hold them?"},
    {"flex_tables", flex_tables, METH_NOARGS, "flex_tables() -> the numbers of ops and dtypes, and the limits"},
    {"flex_check", flex_check, METH_O,
     "flex_check(program) -> the dtype of its result; RuntimeError: it is no program"},
    {"flex_evaluate", flex_evaluate, METH_VARARGS,
     "flex_evaluate(program, tensors, numbers, out, scores=None, first_q=0, first_kv=0): writes the result for every "
     "index of out [b, h, len_q, len_kv]"},
    {"flex_classify", flex_classify, METH_VARARGS,
     "flex_classify(program, tensors, numbers, lists, b, h, len_q, len_kv, block_q, block_kv, q_offset=None) -> the "
     "number of blocks that were evaluated; fills the lists of partial and of full blocks: num_kv, kv, num_q, q, where "
     "num_q and q may be None"},
    {"flex_forward", fa_flex_forward, METH_VARARGS,
     "flex_forward(q, k, v, out, lse, max_scores, scale, plain, score, mask, blocks, "
     "sequences): attention; flex_attend.h"},
    {"flex_direct", fa_flex_direct, METH_VARARGS,
     "flex_direct(q, k, v, scale, enable_gqa, plain, score, mask, block_mask, find_blocks, sequences, wants_lse, "
     "wants_max) -> (out, lse, max_scores, blocks), or None if a check fails; flex_attend.h"},
    {"flex_backward", fa_flex_backward, METH_VARARGS,
     "flex_backward(q, k, v, out, lse, dout, dlse, dq, dk, dv, softmax_d, scale, plain, score, mask, blocks, "
     "derivative, gradients, deterministic, sequences): its gradients; flex_attend.h"},
    {"flex_source", flex_source, METH_VARARGS,
     "flex_source(score, mask, derivative, gradients=None) -> the CUDA C text of programs, and the bytes of its "
     "flex_values; each program is None or a tuple: program, tensors, numbers"},
    {NULL, NULL, 0, NULL},
};
