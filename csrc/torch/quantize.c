/* Checks the arguments of quantize, makes its results and runs it. */
#include "quantize.h"

#include "check.h"
#include "cpu/quantize.h"
#include "execute.h"
#include "gpu/quantize.h"

/* One of q, k and v, with the words for its messages. */
typedef struct {
    const fa_tensor *t, *cu_seqlens;
    const char *dims, *packed_dims;
    int64_t most_columns;
} input;

static fa_status check_input(const input *in, const fa_tensor *q, fa_error *err) {
    const fa_tensor *t = in->t;
    const bool is_packed = present(in->cu_seqlens);
    const int64_t d_at = is_packed ? 2 : 3;
    words w;
    TRY(check_rank(t, d_at + 1, is_packed ? in->packed_dims : in->dims, err));
    TRY(check_device(t, q, err));
    REQUIRE(t->dtype == fa_torch.f16 || t->dtype == fa_torch.bf16 || t->dtype == fa_torch.f32,
            "quantize takes fp16, bf16 and fp32; %s is %s", t->name, dtype_words(t->dtype));
    REQUIRE(t->dtype == q->dtype, "%s must have the dtype of q, %s; it is %s", t->name, dtype_words(q->dtype),
            dtype_words(t->dtype));
    REQUIRE(t->size[d_at] >= 1 && t->size[d_at] <= in->most_columns,
            "%s must have a head_size of 1 to %" PRId64 "; it has shape %s", t->name, in->most_columns,
            shape_words(t, &w));
    REQUIRE(last_dim_contiguous(t), "%s must have contiguous last dimension; it has stride %" PRId64, t->name,
            t->stride[d_at]);
    for (int64_t i = 0; i < d_at; i++)
        REQUIRE(t->size[i] <= INT32_MAX, "%s has %" PRId64 " elements in a dimension; at most %d are taken", t->name,
                t->size[i], INT32_MAX);
    return check_memory(t, err);
}

/* On the CPU the values are checked, too. */
static fa_status check_sums(const fa_tensor *t, const fa_tensor *q, int64_t total, fa_error *err) {
    TRY(check_index(t, q, err));
    TRY(check_rank(t, 1, "(batch_size + 1)", err));
    REQUIRE(t->size[0] >= 1, "%s must have shape (batch_size + 1), at least one element; it is empty", t->name);
    REQUIRE(contiguous(t), "%s must be contiguous; it has stride %" PRId64, t->name, t->stride[0]);
    TRY(check_memory(t, err));
    const int32_t *sums = t->data;
    if (t->device_type != fa_torch.cpu) return FA_OK;
    REQUIRE(sums[0] == 0, "%s must begin with 0; it begins with %d", t->name, sums[0]);
    for (int64_t i = 1; i < t->size[0]; i++)
        REQUIRE(sums[i] >= sums[i - 1] && sums[i] <= total,
                "%s must not decrease, and must not exceed the %" PRId64 " rows; element %" PRId64 " is %d", t->name,
                total, i, sums[i]);
    return FA_OK;
}

