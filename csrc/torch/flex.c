/* Python calls programs of mods through the functions here. */
#include "flex.h"

#include <stdlib.h>
#include <string.h>

#include "failures.h"
#include "flex/classify.h"
#include "flex/dense.h"
#include "flex/program.h"
#include "torch_abi.h"

#define FA_FLEX_DTYPE(enumerator, name, type, bytes) #name,
static const char *const dtype_names[] = {FA_FLEX_DTYPES(FA_FLEX_DTYPE)};
#undef FA_FLEX_DTYPE

static const char *const result_names[] = {"bool", "int64", "float32", "float64"};

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
    for (int dtype = 0; done && dtype < FA_FLEX_NUM_DTYPES; dtype++) done = put(dtypes, dtype_names[dtype], dtype);
    done = done && put(limits, "magic", FA_FLEX_MAGIC) && put(limits, "rank", FA_FLEX_MAX_RANK) &&
           put(limits, "captures", FA_FLEX_MAX_CAPTURES) && put(limits, "params", FA_FLEX_MAX_PARAMS) &&
           put(limits, "instructions", FA_FLEX_MAX_INSTRUCTIONS);
    PyObject *tables = done ? PyTuple_Pack(3, ops, dtypes, limits) : NULL;
    Py_XDECREF(ops);
    Py_XDECREF(dtypes);
    Py_XDECREF(limits);
    return tables;
}

/* ---- a program with its values ----------------------------------------------------------------------------------- */

typedef struct {
    fa_flex_program program;
    fa_flex_capture captures[FA_FLEX_MAX_CAPTURES];
    fa_flex_number params[FA_FLEX_MAX_PARAMS];
    fa_flex_bound bound;
} bound_program;

/* Is `object` a CPU tensor of this dtype? After a failure there is an exception. */
static bool check_tensor(PyObject *object, const char *dtype, const char *what) {
    bool fits = false;
    if (!PyObject_IsInstance(object, fa_tensor_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a torch.Tensor", what);
        return false;
    }
    PyObject *has = PyObject_GetAttrString(object, "dtype"), *want = PyObject_GetAttrString(fa_torch_module, dtype);
    PyObject *is_cpu = PyObject_GetAttrString(object, "is_cpu");
    if (has && want && is_cpu) fits = has == want && is_cpu == Py_True;
    if (has && want && is_cpu && !fits)
        PyErr_Format(PyExc_RuntimeError, "%s must be a CPU tensor of dtype %s", what, dtype);
    Py_XDECREF(has);
    Py_XDECREF(want);
    Py_XDECREF(is_cpu);
    return fits;
}

/* Reads `num` integers of a sequence. Returns false after a failure. */
static bool read_ints(PyObject *sequence, Py_ssize_t num, int64_t *ints) {
    if (!sequence || PySequence_Size(sequence) != num) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "a tensor must have %zd dimensions", num);
        return false;
    }
    for (Py_ssize_t i = 0; i < num; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        ints[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return false;
    }
    return true;
}

/* Reads address, sizes and strides. Returns false after a failure. */
static bool read_tensor(PyObject *tensor, int ndim, void **data, int64_t *size, int64_t *stride) {
    PyObject *address = PyObject_CallMethod(tensor, "data_ptr", NULL);
    PyObject *shape = PyObject_GetAttrString(tensor, "shape");
    PyObject *strides = PyObject_CallMethod(tensor, "stride", NULL);
    const bool done = address && read_ints(shape, ndim, size) && read_ints(strides, ndim, stride);
    *data = done ? PyLong_AsVoidPtr(address) : NULL;
    for (int i = 0; done && i < ndim; i++)
        if (size[i] == 0) *data = NULL;
    Py_XDECREF(address);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return done && !PyErr_Occurred();
}

static bool bind_capture(bound_program *b, PyObject *tensors, int i) {
    fa_flex_capture *c = &b->captures[i];
    void *data = NULL;
    PyObject *tensor = PyTuple_GetItem(tensors, i);
    const bool done = tensor && check_tensor(tensor, dtype_names[b->program.captures[i].dtype], "a capture") &&
                      read_tensor(tensor, b->program.captures[i].rank, &data, c->size, c->stride);
    c->data = data;
    return done;
}

