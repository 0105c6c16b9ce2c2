/* Programmable attention on GPUs: the map and the walks of a block mask, and launches of kernels that have a user's
 * functions. */
#include "mods.h"

#include <assert.h>
#include <string.h>

#include "cuda/cuda_flex.h"
#include "flex/flex.h"
#include "flex/source_words.h"
#include "plan/gpu_problem.h"

/* ---- the block mask ---------------------------------------------------------------------------------------------- */

/* The map is the first of the walks. A problem with flex has no rotated queries at the start of the workspace. */
static unsigned char *block_map_of(const fa_cuda_call *call) {
    void *walks = call->walks ? call->walks : call->workspace;
    return call->problem->flex->block_q > 0 ? walks : NULL;
}

/* One side of the tiles of a plan. */
typedef struct {
    int64_t len, tile, num;
} tiles_of_side;
static tiles_of_side side_of(int64_t len, int64_t tile) { return (tiles_of_side){len, tile, (len + tile - 1) / tile}; }

/* Behind the map lie the walks, their order and the ranks, if the plan is one of Hopper's kernels. */
typedef struct {
    int *walks, *nums, *order;
    unsigned *ranks; /* of the backward */
    unsigned *hidden;
    int *pairs; /* behind the hidden pairs */
    tiles_of_side own, other;
    int64_t masks;
} block_walks;

static block_walks walks_of(const fa_cuda_call *call) {
    const fa_problem *p = call->problem;
    const fa_plan *plan = call->plan;
    if (fa_block_map_bytes(p) == 0 || fa_families[plan->gpu.family].arch != 90) return (block_walks){0};
    const tiles_of_side queries = side_of(p->len_q, plan->block_q), keys = side_of(p->len_kv, plan->block_kv);
    const bool owns_keys = p->pass == FA_BWD;
    block_walks w = {.walks = (int *)(block_map_of(call) + fa_block_walks_at(p)),
                     .own = owns_keys ? keys : queries,
                     .other = owns_keys ? queries : keys,
                     .masks = p->flex->mask_b * p->flex->mask_h};
    w.nums = w.walks + w.masks * w.own.num * (1 + w.other.num);
    int *behind = w.nums + w.masks * w.own.num;
    if (owns_keys) w.ranks = (unsigned *)(behind + w.masks * w.own.num);
    if (!owns_keys || !fa_has_masks_in_groups(p)) w.order = behind; /* pieces of a key tile begin in their order */
    if (plan->gpu.has_hidden) {
        const int64_t pairs = w.masks * w.own.num * w.other.num;
        w.hidden = (unsigned *)((char *)w.walks + fa_block_walks_bytes(p, plan));
        w.pairs = (int *)(w.hidden + pairs * FA_HIDDEN_WORDS(w.other.tile) * 2 * w.own.tile);
    }
    return w;
}

static int as_int(int64_t x) { return (int)(x < 1 << 30 ? x : 1 << 30); }

static fa_cuda_block_list list_of(const fa_flex_list *t) {
    fa_cuda_block_list list = {.num = t->num, .blocks = t->blocks};
    for (int i = 0; i < 3; i++) list.num_stride[i] = t->num_stride[i];
    for (int i = 0; i < 4; i++) list.blocks_stride[i] = t->blocks_stride[i];
    return list;
}

static fa_cuda_flex_blocks blocks_of(const fa_cuda_call *call) {
    const fa_flex *flex = call->problem->flex;
    return (fa_cuda_flex_blocks){
        .partial = list_of(&flex->partial),
        .full = list_of(&flex->full),
        .kinds = block_map_of(call),
        .mask_b = (int)flex->mask_b,
        .mask_h = (int)flex->mask_h,
        .rows = (int)flex->rows,
        .columns = (int)flex->columns,
        .kind_of_partial = flex->mask ? FA_FLEX_PARTIAL : FA_FLEX_FULL,
    };
}

