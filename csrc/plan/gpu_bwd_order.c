/* The order in which key tiles of Hopper's backward begin, and whether they add to dQ in this order. The thresholds are
 * measured (cuda/measurements/backward.md). */
#include "gpu_bwd_order.h"

#include "gpu_problem.h"
#include "kernel_table.h"

/* The choice depends on these numbers. */
typedef struct {
    int heads, heads_per_tile; /* key heads or their pieces, of all sequences if dense; query heads of each */
    int64_t bytes;             /* bytes of a head's queries, dO and sums of dQ */
    int64_t ctas;              /* CTAs at a time, or clusters if CTAs of a cluster share a tile */
    int64_t tiles, all_tiles;  /* mean number of key tiles of a head; uncut key tiles of all heads */
    bool is_causal, is_masked;
    bool is_uneven; /* key tiles have different lengths */
} order_of_tiles;

enum { L2_BYTES = 24 << 20 }; /* of the L2, for the rows that are walked together */

/* Returns how many key heads are walked together. Their bytes fit into the L2. */
static int64_t heads_in_group(const order_of_tiles *o) {
    int64_t group = 1;
    while (group < o->heads && 2 * group * o->bytes <= L2_BYTES) group *= 2;
    return group;
}

/* Key tiles of a block mask begin in the order of their length, or in their own. In their own order the key tiles that
 * walk over the same rows begin together. This is faster where the rows of a group are far more than the L2 holds. Up
 * to 64 columns, key tiles of one head that begin together lose more by waiting for each other. */
static bool follows_rows(const fa_problem *p, const order_of_tiles *o, int64_t group) {
    return fa_block_map_bytes(p) > 0 && fa_columns(p) > 64 && group * o->bytes > 2 * L2_BYTES;
}

/* Does a fixed order cost less than 2%? Then the backward keeps the order even if the caller does not ask for it.
 * Without a mask a fixed order is free if every CTA has many tiles. With a causal mask, grouped heads and up to 64
 * columns, a fixed order is even faster. */
static bool order_is_free(const fa_problem *p, const order_of_tiles *o) {
    const int64_t longest = fa_columns(p) <= 64 ? INT64_MAX : fa_columns(p) > 96 && fa_columns(p) <= 128 ? 8192 : 2048;
    if (o->is_masked) return o->is_causal && fa_columns(p) <= 64 && p->h > p->h_kv && o->all_tiles >= 4 * o->ctas;
    return p->len_q >= p->len_kv && p->len_kv <= longest && o->all_tiles >= 8 * o->ctas;
}

/* Halves the number of heads until the heads fit into these bytes of the L2. */
static int64_t heads_within(int64_t heads, const order_of_tiles *o, int64_t bytes) {
    while (heads > 1 && heads * o->bytes > bytes) heads /= 2;
    return heads;
}

/* Returns the least number of key heads that must be walked together.
 * In a fixed order the key tiles of one head add to dQ one after the other. Tiles of other heads lie between these
 * tiles and keep them apart. The L2 must have room for all heads of the group. Otherwise the speed depends on whether
 * CTAs keep in step. With a causal or a block mask, tiles have different lengths. Every CTA must have a tile of the
 * group, or the last group ends late. Long tiles of one head that have the SMs to themselves reach the diagonal
 * together. */
static int64_t least_heads(const fa_problem *p, const order_of_tiles *o, bool in_order) {
    if (!o->is_uneven) return in_order ? heads_within(1024 / fa_columns(p), o, 50 << 20) : 1;
    const int64_t apart = (in_order ? 2048 / fa_columns(p) : p->len_kv > 4096 ? 8 : 1) / o->heads_per_tile;
    const int64_t busy = p->len_kv > 2048 ? 2 * o->ctas / o->tiles : heads_within(o->ctas / o->tiles, o, 32 << 20);
    return apart > busy ? apart : busy;
}

/* Short causal tiles of up to 64 columns wait for each other even without a fixed order. They need groups of twice as
 * many heads. */
void fa_plan_bwd_order(const fa_problem *p, int64_t ctas, int64_t head_pieces, fa_plan *plan) {
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t mean_q = packed ? p->total_q / p->b : p->len_q, mean_kv = packed ? p->total_kv / p->b : p->len_kv;
    const int64_t block_kv = plan->block_kv;
    order_of_tiles o = {
        .heads = (int)((packed ? p->h_kv : p->b * p->h_kv) * head_pieces),
        .heads_per_tile = (int)(p->h / p->h_kv / head_pieces),
        .ctas = ctas,
        .tiles = mean_kv > 0 ? (mean_kv + block_kv - 1) / block_kv : 1,
        .is_causal = plan->gpu.features & FA_CAUSAL,
        .is_masked = plan->gpu.features & (FA_CAUSAL | FA_LOCAL | FA_FLEX),
        .is_uneven = plan->gpu.features & FA_CAUSAL || fa_block_map_bytes(p) > 0,
    };
    o.all_tiles = p->h_kv * (packed ? p->total_kv / block_kv : p->b * o.tiles);
    o.bytes = 8 * fa_columns(p) * (mean_q > 0 ? mean_q : 1) * o.heads_per_tile;
    const bool in_order = p->deterministic || order_is_free(p, &o);
    plan->gpu.any_order = !in_order;
    plan->gpu.converts = o.is_causal && fa_columns(p) <= 64 && !in_order && p->len_kv > 1024;
    int64_t group = heads_in_group(&o);
    if (o.is_uneven && fa_columns(p) <= 64 && !plan->gpu.converts) group *= 2;
    const int64_t least = least_heads(p, &o, in_order);
    if (group < least) group = least;
    if (group > o.heads) group = o.heads;
    if (o.is_uneven && group > 0) { /* groups get the same size, because a small last group would end late */
        const int64_t groups = o.heads / group;
        group = (o.heads + groups - 1) / groups;
    }
    plan->gpu.group_heads = (int)group;
    plan->gpu.follows_rows = follows_rows(p, &o, group);
}