static bool bind_param(bound_program *b, PyObject *numbers, int i) {
    PyObject *number = PyTuple_GetItem(numbers, i);
    if (!number) return false;
    if (b->program.params[i] == FA_FLEX_BOOL)
        b->params[i].b = PyObject_IsTrue(number) == 1;
    else if (b->program.params[i] == FA_FLEX_I64)
        b->params[i].i = PyLong_AsLongLong(number);
    else
        b->params[i].d = PyFloat_AsDouble(number);
    return !PyErr_Occurred();
}

static void unbind(bound_program *b) {
    if (b) fa_flex_free(&b->program);
    free(b);
}

/* Returns NULL after a failure. Then there is an exception. The tensors must outlive the result. */
static bound_program *bind(PyObject *text, PyObject *tensors, PyObject *numbers) {
    fa_error err = {""};
    if (!PyBytes_Check(text) || !PyTuple_Check(tensors) || !PyTuple_Check(numbers)) {
        PyErr_SetString(PyExc_TypeError, "a program is bytes, with a tuple of tensors and a tuple of numbers");
        return NULL;
    }
    bound_program *b = calloc(1, sizeof *b);
    if (!b) return (bound_program *)(void *)PyErr_NoMemory();
    const fa_status status = fa_flex_decode(PyBytes_AsString(text), (size_t)PyBytes_Size(text), &b->program, &err);
    bool done = status == FA_OK;
    if (!done) fa_raise(status, &err);
    if (done && (PyTuple_Size(tensors) != b->program.num_captures || PyTuple_Size(numbers) != b->program.num_params)) {
        PyErr_Format(PyExc_RuntimeError, "the program needs %d tensors and %d numbers; it got %zd and %zd",
                     b->program.num_captures, b->program.num_params, PyTuple_Size(tensors), PyTuple_Size(numbers));
        done = false;
    }
    for (int i = 0; done && i < b->program.num_captures; i++) done = bind_capture(b, tensors, i);
    for (int i = 0; done && i < b->program.num_params; i++) done = bind_param(b, numbers, i);
    if (!done) {
        unbind(b);
        return NULL;
    }
    b->bound = (fa_flex_bound){&b->program, b->captures, b->params};
    return b;
}

/* ---- functions --------------------------------------------------------------------------------------------------- */

static PyObject *flex_check(PyObject *self, PyObject *text) {
    (void)self;
    fa_error err = {""};
    fa_flex_program program;
    if (!PyBytes_Check(text)) return PyErr_Format(PyExc_TypeError, "flex_check(): the program must be bytes");
    const fa_status status = fa_flex_decode(PyBytes_AsString(text), (size_t)PyBytes_Size(text), &program, &err);
    if (status != FA_OK) return fa_raise(status, &err);
    const char *name = result_names[fa_flex_result(&program)];
    fa_flex_free(&program);
    return PyUnicode_FromString(name);
}

/* Returns the dtype of the scores that the program reads, or NULL if it reads no score. */
static const char *dtype_of_score(const fa_flex_program *p) {
    for (int32_t i = 0; i < p->num_instructions; i++)
        if (p->instructions[i].op == FA_FLEX_score) return result_names[p->instructions[i].type];
    return NULL;
}

/* Fills the pointers of the grid, and its sizes from `out`. */
static bool read_grid(const bound_program *b, PyObject *out, PyObject *scores, fa_flex_grid *grid) {
    int64_t size[4], stride[4], score_size[4];
    void *data = NULL, *score_data = NULL;
    const char *score = dtype_of_score(&b->program);
    if (!check_tensor(out, result_names[fa_flex_result(&b->program)], "out") ||
        !read_tensor(out, 4, &data, size, stride))
        return false;
    bool fits = stride[3] == 1 && stride[2] == size[3] && stride[1] == size[2] * size[3] &&
                stride[0] == size[1] * size[2] * size[3];
    if (score) {
        if (!check_tensor(scores, score, "scores") || !read_tensor(scores, 4, &score_data, score_size, stride))
            return false;
        fits = fits && memcmp(size, score_size, sizeof size) == 0 && stride[3] == 1 && stride[2] == size[3] &&
               stride[1] == size[2] * size[3] && stride[0] == size[1] * size[2] * size[3];
    }
    if (!fits && data) {
        PyErr_SetString(PyExc_RuntimeError, "out and scores must be contiguous and have the same shape");
        return false;
    }
    grid->b = size[0], grid->h = size[1], grid->len_q = size[2], grid->len_kv = size[3];
    grid->out = data, grid->scores = score_data;
    return true;
}

