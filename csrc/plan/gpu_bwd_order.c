/* Hopper's backward: in which order key tiles begin, and whether they add to dQ in that order, as measured
 * (cuda/measurements/backward.md). */
#include "gpu_bwd_order.h"

#include "kernel_table.h"

/* What the choice depends on. */
typedef struct {
    int heads, heads_per_tile; /* key heads or pieces of them, of all sequences if dense; query heads of each */
    int64_t bytes;             /* what a head walks over: its queries, dO and sums of dQ */
    int64_t ctas;              /* clusters, where these share a tile */
    int64_t tiles, all_tiles;  /* key tiles of a head, in the mean; of all, uncut */
    bool is_causal, is_masked;
} order_of_tiles;

/* Key heads that are walked together: as many as have their bytes in 24 MB of the L2. */
static int64_t heads_in_group(const order_of_tiles *o) {
    int64_t group = 1;
    while (group < o->heads && 2 * group * o->bytes <= 24 << 20) group *= 2;
    return group;
}

/* Whether a fixed order costs less than 2%, so that nobody need ask for it: without a mask, and where every CTA has many tiles;
 * causal with grouped heads and up to 64 columns, where it is even faster. */
static bool order_is_free(const fa_problem *p, const order_of_tiles *o) {
    const int64_t longest = p->d <= 64 ? INT64_MAX : p->d > 96 && p->d <= 128 ? 8192 : 2048;
    if (o->is_masked) return o->is_causal && p->d <= 64 && p->h > p->h_kv && o->all_tiles >= 4 * o->ctas;
    return p->len_q >= p->len_kv && p->len_kv <= longest && o->all_tiles >= 8 * o->ctas;
}

/* Half of the heads as often as it takes to have them in so much of the L2. */
static int64_t heads_within(int64_t heads, const order_of_tiles *o, int64_t bytes) {
    while (heads > 1 && heads * o->bytes > bytes) heads /= 2;
    return heads;
}

/* Key heads that must be walked together. In a fixed order key tiles of one head follow each other, at a distance if other
 * heads' lie between: of no more heads than the L2 has room for, or all depends on whether CTAs keep in step. With a causal
 * mask tiles are of any length: of a group's all CTAs have some, or the last group ends late; and long ones of one head
 * alone on the SMs come to the diagonal together. */
static int64_t least_heads(const fa_problem *p, const order_of_tiles *o, bool in_order) {
    if (!o->is_causal) return in_order ? heads_within(1024 / p->d, o, 50 << 20) : 1;
    const int64_t apart = (in_order ? 2048 / p->d : p->len_kv > 4096 ? 8 : 1) / o->heads_per_tile;
    const int64_t busy = p->len_kv > 2048 ? 2 * o->ctas / o->tiles : heads_within(o->ctas / o->tiles, o, 32 << 20);
    return apart > busy ? apart : busy;
}

/* Short causal tiles of up to 64 columns wait for each other in any order, too, and want twice the heads. */
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
        .is_masked = plan->gpu.features & (FA_CAUSAL | FA_LOCAL),
    };
    o.all_tiles = p->h_kv * (packed ? p->total_kv / block_kv : p->b * o.tiles);
    o.bytes = 8 * p->d * (mean_q > 0 ? mean_q : 1) * o.heads_per_tile;
    const bool in_order = p->deterministic || order_is_free(p, &o);
    plan->gpu.any_order = !in_order;
    plan->gpu.converts = o.is_causal && p->d <= 64 && !in_order && p->len_kv > 1024;
    int64_t group = heads_in_group(&o);
    if (o.is_causal && p->d <= 64 && !plan->gpu.converts) group *= 2;
    const int64_t least = least_heads(p, &o, in_order);
    if (group < least) group = least;
    if (group > o.heads) group = o.heads;
    if (o.is_causal && group > 0) { /* groups alike: a small last one would end late */
        const int64_t groups = o.heads / group;
        group = (o.heads + groups - 1) / groups;
    }
    plan->gpu.group_heads = (int)group;
}