/* CTAs with a warp for each of `warps` pieces of work. */
static unsigned ctas_for(int64_t warps, int threads) {
    const int64_t most = 1 << 16, ctas = (warps + threads / 32 - 1) / (threads / 32);
    return (unsigned)(ctas < most ? ctas : most);
}

fa_status fa_cuda_make_block_map(const fa_cuda_call *call, fa_error *err) {
    const fa_flex *flex = call->problem->flex;
    if (!flex || fa_block_map_bytes(call->problem) == 0) return FA_OK;
    const fa_cuda_flex_blocks a = blocks_of(call);
    const fa_variant variant = {.family = FA_FLEX_BLOCKS, .arch = call->gpu->capability};
    const int64_t rows = flex->mask_b * flex->mask_h * flex->rows;
    const fa_launch launch = {ctas_for(rows, FA_FLEX_BLOCKS_THREADS), 1, 1, .threads = FA_FLEX_BLOCKS_THREADS};
    return fa_cuda_launch(call, variant, launch, &a, err);
}

static fa_cuda_flex flex_of(const fa_cuda_call *call) {
    const fa_flex *flex = call->problem->flex;
    const block_walks walks = walks_of(call);
    return (fa_cuda_flex){
        .kinds = block_map_of(call),
        .mask_b = as_int(flex->mask_b),
        .mask_h = as_int(flex->mask_h),
        .rows = as_int(flex->rows),
        .columns = as_int(flex->columns),
        .block_q = as_int(flex->block_q),
        .block_kv = as_int(flex->block_kv),
        .max_scores = {flex->max_scores.data, flex->max_scores.stride_b, flex->max_scores.stride_h},
        .dlse = {flex->dlse.data, flex->dlse.stride_b, flex->dlse.stride_h},
        .q_offset = flex->q_offset,
        .block_offset = flex->blocks_have_offset ? flex->q_offset : NULL,
        .most_offset = as_int(flex->rows * flex->block_q - call->problem->len_q),
        .walks = walks.walks,
        .order = walks.order,
        .hidden = walks.hidden,
    };
}

/* The parameters of flex_hidden.cu. */
typedef union {
    fa_cuda_flex_walks head;
    uint64_t words[FA_MOST_PARAMETER_BYTES / sizeof(uint64_t)];
} hidden_parameters;
static_assert(sizeof(fa_cuda_flex_walks) % sizeof(uint64_t) == 0, "the values follow");

static fa_status find_hidden_pairs(const fa_cuda_call *call, const fa_cuda_flex_walks *walks, int64_t masks,
                                   fa_error *err) {
    enum { CTAS = 1280, MOST_Y = (1 << 16) - 1 }; /* an H100 has room for them */
    const fa_mods all = fa_mods_of(call->problem, NULL);
    const fa_mods mods = {.mask = all.mask, .text.is_wide = all.text.is_wide};
    const fa_variant variant = {FA_FLEX_HIDDEN, 0, FA_FLEX, call->gpu->capability, fa_mods_hash(&mods), &mods};
    const int64_t blocks = walks->own_tile / FA_ROWS_OF_A_WARPGROUP;
    const int64_t most = blocks * walks->own_tiles * walks->other_tiles, wanted = masks < CTAS ? CTAS / masks : 1;
    const fa_launch launch = {(unsigned)(most < wanted ? most : wanted), (unsigned)(masks < MOST_Y ? masks : MOST_Y), 1,
                              .threads = FA_FLEX_HIDDEN_THREADS, .waits_itself = true};
    hidden_parameters a;
    /* The planner has refused calls with more. */
    if (sizeof a.head + fa_flex_values_bytes(NULL, mods.mask, NULL) > sizeof a)
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: the mask_mod captures too many tensors and numbers");
    a.head = *walks;
    fa_flex_fill_values(NULL, call->problem->flex->mask, NULL, NULL, a.words + sizeof a.head / sizeof(uint64_t));
    return fa_cuda_launch(call, variant, launch, &a, err);
}

