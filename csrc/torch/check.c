/* Checks of one tensor. A message names the tensor, the value that came and the allowed values. */
#include "check.h"

#include <stdio.h>

#include "autograd.h"

const char *shape_words(const fa_tensor *t, words *w) {
    int at = snprintf(w->text, sizeof w->text, "(");
    for (int64_t i = 0; i < t->ndim && at < (int)sizeof w->text - 24; i++)
        at += snprintf(w->text + at, sizeof w->text - (size_t)at, i ? ", %" PRId64 : "%" PRId64, t->size[i]);
    snprintf(w->text + at, sizeof w->text - (size_t)at, ")");
    return w->text;
}

const char *stride_words(const fa_tensor *t, words *w) {
    return shape_words(&(fa_tensor){.ndim = t->ndim, .size = t->stride}, w);
}

const char *dtype_words(int32_t dtype) {
    if (dtype == fa_torch.f16) return "fp16";
    if (dtype == fa_torch.bf16) return "bf16";
    if (dtype == fa_torch.f32) return "fp32";
    if (dtype == fa_torch.f64) return "fp64";
    if (dtype == fa_torch.e4m3) return "float8_e4m3fn";
    if (dtype == fa_torch.i32) return "int32";
    if (dtype == fa_torch.i64) return "int64";
    if (dtype == fa_torch.u8) return "uint8";
    /* torch's numbers of the dtypes that no kernel takes. Saved models contain these numbers, so they cannot change. */
    static const char *const others[] = {
        [1] = "int8",    [2] = "int16",        [8] = "complex32",        [9] = "complex64",        [10] = "complex128",
        [11] = "bool",   [23] = "float8_e5m2", [25] = "float8_e5m2fnuz", [26] = "float8_e4m3fnuz", [27] = "uint16",
        [28] = "uint32", [29] = "uint64",      [44] = "float8_e8m0fnu",  [45] = "float4_e2m1fn_x2"};
    const bool is_known = dtype >= 0 && dtype < (int32_t)(sizeof others / sizeof *others) && others[dtype];
    return is_known ? others[dtype] : "a dtype without kernels";
}

const char *device_words(int32_t device_type, int32_t device_idx, words *w) {
    if (device_type == fa_torch.cpu) return "the CPU";
    if (device_type != fa_torch.cuda) return "another kind of device";
    snprintf(w->text, sizeof w->text, "CUDA (cuda:%d)", device_idx);
    return w->text;
}

bool is_empty(const fa_tensor *t) {
    for (int64_t i = 0; i < t->ndim; i++)
        if (t->size[i] == 0) return true;
    return false;
}

/* A stride matters only if its dimension has more than one element and the tensor is not empty. */
bool last_dim_contiguous(const fa_tensor *t) {
    return t->ndim == 0 || t->size[t->ndim - 1] <= 1 || t->stride[t->ndim - 1] == 1 || is_empty(t);
}

bool contiguous(const fa_tensor *t) {
    int64_t stride = 1;
    if (is_empty(t)) return true;
    for (int64_t i = t->ndim - 1; i >= 0; i--) {
        if (t->size[i] > 1 && t->stride[i] != stride) return false;
        stride *= t->size[i];
    }
    return true;
}

int64_t bytes_of_dtype(int32_t dtype) {
    if (dtype == fa_torch.f64 || dtype == fa_torch.i64) return 8;
    if (dtype == fa_torch.f32 || dtype == fa_torch.i32) return 4;
    return dtype == fa_torch.f16 || dtype == fa_torch.bf16 ? 2 : 1;
}

/* FSDP and offloading free a storage with untyped_storage().resize_(0). The tensor then keeps its shape. */
fa_status check_memory(const fa_tensor *t, fa_error *err) {
    int64_t elements = 1, first = 0, bytes = 0;
    if (is_empty(t)) return FA_OK;
    for (int64_t i = 0; i < t->ndim; i++) elements += (t->size[i] - 1) * t->stride[i];
    fa_torch.aoti_torch_get_storage_offset(t->handle, &first);
    fa_torch.aoti_torch_get_storage_size(t->handle, &bytes);
    const int64_t wanted = (first + elements) * bytes_of_dtype(t->dtype);
    words w;
    REQUIRE(t->data && wanted <= bytes,
            "%s has shape %s, for which its storage must hold %" PRId64 " bytes; it holds %" PRId64
            " (has it been freed or resized?)",
            t->name, shape_words(t, &w), wanted, bytes);
    return FA_OK;
}

