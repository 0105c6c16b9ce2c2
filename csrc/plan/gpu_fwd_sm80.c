/* Planner of attn_fwd_sm80: its requirements, and its row of cuda/tiles.def. */
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "gpu_task_order.h"
#include "sequence.h"

const char *fa_plan_fwd_sm80(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const double largest_scale = 1e30; /* with log2 e, and with its products, a larger scale would leave the floats */
    const bool packed = p->cu_seqlens_q != NULL, wants_cache = fa_wants_cache_of_sm80(p);
    const char *why = fa_why_not_of_3(p, wants_cache ? FA_MIXED | FA_CHUNKS | FA_USED_Q | FA_OTHER_NEW : 0);
    if (!why && wants_cache) why = fa_why_not_cache_of_sm80(p);
    if (why) return why;
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "it takes fp16 and bf16");
    NEEDS(p->h > 0, "it wants a query head");
    NEEDS(p->d % 8 == 0, "it wants a head dimension that is a multiple of 8");
    NEEDS(wants_cache ? fa_suits_tma(p, &p->q, packed ? 1 : p->b, p->total_q, p->h) &&
                            (!p->o.data || fa_suits_tma(p, &p->o, packed ? 1 : p->b, p->total_q, p->h))
                      : fa_suits_16_bytes(p),
          "it wants q, k, v and out to start at multiples of 16 bytes, with strides that are multiples of 8 elements");
    NEEDS(wants_cache ? p->len_q <= 1 << 30 && p->total_q <= 1 << 30 : fa_counts_in_32_bits(p, packed),
          "the problem has more rows than 2^30");
    NEEDS((double)(p->b + packed) * (double)p->h < INT32_MAX, "the problem has more heads than 2^31");

    const fa_family *family = &fa_families[FA_FWD_SM80];
    const int row = fa_first_row_of_sm80(p, machine, FA_FWD_SM80);
    NEEDS(row < family->num_rows, "it has no tile for this head dimension");
    const fa_fwd_sm80_columns *t = fa_fwd_sm80_row(row);
    plan->gpu.family = FA_FWD_SM80;
    plan->gpu.row = row;
    plan->gpu.features = fa_cuda_features(p) & (FA_SCORE | FA_DROPOUT | FA_IN_BF16);
    if (!(p->scale < largest_scale)) plan->gpu.features |= FA_SCORE;
    if (wants_cache) plan->gpu.features |= FA_CACHE;
    NEEDS(fa_has_room_for_places(row, plan->gpu.features, machine->gpu_capability),
          "beside its tiles an SM has no room for the places of a cache's keys");
    if (wants_cache) plan->workspace_bytes = fa_rotated_q_bytes(p);
    plan->block_q = 16 * t->warps * t->blocks / t->split;
    plan->block_kv = t->block_kv;
    const int64_t rows = packed && p->b > 0 ? p->total_q / p->b : p->len_q, block_q = plan->block_q;
    plan->gpu.group_heads =
        fa_heads_walked_together(p, (p->b + packed) * p->h, (rows + block_q - 1) / block_q,
                                 (p->len_q + block_q - 1) / block_q, (int64_t)machine->gpu_sms * t->ctas);
    return NULL;
}