/* A block has 1 << shift tiles. -1: it has another number of them, or very many. */
static int shift_of(int64_t block, int64_t tile) {
    for (int shift = 0; shift <= 16; shift++)
        if (tile << shift == block) return shift;
    return -1;
}

/* Each tile lies in one block, the walks are those of query tiles, and no kernel behind reads the map. */
static bool needs_no_map(const fa_cuda_flex_walks *a) {
    enum { MOST_TILES = 1024 }; /* each warp looks at the numbers of all rows */
    return a->hidden && a->own_shift >= 0 && !a->own_keys && a->group_heads == 0 && a->own_tiles <= MOST_TILES &&
           a->flex.columns <= FA_FLEX_WALKS_COLUMNS;
}

/* Launches flex_walks.cu. Without a map there are no phases, and a warp for each tile. A launch of all phases has a
 * cluster for each mask, or a CTA for each of many masks. A cluster has so few warps that a long problem has a
 * launch for each phase. */
static fa_status find_walks(const fa_cuda_call *call, fa_cuda_flex_walks a, int64_t masks, fa_error *err) {
    enum { CTAS_OF_MASK = 8, MANY_MASKS = 32, MOST_MASKS = 1 << 13, MOST_PAIRS = 1 << 18 };
    const fa_variant variant = {.family = FA_FLEX_WALKS, .arch = call->gpu->capability};
    const int64_t tiles = a.own_tiles > a.other_tiles ? a.own_tiles : a.other_tiles;
    const int64_t rows = tiles > a.flex.rows ? tiles : a.flex.rows;
    const int last_phase = a.ranks ? FA_FLEX_RANKS_PHASE : FA_FLEX_ORDER_PHASE;
    fa_launch launch = {1, 1, 1, .threads = FA_FLEX_WALKS_THREADS, .waits_itself = true};
    if (needs_no_map(&a)) {
        a.blocks.kinds = NULL, a.ctas_of_mask = (int)ctas_for(a.own_tiles, FA_FLEX_ROWS_THREADS);
        launch.threads = FA_FLEX_ROWS_THREADS;
        launch.grid_x = (unsigned)(masks < MOST_MASKS ? masks : MOST_MASKS) * (unsigned)a.ctas_of_mask;
        return fa_cuda_launch(call, variant, launch, &a, err);
    }
    if ((int64_t)a.own_tiles * a.other_tiles <= MOST_PAIRS && (int64_t)a.flex.rows * a.flex.columns <= MOST_PAIRS) {
        a.ctas_of_mask = masks < MANY_MASKS ? CTAS_OF_MASK : 1;
        a.first_phase = FA_FLEX_MAP_PHASE, a.last_phase = last_phase;
        launch.grid_x = (unsigned)(masks < MOST_MASKS ? masks : MOST_MASKS) * (unsigned)a.ctas_of_mask;
        launch.cluster = (unsigned)a.ctas_of_mask;
        return fa_cuda_launch(call, variant, launch, &a, err);
    }
    fa_status status = FA_OK;
    launch.grid_x = ctas_for(rows, FA_FLEX_WALKS_THREADS);
    for (int phase = FA_FLEX_MAP_PHASE; phase <= last_phase && status == FA_OK; phase++) {
        a.first_phase = a.last_phase = phase;
        status = fa_cuda_launch(call, variant, launch, &a, err);
    }
    return status;
}

