/* The append to a cache, which runs before the attention. */
#ifndef FA_CPU_KVCACHE_H
#define FA_CPU_KVCACHE_H

#include "flash_attn.h"
#include "pool.h"

/* Writes k_new (rotated) and v_new into the cache. With rotary embedding the function also writes the rotated queries
 * to q_rotated [b, len_q, h, d], contiguous. The attention that follows reads q_rotated instead of q. */
bool fa_cpu_append(const fa_problem *problem, void *q_rotated, const fa_pool *pool);

#endif
