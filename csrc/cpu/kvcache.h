/* The append to a cache, in front of the attention. */
#ifndef FA_CPU_KVCACHE_H
#define FA_CPU_KVCACHE_H

#include "flash_attn.h"
#include "pool.h"

/* Writes k_new (rotated) and v_new into the cache, and q rotated into q_rotated [b, len_q, h, d]
 * contiguous (used instead of q by the attention that follows) if there is rotary. */
bool fa_cpu_append(const fa_problem *problem, void *q_rotated, const fa_pool *pool);

#endif
