/* Planner of attn_bwd_sm80: its requirements, and its row of cuda/tiles.def. */
#include "bwd_sm80_workspace.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "gpu_task_order.h"

/* Does the kernel leave more than half of the SMs idle, where the generic kernels would not? A CTA walks over all query
 * heads of its key head. The generic kernel of dQ has CTAs for each query head, and those of keys own fewer keys. NOTE:
 * the limits are counted, not measured: 5 products of 128 keys on 8 warps beside 4 products of 64 keys on 4 warps. */
static bool has_too_few_tiles(const fa_problem *p, int block_kv, int sms) {
    const int64_t tiles =
        p->cu_seqlens_k ? p->total_kv / block_kv + p->b : p->b * ((p->len_kv + block_kv - 1) / block_kv);
    return p->h >= 4 * p->h_kv && 2 * tiles * p->h_kv <= sms;
}

const char *fa_plan_bwd_sm80(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const char *why = fa_why_not_of_3(p, 0);
    if (why) return why;
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "it takes fp16 and bf16");
    NEEDS(!p->paged && !p->leftpad_k && !p->cache_batch_idx && !p->seqused_k, "it reads no KV cache");
    NEEDS(p->h > 0, "it wants a query head");
    NEEDS(p->d % 8 == 0, "it wants a head dimension that is a multiple of 8");
    NEEDS(fa_suits_16_bytes(p), FA_16_BYTES_REASON);
    NEEDS(fa_counts_in_32_bits(p, p->cu_seqlens_q != NULL), "the problem has more rows than 2^30");

    const fa_family *family = &fa_families[FA_BWD_SM80];
    const int row = fa_first_row_of_sm80(p, machine, FA_BWD_SM80);
    NEEDS(row < family->num_rows, "it has no tile for this head dimension in this GPU's shared memory");
    const fa_bwd_sm80_columns *t = fa_bwd_sm80_row(row);
    NEEDS(!has_too_few_tiles(p, t->block_kv, machine->gpu_sms),
          "its tiles of keys would leave more than half of the multiprocessors idle");
    plan->gpu.family = FA_BWD_SM80;
    plan->gpu.row = row;
    plan->gpu.features = fa_cuda_features(p) & (FA_SCORE | FA_DROPOUT | FA_IN_BF16);
    plan->gpu.any_order = !p->deterministic;
    plan->block_q = t->block_q;
    plan->block_kv = t->block_kv;
    const int64_t keys = p->cu_seqlens_k && p->b > 0 ? p->total_kv / p->b : p->len_kv;
    plan->gpu.group_heads =
        fa_heads_walked_together(p, p->b * p->h_kv, (keys + t->block_kv - 1) / t->block_kv,
                                 (p->len_kv + t->block_kv - 1) / t->block_kv, (int64_t)machine->gpu_sms * t->ctas);
    plan->workspace_bytes = fa_bwd_sm80_workspace_of(p, t).bytes;
    return NULL;
}
