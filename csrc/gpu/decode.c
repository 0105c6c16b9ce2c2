/* Launches attention over a KV cache: cuda/attn_decode.cu. If possible, the same kernel appends and rotates. */
#include "append.h"
#include "cuda/attn_decode_params.h"
#include "division.h"
#include "launch.h"
#include "flex/flex.h"
#include "launchers.h"
#include "mods.h"
#include "plan/gpu_decode.h"
#include "plan/gpu_problem.h"
#include "sinks.h"
#include "slots.h"

#include <limits.h>

static fa_decode_cache cache_of(const fa_view *t) {
    return (fa_decode_cache){t->data, (unsigned)(t->stride_b / 8), (unsigned)(t->stride_row / 8),
                             (unsigned)(t->stride_h / 8)};
}

static fa_attn_decode_params params_of(const fa_problem *p) {
    const bool packed = p->cu_seqlens_q != NULL, packed_keys = p->cu_seqlens_k && !p->paged;
    const float scale = (float)p->scale;
    fa_attn_decode_params a = {
        .q = p->q.data,
        .o = p->o.data,
        .q_stride_b = p->q.stride_b,
        .q_stride_row = p->q.stride_row,
        .q_stride_h = p->q.stride_h,
        .o_stride_b = p->o.stride_b,
        .o_stride_row = p->o.stride_row,
        .o_stride_h = p->o.stride_h,
        .lse = p->lse.data,
        .lse_stride_b = packed ? 0 : p->lse.stride_b,
        .lse_stride_h = p->lse.stride_h,
        .k = cache_of(&p->k),
        .v = cache_of(&p->v),
        .b = (int)p->b,
        .h = (int)p->h,
        .h_kv = (int)p->h_kv,
        .heads_per_kv = (int)(p->h / p->h_kv),
        .d = (int)p->d,
        .len_q = (int)p->len_q,
        .total_q = (int)p->total_q,
        .capacity = (int)(packed_keys ? p->total_kv
                          : p->paged  ? p->block_table_cols * p->page_size
                                      : p->len_kv),
        .len_new = (int)p->len_new,
        .num_caches = (int)p->cache_rows,
        .cu_seqlens_q = p->cu_seqlens_q,
        .cu_seqlens_k = p->cu_seqlens_k,
        .seqused_k = p->seqused_k,
        .leftpad_k = p->leftpad_k,
        .cache_batch_idx = p->cache_batch_idx,
        .block_table = p->block_table,
        .table_stride = p->block_table_stride,
        .page_size = (int)p->page_size,
        .num_pages = (int)p->num_pages,
        .changes_scores = fa_changes_scores(p) || (p->flex && p->flex->score),
        .score_scale = scale,
        .softcap = (float)p->softcap,
        .window_left = fa_clamp_window(p->window_left),
        .window_right = fa_clamp_window(p->window_right),
        .attention_chunk = fa_clamp_chunk(p->attention_chunk),
        .alibi_slopes = p->alibi_slopes,
        .alibi_stride_b = p->alibi_stride_b,
        .empty_lse = p->empty_lse,
        .sinks = fa_cuda_sinks_of(p),
    };
    a.scale_log2 = (a.changes_scores ? 1 : scale) * FA_LOG2_E;
    /* A cache without rows or pages has no key to read. */
    if ((p->paged && p->num_pages == 0) || (p->cache_batch_idx && p->cache_rows == 0))
        a.capacity = 0, a.cache_batch_idx = NULL, a.block_table = NULL;
    return a;
}

static void add_append(const fa_problem *p, fa_attn_decode_params *a) {
    a->k_new = cache_of(&p->k_new), a->v_new = cache_of(&p->v_new);
    a->rotary_cos = p->rotary_cos, a->rotary_sin = p->rotary_sin;
    a->rotary_rows = (int)p->rotary_rows, a->rotary_dim = (int)p->rotary_dim;
    a->rotary_interleaved = p->rotary_interleaved, a->rotary_q_by_row = p->rotary_q_by_row;
}

