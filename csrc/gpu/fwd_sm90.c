/* Launches the forward on Hopper: fills the parameters of attn_fwd_sm90 or attn_fwd_fp8_sm90, and launches the
 * kernel. */
#include "append.h"
#include "division.h"
#include "gather.h"
#include "launch.h"
#include "launchers.h"
#include "map.h"
#include "mods.h"
#include "parts.h"
#include "sinks.h"
#include "slots.h"

#include <math.h>
#include <string.h>

#include "cuda/attn_fwd_params.h"
#include "flex/flex.h"
#include "plan/gpu_problem.h"

static int tile_heads_of(const fa_plan *plan) { return plan->gpu.tile_heads > 1 ? plan->gpu.tile_heads : 1; }

static void fill_scalars(const fa_cuda_call *call, fa_attn_fwd_params *a) {
    const fa_problem *p = call->problem;
    const unsigned features = call->plan->gpu.features;
    const bool packed = features & FA_VARLEN;
    const int64_t block_q = call->plan->block_q;
    a->lse = p->lse.data;
    a->sinks = fa_cuda_sinks_of(p);
    a->empty_lse = p->sinks.data ? INFINITY : p->flex ? -INFINITY : p->empty_lse;
    a->lse_stride_b = packed ? 0 : p->lse.stride_b;
    a->lse_stride_h = p->lse.stride_h;
    a->o_data = p->o.data;
    a->o_stride_b = packed ? 0 : p->o.stride_b;
    a->o_stride_row = p->o.stride_row;
    a->o_stride_h = p->o.stride_h;
    a->b = (int)p->b, a->h = (int)p->h, a->heads_per_kv = (int)(p->h / p->h_kv);
    a->d_v = (int)p->d_v;
    a->len_q = (int)(packed ? p->total_q : p->len_q);
    a->len_kv = (int)(packed ? p->total_kv : p->len_kv);
    a->cu_seqlens_q = p->cu_seqlens_q;
    a->cu_seqlens_k = p->cu_seqlens_k;
    a->seqused_q = p->seqused_q;
    a->seqused_k = p->seqused_k;
    const int64_t tile_heads = tile_heads_of(call->plan), rows = block_q / tile_heads;
    a->num_q_tiles = (int)((p->len_q + rows - 1) / rows);
    a->num_tiles = a->num_q_tiles * (int)(p->b * p->h / tile_heads) * call->plan->num_splits;
    a->group_heads = (int)(call->plan->gpu.group_heads / tile_heads);

    const float scale = (float)p->scale;
    const bool changes_scores = features & FA_SCORE || (p->flex && p->flex->score);
    a->scale_log2 = (changes_scores ? 1 : scale) * FA_LOG2_E;
    a->score_scale = scale;
    a->softcap = (float)p->softcap;
    a->window_left = fa_clamp_window(p->window_left), a->window_right = fa_clamp_window(p->window_right);
    a->attention_chunk = fa_clamp_chunk(p->attention_chunk);
    a->alibi_slopes = p->alibi_slopes;
    a->alibi_stride_b = p->alibi_stride_b;
    a->rng_state = (const unsigned long long *)p->rng_state;
    a->keep_max = p->keep_max;
    a->keep_scale = features & FA_DROPOUT ? (float)(1 / (1 - p->dropout_p)) : 1;
}

static fa_attn_fwd_rows rows_of(const fa_view *t, int64_t columns) {
    return (fa_attn_fwd_rows){t->data, t->stride_h / 8, (unsigned)(t->stride_b / 8), (unsigned)(t->stride_row / 8),
                              (int)columns};
}

/* A cache that has no row or no page has no key to read. */
static fa_attn_fwd_cache cache_of(const fa_problem *p, const fa_plan *plan, int box) {
    const int tile_heads = tile_heads_of(plan);
    const fa_cache_pages pages = fa_cache_pages_of(p);
    const bool is_empty = pages.num == 0 || pages.capacity == 0, has_groups = plan->gpu.features & FA_WHOLE_KEYS;
    return (fa_attn_fwd_cache){
        .block_table = is_empty ? NULL : p->block_table,
        .table_stride = p->block_table_stride,
        .rows = (int)p->cache_rows,
        .num_pages = (int)pages.num,
        .page_size = (int)pages.size,
        .capacity = is_empty ? 0 : (int)pages.capacity,
        .box = box,
        .cache_batch_idx = is_empty ? NULL : p->cache_batch_idx,
        .leftpad_k = p->leftpad_k,
        .cu_seqlens_k_new = p->cu_seqlens_k_new,
        .len_new = (int)p->len_new,
        .total_new = (int)p->total_new,
        .tile_heads = tile_heads,
        .rows_of_head = plan->block_q / tile_heads,
        .h_in_tiles = (int)p->h / tile_heads,
        .rows_inverse = FA_ROWS_INVERSE(plan->block_q / tile_heads),
        .num_parts = plan->num_splits,
        .k = rows_of(&p->k, p->d),
        .v = rows_of(&p->v, p->d_v),
        .by_page_size = fa_division_by(pages.size > 0 ? (unsigned)pages.size : 1),
        .page_groups = {has_groups ? (int)fa_groups_of_page(p, &p->k) : 0,
                        has_groups ? (int)fa_groups_of_page(p, &p->v) : 0},
    };
}

/* The kernel writes the parts of the keys to the workspace. The sinks come when they are combined. */
static void place_parts(const fa_cuda_call *call, fa_attn_fwd_params *a) {
    const fa_problem *p = call->problem;
    const int64_t of_part = p->b * p->h * p->len_q;
    a->cache.part_rows = (int)of_part;
    a->cache.part_o = (float *)((char *)call->workspace + fa_key_parts_at(p));
    a->lse = a->cache.part_o + a->cache.num_parts * of_part * p->d_v;
    a->lse_stride_h = p->len_q, a->lse_stride_b = p->h * p->len_q;
    a->sinks = (fa_cuda_sinks){0};
    a->empty_lse = -INFINITY;
}

