/* Allocates the tensors that an op returns. The fakes in flash_attn/ promise the same shapes, dtypes and strides. */
#define _DEFAULT_SOURCE /* declares madvise */
#include "outputs.h"

#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "check.h"
#include "gpu/memory.h"
#include "seed.h"

#define MAX_NDIM 4

/* The pages of a large result are untouched, and the system clears each page at its first write. Pages of 2 MiB make
 * clearing 6 times as fast. Only whole pages of 2 MiB inside the memory are asked for. A system may refuse. */
static void ask_for_huge_pages(void *data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 2 << 20, begin = ((uintptr_t)data + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)data + bytes) / page * page;
    if (bytes >= 2 * page) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

static size_t bytes_of(int64_t ndim, const int64_t *size, const int64_t *stride, int32_t dtype) {
    int64_t elements = 1;
    for (int64_t i = 0; i < ndim; i++) {
        if (size[i] == 0) return 0;
        elements += (size[i] - 1) * stride[i];
    }
    return (size_t)elements * (dtype == fa_torch.f32    ? 4
                               : dtype == fa_torch.e4m3 ? 1
                                                        : 2); /* a lower bound is enough */
}

/* Most callers have just allocated the gradients. Pages that are in use stay as they are. q, k and v in one tensor have
 * gradients that are a third of the memory around them. In sparser views most pages belong to others. */
void fa_ask_for_gradient(const fa_tensor *t) {
    enum { SPARSE = 4 };
    int64_t elements = 1;
    for (int64_t i = 0; i < t->ndim; i++) elements *= t->size[i];
    const int64_t dense[] = {elements}, step[] = {1};
    const size_t bytes = t->data ? bytes_of(t->ndim, t->size, t->stride, t->dtype) : 0;
    if (bytes <= SPARSE * bytes_of(1, dense, step, t->dtype)) ask_for_huge_pages(t->data, bytes);
}

fa_status fa_make_output(fa_outputs *outputs, const fa_tensor *like, int64_t ndim, const int64_t *size,
                         const int64_t *stride, int32_t dtype, void **data, fa_error *err) {
    AtenTensorHandle t = NULL;
    if (fa_torch.aoti_torch_empty_strided(ndim, size, stride, dtype, like->device_type, like->device_idx, &t) != 0)
        return fa_fail(err, like->device_type == fa_torch.cpu ? FA_ENOMEM : FA_ENOMEM_GPU,
                       "out of memory: torch could not allocate an output of the call");
    outputs->tensor[outputs->num++] = t;
    if (fa_torch.torch_get_mutable_data_ptr(t, data) != 0)
        return fa_fail(err, FA_ENOMEM, "an output of the call has no memory");
    if (like->device_type == fa_torch.cpu) ask_for_huge_pages(*data, bytes_of(ndim, size, stride, dtype));
    return FA_OK;
}

void fa_drop_outputs(fa_outputs *outputs) {
    while (outputs->num > 0) fa_torch.aoti_torch_delete_tensor_object(outputs->tensor[--outputs->num]);
}

static fa_status make_contiguous(fa_outputs *outputs, const fa_tensor *like, int64_t ndim, const int64_t *size,
                                 int32_t dtype, void **data, fa_error *err) {
    int64_t stride[MAX_NDIM];
    for (int64_t i = ndim - 1, step = 1; i >= 0; i--) {
        stride[i] = step;
        step *= size[i] > 1 ? size[i] : 1;
    }
    return fa_make_output(outputs, like, ndim, size, stride, dtype, data, err);
}

/* Returns 1 if dimension x lies inside dimension y in memory, -1 if outside, and 0 if the strides do not tell. */
static int order_of(const fa_tensor *t, int64_t x, int64_t y) {
    if (t->stride[x] == 0 || t->stride[y] == 0) return 0;
    if (t->stride[x] != t->stride[y]) return t->stride[x] < t->stride[y] ? 1 : -1;
    return t->size[x] > t->size[y] ? -1 : 0;
}

/* Computes the strides of torch.empty_like(t). A dense t keeps its own strides. Otherwise the result is dense and keeps
 * the order of dimensions. If the last dimension would not be contiguous (overlapping windows), all dimensions are. */
