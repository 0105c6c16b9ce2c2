#include "kept_walks.h"

#include <string.h>

#include "flex/source_words.h"
#include "memory.h"
#include "plan/gpu_problem.h"

static int64_t *add_list(int64_t *word, const fa_flex_list *list) {
    *word++ = (int64_t)(intptr_t)list->num, *word++ = (int64_t)(intptr_t)list->blocks;
    for (int i = 0; i < 3; i++) *word++ = list->num_stride[i];
    for (int i = 0; i < 4; i++) *word++ = list->blocks_stride[i];
    return word;
}

/* Everything that walks depend on, but for what the tensors hold. Returns the number of words, or 0 if there are
 * too many. */
static size_t key_of(const fa_problem *p, const fa_plan *plan, CUstream stream, int64_t key[FA_FLEX_MOST_KEY]) {
    const fa_flex *f = p->flex;
    const fa_mods all = fa_mods_of(p, NULL), mods = {.mask = all.mask, .text.is_wide = all.text.is_wide};
    const fa_gpu_plan *gpu = &plan->gpu;
    const int64_t words[] = {
        p->pass,
        p->device_idx,
        (int64_t)(intptr_t)stream,
        p->b,
        p->h,
        p->h_kv,
        p->len_q,
        p->len_kv,
        gpu->family,
        plan->block_q,
        plan->block_kv,
        gpu->has_hidden,
        gpu->follows_rows,
        gpu->group_heads,
        gpu->num_sms,
        f->mask_b,
        f->mask_h,
        f->rows,
        f->columns,
        f->block_q,
        f->block_kv,
        mods.mask != NULL,
        (int64_t)fa_mods_hash(&mods),
    };
    enum { NUM = sizeof words / sizeof *words, OF_LISTS = 18 };
    if (NUM + OF_LISTS + fa_flex_values_bytes(NULL, mods.mask, NULL) / sizeof *key > FA_FLEX_MOST_KEY) return 0;
    memcpy(key, words, sizeof words);
    int64_t *word = add_list(add_list(key + NUM, &f->partial), &f->full);
    fa_flex_fill_values(NULL, f->mask, NULL, NULL, word);
    return NUM + OF_LISTS + fa_flex_values_bytes(NULL, mods.mask, NULL) / sizeof *key;
}

fa_status fa_cuda_find_kept_walks(const fa_problem *problem, const fa_plan *plan, fa_kept_walks *kept, fa_error *err) {
    const fa_flex *f = problem->flex;
    const int family = plan->gpu.family;
    int64_t key[FA_FLEX_MOST_KEY];
    fa_cuda_place place;
    kept->bytes = 0, kept->is_wanted = true;
    if ((family != FA_FWD_SM90 && family != FA_BWD_SM90 && family != FA_BWD_WIDE_SM90) || f->q_offset) return FA_OK;
    if (fa_block_map_bytes(problem) == 0 || !(plan->gpu.features & FA_FLEX)) return FA_OK;
    const fa_status status = fa_cuda_enter(problem->device_idx, &place, err);
    if (status != FA_OK) return status;
    const bool is_recorded = fa_cuda_is_capturing(&place);
    fa_cuda_leave(&place);
    const size_t num = is_recorded ? 0 : key_of(problem, plan, place.stream, key);
    if (num == 0) return FA_OK;
    kept->bytes = fa_block_walks_at(problem) + fa_block_walks_bytes(problem, plan) + fa_hidden_bytes(problem, plan);
    if (kept->bytes > kept->most_bytes) kept->bytes = 0;
    kept->is_wanted = !kept->data || kept->num_key != num || memcmp(kept->key, key, num * sizeof *key) != 0;
    memcpy(kept->key, key, num * sizeof *key);
    kept->num_key = num;
    return FA_OK;
}
