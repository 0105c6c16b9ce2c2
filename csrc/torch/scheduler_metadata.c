/* The op get_scheduler_metadata. The plans of this library are made in a microsecond, so a forward needs no metadata,
 * and ignores them. The op checks its arguments and returns one zero. */
#include "scheduler_metadata.h"

#include "args.h"
#include "check.h"

static fa_status check_sums(const fa_tensor *t, const fa_call *c, fa_error *err) {
    if (!present(t)) return FA_OK;
    TRY(check_index(t, &c->seqused_k, err));
    return SHAPE(t, "(batch_size + 1)", c->batch_size + 1);
}

/* Sizes that no call can have. */
static fa_status check_sizes(const fa_call *c, fa_error *err) {
    const int64_t step = (int32_t)c->dtype == fa_torch.e4m3 ? 16 : 8, d = c->headdim, d_v = c->headdim_v;
    const struct {
        const char *name;
        int64_t value, least;
    } sizes[] = {{"batch_size", c->batch_size, 0},
                 {"max_seqlen_q", c->max_seqlen_q, 0},
                 {"max_seqlen_k", c->max_seqlen_k, 0},
                 {"max_seqlen_k_new", c->max_seqlen_k_new, 0},
                 {"page_size", c->page_size == FA_NOT_GIVEN ? 1 : c->page_size, 1}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        REQUIRE(sizes[i].value >= sizes[i].least, "%s must be at least %" PRId64 "; it is %" PRId64, sizes[i].name,
                sizes[i].least, sizes[i].value);
    REQUIRE(d >= step && d <= FA_MAX_HEAD_DIM && d % step == 0,
            "headdim must be a multiple of %" PRId64 " up to %d; it is %" PRId64, step, FA_MAX_HEAD_DIM, d);
    REQUIRE(d_v >= step && d_v % step == 0 && fa_head_dims_of_3_fit(d, d_v),
            "headdim_v must be headdim, or a multiple of %" PRId64
            " up to 128 if headdim is in (128, 192], or up to %d if headdim is up to 64; headdim_v is %" PRId64
            ", headdim is %" PRId64,
            step, FA_MAX_HEAD_DIM_V, d_v, d);
    return FA_OK;
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
    TRY(check_sizes(c, err));
    REQUIRE(c->num_splits <= 256, "num_splits > 256 not supported; num_splits is %" PRId64, c->num_splits);
    TRY(check_index_per_batch(used, used, c->batch_size, err));
    TRY(check_index_per_batch(&c->seqused_q, used, c->batch_size, err));
    TRY(check_index_per_batch(&c->leftpad_k, used, c->batch_size, err));
    TRY(check_sums(&c->cu_seqlens_q, c, err));
    TRY(check_sums(&c->cu_seqlens_k, c, err));
    TRY(check_sums(&c->cu_seqlens_k_new, c, err));
    return fa_make_zero(used, outputs, err);
}
