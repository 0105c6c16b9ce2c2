/* Planner of attn_bwd_sm90 and attn_bwd_wide_sm90: their requirements, and their row of cuda/tiles.def. */
#include "bwd_workspace.h"
#include "cuda/attn_bwd_params.h"
#include "flex/flex.h"
#include "flex/pairs.h"
#include "flex/sums.h"
#include "gpu_bwd_order.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "gpu_short.h"
#include "kernel_table.h"

/* Do scores need many registers and operations? Softcap and dropout weigh dS with other numbers than P, and so does the
 * derivative of a score_mod that is no sum. A bias of each pair needs registers until its score is there. */
static bool has_heavy_scores(const fa_problem *p) {
    const unsigned features = fa_cuda_features(p);
    if (features & FA_DROPOUT || (features & FA_SCORE && !fa_has_alibi_alone(p))) return true;
    if (!p->flex || !p->flex->score) return false;
    const fa_flex_program *score = p->flex->score->program;
    return fa_pair_of_bits(score) >= 0 || !fa_is_sum_with_score(score);
}

/* Returns the first row that has room for the head dimension and serves every feature, or -1. */
static int first_row(const fa_problem *p, fa_family_id id, unsigned wanted, fa_plan *plan) {
    enum { BOX = 64 };
    const fa_family *family = &fa_families[id];
    const bool is_heavy = has_heavy_scores(p);
    for (int row = 0; row < family->num_rows; row++) {
        const fa_bwd_sm90_columns *t = fa_bwd_sm90_row(id, row);
        if (t->d < p->d || t->d_v < p->d_v)
            fa_rule_out(plan, family->rows[row].name, "its tiles have fewer columns than the heads");
        else if (p->cu_seqlens_q && !(fa_fills_boxes(p->d, t->d, BOX) && fa_fills_boxes(p->d_v, t->d_v, BOX)))
            fa_rule_out(plan, family->rows[row].name, FA_BOXES_REASON);
        else if ((family->rows[row].serves & wanted) != wanted)
            fa_rule_out(plan, family->rows[row].name, "its tiles do not serve every option of the call");
        else if (id == FA_BWD_SM90 && !fa_bwd_sm90_takes(row, is_heavy))
            fa_rule_out(plan, family->rows[row].name,
                        is_heavy ? "softcap, dropout and a bias of each pair are faster with fewer query rows"
                                 : "it is for softcap, dropout and a bias of each pair");
        else
            return row;
    }
    return -1;
}

const char *fa_plan_bwd_sm90(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const unsigned features = fa_cuda_features(p) | (fa_has_mods(p) ? FA_FLEX : 0u);
    const unsigned with_alibi = fa_has_alibi_alone(p) ? (features & ~(unsigned)FA_SCORE) | FA_ALIBI : features;
    const char *why = fa_why_not_of_3(p, FA_OTHER_D_V);
    if (!why && p->flex) why = fa_why_not_mods_of_sm90(p, sizeof(fa_attn_bwd_params));
    if (!why && p->flex) why = fa_why_not_captures_of_sm90(p);
    if (why) return why;
    NEEDS(machine->gpu_capability == 90, "it is for compute capability 9.0 (Hopper), and this GPU has another");
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "it takes fp16 and bf16");
    NEEDS(p->h > 0, "it wants a query head");
    NEEDS(p->softcap <= FA_HOPPERS_SOFTCAP, FA_SOFTCAP_REASON);
    NEEDS(!p->paged && !p->leftpad_k && !p->cache_batch_idx && !p->seqused_k, "it reads no KV cache");
    NEEDS(p->d % 8 == 0 && p->d_v % 8 == 0, "it wants a head dimension that is a multiple of 8, of v too");
    NEEDS(fa_suits_16_bytes(p), FA_16_BYTES_REASON);

    fa_family_id id = FA_BWD_SM90;
    int row = first_row(p, id, with_alibi & ~(unsigned)FA_DTYPES, plan);
    if (row < 0) row = first_row(p, id = FA_BWD_WIDE_SM90, features & ~(unsigned)FA_DTYPES, plan);
    NEEDS(row >= 0, "it has no tile for this head dimension");
    NEEDS(id == FA_BWD_SM90 || !fa_has_masks_in_groups(p),
          "above 128 columns it takes one block mask for all query heads of a key head");
    const fa_bwd_sm90_columns *t = fa_bwd_sm90_row(id, row);
    const int64_t sms = id == FA_BWD_SM90 ? machine->gpu_sms : 0;
    const fa_bwd_workspace w = fa_bwd_workspace_of(p, t->d, t->block_q, t->block_kv, sms);
    const int64_t heads_per_kv = p->h / p->h_kv;
    NEEDS(fa_counts_in_32_bits(p, p->cu_seqlens_q != NULL) && w.num_slabs * w.num_heads < INT32_MAX &&
              w.num_slabs * heads_per_kv * heads_per_kv < INT32_MAX &&
              p->b * p->h_kv * w.head_pieces * (p->len_kv / t->block_kv + 1) < INT32_MAX,
          "the problem has more rows than 2^30, or more tiles than 2^31");
    NEEDS(w.num_cut * 2 * t->block_kv * t->d / 4 < INT32_MAX, "the sums of its cut tiles would take more than 32 GiB");

    plan->gpu.family = id;
    plan->gpu.row = row;
    plan->gpu.features = id == FA_BWD_SM90 ? with_alibi : features;
    plan->block_q = t->block_q;
    plan->block_kv = t->block_kv;
    plan->workspace_bytes = fa_bwd_workspace_at(p, plan) + w.bytes;
    plan->gpu.short_rows = fa_short_rows_beside(p, machine);
    if (features & FA_FLEX) {
        if ((why = fa_plan_mask_of_sm90(p, plan)) != NULL) return why;
        fa_plan_mods(p, plan);
    }
    const int ctas = machine->gpu_sms / (id == FA_BWD_WIDE_SM90 ? 2 : 1);
    if (p->b > 0) fa_plan_bwd_order(p, ctas > 0 ? ctas : 1, w.head_pieces, plan);
    return NULL;
}
