/* Planners of the generic kernels. They require little of a problem. They take the first row of cuda/tiles.def that has
 * room for the head dimension. */
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"
#include "sequence.h"

static const char *why_not(const fa_problem *p) {
    const char *why = fa_why_not_of_3(p, 0);
    if (why) return why;
    const int64_t most = 1 << 30; /* positions and lengths are added as 32-bit numbers */
    if (p->len_q > most || p->len_kv > most || p->b > most || p->h > most) return "it counts rows up to 2^30";
    if (p->cu_seqlens_q && (p->total_q > most || p->total_kv > most)) return "it counts packed rows up to 2^30";
    if (p->len_new > most || p->block_table_cols > most || p->page_size > most || p->num_pages > INT32_MAX ||
        p->cache_rows > INT32_MAX || p->rotary_rows > INT32_MAX)
        return "it counts rows and pages of a KV cache up to 2^30";
    return NULL;
}

const char *fa_plan_fwd_any(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const char *why = why_not(p);
    (void)machine;
    if (why) return why;
    const int element_bytes = (int)fa_dtype_bytes(p->dtype);
    int row = 0;
    while (fa_fwd_any_row(row)->d < p->d || fa_fwd_any_row(row)->element_bytes != element_bytes) row++;
    plan->gpu.family = FA_FWD_ANY;
    plan->gpu.row = row;
    plan->gpu.features = fa_dtype_feature(p->dtype);
    plan->block_q = 16 * fa_fwd_any_row(row)->blocks * fa_fwd_any_row(row)->warps;
    plan->block_kv = fa_fwd_any_row(row)->block_kv;
    plan->workspace_bytes = fa_rotated_q_bytes(p);
    return NULL;
}

const char *fa_plan_bwd_any(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const char *why = why_not(p);
    (void)machine;
    if (why) return why;
    const int element_bytes = (int)fa_dtype_bytes(p->dtype);
    int row = 0; /* the row of dQ; the rows of the other gradients follow */
    while (fa_bwd_any_row(row)->d < p->d || fa_bwd_any_row(row)->element_bytes != element_bytes ||
           fa_bwd_any_row(row)->grad != 0)
        row++;
    plan->gpu.family = FA_BWD_ANY;
    plan->gpu.row = row;
    plan->gpu.features = fa_dtype_feature(p->dtype);
    plan->block_q = 16 * fa_bwd_any_row(row)->blocks * fa_bwd_any_row(row)->warps;
    plan->block_kv = fa_bwd_any_row(row)->walk;
    return NULL;
}