fa_status check_no_gradient(const fa_tensor *t, bool may_be_computed, fa_error *err) {
    if (!fa_torch.aoti_torch_grad_mode_is_enabled()) return FA_OK;
    const char *what = fa_leaf_in(t->handle);
    REQUIRE(!what, "%sa leaf Variable that requires grad is being used in an in-place operation: %s is written", what,
            t->name);
    REQUIRE(may_be_computed || !fa_requires_grad(t->handle),
            "%s is written and must not require grad while gradients are recorded: detach it, or use torch.no_grad()",
            t->name);
    return FA_OK;
}

int written_tensors(const fa_call *c, const fa_tensor *written[MAX_WRITTEN]) {
    const bool appends = c->pass == FA_FWD && present(&c->k_new);
    const fa_tensor *candidates[MAX_WRITTEN] = {c->pass == FA_BWD ? &c->dq : &c->out, appends ? &c->k : &c->dk,
                                                appends ? &c->v : &c->dv};
    int num = 0;
    for (int i = 0; i < MAX_WRITTEN; i++)
        if (present(candidates[i]) && !(c->fresh_out && (c->pass == FA_BWD || candidates[i] == &c->out)))
            written[num++] = candidates[i];
    return num;
}

fa_status check_device(const fa_tensor *t, const fa_tensor *q, fa_error *err) {
    words here, there;
    REQUIRE(t->device_type == q->device_type && (t->device_type == fa_torch.cpu || t->device_idx == q->device_idx),
            "%s must be on %s, where q is; it is on %s", t->name, device_words(q->device_type, q->device_idx, &there),
            device_words(t->device_type, t->device_idx, &here));
    return FA_OK;
}

fa_status check_rank(const fa_tensor *t, int64_t ndim, const char *dims, fa_error *err) {
    words w;
    REQUIRE(t->ndim == ndim, "%s must have %" PRId64 " dimensions %s; it has %" PRId64 ": shape %s", t->name, ndim,
            dims, t->ndim, shape_words(t, &w));
    return FA_OK;
}

fa_status check_shape(const fa_tensor *t, int64_t ndim, const int64_t *size, const char *dims, fa_error *err) {
    TRY(check_rank(t, ndim, dims, err));
    for (int64_t i = 0; i < ndim; i++) {
        words came, want;
        if (t->size[i] == size[i]) continue;
        fa_tensor wanted = {.ndim = ndim, .size = size};
        return fa_fail(err, FA_EINVAL, "%s must have shape %s = %s; it has %s", t->name, dims,
                       shape_words(&wanted, &want), shape_words(t, &came));
    }
    return FA_OK;
}

fa_status check_index(const fa_tensor *t, const fa_tensor *q, fa_error *err) {
    TRY(check_device(t, q, err));
    REQUIRE(t->dtype == fa_torch.i32, "%s must have dtype int32; it is %s", t->name, dtype_words(t->dtype));
    return FA_OK;
}

fa_status check_index_if_given(const fa_tensor *t, const fa_tensor *q, fa_error *err) {
    return present(t) ? check_index(t, q, err) : FA_OK;
}

fa_status check_index_per_batch(const fa_tensor *t, const fa_tensor *q, int64_t b, fa_error *err) {
    if (!present(t)) return FA_OK;
    TRY(check_index(t, q, err));
    TRY(SHAPE(t, "(batch_size)", b));
    REQUIRE(contiguous(t), "%s must be contiguous; it has stride %" PRId64, t->name, t->stride[0]);
    return FA_OK;
}

fa_status check_q_offset(const fa_tensor *t, const fa_tensor *q, int64_t b, int64_t len_q, fa_error *err) {
    TRY(check_index_per_batch(t, q, b, err));
    const int32_t *offset = t->data;
    for (int64_t i = 0; i < b && present(t) && t->device_type == fa_torch.cpu; i++)
        REQUIRE(offset[i] >= 0 && offset[i] <= INT32_MAX - len_q,
                "q_offset must be from 0 to 2^31 - 1 less the %" PRId64 " queries; element %" PRId64 " is %d", len_q, i,
                offset[i]);
    return FA_OK;
}

/* Returns the view of a tensor. A stride is meaningful only if its dimension has more than one element. */
fa_view view_of(const fa_tensor *t) {
    if (!present(t)) return (fa_view){0};
    int64_t at = t->ndim - 3;
    return (fa_view){.data = t->data,
                     .stride_b = t->ndim == 4 ? t->stride[0] : 0,
                     .stride_row = t->stride[at],
                     .stride_h = t->stride[at + 1]};
}