static fa_status check_inputs(const fa_call *c, fa_quantization *z, fa_error *err) {
    const fa_tensor *cu_q = &c->cu_seqlens_q, *cu_k = &c->cu_seqlens_k, *q = &c->q, *k = &c->k, *v = &c->v;
    const input inputs[] = {
        {q, cu_q, "(batch_size, seqlen_q, num_heads, head_size)", "(total_q, num_heads, head_size)", FA_MAX_HEAD_DIM},
        {k, cu_k, "(batch_size, seqlen_k, num_heads_k, head_size)", "(total_k, num_heads_k, head_size)",
         FA_MAX_HEAD_DIM},
        {v, cu_k, "(batch_size, seqlen_k, num_heads_k, head_size_v)", "(total_k, num_heads_k, head_size_v)",
         FA_MAX_HEAD_DIM_V}};
    words w;
    REQUIRE(q->device_type == fa_torch.cpu || q->device_type == fa_torch.cuda,
            "q must be on the CPU or on CUDA; it is on %s", device_words(q->device_type, q->device_idx, &w));
    for (int i = 0; i < 3; i++) TRY(check_input(&inputs[i], q, err));
    if (present(cu_q)) TRY(check_sums(cu_q, q, q->size[0], err));
    if (present(cu_k)) TRY(check_sums(cu_k, q, k->size[0], err));
    z->b = present(cu_q) ? cu_q->size[0] - 1 : q->size[0];
    if (present(cu_k)) TRY(SHAPE(cu_k, "(batch_size + 1)", z->b + 1));

    const int64_t n = k->ndim, h_kv = k->size[n - 2], d = k->size[n - 1], h = q->size[q->ndim - 2];
    if (!present(cu_k)) TRY(SHAPE(k, inputs[1].dims, z->b, k->size[1], h_kv, d));
    REQUIRE(h_kv > 0 ? h % h_kv == 0 : h == 0,
            "Number of heads in key/value must divide number of heads in query; k has %" PRId64 ", q has %" PRId64,
            h_kv, h);
    REQUIRE(q->size[q->ndim - 1] == d, "q must have the head_size of k, %" PRId64 "; it has shape %s", d,
            shape_words(q, &w));
    const int64_t like_k[] = {z->b, k->size[n - 3], h_kv, v->size[n - 1]};
    TRY(check_shape(v, n, like_k + 4 - n, present(cu_k) ? inputs[2].packed_dims : inputs[2].dims, err));
    REQUIRE(!c->hadamard || d % 8 == 0, "hadamard needs a head_size that is a multiple of 8; q has %" PRId64, d);

    z->h_kv = h_kv;
    for (int i = 0; i < 3; i++) {
        const fa_tensor *t = inputs[i].t, *cu = inputs[i].cu_seqlens;
        z->tensors[i] = (fa_quantized){.x = view_of(t),
                                       .cu_seqlens = present(cu) ? (const int32_t *)cu->data : NULL,
                                       .rows = t->size[t->ndim - 3],
                                       .g = i == 0 && h_kv > 0 ? h / h_kv : 1,
                                       .d = t->size[t->ndim - 1],
                                       .rotates = c->hadamard && i < 2};
    }
    z->device = is_on_gpu(q) ? FA_CUDA : FA_CPU;
    z->device_idx = q->device_idx;
    z->dtype = q->dtype == fa_torch.f16 ? FA_F16 : q->dtype == fa_torch.bf16 ? FA_BF16 : FA_F32;
    z->is_per_tensor = c->per_tensor;
    return FA_OK;
}

static bool torch_parallel_for(int64_t n, fa_range_fn *fn, void *ctx) {
    return fa_torch.torch_parallel_for(0, n, 1, fn, ctx) == 0;
}

static fa_status run_on_gpu(const fa_call *c, const fa_quantization *z, fa_error *err) {
    AtenTensorHandle workspace = NULL;
    void *data = NULL;
    const int64_t bytes = (int64_t)fa_cuda_quantize_workspace(z), one = 1;
    if (fa_torch.aoti_torch_empty_strided(1, &bytes, &one, fa_torch.u8, c->q.device_type, c->q.device_idx,
                                          &workspace) != 0 ||
        fa_torch.torch_get_mutable_data_ptr(workspace, &data) != 0)
        return fa_fail(err, FA_ENOMEM_GPU, "CUDA out of memory: quantize needs %" PRId64 " bytes of workspace", bytes);
    fa_status status = fa_cuda_quantize(z, data, err);
    fa_torch.aoti_torch_delete_tensor_object(workspace);
    return status;
}

fa_status fa_execute_quantize(const fa_call *c, fa_outputs *outputs, fa_error *err) {
    const fa_pool pool = {torch_parallel_for};
    fa_quantization quantization = {0};
    outputs->num = 0;
    TRY(check_inputs(c, &quantization, err));
    TRY(fa_make_quantized(c, outputs, &quantization, err));
    fa_status status =
        quantization.device == FA_CUDA ? run_on_gpu(c, &quantization, err) : fa_cpu_quantize(&quantization, &pool, err);
    if (status != FA_OK)
        while (outputs->num > 0) fa_torch.aoti_torch_delete_tensor_object(outputs->tensor[--outputs->num]);
    return status;
}
