/* The workspace of attn_bwd_sm80. A slab is BLOCK_Q query rows of one head (cuda/attn_bwd_sm80.cuh). */
#ifndef FA_PLAN_BWD_SM80_WORKSPACE_H
#define FA_PLAN_BWD_SM80_WORKSPACE_H

#include "kernel_table.h"

typedef struct {
    int64_t num_slabs, num_heads;        /* slabs of one head; heads (packed), or heads of all sequences (dense) */
    size_t dq_sums, turns, tile_counter; /* offsets in bytes; turns and the counter: only in a fixed order */
    size_t bytes;                        /* a multiple of 4; everything begins as zeros */
} fa_bwd_sm80_workspace;

/* Each packed sequence begins a new slab. */
static inline fa_bwd_sm80_workspace fa_bwd_sm80_workspace_of(const fa_problem *p, const fa_bwd_sm80_columns *t) {
    const bool packed = p->cu_seqlens_q != NULL;
    fa_bwd_sm80_workspace w = {.num_slabs = packed ? p->total_q / t->block_q + p->b + 1
                                                   : (p->len_q + t->block_q - 1) / t->block_q,
                               .num_heads = packed ? p->h : p->b * p->h};
    const size_t slabs = (size_t)(w.num_slabs * w.num_heads);
    w.turns = slabs * (size_t)(t->block_q * t->d) * sizeof(float);
    w.tile_counter = w.turns + (p->deterministic ? slabs * sizeof(unsigned) : 0);
    w.bytes = w.tile_counter + (p->deterministic ? sizeof(unsigned) : 0);
    return w;
}

#endif
