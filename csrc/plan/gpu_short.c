/* Planners of attn_fwd_short and attn_bwd_short: their requirements, and their row of cuda/tiles.def. */
#include "gpu_short.h"

#include "cuda/cuda_problem.h"
#include "flex/flex.h"
#include "gpu_planners.h"
#include "gpu_problem.h"

/* The longer one of the lengths. */
static int64_t rows_of(const fa_problem *p) { return p->len_q > p->len_kv ? p->len_q : p->len_kv; }

int fa_find_short_row(const fa_problem *p, fa_family_id id, int64_t rows, int capability) {
    for (int row = 0; row < fa_families[id].num_rows; row++)
        if (fa_short_row(id, row)->d >= p->d && fa_short_row(id, row)->rows >= rows &&
            fa_families[id].rows[row].shared_bytes + FA_RESERVED_BYTES <= fa_shared_bytes_of_sm(capability))
            return row;
    return -1;
}

/* With log2 e, and with its products, a larger scale would leave the floats. */
static const double largest_scale = 1e30;

unsigned fa_short_features(const fa_problem *p) {
    const unsigned features =
        (fa_cuda_features(p) & (FA_VARLEN | FA_SCORE | FA_DROPOUT | FA_IN_BF16)) | (fa_has_mods(p) ? FA_FLEX : 0u);
    return p->scale < largest_scale ? features : features | FA_SCORE;
}

/* The requirements but for the lengths. */
static const char *why_not_short(const fa_problem *p) {
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
    NEEDS(fa_counts_in_32_bits(p, p->cu_seqlens_q != NULL), "the problem has more rows than 2^30");
    return NULL;
}

/* The requirements of a user's functions. */
static const char *why_not_mods(const fa_problem *p) {
    NEEDS(!p->cu_seqlens_q, "it takes no functions of packed sequences");
    NEEDS(!p->flex->max_scores.data, "it keeps no maximum of scores");
    NEEDS(p->scale < largest_scale, "with mods it wants a scale below 1e30");
    NEEDS(fa_has_mods(p) || !p->flex->dlse.data, "it takes a gradient of the lse beside functions alone");
    const char *why = fa_why_not_short_mods(p, sizeof(fa_cuda_problem));
    return why ? why : fa_why_not_captures_of_sm90(p);
}

static const char *plan_short(const fa_problem *p, fa_family_id id, const fa_machine *machine, fa_plan *plan) {
    const int row = fa_find_short_row(p, id, rows_of(p), machine->gpu_capability);
    NEEDS(row >= 0, "it is for up to 64 queries and keys, of heads of up to 160 columns");
    const char *why = why_not_short(p);
    if (!why && p->flex) why = why_not_mods(p);
    if (why) return why;
    /* A sequence that is longer than max_seqlen is served, but slowly. */
    NEEDS(!p->cu_seqlens_q || (p->total_q <= p->b * p->len_q && p->total_kv <= p->b * p->len_kv),
          "there are more rows than sequences of max_seqlen have");
    plan->gpu.family = id;
    plan->gpu.row = row;
    plan->gpu.features = fa_short_features(p);
    plan->block_q = plan->block_kv = fa_short_row(id, row)->rows;
    plan->workspace_bytes = fa_block_map_bytes(p);
    fa_plan_mods(p, plan);
    return NULL;
}

const char *fa_plan_fwd_short(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    enum { FEW = 32 };
    NEEDS(fa_has_mods(p) || rows_of(p) <= FEW || machine->gpu_capability != 90 ||
              !fa_allows_kernel(machine, "attn_fwd_sm90"),
          "attn_fwd_sm90 is faster with more than 32 queries or keys");
    return plan_short(p, FA_FWD_SHORT, machine, plan);
}

const char *fa_plan_bwd_short(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    return plan_short(p, FA_BWD_SHORT, machine, plan);
}

/* The lengths are on the GPU. So their mean decides, which is known here. */
int fa_short_rows_beside(const fa_problem *p, const fa_machine *machine) {
    enum { MANY = 256, MEAN = 72, ROWS = 64 };
    const bool is_packed = p->cu_seqlens_q && p->cu_seqlens_k, is_allowed = fa_allows_kernel(machine, "attn_bwd_short");
    if (!is_packed || !is_allowed || p->flex || p->b < MANY) return 0;
    if (p->total_q > MEAN * p->b || p->total_kv > MEAN * p->b || why_not_short(p)) return 0;
    return fa_find_short_row(p, FA_BWD_SHORT, ROWS, machine->gpu_capability) < 0 ? 0 : ROWS;
}