void fa_empty_like_strides(const fa_tensor *t, int64_t *stride) {
    int64_t inner_first[MAX_NDIM], n = t->ndim;
    for (int64_t i = 0; i < n; i++) inner_first[i] = n - 1 - i;
    for (int64_t i = 1; i < n; i++) /* insertion sort; undecided pairs keep their order */
        for (int64_t at = i, j = i - 1; j >= 0; j--) {
            int order = order_of(t, inner_first[j], inner_first[at]);
            if (order > 0) break;
            if (order < 0) {
                int64_t swap = inner_first[j];
                inner_first[j] = inner_first[at];
                inner_first[at] = swap;
                at = j;
            }
        }
    int64_t step = 1;
    bool dense = true, empty = false;
    for (int64_t i = 0; i < n; i++) {
        int64_t dim = inner_first[i];
        stride[dim] = step;
        empty = empty || t->size[dim] == 0;
        if (t->size[dim] > 1) {
            dense = dense && t->stride[dim] == step;
            step *= t->size[dim];
        }
    }
    if (dense || empty)
        for (int64_t i = 0; i < n; i++) stride[i] = t->stride[i];
    if (t->size[n - 1] > 1 && stride[n - 1] != 1)
        for (int64_t i = n - 1, s = 1; i >= 0; i--) {
            stride[i] = s;
            s *= t->size[i] > 1 ? t->size[i] : 1;
        }
}

/* flash-attn 3 always makes a contiguous out. An op whose first result is out returns the caller's out, too. */
static fa_status make_out_of_3(const fa_call *c, fa_problem *p, fa_outputs *outputs, fa_error *err) {
    const int64_t n = c->q.ndim;
    int64_t size[MAX_NDIM];
    if (c->out.handle) {
        if (c->num_results != 4 || c->fresh_out) return FA_OK;
        if (fa_torch.aoti_torch_new_tensor_handle(c->out.handle, &outputs->tensor[0]) != 0)
            return fa_fail(err, FA_ENOMEM, "out of memory: torch could not return out");
        outputs->num = 1;
        return FA_OK;
    }
    memcpy(size, c->q.size, (size_t)n * sizeof *size);
    size[n - 1] = p->d_v;
    p->o = (fa_view){.stride_b = n == 4 ? size[1] * size[2] * size[3] : 0,
                     .stride_row = size[n - 2] * size[n - 1],
                     .stride_h = size[n - 1]};
    return make_contiguous(outputs, &c->q, n, size, p->dtype == FA_E4M3 ? fa_torch.bf16 : c->q.dtype, &p->o.data, err);
}

static fa_status make_out(const fa_call *c, fa_problem *p, fa_outputs *outputs, fa_error *err) {
    int64_t stride[MAX_NDIM] = {0};
    if (c->layout == FA_OP_3) return make_out_of_3(c, p, outputs, err);
    if (c->out.handle) return FA_OK;
    fa_empty_like_strides(&c->q, stride);
    const int64_t n = c->q.ndim;
    p->o = (fa_view){.stride_b = n == 4 ? stride[0] : 0, .stride_row = stride[n - 3], .stride_h = stride[n - 2]};
    return fa_make_output(outputs, &c->q, n, c->q.size, stride, c->q.dtype, &p->o.data, err);
}

static fa_status make_lse(const fa_call *c, fa_problem *p, fa_outputs *outputs, fa_error *err) {
    const bool packed = packs_q(c);
    const int64_t size[3] = {p->b, p->h, p->len_q}, packed_size[2] = {p->h, p->total_q};
    void *data = NULL;
    fa_status status = FA_OK;
    if (c->is_for_cpu) { /* the heads of a row lie together */
        p->lse = (fa_row_stats){.stride_b = p->len_q * p->h, .stride_h = 1, .stride_row = p->h};
        status =
            fa_make_output(outputs, &c->q, 3, size, (int64_t[]){p->lse.stride_b, 1, p->h}, fa_torch.f32, &data, err);
        p->lse.data = data;
        return status;
    }
    if (!c->only_out)
        status = make_contiguous(outputs, &c->q, packed ? 2 : 3, packed ? packed_size : size, fa_torch.f32, &data, err);
    p->lse = (fa_row_stats){
        .data = (float *)data, .stride_b = packed ? 0 : p->h * p->len_q, .stride_h = packed ? p->total_q : p->len_q};
    return status;
}

