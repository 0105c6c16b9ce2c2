/* The op get_scheduler_metadata. The plans of this library are made in a microsecond, so a forward needs no metadata,
 * and ignores them. The op checks its arguments and returns one zero. */
#include "scheduler_metadata.h"

#include "check.h"

static fa_status check_sums(const fa_tensor *t, const fa_call *c, fa_error *err) {
    if (!present(t)) return FA_OK;
    TRY(check_index(t, &c->seqused_k, err));
    return SHAPE(t, "(batch_size + 1)", c->batch_size + 1);
}

fa_status fa_execute_scheduler_metadata(const fa_call *c, fa_outputs *outputs, fa_error *err) {
    const fa_tensor *used = &c->seqused_k;
    const int32_t dtype = (int32_t)c->dtype;
    words w;
    outputs->num = 0;
    REQUIRE(used->device_type == fa_torch.cpu || used->device_type == fa_torch.cuda,
            "seqused_k must be on the CPU or on CUDA; it is on %s",
            device_words(used->device_type, used->device_idx, &w));
    REQUIRE(dtype == fa_torch.f16 || dtype == fa_torch.bf16 || dtype == fa_torch.e4m3 || dtype == fa_torch.f32 ||
                dtype == fa_torch.f64,
            "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type, fp32, and on the CPU fp64; qkv_dtype is "
            "%s",
            dtype_words(dtype));
    REQUIRE(c->num_heads_k >= 1 && c->num_heads >= 0 && c->num_heads % c->num_heads_k == 0,
            "Number of heads in key/value must divide number of heads in query; num_heads_kv is %" PRId64
            ", num_heads_q is %" PRId64,
            c->num_heads_k, c->num_heads);
    REQUIRE(c->batch_size >= 0, "batch_size must be at least 0; it is %" PRId64, c->batch_size);
    REQUIRE(c->num_splits <= 256, "num_splits > 256 not supported; num_splits is %" PRId64, c->num_splits);
    TRY(check_index_per_batch(used, used, c->batch_size, err));
    TRY(check_index_per_batch(&c->seqused_q, used, c->batch_size, err));
    TRY(check_index_per_batch(&c->leftpad_k, used, c->batch_size, err));
    TRY(check_sums(&c->cu_seqlens_q, c, err));
    TRY(check_sums(&c->cu_seqlens_k, c, err));
    TRY(check_sums(&c->cu_seqlens_k_new, c, err));
    return fa_make_zero(used, outputs, err);
}
