/* The workspace of the backward on Hopper: slabs of BLOCK_Q query rows of one head, see cuda/attn_bwd_slabs.cuh. */
#ifndef FA_BWD_WORKSPACE_H
#define FA_BWD_WORKSPACE_H

#include "flash_attn.h"

typedef struct {
    int64_t num_slabs, num_heads;               /* per head; heads that count */
    size_t dq_sums, stats, turns, tile_counter; /* offsets */
    size_t bytes;
} fa_bwd_workspace;

/* d: columns of the tile. A packed sequence begins a slab of its own. */
static inline fa_bwd_workspace fa_bwd_workspace_of(const fa_problem *p, int d, int block_q) {
    const bool packed = p->cu_seqlens_q != NULL;
    fa_bwd_workspace w = {.num_slabs = packed         ? p->total_q / block_q + p->b + 1
                                       : p->len_q > 0 ? (p->len_q + block_q - 1) / block_q
                                                      : 1,
                          .num_heads = packed ? p->h : p->b * p->h};
    const size_t slabs = (size_t)(w.num_slabs * w.num_heads), rows = slabs * (size_t)block_q;
    w.stats = w.dq_sums + rows * (size_t)d * sizeof(float);
    w.turns = w.stats + 2 * rows * sizeof(float);
    w.tile_counter = w.turns + 2 * slabs * sizeof(unsigned);
    w.bytes = w.tile_counter + sizeof(unsigned);
    return w;
}

#endif
