/* Launches the generic kernels, which serve every problem on every GPU. */
#include "any_problem.h"
#include "append.h"
#include "capture_sums.h"
#include "launchers.h"
#include "mods.h"
#include "parts.h"
#include "plan/gpu_problem.h"

/* Returns the number of blocks of d columns of v. */
static int count_v_blocks(const fa_problem *p, int d) { return p->d_v <= d ? 1 : (int)((p->d_v + d - 1) / d); }

/* The results of the parts of the keys, behind the map of the block mask. */
static void place_parts(const fa_cuda_call *call, fa_cuda_problem *a) {
    const fa_problem *p = call->problem;
    a->num_parts = call->plan->num_splits;
    a->part_o = (float *)((char *)call->workspace + fa_key_parts_at(p));
    a->part_lse = a->part_o + a->num_parts * p->b * p->h * p->len_q * p->d_v;
}

fa_status fa_cuda_fwd_any(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const int row = call->plan->gpu.row, block_q = call->plan->block_q;
    const bool packed = p->cu_seqlens_q != NULL;
    fa_cuda_problem a = fa_cuda_problem_of(call);
    a.num_tiles = fa_count_tiles(p->len_q, p->total_q, packed, block_q);
    a.num_v_blocks = count_v_blocks(p, fa_fwd_any_row(row)->d);
    if (call->plan->num_splits > 1) place_parts(call, &a);
    fa_status status = fa_cuda_append(call, call->workspace, err);
    if (status == FA_OK) status = fa_cuda_make_block_map(call, err);
    if (status == FA_OK && p->rotary_cos)
        a.q = (fa_cuda_view){call->workspace, packed ? 0 : p->len_q * p->h * p->d, p->h * p->d, p->d};
    if (status == FA_OK)
        status = fa_cuda_launch_any(call, FA_FWD_ANY, row, &a,
                                    (p->b + packed) * p->h * a.num_tiles * a.num_v_blocks * a.num_parts,
                                    32 * fa_fwd_any_row(row)->warps, err);
    if (status == FA_OK && a.num_parts > 1)
        status = fa_cuda_combine_parts(call, a.part_o, a.part_lse, a.empty_lse, err);
    return status == FA_OK ? fa_cuda_launch_probs(call, &a, err) : status;
}

/* A row of the backward. */
typedef struct {
    int row;
    const fa_cuda_problem *problem;
    int64_t num_tasks;
    int threads;
} bwd_launch;

static fa_status launch_bwd(const fa_cuda_call *call, const void *context, fa_error *err) {
    const bwd_launch *l = context;
    return fa_cuda_launch_any(call, FA_BWD_ANY, l->row, l->problem, l->num_tasks, l->threads, err);
}

fa_status fa_cuda_bwd_any(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const int first = call->plan->gpu.row, num_rows = fa_families[FA_BWD_ANY].num_rows;
    const bool packed = p->cu_seqlens_q != NULL;
    const bool is_wanted[] = {p->dq.data || fa_wants_capture_gradients(p), p->dk.data, p->dv.data,
                              p->dk.data || p->dv.data};
    fa_cuda_problem a = fa_cuda_problem_of(call);
    fa_status status = fa_cuda_launch_delta(call, err);
    if (status == FA_OK) status = fa_cuda_make_block_map(call, err);
    for (int row = first; status == FA_OK && row < num_rows; row++) {
        const fa_bwd_any_columns *tile = fa_bwd_any_row(row);
        const int grad = tile->grad, own = 16 * tile->blocks * tile->warps;
        const bool owns_keys = grad > 0, owns_packed = owns_keys ? p->cu_seqlens_k != NULL : packed;
        if (row > first && grad == 0) break; /* the rows of the next tile begin here */
        if (!is_wanted[grad]) continue;
        a.zero_tensors = owns_packed && call->zero_tensors;
        a.num_tiles = owns_keys ? fa_count_tiles(p->len_kv, p->total_kv, owns_packed, own)
                                : fa_count_tiles(p->len_q, p->total_q, owns_packed, own);
        a.num_v_blocks = count_v_blocks(p, tile->d);
        const bwd_launch launch = {row, &a,
                                   (p->b + a.zero_tensors) * (owns_keys ? p->h_kv : p->h) * a.num_tiles *
                                       (grad == GRAD_dv ? a.num_v_blocks : 1),
                                   32 * tile->warps};
        if (grad == GRAD_dq && fa_wants_exact_sums(p))
            status = fa_cuda_add_exactly(call, launch_bwd, &launch, err);
        else
            status = launch_bwd(call, &launch, err);
    }
    return status;
}
