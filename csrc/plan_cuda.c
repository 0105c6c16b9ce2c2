/* problem -> plan on a GPU: what the hardware and the kernels ask for, one line each with its reason, then the first row
 * of cuda/tiles.def that has room for the head dimension and serves every feature. */
#include "plan_cuda.h"

#include <stdio.h>
#include <string.h>

#include "kernels.h"

#define NEEDS(condition, ...)                                                               \
    do {                                                                                    \
        if (!(condition)) return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: " __VA_ARGS__); \
    } while (0)

static fa_status check_device(const fa_problem *p, const fa_machine *machine, fa_error *err) {
    NEEDS(machine->gpu_capability >= 80,
          "this GPU has compute capability %d.%d, and the kernels begin at 8.0; use "
          "torch.nn.functional.scaled_dot_product_attention",
          machine->gpu_capability / 10, machine->gpu_capability % 10);
    NEEDS(machine->gpu_capability == 90,
          "there are kernels for compute capability 9.0 (Hopper) in this version, and this GPU has %d.%d; use "
          "torch.nn.functional.scaled_dot_product_attention",
          machine->gpu_capability / 10, machine->gpu_capability % 10);
    NEEDS(p->pass == FA_FWD, "there is no CUDA kernel for the backward pass in this version");
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "the CUDA kernels of this version take fp16 and bf16; q is %s",
          fa_dtype_name(p->dtype));
    return FA_OK;
}

static fa_status check_options(const fa_problem *p, fa_error *err) {
    NEEDS(!p->block_table, "there is no CUDA kernel for a block_table in this version");
    NEEDS(!p->leftpad_k, "there is no CUDA kernel for leftpad_k in this version");
    NEEDS(!p->cache_batch_idx, "there is no CUDA kernel for cache_batch_idx in this version");
    NEEDS(!p->k_new.data && !p->rotary_cos, "there is no CUDA kernel that appends to a KV cache in this version");
    NEEDS(!p->seqused_k || p->cu_seqlens_k, "there is no CUDA kernel for cache_seqlens in this version");
    return FA_OK;
}

/* TMA steps by 16 bytes: 8 elements. A stride of a dimension of one element is never taken. */
static bool suits_tma(const fa_problem *p, const fa_view *t, int64_t rows, int64_t heads) {
    const bool packed = p->cu_seqlens_q != NULL;
    return (uintptr_t)t->data % 16 == 0 && (rows <= 1 || t->stride_row % 8 == 0) &&
           (heads <= 1 || t->stride_h % 8 == 0) && (packed || p->b <= 1 || t->stride_b % 8 == 0);
}

static fa_status check_layout(const fa_problem *p, fa_error *err) {
    NEEDS(p->d % 8 == 0, "on CUDA the head dimension must be a multiple of 8 in this version; q has %d", (int)p->d);
    NEEDS(suits_tma(p, &p->q, p->total_q, p->h) && suits_tma(p, &p->k, p->total_kv, p->h_kv) &&
              suits_tma(p, &p->v, p->total_kv, p->h_kv) && (!p->o.data || suits_tma(p, &p->o, p->total_q, p->h)),
          "on CUDA q, k, v and out must start at multiples of 16 bytes and have strides that are multiples of 8 "
          "elements in this version");
    NEEDS(p->total_q < INT32_MAX && p->total_kv < INT32_MAX && p->b * p->h * (p->len_q / 64 + 1) < INT32_MAX,
          "the problem has more rows or tiles than 2^31");
    return FA_OK;
}

static unsigned features_of(const fa_problem *p) {
    const bool windowed = p->window_left >= 0 || p->window_right >= 0;
    const bool is_causal = p->window_left < 0 && p->window_right == 0;
    return (is_causal  ? FA_CAUSAL
            : windowed ? FA_LOCAL
                       : 0u) |
           (p->cu_seqlens_q ? FA_VARLEN : 0u) | (p->softcap > 0 || p->alibi_slopes || !(p->scale > 0) ? FA_SCORE : 0u) |
           (p->dropout_p > 0 ? FA_DROPOUT : 0u) | (p->dtype == FA_BF16 ? FA_IN_BF16 : 0u);
}

static void rule_out(fa_plan *plan, const fa_tile *tile, const char *reason) {
    if (plan->num_ruled_out == FA_MAX_RULED_OUT) return;
    plan->ruled_out[plan->num_ruled_out++] = (fa_ruled_out){tile->name, reason};
}

fa_status fa_plan_cuda(const fa_problem *p, const fa_machine *machine, fa_plan *plan, fa_error *err) {
    fa_variant variant = {.features = features_of(p)};
    const unsigned wanted = variant.features & FA_ALL_FEATURES;
    char name[FA_VARIANT_NAME_BYTES];
    fa_status status = check_device(p, machine, err);
    if (status == FA_OK) status = check_options(p, err);
    if (status == FA_OK) status = check_layout(p, err);
    if (status != FA_OK) return status;

    /* head_dim 64, causal, TFLOPS with 192 and 128 rows: 309 and 352 at length 1k, 466 and 456 at 4k. */
    const bool is_short_diagonal = (wanted & FA_CAUSAL) && p->len_q <= 2048;
    *plan = (fa_plan){.pass = p->pass, .device = p->device, .num_splits = 1};
    for (variant.tile = 0; variant.tile < fa_num_fwd_tiles_sm90; variant.tile++) {
        const fa_tile *t = &fa_fwd_tiles_sm90[variant.tile];
        if (t->d < p->d)
            rule_out(plan, t, "its tiles have fewer columns than the heads");
        else if ((t->serves & wanted) != wanted)
            rule_out(plan, t, "this row of tiles.def does not serve every feature");
        else if (t->wgs == 3 && is_short_diagonal)
            rule_out(plan, t, "192 rows waste too much of a short diagonal");
        else
            break;
    }
    plan->cuda_tile = variant.tile;
    plan->cuda_features = variant.features;
    plan->block_q = FA_ROWS_OF_A_WARPGROUP * fa_fwd_tiles_sm90[variant.tile].wgs;
    plan->block_kv = fa_fwd_tiles_sm90[variant.tile].block_kv;
    fa_variant_name(variant, name);
    snprintf(plan->kernel, sizeof plan->kernel, "%.*s", (int)sizeof plan->kernel - 1, name);
    return FA_OK;
}