/* Chooses the counters of finished parts. The kernel's own counters return to zero by themselves. If there are too many
 * counters, or no slot is left, the counters lie in the workspace. */
static fa_status give_counters(const fa_cuda_call *call, const fa_decode_layout *at, fa_attn_decode_params *a,
                               fa_error *err) {
    if (a->num_splits == 1) return FA_OK;
    a->counter_slot = a->num_splits == 0 ? fa_cuda_slot(call, FA_DECODE_COUNTER_SLOTS) : -1;
    if (a->counter_slot >= 0) return FA_OK;
    a->counters = (unsigned *)((char *)call->workspace + at->counters);
    return fa_driver_check(
        call->driver->cuMemsetD32Async((uintptr_t)a->counters, 0, (size_t)at->num_counters, call->stream),
        "clearing the counters of a decode", err);
}

/* Executes one launch of the plan. */
static fa_status launch(const fa_cuda_call *call, const fa_decode_launch *planned, fa_attn_decode_params *a,
                        fa_error *err) {
    const int cluster = call->plan->gpu.cluster;
    fa_variant variant = fa_plan_variant(call->plan, call->gpu->capability);
    variant.row = planned->row;
    const fa_gpu_decode_columns *tile = fa_gpu_decode_row(variant.family, variant.row);
    a->lanes = planned->lanes, a->groups = planned->groups;
    a->head_blocks = a->h_kv / a->lanes;
    a->by_groups = fa_division_by((unsigned)a->groups);
    a->by_head_blocks = fa_division_by((unsigned)a->head_blocks);
    a->by_heads_per_kv = fa_division_by((unsigned)a->heads_per_kv);
    a->by_page_size = fa_division_by(a->block_table ? (unsigned)a->page_size : 1);
    while (1 << a->cluster_bits < cluster) a->cluster_bits++;
    const fa_launch shape = {
        .grid_x = (unsigned)(cluster > 0 ? cluster : a->lanes),
        .grid_y = (unsigned)(cluster > 0 ? a->h_kv : a->groups),
        .grid_z = (unsigned)(cluster > 0 ? a->groups : 1),
        .threads = 32 * (unsigned)(tile->warps_q * tile->teams),
        .cluster = (unsigned)cluster,
        .waits_itself = tile->is_hopper,
    };
    return fa_cuda_launch_with_mods(call, variant, shape, a, sizeof *a, err);
}

fa_status fa_cuda_decode(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const fa_decode_layout at = fa_decode_lay_out(p, call->plan);
    char *workspace = call->workspace;
    const bool appends = fa_decode_appends(p, call->plan);
    fa_status status = appends ? FA_OK : fa_cuda_append(call, workspace, err);
    if (status != FA_OK || p->total_q == 0 || p->h == 0) return status;

    fa_attn_decode_params a = params_of(p);
    if (appends) {
        add_append(p, &a);
    } else if (p->rotary_cos) {
        a.q = workspace;
        a.q_stride_h = p->d, a.q_stride_row = p->h * p->d, a.q_stride_b = p->cu_seqlens_q ? 0 : p->len_q * p->h * p->d;
    }
    a.zero_tensors = call->zero_tensors;
    a.num_splits = call->plan->num_splits;
    a.max_q_tiles = at.max_q_tiles;
    a.partial_rows = at.partial_rows;
    a.partial_o = (float *)(workspace + at.partial_o);
    status = give_counters(call, &at, &a, err);

    const fa_decode_launch *low = &call->plan->gpu.decode_low;
    if (status == FA_OK && low->row >= 0) {
        a.max_rows = 16 * fa_gpu_decode_row((fa_family_id)call->plan->gpu.family, low->row)->warps_q;
        status = launch(call, low, &a, err);
        a.min_rows = a.max_rows + 1;
    }
    a.max_rows = INT_MAX;
    return status == FA_OK ? launch(call, &call->plan->gpu.decode, &a, err) : status;
}
