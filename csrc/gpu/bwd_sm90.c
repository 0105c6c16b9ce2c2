/* Launches the backward on Hopper: attn_bwd_prep, then attn_bwd_sm90 or attn_bwd_wide_sm90. Both kernels get the same
 * parameters. */
#include <math.h>

#include "cuda/attn_bwd_params.h"
#include "cuda/attn_fwd_params.h"
#include "flex/flex.h"
#include "launch.h"
#include "launchers.h"
#include "map.h"
#include "mods.h"
#include "short.h"
#include "plan/bwd_workspace.h"
#include "plan/gpu_problem.h"

enum { HELPER_THREADS = 256 };

/* Returns the number of CTAs that share a tile's keys. They form a thread block cluster. */
static int ctas_of_tile(const fa_cuda_call *call) { return call->plan->gpu.family == FA_BWD_WIDE_SM90 ? 2 : 1; }

/* Returns the threads of a CTA: one warpgroup that feeds, and two or three that compute. */
static unsigned main_threads(const fa_bwd_sm90_columns *tile, bool is_wide) {
    return is_wide && tile->d <= 192 ? 512 : 384;
}

static fa_bwd_tensor tensor_of(const fa_view *t, bool packed) {
    return (fa_bwd_tensor){t->data, packed ? 0 : t->stride_b, t->stride_row, t->stride_h};
}
static fa_bwd_row_stats stats_of(const fa_row_stats *t, bool packed) {
    return (fa_bwd_row_stats){t->data, packed ? 0 : t->stride_b, t->stride_h};
}

/* Fills all but the tensor maps. */
static void fill_scalars(const fa_cuda_call *call, const fa_bwd_workspace *w, fa_attn_bwd_params *a) {
    const fa_problem *p = call->problem;
    const unsigned features = call->plan->gpu.features;
    const bool packed = features & FA_VARLEN;
    const int64_t block_kv = call->plan->block_kv;
    char *workspace = (char *)call->workspace + fa_bwd_workspace_at(p, call->plan);
    a->o = tensor_of(&p->o, packed), a->dout_rows = tensor_of(&p->dout, packed);
    a->dq = tensor_of(&p->dq, packed), a->dk = tensor_of(&p->dk, packed), a->dv = tensor_of(&p->dv, packed);
    a->lse = stats_of(&p->lse, packed), a->softmax_d = stats_of(&p->softmax_d, packed);
    a->softmax_d_rows = (int)(p->flex ? 0 : p->softmax_d.stride_h); /* mods: all rows are queries */
    a->stats = (float *)(workspace + w->stats);
    a->dq_sums = (float *)(workspace + w->dq_sums);
    a->turns = (unsigned *)(workspace + w->turns);
    a->kv_sums = (float *)(workspace + w->kv_sums);
    a->kv_turns = (unsigned *)(workspace + w->kv_turns);
    a->tile_counter = (unsigned *)(workspace + w->tile_counter);
    a->num_slabs = (int)w->num_slabs;
    a->b = (int)p->b, a->h = (int)p->h, a->h_kv = (int)p->h_kv, a->d = (int)p->d;
    a->d_v = (int)p->d_v;
    a->heads_per_tile = (int)(p->h / p->h_kv / w->head_pieces);
    a->heads_inverse = FA_HEADS_INVERSE(a->heads_per_tile);
    a->len_q = (int)(packed ? p->total_q : p->len_q);
    a->len_kv = (int)(packed ? p->total_kv : p->len_kv);
    a->cu_seqlens_q = p->cu_seqlens_q;
    a->cu_seqlens_k = p->cu_seqlens_k;
    a->num_kv_tiles = (int)((p->len_kv + block_kv - 1) / block_kv);
    a->num_whole = (int)(w->num_tiles - w->num_cut), a->num_cut = (int)w->num_cut, a->pieces = (int)w->pieces;
    a->num_tiles = (int)(a->num_whole + w->num_cut * w->pieces);
    a->in_order = !call->plan->gpu.any_order, a->converts = call->plan->gpu.converts,
    a->group_heads = call->plan->gpu.group_heads;

    const float scale = (float)p->scale;
    const bool changes_scores = features & FA_SCORE || (p->flex && p->flex->score);
    a->scale_log2 = (changes_scores ? 1 : scale) * FA_LOG2_E;
    a->score_scale = a->scale = scale;
    a->softcap = (float)p->softcap;
    a->window_left = fa_clamp_window(p->window_left), a->window_right = fa_clamp_window(p->window_right);
    a->alibi_slopes = p->alibi_slopes;
    a->alibi_stride_b = p->alibi_stride_b;
    a->rng_state = (const unsigned long long *)p->rng_state;
    if (p->flex) {
        a->dlse = stats_of(&p->flex->dlse, packed);
        a->ranks = fa_cuda_block_ranks(call);
        a->mask_b = (int)p->flex->mask_b, a->mask_h = (int)p->flex->mask_h;
    }
    a->short_rows = call->plan->gpu.short_rows;
    a->keep_max = p->keep_max;
    a->keep_scale = features & FA_DROPOUT ? (float)(1 / (1 - p->dropout_p)) : 1;
}