fa_status fa_cuda_make_block_walks(const fa_cuda_call *call, fa_error *err) {
    const fa_problem *p = call->problem;
    if (!p->flex || fa_block_map_bytes(p) == 0 || call->has_walks) return FA_OK;
    const block_walks w = walks_of(call);
    const fa_gpu_plan *plan = &call->plan->gpu;
    const bool owns_keys = p->pass == FA_BWD;
    const int of_own = shift_of(owns_keys ? p->flex->block_kv : p->flex->block_q, w.own.tile);
    const int of_other = shift_of(owns_keys ? p->flex->block_q : p->flex->block_kv, w.other.tile);
    const bool lie_in_blocks = of_own >= 0 && of_other >= 0 && !p->flex->blocks_have_offset;
    const fa_cuda_flex_walks a = {
        .flex = flex_of(call),
        .blocks = blocks_of(call),
        .walks = w.walks,
        .nums = w.nums,
        .order = w.order,
        .ranks = w.ranks,
        .hidden = w.hidden,
        .pairs = w.pairs,
        .own_len = (int)w.own.len,
        .own_tile = (int)w.own.tile,
        .own_tiles = (int)w.own.num,
        .other_len = (int)w.other.len,
        .other_tile = (int)w.other.tile,
        .other_tiles = (int)w.other.num,
        .own_keys = owns_keys,
        .own_shift = lie_in_blocks ? of_own : -1,
        .other_shift = lie_in_blocks ? of_other : -1,
        .group_heads = plan->follows_rows ? plan->group_heads : 0,
        .num_heads = as_int(p->b * p->h_kv),
        .ctas = plan->num_sms / (plan->family == FA_BWD_WIDE_SM90 ? 2 : 1),
    };
    const fa_status status = find_walks(call, a, w.masks, err);
    return status == FA_OK && w.hidden ? find_hidden_pairs(call, &a, w.masks, err) : status;
}

const unsigned *fa_cuda_block_ranks(const fa_cuda_call *call) { return walks_of(call).ranks; }

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* The parameters of a kernel with FA_FLEX: those of other kernels, fa_cuda_flex, and the values of the functions. The
 * tensor maps of Hopper's kernels are aligned to 64 bytes. */
typedef struct {
    _Alignas(64) unsigned char bytes[FA_MOST_PARAMETER_BYTES];
} flex_parameters;
static_assert(sizeof(fa_cuda_flex) % sizeof(uint64_t) == 0, "the values follow");

/* Of the generic kernels that compute the derivative, only the kernel of dQ adds to the gradients of captures. */
static void fill_values(const fa_cuda_call *call, fa_variant variant, void *values) {
    const fa_flex *flex = call->problem->flex;
    if (!fa_families[variant.family].takes_mods) return;
    const bool adds_gradients = variant.family == FA_BWD_SM90 || variant.family == FA_BWD_WIDE_SM90 ||
                                variant.family == FA_BWD_SHORT ||
                                (variant.family == FA_BWD_ANY && fa_bwd_any_row(variant.row)->grad == GRAD_dq);
    fa_flex_fill_values(flex->score, variant.mods->mask ? flex->mask : NULL,
                        variant.mods->derivative ? flex->derivative : NULL, adds_gradients ? flex->gradients : NULL,
                        values);
}

fa_status fa_cuda_launch_with_mods(const fa_cuda_call *call, fa_variant variant, fa_launch launch,
                                   const void *parameters, size_t num_bytes, fa_error *err) {
    if (!(variant.features & FA_FLEX)) {
        variant.mods_hash = 0; /* one kernel serves all mods */
        return fa_cuda_launch(call, variant, launch, parameters, err);
    }
    flex_parameters a;
    const fa_mods mods = fa_mods_of(call->problem, call->plan);
    const fa_cuda_flex flex = flex_of(call);
    if (num_bytes + sizeof flex + fa_flex_values_bytes(mods.score, mods.mask, mods.derivative) > sizeof a)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: the mods capture more tensors and numbers than the %d bytes of a kernel's "
                       "parameters hold; gather some of them in one tensor",
                       FA_MOST_PARAMETER_BYTES);
    variant.mods = &mods;
    variant.mods_hash = fa_families[variant.family].takes_mods ? call->plan->gpu.mods : 0;
    memcpy(a.bytes, parameters, num_bytes);
    memcpy(a.bytes + num_bytes, &flex, sizeof flex);
    fill_values(call, variant, a.bytes + num_bytes + sizeof flex);
    return fa_cuda_launch(call, variant, launch, &a, err);
}
