/* How many heads are walked together where a CTA takes one tile of one head (cuda/task_order.cuh). */
#ifndef FA_PLAN_GPU_TASK_ORDER_H
#define FA_PLAN_GPU_TASK_ORDER_H

#include "flash_attn.h"

/* Returns how many of the `heads` heads of all sequences are walked together. 0: the tiles of a head follow each other.
 * tiles: of a head, in the mean of all sequences, and at most. ctas: that run at a time; 0: unknown.
 *
 * With a causal mask a group has 3 tiles for 2 CTAs. So a launch ends with short tiles, and the keys of the group still
 * fit into the L2: 26 MB of 128 columns in a forward on an H100, at any length (cuda/measurements/sm80.md). */
static inline int fa_heads_walked_together(const fa_problem *p, int64_t heads, int64_t mean_tiles, int64_t most_tiles,
                                           int64_t ctas) {
    enum { MOST_TASKS = 1 << 30 };
    if (p->window_right < 0 || mean_tiles <= 1) return 0;
    const int64_t least = (3 * ctas + 2 * mean_tiles - 1) / (2 * mean_tiles);
    if (least <= 1 || heads <= 1) return 0;
    const int64_t group = least < heads ? heads / (heads / least) : heads;
    return group * most_tiles < MOST_TASKS ? (int)group : 0;
}

#endif
