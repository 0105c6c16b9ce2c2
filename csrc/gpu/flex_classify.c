/* Launches cuda/flex_classify.cu and cuda/flex_lists.cu. */
#include "flex_classify.h"

#include <assert.h>

#include "cuda/cuda_flex.h"
#include "flex/source_words.h"
#include "flex/wide.h"
#include "launch.h"
#include "memory.h"
#include "plan/gpu_problem.h"

static int64_t blocks_of(int64_t len, int64_t block) { return len / block + (len % block != 0); }

static unsigned grid_of(int64_t ctas) { return ctas < INT32_MAX ? (unsigned)ctas : INT32_MAX; }

size_t fa_cuda_flex_classify_workspace(const fa_flex_blocks *k) {
    return (size_t)(k->b * k->h * blocks_of(k->len_q, k->block_q) * blocks_of(k->len_kv, k->block_kv));
}

/* The parameters of flex_classify.cu. */
typedef union {
    fa_cuda_flex_classification head;
    uint64_t words[FA_MOST_PARAMETER_BYTES / sizeof(uint64_t)];
} classify_parameters;
static_assert(sizeof(fa_cuda_flex_classification) % sizeof(uint64_t) == 0, "the values follow");

/* Each thread of a CTA may have a block. Few blocks are spread over the GPU, because a CTA may have to evaluate all. */
static int64_t blocks_per_cta(int64_t num_blocks, int num_sms) {
    const int64_t ctas = 16 * (int64_t)(num_sms > 0 ? num_sms : 1), share = blocks_of(num_blocks, ctas);
    return share < 1 ? 1 : share < FA_FLEX_CLASSIFY_THREADS ? share : FA_FLEX_CLASSIFY_THREADS;
}

static fa_status find_kinds(const fa_cuda_call *call, const fa_flex_bound *bound, const fa_flex_blocks *k,
                            fa_error *err) {
    const int64_t heads = k->b > k->h ? k->b : k->h, rows = k->len_q > k->len_kv ? k->len_q : k->len_kv;
    const fa_mods mods = {.mask = bound->program, .text.is_wide = fa_flex_is_wide(bound, heads > rows ? heads : rows)};
    const fa_variant variant = {FA_FLEX_CLASSIFY, 0, FA_FLEX, call->gpu->capability, fa_mods_hash(&mods), &mods};
    const int64_t num_blocks = (int64_t)fa_cuda_flex_classify_workspace(k);
    const int64_t per_cta = blocks_per_cta(num_blocks, call->gpu->num_sms);
    const fa_launch launch = {grid_of(blocks_of(num_blocks, per_cta)), 1, 1, .threads = FA_FLEX_CLASSIFY_THREADS};
    classify_parameters a;
    if (sizeof a.head + fa_flex_values_bytes(NULL, bound->program, NULL) > sizeof a)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: the mask_mod captures more tensors and numbers than the %d bytes of a kernel's "
                       "parameters hold; gather some of them in one tensor",
                       FA_MOST_PARAMETER_BYTES);
    a.head = (fa_cuda_flex_classification){
        .kinds = call->workspace,
        .b = (int)k->b,
        .h = (int)k->h,
        .len_q = (int)k->len_q,
        .len_kv = (int)k->len_kv,
        .block_q = (int)k->block_q,
        .block_kv = (int)k->block_kv,
        .rows = (int)blocks_of(k->len_q, k->block_q),
        .columns = (int)blocks_of(k->len_kv, k->block_kv),
        .per_cta = (int)per_cta,
    };
    fa_flex_fill_values(NULL, bound, NULL, NULL, a.words + sizeof a.head / sizeof(uint64_t));
    return fa_cuda_launch(call, variant, launch, &a, err);
}

static fa_cuda_block_places places_of(const fa_flex_lists *l) {
    return (fa_cuda_block_places){.num_kv = l->num_kv, .kv = l->kv, .num_q = l->num_q, .q = l->q};
}

static fa_status list_blocks(const fa_cuda_call *call, const fa_flex_blocks *k, fa_error *err) {
    enum { WARPS = FA_FLEX_CLASSIFY_THREADS / 32 };
    const fa_cuda_flex_lists a = {
        .kinds = call->workspace,
        .partial = places_of(&k->partial),
        .full = places_of(&k->full),
        .heads = k->b * k->h,
        .rows = (int)blocks_of(k->len_q, k->block_q),
        .columns = (int)blocks_of(k->len_kv, k->block_kv),
    };
    const fa_variant variant = {.family = FA_FLEX_LISTS, .arch = call->gpu->capability};
    const unsigned grid = grid_of(blocks_of(a.heads * (a.rows + (a.partial.num_q ? (int64_t)a.columns : 0)), WARPS));
    return fa_cuda_launch(call, variant, (fa_launch){grid, 1, 1, .threads = 32 * WARPS}, &a, err);
}

fa_status fa_cuda_flex_classify(const fa_flex_bound *bound, const fa_flex_blocks *blocks, int device_idx,
                                void *workspace, fa_error *err) {
    fa_cuda_place place;
    fa_status status = fa_cuda_enter(device_idx, &place, err);
    if (status != FA_OK) return status;
    const fa_cuda_call call = {
        .workspace = workspace, .gpu = place.gpu, .driver = place.driver, .stream = place.stream};
    status = find_kinds(&call, bound, blocks, err);
    if (status == FA_OK) status = list_blocks(&call, blocks, err);
    fa_cuda_leave(&place);
    return status;
}
