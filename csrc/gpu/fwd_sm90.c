/* Forward on CUDA: fills a kernel's parameters and launches it. */
#include "launch.h"
#include "launchers.h"
#include "map.h"
#include "slots.h"

#include <math.h>
#include <string.h>

#include "cuda/attn_fwd_params.h"

/* ---- order of tiles -------------------------------------------------------------------------------------------- */

/* Query heads that are walked together: those of as many key heads as have their keys and values in 32 MB of the L2, or,
 * if they are more than 16, in 16 MB: with many, the heads' first tiles are long done when their last ones want the same
 * keys. Fewer, and a launch ends with long tiles. Causal on an H100, TFLOPS: head_dim 256 at length 16k 1 head 645, 2 691,
 * 4 694; at 4k 4 heads 599, 8 632, 16 633. In us: head_dim 128 at 512 16 heads 109.4, 32 106.9, 64 106.6, 128 121.3; at 1k
 * 135.6, 134.9, 147.1; head_dim 64 at 512 16 heads 112.2, 64 110.0, 128 108.8; at 1k 16 164.6, 64 159.4. */
static int heads_in_group(const fa_problem *p) {
    const int64_t kv_bytes = 4 * p->d * (p->len_kv > 0 ? p->len_kv : 1), heads = p->b * p->h;
    int64_t kv_heads = 1;
    while (2 * kv_heads * kv_bytes <= (kv_heads < 16 ? 32 : 16) << 20) kv_heads *= 2;
    int64_t group = kv_heads * (p->h / p->h_kv);
    return (int)(group < heads ? group : heads);
}

/* ---- launch ---------------------------------------------------------------------------------------------------- */

static void fill_scalars(const fa_problem *p, const fa_fwd_sm90_columns *tile, unsigned features,
                         fa_attn_fwd_params *a) {
    const bool packed = features & FA_VARLEN;
    const int64_t block_q = FA_ROWS_OF_A_WARPGROUP * tile->wgs;
    a->lse = p->lse.data;
    a->lse_stride_b = packed ? 0 : p->lse.stride_b;
    a->lse_stride_h = p->lse.stride_h;
    a->o_data = p->o.data;
    a->o_stride_b = packed ? 0 : p->o.stride_b;
    a->o_stride_row = p->o.stride_row;
    a->o_stride_h = p->o.stride_h;
    a->b = (int)p->b, a->h = (int)p->h, a->heads_per_kv = (int)(p->h / p->h_kv), a->d = (int)p->d;
    a->len_q = (int)(packed ? p->total_q : p->len_q);
    a->len_kv = (int)(packed ? p->total_kv : p->len_kv);
    a->cu_seqlens_q = p->cu_seqlens_q;
    a->cu_seqlens_k = p->cu_seqlens_k;
    a->seqused_k = p->seqused_k;
    a->num_q_tiles = (int)((p->len_q + block_q - 1) / block_q);
    a->num_tiles = a->num_q_tiles * a->b * a->h;
    a->group_heads = heads_in_group(p);

    const float scale = (float)p->scale;
    const bool changes_scores = features & FA_SCORE;
    a->scale_log2 = (changes_scores ? 1 : scale) * FA_LOG2_E;
    a->score_scale = scale;
    a->softcap = (float)p->softcap;
    a->window_left = fa_clamp_window(p->window_left), a->window_right = fa_clamp_window(p->window_right);
    a->alibi_slopes = p->alibi_slopes;
    a->alibi_stride_b = p->alibi_stride_b;
    a->rng_state = (const unsigned long long *)p->rng_state;
    a->keep_max = p->keep_max;
    a->keep_scale = features & FA_DROPOUT ? (float)(1 / (1 - p->dropout_p)) : 1;
}

/* No more tiles than these. */
static int64_t most_tiles(const fa_problem *p, const fa_fwd_sm90_columns *tile, const fa_attn_fwd_params *a) {
    return p->cu_seqlens_q ? (p->total_q / (FA_ROWS_OF_A_WARPGROUP * tile->wgs) + p->b) * p->h : a->num_tiles;
}

/* CTAs get their next tile from a counter. Not where each has but one; nor where tiles are alike and so short that the
 * counter answers later than they end: 64 sequences of 17, 16 heads, head_dim 64, on an H100 16.5 us instead of 19.9, of 128
 * 32.2 instead of 34.3, of 256 58.4 instead of 60.1. */
static bool needs_counter(const fa_problem *p, const fa_attn_fwd_params *a, int64_t tiles, unsigned ctas) {
    enum { SHORT = 256 };
    const bool is_short = !p->cu_seqlens_q && a->num_q_tiles == 1 && p->len_kv <= SHORT;
    return tiles > ctas && !is_short;
}

fa_status fa_cuda_fwd_sm90(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    const fa_fwd_sm90_columns *tile = fa_fwd_sm90_row(call->plan->cuda_row);
    const unsigned features = call->plan->cuda_features;
    fa_attn_fwd_params a;
    const bool packed = features & FA_VARLEN;

    fill_scalars(p, tile, features, &a);
    const int64_t tiles = most_tiles(p, tile, &a);
    const int64_t ctas = (int64_t)call->gpu->num_sms * tile->ctas;
    const unsigned grid = (unsigned)(tiles < ctas ? tiles : ctas);
    if (grid == 0 || p->total_q == 0) return FA_OK; /* no query: nothing to write */

    const int columns = tile->d % 64 == 0 ? 64 : 32;
    const fa_box box_q = {FA_ROWS_OF_A_WARPGROUP * tile->wgs, columns, packed},
                 box_kv = {tile->block_kv, columns, packed}, box_o = {16, columns, packed};
    const int64_t rows_q = packed ? p->total_q : p->len_q, rows_kv = packed ? p->total_kv : p->len_kv;
    fa_status status = fa_cuda_map(call, &p->q, rows_q, p->h, box_q, &a.q, err);
    if (status == FA_OK) status = fa_cuda_map(call, &p->k, rows_kv, p->h_kv, box_kv, &a.k, err);
    if (status == FA_OK) status = fa_cuda_map(call, &p->v, rows_kv, p->h_kv, box_kv, &a.v, err);
    if (status == FA_OK) status = fa_cuda_map(call, &p->o, rows_q, p->h, box_o, &a.o, err);
    if (status != FA_OK) return status;

    a.counter_slot = needs_counter(p, &a, tiles, grid) ? fa_cuda_slot(call, FA_TILE_COUNTERS) : -1;
    const fa_launch launch = {grid, 1, 1, .threads = 128 * ((unsigned)tile->wgs + 1), .waits_itself = true};
    return fa_cuda_launch(call, fa_plan_variant(call->plan, call->gpu->capability), launch, &a, err);
}
