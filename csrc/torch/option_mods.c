#include "option_mods.h"

#include "check.h"
#include "failures.h"
#include "flex_values.h"
#include "options.h"
#include "python_tensors.h"
#include "wrap.h"

enum { NUM_PLACES = FA_NUM_PLACES };
static_assert((int)FA_VALUE_LEN_SHIFT == (int)FA_VALUE_PLACES + (int)FA_NUM_PLACES, "places lie between");

/* ---- kinds ------------------------------------------------------------------------------------------------------- */

/* Adds bits to a kind, the first ones lowest. */
typedef struct {
    uint64_t bits;
    int num;
} kind;
static void add(kind *k, uint64_t bits, int num) {
    k->bits |= bits << k->num;
    k->num += num;
}

/* Which dimensions of the last `num` of a shape a tensor has, as bits. false: it has other sizes. */
static bool dims_of(const fa_tensor *t, const int64_t *shape, int num, uint64_t *dims) {
    *dims = 0;
    for (int64_t i = 0; i < t->ndim; i++) {
        const int64_t dim = num - t->ndim + i;
        if (dim < 0 || (t->size[i] != 1 && t->size[i] != shape[dim])) return false;
        if (t->size[i] != 1) *dims |= (uint64_t)1 << dim;
    }
    return true;
}

/* Adds whether there is a tensor, and its dimensions. */
static fa_status add_dims(kind *k, const fa_tensor *t, const int64_t *shape, int num, fa_error *err) {
    uint64_t dims = 0;
    REQUIRE(!present(t) || dims_of(t, shape, num, &dims), "%s has other sizes than the call", t->name);
    add(k, present(t), 1);
    add(k, dims, num);
    return FA_OK;
}

