/* Programmable attention on GPUs: the map and the walks of a block mask, and launches of kernels that have a user's
 * functions. */
#include "mods.h"

#include <assert.h>
#include <string.h>

#include "cuda/cuda_flex.h"
#include "flex/flex.h"
#include "flex/source.h"
#include "plan/gpu_problem.h"

/* ---- the block mask ---------------------------------------------------------------------------------------------- */

/* The map lies at the start of the workspace. A problem with flex has no rotated queries there. */
static unsigned char *block_map_of(const fa_cuda_call *call) {
    return call->problem->flex->block_q > 0 ? call->workspace : NULL;
}

/* Behind the map lie the walks and their order, if the plan is one of Hopper's kernels. */
typedef struct {
    int *walks, *order;
    int64_t num; /* masks times query tiles */
    int q_tiles, kv_tiles;
} block_walks;

static block_walks walks_of(const fa_cuda_call *call) {
    const fa_problem *p = call->problem;
    const fa_plan *plan = call->plan;
    if (fa_block_map_bytes(p) == 0 || fa_families[plan->gpu.family].arch != 90) return (block_walks){0};
    block_walks w = {.walks = (int *)((char *)call->workspace + fa_block_walks_at(p)),
                     .q_tiles = (int)((p->len_q + plan->block_q - 1) / plan->block_q),
                     .kv_tiles = (int)((p->len_kv + plan->block_kv - 1) / plan->block_kv)};
    w.num = p->flex->mask_b * p->flex->mask_h * w.q_tiles;
    w.order = w.walks + w.num * (1 + w.kv_tiles);
    return w;
}

static int as_int(int64_t x) { return (int)(x < 1 << 30 ? x : 1 << 30); }

static fa_cuda_block_list list_of(const fa_flex_list *t) {
    fa_cuda_block_list list = {.num = t->num, .blocks = t->blocks};
    for (int i = 0; i < 3; i++) list.num_stride[i] = t->num_stride[i];
    for (int i = 0; i < 4; i++) list.blocks_stride[i] = t->blocks_stride[i];
    return list;
}

fa_status fa_cuda_make_block_map(const fa_cuda_call *call, fa_error *err) {
    enum { THREADS = 128, MOST_CTAS = 1 << 16 };
    const fa_flex *flex = call->problem->flex;
    if (!flex || fa_block_map_bytes(call->problem) == 0) return FA_OK;
    const fa_cuda_flex_blocks a = {
        .partial = list_of(&flex->partial),
        .full = list_of(&flex->full),
        .kinds = block_map_of(call),
        .mask_b = (int)flex->mask_b,
        .mask_h = (int)flex->mask_h,
        .rows = (int)flex->rows,
        .columns = (int)flex->columns,
        .kind_of_partial = flex->mask ? FA_FLEX_PARTIAL : FA_FLEX_FULL,
    };
    const fa_variant variant = {.family = FA_FLEX_BLOCKS, .arch = call->gpu->capability};
    const int64_t rows = flex->mask_b * flex->mask_h * flex->rows;
    const fa_launch launch = {(unsigned)(rows < MOST_CTAS ? rows : MOST_CTAS), 1, 1, .threads = THREADS};
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
    };
}

fa_status fa_cuda_make_block_walks(const fa_cuda_call *call, fa_error *err) {
    enum { WARPS = FA_FLEX_WALKS_THREADS / 32, MOST_CTAS = 1 << 16 };
    const fa_problem *p = call->problem;
    const fa_plan *plan = call->plan;
    if (!p->flex || fa_block_map_bytes(p) == 0) return FA_OK;
    const block_walks w = walks_of(call);
    const fa_cuda_flex_walks a = {
        .flex = flex_of(call),
        .walks = w.walks,
        .order = w.order,
        .own_len = (int)p->len_q,
        .own_tile = plan->block_q,
        .own_tiles = w.q_tiles,
        .other_len = (int)p->len_kv,
        .other_tile = plan->block_kv,
        .other_tiles = w.kv_tiles,
    };
    const int64_t ctas = (w.num + WARPS - 1) / WARPS;
    const fa_launch launch = {(unsigned)(ctas < MOST_CTAS ? ctas : MOST_CTAS), 1, 1, .threads = 32 * WARPS};
    const fa_variant list = {.family = FA_FLEX_WALKS, .arch = call->gpu->capability},
                     sort = {.family = FA_FLEX_ORDER, .arch = call->gpu->capability};
    fa_status status = fa_cuda_make_block_map(call, err);
    if (status == FA_OK) status = fa_cuda_launch(call, list, launch, &a, err);
    return status == FA_OK ? fa_cuda_launch(call, sort, launch, &a, err) : status;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* The parameters of a kernel with FA_FLEX: those of other kernels, fa_cuda_flex, and the values of the functions. The
 * tensor maps of Hopper's kernels are aligned to 64 bytes. */
typedef struct {
    _Alignas(64) unsigned char bytes[FA_MOST_PARAMETER_BYTES];
} flex_parameters;
static_assert(sizeof(fa_cuda_flex) % sizeof(uint64_t) == 0, "the values follow");

/* Of the kernels that compute the derivative, only the kernel of dQ adds to the gradients of captures. */
static void fill_values(const fa_cuda_call *call, fa_variant variant, void *values) {
    const fa_flex *flex = call->problem->flex;
    if (!fa_families[variant.family].takes_mods) return;
    const bool adds_gradients = variant.family == FA_BWD_ANY && fa_bwd_any_row(variant.row)->grad == GRAD_dq;
    fa_flex_fill_values(flex->score, flex->mask, variant.mods->derivative ? flex->derivative : NULL,
                        adds_gradients ? flex->gradients : NULL, values);
}

fa_status fa_cuda_launch_with_mods(const fa_cuda_call *call, fa_variant variant, fa_launch launch,
                                   const void *parameters, size_t num_bytes, fa_error *err) {
    if (!(variant.features & FA_FLEX)) return fa_cuda_launch(call, variant, launch, parameters, err);
    flex_parameters a;
    const fa_mods mods = fa_mods_of(call->problem);
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