static fa_status make_sink_probability(const fa_call *c, fa_problem *p, fa_outputs *outputs, fa_error *err) {
    const bool packed = packs_q(c);
    const int64_t size[3] = {p->b, p->h, p->len_q}, packed_size[2] = {p->h, p->total_q};
    void *data = NULL;
    if (!c->wants_sink_probability || p->device != FA_CPU) return FA_OK;
    p->sink_probability =
        (fa_row_stats){.stride_b = packed ? 0 : p->h * p->len_q, .stride_h = packed ? p->total_q : p->len_q};
    const fa_status status =
        make_contiguous(outputs, &c->q, packed ? 2 : 3, packed ? packed_size : size, fa_torch.f32, &data, err);
    p->sink_probability.data = data;
    return status;
}

static int64_t round_up_128(int64_t n) { return (n + 127) / 128 * 128; }

static fa_status make_s_dmask(const fa_call *c, fa_problem *p, fa_outputs *outputs, fa_error *err) {
    if (!c->return_softmax) {
        void *unused;
        return make_contiguous(outputs, &c->q, 1, (int64_t[]){0}, c->q.dtype, &unused, err);
    }
    const bool packed = c->layout == FA_OP_VARLEN;
    const int64_t rows = packed ? c->max_seqlen_q : p->len_q, cols = packed ? c->max_seqlen_k : p->len_kv;
    if ((double)p->b * (double)p->h * (double)rows * (double)cols > 1e15) /* the size might not fit 64 bits */
        return fa_fail(err, FA_EINVAL, "S_dmask of %g x %g scores does not fit into any memory", (double)rows,
                       (double)cols);
    p->s_dmask_rows = round_up_128(rows);
    p->s_dmask_cols = round_up_128(cols);
    return make_contiguous(outputs, &c->q, 4, (int64_t[]){p->b, p->h, p->s_dmask_rows, p->s_dmask_cols}, c->q.dtype,
                           &p->s_dmask, err);
}

/* Writes seed and offset of dropout into the GPU's memory. As upstream does, they come from PyTorch's generator of this
 * GPU. Without dropout both are 0. The host does not wait for the device. */
static fa_status fill_on_gpu(const fa_problem *p, void *rng_state, fa_error *err) {
    uint64_t state[2] = {0, 0}, drawn;
    void *owner;
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(p->device_idx, &place, err);
    if (status != FA_OK) return status;
    if (p->dropout_p > 0 && fa_cuda_is_capturing(&place)) {
        status = fa_draw_on_gpu(p->device_idx, &drawn, &owner, err);
        if (status == FA_OK) {
            status = fa_cuda_copy(&place, rng_state, drawn, sizeof state, err);
            fa_release_drawn(owner);
        }
    } else {
        if (p->dropout_p > 0)
            status = fa_advance_gpu_generator(p->device_idx, 32 * (uint64_t)(p->b * p->h), state, err);
        if (status == FA_OK) status = fa_cuda_write(&place, rng_state, state, 2, err);
    }
    fa_cuda_leave(&place);
    return status;
}

static fa_status make_rng_state(const fa_call *c, fa_problem *p, bool draw, fa_outputs *outputs, fa_error *err) {
    void *data = NULL;
    fa_status status =
        make_contiguous(outputs, &c->q, 1, (int64_t[]){2}, c->is_aten ? fa_torch.u64 : fa_torch.i64, &data, err);
    if (status != FA_OK) return status;
    if (p->device == FA_CUDA) {
        if (p->dropout_p > 0) p->rng_state = (const uint64_t *)data;
        return draw ? fill_on_gpu(p, data, err) : FA_OK;
    }
    if (p->dropout_p > 0 && draw) status = fa_draw_seed(&p->seed, err);
    if (status == FA_OK) memcpy(data, (uint64_t[]){p->seed, p->offset}, 2 * sizeof(uint64_t));
    return status;
}

static fa_status make_softmax_d(const fa_call *c, fa_problem *p, fa_outputs *outputs, fa_error *err) {
    void *data = NULL;
    fa_status status;
    const bool packed = packs_q(c);
    int64_t rows = packed ? p->total_q + 128 * p->b : round_up_128(p->len_q);
    if (packed)
        status = make_contiguous(outputs, &c->q, 2, (int64_t[]){p->h, rows}, fa_torch.f32, &data, err);
    else
        status = make_contiguous(outputs, &c->q, 3, (int64_t[]){p->b, p->h, rows}, fa_torch.f32, &data, err);
    p->softmax_d = (fa_row_stats){.data = (float *)data, .stride_b = packed ? 0 : p->h * rows, .stride_h = rows};
    if (status == FA_OK && p->device == FA_CPU && data) /* padding rows are zero */
        memset(data, 0, sizeof(float) * (size_t)(p->h * rows * (packed ? 1 : p->b)));
    return status;
}