/* Returns what Python made of a kind, which is kept. The reference is borrowed. NULL: there is an exception. */
static PyObject *programs_of(uint64_t bits, PyObject *kind_of) {
    static PyObject *kept;
    if (!kept && !(kept = PyDict_New())) return NULL;
    PyObject *key = PyLong_FromUnsignedLongLong(bits);
    PyObject *found = key ? PyDict_GetItemWithError(kept, key) : NULL;
    if (key && !found && !PyErr_Occurred()) {
        PyObject *made = PyObject_CallFunctionObjArgs(kind_of, key, NULL);
        if (made && PyDict_SetItem(kept, key, made) == 0) found = made;
        Py_XDECREF(made); /* the dictionary holds it */
    }
    Py_XDECREF(key);
    return found;
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* The objects that `which` numbers. Behind the values come those of `fixed`. Returns a new reference. */
static PyObject *picked(PyObject *which, PyObject *const values[FA_NUM_VALUES], PyObject *fixed) {
    const Py_ssize_t num = PyTuple_Size(which);
    PyObject *tuple = num < 0 ? NULL : PyTuple_New(num);
    for (Py_ssize_t i = 0; tuple && i < num; i++) {
        const long at = PyLong_AsLong(PyTuple_GetItem(which, i));
        PyObject *value = at < 0 ? NULL : at < FA_NUM_VALUES ? values[at] : PyTuple_GetItem(fixed, at - FA_NUM_VALUES);
        Py_XINCREF(value);
        if (!value || PyTuple_SetItem(tuple, i, value) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

/* A mod with the values of a call, or None. Returns a new reference, or NULL with an exception. */
static PyObject *bound(PyObject *program, PyObject *const values[FA_NUM_VALUES]) {
    PyObject *text, *tensors, *numbers, *fixed, *mod = NULL;
    if (program == Py_None) {
        Py_INCREF(Py_None);
        return Py_None;
    }
    if (!PyTuple_Check(program) || !PyArg_UnpackTuple(program, "program", 4, 4, &text, &tensors, &numbers, &fixed))
        return NULL;
    tensors = picked(tensors, values, fixed);
    numbers = tensors ? picked(numbers, values, fixed) : NULL;
    if (numbers) mod = PyTuple_Pack(3, text, tensors, numbers);
    Py_XDECREF(tensors);
    Py_XDECREF(numbers);
    return mod;
}

/* Wraps the tensors of a list of outputs: the bits of `wanted` say which objects they are. Others are None. */
static PyObject *list_of(const fa_outputs *outputs, unsigned wanted, int num) {
    PyObject *list = PyList_New(num);
    for (int i = 0, made = 0; list && i < num; i++) {
        PyObject *object = Py_None;
        if (wanted >> i & 1)
            object = fa_wrap(outputs->tensor[made++]);
        else
            Py_INCREF(object);
        if (!object || PyList_SetItem(list, i, object) < 0) Py_CLEAR(list);
    }
    return list;
}

/* ---- the shift --------------------------------------------------------------------------------------------------- */

/* The numbers of a shift in fp32, of one in fp64 on the CPU. */
static fa_status make_floats(PyObject *shift, PyObject **floats, fa_error *err) {
    fa_flex_tensor t;
    fa_outputs outputs = {.num = 0};
    void *data = NULL;
    int64_t num = 1;
    TRY(fa_flex_read_tensor(shift, "the shift", &t, err));
    for (int64_t i = 0; i < t.t.ndim; i++) num *= t.t.size[i];
    fa_status status = fa_make_output(&outputs, &t.t, t.t.ndim, t.t.size, t.t.stride, fa_torch.f32, &data, err);
    for (int64_t i = 0; status == FA_OK && i < num; i++) ((float *)data)[i] = (float)((const double *)t.t.data)[i];
    if (status == FA_OK && !(*floats = fa_wrap(outputs.tensor[0]))) status = FA_EINVAL;
    fa_drop_outputs(&outputs);
    return status;
}

static fa_status make_places(const fa_call *call, int64_t right, unsigned wanted, fa_option_mods *m, fa_error *err) {
    fa_outputs outputs = {.num = 0};
    const fa_status status = fa_make_packed_places(call, right, wanted, &outputs, err);
    if (status == FA_OK) m->made_places = list_of(&outputs, wanted, NUM_PLACES);
    fa_drop_outputs(&outputs);
    return status == FA_OK && !m->made_places ? FA_EINVAL : status;
}

/* Makes the shift, unless a look at the biases tells that every shift is 0. */
static fa_status make_shift(const fa_call *call, const fa_problem *p, int64_t right, const fa_tensor *bias,
                            fa_option_mods *m, fa_error *err) {
    const bool is_packed = packs_q(call);
    const bool is_of_keys = bias->ndim == 1 || (bias->ndim > 1 && bias->size[bias->ndim - 2] == 1);
    fa_shift_request r = {.bias = m->attn_bias,
                          .sinks = m->sinks,
                          .sequence = Py_None,
                          .row = Py_None,
                          .least = m->least,
                          .is_cut = !is_packed && call->window_left < 0 && right >= 0 && is_of_keys &&
                                    bias->size[bias->ndim - 1] > 1,
                          .rows = p->len_q,
                          .last = p->len_kv - p->len_q + right};
    fa_outputs outputs = {.num = 0};
    bool are_high = false;
    if (m->given_shift != Py_None) {
        m->shift = PySequence_GetItem(m->given_shift, 0), m->of_rows = PySequence_GetItem(m->given_shift, 1);
        return m->shift && m->of_rows ? FA_OK : FA_EINVAL;
    }
    if (m->on_cpu) TRY(fa_biases_are_high(&r, &are_high, err));
    if (are_high) return FA_OK;
    if (is_packed && m->on_cpu) TRY(make_places(call, right, (1u << NUM_PLACES) - 1, m, err));
    PyObject *places = m->made_places ? m->made_places : m->places;
    if (is_packed) {
        r.sequence = PySequence_GetItem(places, FA_SEQUENCE), r.row = PySequence_GetItem(places, FA_PLACE_IN_SEQUENCE);
        Py_XDECREF(r.sequence); /* the places hold them */
        Py_XDECREF(r.row);
        if (!r.sequence || !r.row) return FA_EINVAL;
    }
    fa_status status = fa_make_shift(&r, &outputs, err);
    if (status == FA_OK && !(m->shift = fa_wrap(outputs.tensor[0]))) status = FA_EINVAL;
    fa_drop_outputs(&outputs);
    TRY(status);
    if (bias->dtype == fa_torch.f64) return make_floats(m->shift, &m->of_rows, err);
    Py_INCREF(m->shift);
    m->of_rows = m->shift;
    return FA_OK;
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */

static fa_status read_option(PyObject *object, const char *name, const fa_tensor *q, fa_flex_tensor *t, fa_error *err) {
    REQUIRE(object == Py_None || fa_is_plain(object), "%s must be a torch.Tensor", name);
    TRY(fa_flex_read_tensor(object, name, t, err));
    return present(&t->t) ? check_device(&t->t, q, err) : FA_OK;
}

static int dtype_bits(int32_t dtype) {
    return dtype == fa_torch.f16 ? 0 : dtype == fa_torch.bf16 ? 1 : dtype == fa_torch.f32 ? 2 : 3;
}

/* Makes the shift, and finds the kind of the call. */
static fa_status find_kind(const fa_call *call, const fa_problem *p, int64_t right, fa_option_mods *m, kind *k,
                           fa_error *err) {
    const bool is_packed = packs_q(call);
    const int64_t shape[] = {p->b, p->h, is_packed ? call->max_seqlen_q : p->len_q,
                             is_packed ? call->max_seqlen_k : p->len_kv};
    const fa_tensor *slopes = &call->alibi_slopes;
    fa_flex_tensor bias, mask, shift;
    TRY(read_option(m->attn_bias, "attn_bias", &call->q, &bias, err));
    TRY(read_option(m->attn_mask, "attn_mask", &call->q, &mask, err));
    const bool is_floating = bias.t.dtype == fa_torch.f16 || bias.t.dtype == fa_torch.bf16 ||
                             bias.t.dtype == fa_torch.f32 || bias.t.dtype == fa_torch.f64;
    REQUIRE(!present(&bias.t) || (is_floating && !is_empty(&bias.t)), "attn_bias must be floating, and not empty");
    add(k, call->q.dtype == fa_torch.f64, 1);
    add(k, is_packed, 1);
    add(k, call->softcap > 0, 1);
    add(k, slopes->ndim == 2, 1);
    TRY(add_dims(k, slopes, shape, 2, err));
    TRY(add_dims(k, &bias.t, shape, 4, err));
    add(k, present(&bias.t) ? (uint64_t)dtype_bits(bias.t.dtype) : 0, 2);
    TRY(add_dims(k, &mask.t, shape, 4, err));
    add(k, call->window_left >= 0, 1);
    add(k, right >= 0, 1);
    if (present(&bias.t)) TRY(make_shift(call, p, right, &bias.t, m, err));
    TRY(fa_flex_read_tensor(m->shift ? m->shift : Py_None, "the shift", &shift, err));
    REQUIRE(!m->shift || shift.t.ndim == 3, "the shift must be [b, h, rows]");
    TRY(add_dims(k, &shift.t, shift.t.size, 3, err)); /* its sizes are those of its rows, or 1 */
    add(k, shift.t.dtype == fa_torch.f64, 1);
    return FA_OK;
}

static fa_status bind_programs(const fa_call *call, const fa_problem *p, int64_t right, PyObject *programs,
                               fa_option_mods *m, fa_error *err) {
    PyObject *values[FA_NUM_VALUES] = {m->attn_bias, m->attn_mask,
                                       present(&call->alibi_slopes) ? fa_object_of(call->alibi_slopes.handle) : Py_None,
                                       m->shift ? m->shift : Py_None};
    const unsigned wanted = (unsigned)PyLong_AsUnsignedLong(PyTuple_GetItem(programs, 2));
    if (packs_q(call) && m->on_cpu && !m->made_places) TRY(make_places(call, right, wanted, m, err));
    PyObject *places = m->made_places ? m->made_places : m->places;
    for (int i = 0; i < NUM_PLACES; i++) {
        values[FA_VALUE_PLACES + i] = places == Py_None ? Py_None : PySequence_GetItem(places, i);
        if (!values[FA_VALUE_PLACES + i]) return FA_EINVAL;
        if (places != Py_None) Py_DECREF(values[FA_VALUE_PLACES + i]); /* the places hold it */
    }
    values[FA_VALUE_LEN_SHIFT] = PyLong_FromLongLong(p->len_kv - p->len_q);
    values[FA_VALUE_LEFT] = PyLong_FromLongLong(call->window_left);
    values[FA_VALUE_RIGHT] = PyLong_FromLongLong(right);
    values[FA_VALUE_CAP] = PyFloat_FromDouble(call->softcap);
    if (!PyErr_Occurred()) m->score = bound(PyTuple_GetItem(programs, 0), values);
    if (m->score) m->mask = bound(PyTuple_GetItem(programs, 1), values);
    for (int i = FA_VALUE_LEN_SHIFT; i < FA_NUM_VALUES; i++) Py_XDECREF(values[i]);
    return m->mask ? FA_OK : FA_EINVAL;
}

static fa_status find_blocks(PyObject *programs, fa_option_mods *m) {
    if (m->blocks != Py_None && !PyTuple_Check(m->blocks)) {
        if (m->mask != Py_None) m->made_blocks = PyObject_CallFunctionObjArgs(m->blocks, programs, m->mask, NULL);
        m->has_raised = m->mask != Py_None && !m->made_blocks;
        if (m->mask != Py_None) return m->made_blocks ? FA_OK : FA_EINVAL;
        m->blocks = Py_None;
    }
    Py_INCREF(m->blocks);
    m->made_blocks = m->blocks;
    return FA_OK;
}

fa_status fa_make_option_mods(const fa_call *call, const fa_problem *p, fa_option_mods *m, fa_error *err) {
    const int64_t right = call->causal ? 0 : call->window_right;
    kind k = {0};
    REQUIRE(!fa_gpu_imagined() && fa_torch.wrap && fa_find_tensors(), "this is no plain call");
    REQUIRE(!packs_q(call) || m->on_cpu || m->places != Py_None, "the places of packed rows are missing");
    REQUIRE(m->sinks == Py_None || fa_is_plain(m->sinks), "sinks must be a torch.Tensor");
    TRY(find_kind(call, p, right, m, &k, err));
    PyObject *programs = programs_of(k.bits, m->kind_of);
    REQUIRE(programs && PyTuple_Check(programs) && PyTuple_Size(programs) >= 3, "no programs serve the call");
    Py_INCREF(programs);
    fa_status status = bind_programs(call, p, right, programs, m, err);
    if (status == FA_OK) status = find_blocks(programs, m);
    if (status == FA_OK && m->record != Py_None) {
        PyObject *made[] = {programs, m->score, m->mask, m->made_blocks, m->of_rows ? m->of_rows : Py_None};
        for (size_t i = 0; i < sizeof made / sizeof *made && status == FA_OK; i++)
            if (PyList_Append(m->record, made[i]) < 0) status = FA_EINVAL;
    }
    Py_DECREF(programs);
    return status;
}

void fa_drop_option_mods(fa_option_mods *m) {
    PyObject *made[] = {m->score, m->mask, m->made_blocks, m->shift, m->of_rows, m->made_places};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) Py_XDECREF(made[i]);
}
