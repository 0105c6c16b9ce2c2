/* Planners of attn_fwd_short and attn_bwd_short: their requirements, and their row of cuda/tiles.def. */
#include "gpu_planners.h"
#include "gpu_problem.h"

/* The longer one of the lengths. */
static int64_t rows_of(const fa_problem *p) { return p->len_q > p->len_kv ? p->len_q : p->len_kv; }

/* Returns the first row with tiles for the problem, and for which an SM has room. -1: there is none. */
static int row_of(const fa_problem *p, fa_family_id id, int capability) {
    for (int row = 0; row < fa_families[id].num_rows; row++)
        if (fa_short_row(id, row)->d >= p->d && fa_short_row(id, row)->rows >= rows_of(p) &&
            fa_families[id].rows[row].shared_bytes + FA_RESERVED_BYTES <= fa_shared_bytes_of_sm(capability))
            return row;
    return -1;
}

static const char *plan_short(const fa_problem *p, fa_family_id id, const fa_machine *machine, fa_plan *plan) {
    const double largest_scale = 1e30; /* with log2 e, and with its products, a larger scale would leave the floats */
    const int row = row_of(p, id, machine->gpu_capability);
    NEEDS(row >= 0, "it is for up to 64 queries and keys, of heads of up to 160 columns");
    const char *why = fa_why_not_of_3(p, 0);
    if (why) return why;
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "it takes fp16 and bf16");
    NEEDS(!p->cu_seqlens_q == !p->cu_seqlens_k, "it wants queries and keys packed, or neither");
    NEEDS(!p->paged && !p->leftpad_k && !p->cache_batch_idx && !p->seqused_k && !p->k_new.data && p->len_new == 0 &&
              !p->rotary_cos,
          "it reads no KV cache");
    NEEDS(p->h > 0 && p->b > 0, "it wants a sequence and a query head");
    NEEDS(p->pass == FA_FWD || p->h == p->h_kv, "it wants as many key heads as query heads");
    NEEDS(p->d % 8 == 0, "it wants a head dimension that is a multiple of 8");
    NEEDS(fa_suits_16_bytes(p), FA_16_BYTES_REASON);
    NEEDS((double)p->b * (double)p->h < INT32_MAX, "the problem has more heads than 2^31");

    plan->gpu.family = id;
    plan->gpu.row = row;
    plan->gpu.features = fa_cuda_features(p) & (FA_VARLEN | FA_SCORE | FA_DROPOUT | FA_IN_BF16);
    if (!(p->scale < largest_scale)) plan->gpu.features |= FA_SCORE;
    plan->block_q = plan->block_kv = fa_short_row(id, row)->rows;
    return NULL;
}

const char *fa_plan_fwd_short(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    enum { FEW = 32 };
    NEEDS(rows_of(p) <= FEW || machine->gpu_capability != 90 || !fa_allows_kernel(machine, "attn_fwd_sm90"),
          "attn_fwd_sm90 is faster with more than 32 queries or keys");
    return plan_short(p, FA_FWD_SHORT, machine, plan);
}

const char *fa_plan_bwd_short(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    return plan_short(p, FA_BWD_SHORT, machine, plan);
}