static fa_status fill_maps(const fa_cuda_call *call, const fa_bwd_sm90_columns *tile, fa_attn_bwd_params *a,
                           fa_error *err) {
    const fa_problem *p = call->problem;
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t rows_q = packed ? p->total_q : p->len_q, rows_kv = packed ? p->total_kv : p->len_kv;
    const int block_kv = call->plan->block_kv / ctas_of_tile(call);
    const fa_box box_q = {call->plan->block_q, 64, packed, p->d, p->b, 1},
                 box_o = {call->plan->block_q, 64, packed, p->d_v, p->b, 1};
    const fa_box box_k = {block_kv, 64, packed, p->d, p->b, 1}, box_v = {block_kv, 64, packed, p->d_v, p->b, 1};
    fa_status status = fa_cuda_map(call, &p->q, rows_q, p->h, box_q, &a->q, err);
    if (status == FA_OK) status = fa_cuda_map(call, &p->dout, rows_q, p->h, box_o, &a->dout, err);
    if (status == FA_OK) status = fa_cuda_map(call, &p->k, rows_kv, p->h_kv, box_k, &a->k, err);
    if (status == FA_OK) status = fa_cuda_map(call, &p->v, rows_kv, p->h_kv, box_v, &a->v, err);
    if (call->plan->gpu.family != FA_BWD_SM90) return status;
    const int columns = FA_DQ_BOX(tile->d, tile->block_q);
    const fa_box box = {16, columns, packed, p->d, p->b, 1};
    if (status == FA_OK && p->dq.data) status = fa_cuda_map(call, &p->dq, rows_q, p->h, box, &a->dq_rows, err);
    if (status == FA_OK && p->dk.data) status = fa_cuda_map(call, &p->dk, rows_kv, p->h_kv, box_k, &a->dk_tiles, err);
    if (status == FA_OK && p->dv.data) status = fa_cuda_map(call, &p->dv, rows_kv, p->h_kv, box_v, &a->dv_tiles, err);
    return status;
}

/* Launches one of the kernels with the plan's features that the kernel's family knows. */
static fa_status launch(const fa_cuda_call *call, fa_family_id family, int row, int64_t grid, unsigned threads,
                        fa_attn_bwd_params *a, fa_error *err) {
    fa_variant variant = fa_plan_variant(call->plan, call->gpu->capability);
    variant.family = family, variant.row = row;
    variant.features &= fa_families[family].knows;
    const fa_launch shape = {(unsigned)grid, 1, 1, .threads = threads, .waits_itself = true};
    return fa_cuda_launch_with_mods(call, variant, shape, a, sizeof *a, err);
}

fa_status fa_cuda_bwd_sm90(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const fa_family_id family = (fa_family_id)call->plan->gpu.family;
    const int row = call->plan->gpu.row;
    const fa_bwd_sm90_columns *tile = fa_bwd_sm90_row(family, row);
    const bool is_wide = family == FA_BWD_WIDE_SM90;
    const int64_t sms = call->plan->gpu.num_sms;
    const fa_bwd_workspace w = fa_bwd_workspace_of(p, tile->d, tile->block_q, tile->block_kv, is_wide ? 0 : sms);
    fa_attn_bwd_params a = {0};
    if (p->b == 0 || p->total_q + p->total_kv == 0) return FA_OK; /* there is no gradient to write */
    fill_scalars(call, &w, &a);
    fa_status status = fill_maps(call, tile, &a, err);
    if (status != FA_OK) return status;

    /* The main kernel has one CTA per SM, but at most as many CTAs as there can be tiles. */
    const int64_t tiles =
        p->cu_seqlens_q ? (p->total_kv / tile->block_kv + p->b) * p->h_kv * w.head_pieces : a.num_tiles;
    const int64_t slabs = w.num_slabs * w.num_heads;
    const int ctas = ctas_of_tile(call), clusters = sms > ctas ? (int)sms / ctas : 1;
    const bool wants_main = p->dq.data || p->dk.data || p->dv.data || fa_wants_capture_gradients(p);
    if (call->plan->gpu.short_rows > 0) status = fa_cuda_bwd_short_beside(call, err);
    if (call->plan->gpu.features & FA_FLEX) status = fa_cuda_make_block_walks(call, err);
    if (status != FA_OK) return status;
    status = launch(call, FA_BWD_PREP_SM90, is_wide ? fa_families[FA_BWD_SM90].num_rows + row : row, slabs,
                    HELPER_THREADS, &a, err);
    if (status == FA_OK && wants_main)
        status = launch(call, family, row, ctas * (tiles < clusters ? tiles : clusters), main_threads(tile, is_wide),
                        &a, err);
    return status;
}
