/* Checks the arguments of fwd_combine, makes its results and runs it. */
#include "combine.h"

#include <math.h>

#include "autograd.h"
#include "check.h"
#include "cpu/combine.h"
#include "gpu/combine.h"
#include "overlap.h"

#define OUT_DIMS "(batch_size, seqlen, num_heads, head_size)"
#define LSE_DIMS "(num_splits, batch_size, seqlen, num_heads)"

static fa_status choose_dtype(const fa_call *c, fa_combination *combination, int32_t *dtype, fa_error *err) {
    *dtype = c->dtype != FA_NOT_GIVEN ? (int32_t)c->dtype : fa_torch.f32;
    REQUIRE(*dtype == fa_torch.f32 || *dtype == fa_torch.f16 || *dtype == fa_torch.bf16,
            "Output type must be FP32, FP16 or BF16; out_dtype is %s", dtype_words(*dtype));
    combination->dtype = *dtype == fa_torch.f32 ? FA_F32 : *dtype == fa_torch.f16 ? FA_F16 : FA_BF16;
    return FA_OK;
}

static fa_status check_partials(const fa_call *c, fa_combination *combination, fa_error *err) {
    const fa_tensor *o = &c->out_partial, *lse = &c->lse_partial;
    words w;
    REQUIRE(o->device_type == fa_torch.cpu || o->device_type == fa_torch.cuda,
            "out_partial must be on the CPU or on CUDA; it is on %s", device_words(o->device_type, o->device_idx, &w));
    TRY(check_device(lse, o, err));
    REQUIRE(o->dtype == fa_torch.f32 && lse->dtype == fa_torch.f32,
            "Attention combine function only support fp32 data type; out_partial is %s, lse_partial is %s",
            dtype_words(o->dtype), dtype_words(lse->dtype));
    TRY(check_rank(o, 5, "(num_splits, batch_size, seqlen, num_heads, head_size)", err));
    TRY(SHAPE(lse, LSE_DIMS, o->size[0], o->size[1], o->size[2], o->size[3]));
    REQUIRE(o->size[0] <= FA_MAX_PARTS,
            "FlashAttention combine only supports num_splits at most %d; out_partial has %" PRId64, FA_MAX_PARTS,
            o->size[0]);
    REQUIRE(last_dim_contiguous(o), "Input tensor must have contiguous last dimension; out_partial has stride %" PRId64,
            o->stride[4]);
    const bool is_empty = o->size[0] * o->size[1] * o->size[3] == 0;
    REQUIRE(lse->size[2] <= 1 || lse->stride[2] == 1 || is_empty,
            "LSE tensor must be contiguous in the seqlen dimension; lse_partial has stride %" PRId64, lse->stride[2]);
    TRY(check_memory(o, err));
    TRY(check_memory(lse, err));
    *combination = (fa_combination){.device = is_on_gpu(o) ? FA_CUDA : FA_CPU,
                                    .device_idx = o->device_idx,
                                    .num_parts = o->size[0],
                                    .b = o->size[1],
                                    .len = o->size[2],
                                    .h = o->size[3],
                                    .d = o->size[4],
                                    .out_partial = (const float *)o->data,
                                    .stride_part = o->stride[0],
                                    .stride_b = o->stride[1],
                                    .stride_row = o->stride[2],
                                    .stride_h = o->stride[3],
                                    .lse_partial = (const float *)lse->data,
                                    .lse_stride_part = lse->stride[0],
                                    .lse_stride_b = lse->stride[1],
                                    .lse_stride_h = lse->stride[3],
                                    .empty_lse = -INFINITY};
    return FA_OK;
}

static fa_status check_out(const fa_call *c, int32_t dtype, fa_error *err) {
    const fa_tensor *out = &c->out, *o = &c->out_partial;
    if (!present(out)) return FA_OK;
    TRY(check_device(out, o, err));
    REQUIRE(out->dtype == dtype, "out must have the dtype of out_dtype, %s; it is %s", dtype_words(dtype),
            dtype_words(out->dtype));
    TRY(SHAPE(out, OUT_DIMS, o->size[1], o->size[2], o->size[3], o->size[4]));
    REQUIRE(last_dim_contiguous(out), "Output tensor must have contiguous last dimension; out has stride %" PRId64,
            out->stride[3]);
    TRY(check_distinct_elements(out, err));
    TRY(check_memory(out, err));
    REQUIRE(!share_memory(out, o) && !share_memory(out, &c->lse_partial),
            "out is written and must not share memory with the partial results, which are read");
    return check_no_gradient(out, false, err);
}

static bool torch_parallel_for(int64_t n, fa_range_fn *fn, void *ctx) {
    return fa_torch.torch_parallel_for(0, n, 1, fn, ctx) == 0;
}

static fa_status run(const fa_combination *combination, fa_error *err) {
    const fa_pool pool = {torch_parallel_for};
    if (combination->device == FA_CUDA) return fa_cuda_combine(combination, err);
    return fa_cpu_combine(combination, &pool)
               ? FA_OK
               : fa_fail(err, FA_ENOMEM, "torch could not start the threads of the call");
}

fa_status fa_execute_combine(const fa_call *c, fa_outputs *outputs, fa_error *err) {
    fa_combination combination;
    int32_t dtype;
    outputs->num = 0;
    TRY(check_partials(c, &combination, err));
    TRY(choose_dtype(c, &combination, &dtype, err));
    TRY(check_out(c, dtype, err));
    TRY(fa_make_combined(c, dtype, outputs, &combination, err));
    if (present(&c->out)) fa_bump_version(c->out.handle);
    fa_status status = run(&combination, err);
    if (status != FA_OK)
        while (outputs->num > 0) fa_torch.aoti_torch_delete_tensor_object(outputs->tensor[--outputs->num]);
    return status;
}