fa_status fa_make_outputs(const fa_call *c, bool draw_seed, fa_problem *p, fa_outputs *outputs, fa_error *err) {
    fa_status status = FA_OK;
    outputs->num = 0;
    if (c->pass == FA_BWD) {
        const fa_tensor *gradients[] = {&c->dq, &c->dk, &c->dv};
        for (int i = 0; i < 3 && p->device == FA_CPU; i++) fa_ask_for_gradient(gradients[i]);
        status = make_softmax_d(c, p, outputs, err);
    } else {
        status = make_out(c, p, outputs, err);
        if (status == FA_OK) status = make_lse(c, p, outputs, err);
        if (status == FA_OK) status = make_sink_probability(c, p, outputs, err);
        if (status == FA_OK && c->has_dropout) status = make_s_dmask(c, p, outputs, err);
        if (status == FA_OK && c->has_dropout) status = make_rng_state(c, p, draw_seed, outputs, err);
    }
    while (status == FA_OK && c->layout == FA_OP_3 && !c->only_out && outputs->num < c->num_results) {
        void *unused; /* flash-attn 3 names further results, which no caller reads */
        status = make_contiguous(outputs, &c->q, 1, (int64_t[]){0}, fa_torch.f32, &unused, err);
    }
    if (status != FA_OK) fa_drop_outputs(outputs);
    return status;
}

/* ---- the other ops of flash-attn 3 --------------------------------------------------------------------------- */

fa_status fa_make_combined(const fa_call *call, int32_t dtype, fa_outputs *outputs, fa_combination *c, fa_error *err) {
    const fa_tensor *like = &call->out_partial;
    fa_status status = FA_OK;
    void *data = NULL;
    outputs->num = 0;
    if (call->out.handle) {
        c->out = view_of(&call->out);
        if (fa_torch.aoti_torch_new_tensor_handle(call->out.handle, &outputs->tensor[0]) != 0)
            return fa_fail(err, FA_ENOMEM, "out of memory: torch could not return out");
        outputs->num = 1;
    } else {
        c->out = (fa_view){.stride_b = c->len * c->h * c->d, .stride_row = c->h * c->d, .stride_h = c->d};
        status = make_contiguous(outputs, like, 4, (int64_t[]){c->b, c->len, c->h, c->d}, dtype, &c->out.data, err);
    }
    if (status == FA_OK)
        status = fa_make_output(outputs, like, 3, (int64_t[]){c->b, c->len, c->h},
                                (int64_t[]){c->h * c->len, 1, c->len}, fa_torch.f32, &data, err);
    c->lse = (fa_row_stats){.data = (float *)data, .stride_b = c->h * c->len, .stride_h = c->len};
    if (status != FA_OK) fa_drop_outputs(outputs);
    return status;
}

fa_status fa_make_quantized(const fa_call *call, fa_outputs *outputs, fa_quantization *q, fa_error *err) {
    const fa_tensor *inputs[] = {&call->q, &call->k, &call->v};
    const int64_t descales[] = {q->is_per_tensor ? 1 : q->b, q->is_per_tensor ? 1 : q->h_kv};
    fa_status status = FA_OK;
    void *data = NULL;
    outputs->num = 0;
    for (int i = 0; i < 3 && status == FA_OK; i++) {
        status = make_contiguous(outputs, inputs[i], inputs[i]->ndim, inputs[i]->size, fa_torch.e4m3, &data, err);
        q->tensors[i].out = data;
    }
    for (int i = 0; i < 3 && status == FA_OK; i++) {
        status = make_contiguous(outputs, &call->q, 2, descales, fa_torch.f32, &data, err);
        q->tensors[i].descale = data;
    }
    if (status != FA_OK) fa_drop_outputs(outputs);
    return status;
}

fa_status fa_make_zero(const fa_tensor *like, fa_outputs *outputs, fa_error *err) {
    void *data = NULL;
    fa_cuda_place place;
    fa_status status = make_contiguous(outputs, like, 1, (int64_t[]){1}, fa_torch.i32, &data, err);
    if (status == FA_OK && like->device_type == fa_torch.cpu) {
        *(int32_t *)data = 0;
    } else if (status == FA_OK && (status = fa_cuda_enter(like->device_idx, &place, err)) == FA_OK) {
        status = fa_cuda_fill(&place, data, 0, 1, err);
        fa_cuda_leave(&place);
    }
    if (status != FA_OK) fa_drop_outputs(outputs);
    return status;
}
