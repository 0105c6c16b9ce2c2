/* A capture that a score_mod reads at [.., kv_idx], such as a bias of each query and key, has its elements of two keys
 * side by side. A thread of Hopper's forward has scores of keys 2 n and 2 n + 1, and one load brings what both read. */
#ifndef FA_FLEX_PAIRS_H
#define FA_FLEX_PAIRS_H

#include "program.h"

/* Is an instruction such a load? */
static inline bool fa_flex_reads_keys(const fa_flex_program *p, const fa_flex_instruction *x) {
    if (x->op != FA_FLEX_gather || p->captures[x->source].rank == 0) return false;
    const int last = p->captures[x->source].rank - 1, dtype = p->captures[x->source].dtype;
    if (p->instructions[x->operand[last]].op != FA_FLEX_kv_idx) return false;
    for (int i = 0; i < last; i++)
        if (p->instructions[x->operand[i]].depends & (FA_FLEX_ON_KV | FA_FLEX_ON_SCORE)) return false;
    return dtype == FA_FLEX_OF_F16 || dtype == FA_FLEX_OF_BF16 || dtype == FA_FLEX_OF_F32;
}

/* Are there such loads, and do all of them find two elements in one aligned place, for all keys up to len_kv? */
static inline bool fa_flex_has_pairs(const fa_flex_bound *bound, int64_t len_kv) {
    const fa_flex_program *p = bound->program;
    bool has_pairs = false;
    for (int32_t i = 0; i < p->num_instructions; i++) {
        const fa_flex_instruction *x = &p->instructions[i];
        if (!fa_flex_reads_keys(p, x)) continue;
        const fa_flex_capture *c = &bound->captures[x->source];
        const int last = p->captures[x->source].rank - 1;
        const uintptr_t bytes = p->captures[x->source].dtype == FA_FLEX_OF_F32 ? 8 : 4;
        if (!c->data || (uintptr_t)c->data % bytes || c->stride[last] != 1 || c->size[last] % 2 ||
            c->size[last] < len_kv)
            return false;
        for (int dim = 0; dim < last; dim++)
            if (c->size[dim] > 1 && c->stride[dim] % 2) return false;
        has_pairs = true;
    }
    return has_pairs;
}

#endif