/* The shape of a kernel's tiles: columns of the boxes that TMA loads, and of the boxes of O that it stores. */
typedef struct {
    int wgs, ctas, block_kv, columns, columns_o;
} tile_shape;

/* The parameters beyond fill_scalars are filled in `a`. */
static fa_status launch_forward(const fa_cuda_call *call, tile_shape tile, fa_attn_fwd_params *a, fa_error *err) {
    const fa_problem *p = call->problem;
    const unsigned features = call->plan->gpu.features;
    const bool packed = features & FA_VARLEN;
    fill_scalars(call, a);

    fa_box box_q = {FA_ROWS_OF_A_WARPGROUP * tile.wgs, tile.columns, packed, p->d, p->b, 1}, box_o = box_q;
    fa_box box_k = {tile.block_kv, tile.columns, packed, p->d, p->b, 1};
    int64_t rows_q = packed ? p->total_q : p->len_q, rows_kv = packed ? p->total_kv : p->len_kv;
    if (features & FA_CACHE) {
        const fa_cache_pages pages = fa_cache_pages_of(p);
        box_k = (fa_box){fa_cache_box(p, tile.block_kv), tile.columns, false, p->d, pages.num, 1};
        rows_kv = pages.size;
        a->cache = cache_of(p, call->plan, box_k.rows);
        box_q.rows = a->cache.rows_of_head, box_q.heads = a->cache.tile_heads;
        if (a->cache.num_parts > 1) place_parts(call, a);
    }
    fa_box box_v = box_k;
    box_v.d = box_o.d = p->d_v, box_o.rows = 16, box_o.columns = tile.columns_o;
    fa_status status = fa_cuda_map(call, &p->q, rows_q, p->h, box_q, &a->q, err);
    for (int is_v = 0; is_v < 2 && status == FA_OK && !(features & FA_SINGLE_KEYS); is_v++) {
        const fa_view *t = is_v ? &p->v : &p->k;
        const fa_box box = is_v ? box_v : box_k;
        fa_tensor_map *map = is_v ? &a->v : &a->k;
        status = features & FA_WHOLE_KEYS ? fa_cuda_map_of_pages(call, t, (int)box.d, box.rows, map, err)
                                          : fa_cuda_map(call, t, rows_kv, p->h_kv, box, map, err);
    }
    if (status == FA_OK) status = fa_cuda_map(call, &p->o, rows_q, p->h, box_o, &a->o, err);
    if (status != FA_OK) return status;

    a->counter_slot = call->plan->gpu.is_dynamic ? fa_cuda_slot(call, FA_TILE_COUNTERS) : -1;
    const fa_launch launch = {(unsigned)call->plan->gpu.num_ctas, 1, 1,
                              .threads = (unsigned)FA_FWD_THREADS(tile.wgs, tile.ctas), .waits_itself = true};
    const fa_variant variant = fa_plan_variant(call->plan, call->gpu->capability);
    status = features & FA_FLEX ? fa_cuda_make_block_walks(call, err) : FA_OK;
    if (status == FA_OK) status = fa_cuda_launch_with_mods(call, variant, launch, a, sizeof *a, err);
    if (status == FA_OK && a->cache.num_parts > 1)
        status = fa_cuda_combine_parts(call, a->cache.part_o, a->lse, p->empty_lse, err);
    return status;
}

fa_status fa_cuda_fwd_sm90(const fa_cuda_call *call, fa_error *err) {
    const fa_fwd_sm90_columns *tile = fa_fwd_sm90_row(call->plan->gpu.row);
    const int columns = fa_fwd_sm90_box(tile);
    const tile_shape shape = {tile->wgs, tile->ctas, tile->block_kv, columns, columns};
    fa_attn_fwd_params a = {0};
    fa_status status = call->plan->gpu.features & FA_CACHE ? fa_cuda_append(call, call->workspace, err) : FA_OK;
    if (status != FA_OK || call->plan->gpu.num_ctas == 0) return status; /* no query: nothing to write */
    const bool gathers = call->plan->gpu.gathers;
    if (!gathers && !call->problem->rotary_cos) return launch_forward(call, shape, &a, err);
    fa_problem changed = *call->problem;
    fa_cuda_call with_changed = *call;
    with_changed.problem = &changed;
    if (gathers) status = fa_cuda_gather(call, &changed, err);
    const int64_t row = changed.h * changed.d;
    if (changed.rotary_cos)
        changed.q = (fa_view){call->workspace, changed.cu_seqlens_q ? 0 : changed.len_q * row, row, changed.d};
    return status == FA_OK ? launch_forward(&with_changed, shape, &a, err) : status;
}

static fa_attn_fwd_factors factors_of(const fa_descale *f) {
    return (fa_attn_fwd_factors){f->data, f->stride_b, f->stride_h};
}

fa_status fa_cuda_fwd_fp8_sm90(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const fa_fwd_fp8_sm90_columns *tile = fa_fwd_fp8_sm90_row(call->plan->gpu.row);
    fa_attn_fwd_params a = {.q_descale = factors_of(&p->q_descale),
                            .k_descale = factors_of(&p->k_descale),
                            .v_descale = factors_of(&p->v_descale),
                            .sums = call->plan->workspace_bytes ? call->workspace : NULL};
    if (call->plan->gpu.num_ctas == 0) return FA_OK; /* without queries there is nothing to write */
    return launch_forward(call, (tile_shape){tile->wgs, 1, tile->block_kv, tile->d % 128 == 0 ? 128 : 64, 64}, &a, err);
}
