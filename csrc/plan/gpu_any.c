/* Planners of the generic kernels. They require little of a problem. They take the first row of cuda/tiles.def that has
 * room for both head dimensions. The widest row takes qv, and v of more columns in blocks. */
#include "flex/flex.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"
#include "sequence.h"

/* The columns that a tile needs, and the bytes of an element in the tile. */
typedef struct {
    int64_t d;
    int bytes;
} tile_row;

static tile_row tile_row_of(const fa_problem *p) {
    const int64_t d_v = p->d_v < FA_MAX_HEAD_DIM && !p->qv.data ? p->d_v : FA_MAX_HEAD_DIM;
    return (tile_row){p->d > d_v ? p->d : d_v, p->dtype == FA_F32 ? 4 : 2};
}

static const char *why_not_flex(const fa_problem *p) {
    NEEDS(!fa_wants_exact_sums(p) || fa_exact_sums_digits(p) >= 12,
          "with deterministic it adds to the gradients of captured tensors from up to 2^50 pairs");
    return fa_why_not_blocks(p);
}

static const char *why_not(const fa_problem *p) {
    const char *why = fa_why_not_of_3(p, p->pass == FA_FWD ? FA_ALL_OF_3 : FA_ALL_OF_3 - FA_QV - FA_E4M3_IN);
    if (!why && p->flex) why = why_not_flex(p);
    if (why) return why;
    if (p->dtype == FA_E4M3 && p->qv.data) return "it takes no qv of float8_e4m3fn";
    if (p->s_dmask && (p->dtype == FA_E4M3 || p->qv.data)) return "its s_dmask takes no qv and no float8_e4m3fn";
    const int64_t most = 1 << 30; /* positions and lengths are added as 32-bit numbers */
    if (p->len_q > most || p->len_kv > most || p->b > most || p->h > most) return "it counts rows up to 2^30";
    if (p->cu_seqlens_q && p->total_q > most) return "it counts packed rows up to 2^30";
    if (p->cu_seqlens_k && p->total_kv > most) return "it counts packed keys up to 2^30";
    if (p->len_new > most || p->block_table_cols > most || p->page_size > most || p->num_pages > INT32_MAX ||
        p->cache_rows > INT32_MAX || p->rotary_rows > INT32_MAX || p->total_new > INT32_MAX)
        return "it counts rows and pages of a KV cache up to 2^30";
    return NULL;
}

const char *fa_plan_fwd_any(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const char *why = why_not(p);
    if (why) return why;
    const tile_row wanted = tile_row_of(p);
    int row = 0;
    while (fa_fwd_any_row(row)->d < wanted.d || fa_fwd_any_row(row)->factor_bytes != wanted.bytes) row++;
    plan->gpu.family = FA_FWD_ANY;
    plan->gpu.row = row;
    plan->gpu.features = fa_any_features(p);
    plan->block_q = 16 * fa_fwd_any_row(row)->blocks * fa_fwd_any_row(row)->warps;
    plan->block_kv = fa_fwd_any_row(row)->block_kv;
    plan->workspace_bytes = fa_rotated_q_bytes(p) + fa_block_map_bytes(p);
    plan->num_splits = fa_num_key_parts(p, machine);
    if (plan->num_splits > 1) plan->workspace_bytes = fa_key_parts_at(p) + fa_key_parts_bytes(p, plan->num_splits);
    fa_plan_mods(p, plan);
    return NULL;
}

const char *fa_plan_bwd_any(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const char *why = why_not(p);
    (void)machine;
    if (why) return why;
    const tile_row wanted = tile_row_of(p);
    int row = 0; /* the row of dQ; the rows of the other gradients follow */
    while (fa_bwd_any_row(row)->d < wanted.d || fa_bwd_any_row(row)->factor_bytes != wanted.bytes ||
           fa_bwd_any_row(row)->grad != 0)
        row++;
    plan->gpu.family = FA_BWD_ANY;
    plan->gpu.row = row;
    plan->gpu.features = fa_any_features(p);
    plan->block_q = 16 * fa_bwd_any_row(row)->blocks * fa_bwd_any_row(row)->warps;
    plan->block_kv = fa_bwd_any_row(row)->walk;
    plan->workspace_bytes = fa_block_map_bytes(p);
    if (fa_wants_exact_sums(p)) plan->workspace_bytes = fa_exact_sums_at(p) + fa_exact_sums_bytes(p);
    fa_plan_mods(p, plan);
    return NULL;
}