static PyObject *flex_evaluate(PyObject *self, PyObject *args) {
    (void)self;
    static const fa_pool pool = {torch_parallel_for};
    PyObject *text, *tensors, *numbers, *out, *scores = Py_None, *first_q = NULL, *first_kv = NULL;
    fa_flex_grid grid = {0};
    fa_error err = {""};
    fa_status status = FA_OK;
    if (!PyArg_UnpackTuple(args, "flex_evaluate", 4, 7, &text, &tensors, &numbers, &out, &scores, &first_q, &first_kv))
        return NULL;
    grid.first_q = first_q ? PyLong_AsLongLong(first_q) : 0;
    grid.first_kv = first_kv ? PyLong_AsLongLong(first_kv) : 0;
    if (PyErr_Occurred()) return NULL;
    bound_program *b = bind(text, tensors, numbers);
    if (!b) return NULL;
    if (!read_grid(b, out, scores, &grid)) {
        unbind(b);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS if (grid.out) status = fa_flex_evaluate(&b->bound, &grid, &pool, &err);
    Py_END_ALLOW_THREADS unbind(b);
    if (status != FA_OK) return fa_raise(status, &err);
    Py_RETURN_NONE;
}

/* Finds the memory of one kind's lists in four tensors of int32. */
static bool read_lists(PyObject *tensors, int first, const int64_t *lines, fa_flex_lists *lists) {
    if (!PyTuple_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "the lists must be a tuple of tensors");
        return false;
    }
    int32_t **const to[] = {&lists->num_kv, &lists->kv, &lists->num_q, &lists->q};
    for (int i = 0; i < 4; i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, first + i);
        const int64_t want[] = {lines[0], lines[1], lines[2 + i / 2], lines[3 - i / 2]};
        const int ndim = i % 2 ? 4 : 3;
        int64_t size[4], stride[4], elements = 1;
        void *data = NULL;
        if (!tensor || !check_tensor(tensor, "int32", "a list") || !read_tensor(tensor, ndim, &data, size, stride))
            return false;
        bool fits = data != NULL;
        for (int dim = ndim - 1; dim >= 0; elements *= size[dim--])
            fits = fits && size[dim] == want[dim] && stride[dim] == elements;
        if (!fits) {
            PyErr_SetString(PyExc_RuntimeError, "a list of blocks has another shape or is not contiguous");
            return false;
        }
        *to[i] = data;
    }
    return true;
}

static PyObject *flex_classify(PyObject *self, PyObject *args) {
    (void)self;
    static const fa_pool pool = {torch_parallel_for};
    PyObject *text, *tensors, *numbers, *lists, *sizes[6];
    long long n[6];
    fa_flex_blocks blocks = {0};
    fa_error err = {""};
    fa_status status = FA_OK;
    if (!PyArg_UnpackTuple(args, "flex_classify", 10, 10, &text, &tensors, &numbers, &lists, &sizes[0], &sizes[1],
                           &sizes[2], &sizes[3], &sizes[4], &sizes[5]))
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
    bound_program *b = bind(text, tensors, numbers);
    if (!b) return NULL;
    if (fa_flex_result(&b->program) != FA_FLEX_BOOL || dtype_of_score(&b->program))
        PyErr_SetString(PyExc_RuntimeError, "flex_classify(): the program must be that of a mask");
    if (PyErr_Occurred() || !read_lists(lists, 0, lines, &blocks.partial) ||
        !read_lists(lists, 4, lines, &blocks.full)) {
        unbind(b);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS status = fa_flex_classify(&b->bound, &blocks, &pool, &err);
    Py_END_ALLOW_THREADS unbind(b);
    if (status != FA_OK) return fa_raise(status, &err);
    return PyLong_FromLongLong(blocks.num_evaluated);
}

PyMethodDef fa_flex_functions[] = {
    {"flex_tables", flex_tables, METH_NOARGS, "flex_tables() -> the numbers of ops and dtypes, and the limits"},
    {"flex_check", flex_check, METH_O,
     "flex_check(program) -> the dtype of its result; RuntimeError: it is no program"},
    {"flex_evaluate", flex_evaluate, METH_VARARGS,
     "flex_evaluate(program, tensors, numbers, out, scores=None, first_q=0, first_kv=0): writes the result for every "
     "index of out [b, h, len_q, len_kv]"},
    {"flex_classify", flex_classify, METH_VARARGS,
     "flex_classify(program, tensors, numbers, lists, b, h, len_q, len_kv, block_q, block_kv) -> the number of blocks "
     "that were evaluated; fills the lists of partial and of full blocks: num_kv, kv, num_q, q"},
    {NULL, NULL, 0, NULL},
};
