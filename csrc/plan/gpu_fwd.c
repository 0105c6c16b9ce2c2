/* Planner of attn_fwd_sm90. The planner takes the first rows of cuda/tiles.def that have room for the columns. Among
 * the rows that serve every feature, it takes the row that wastes least beyond the sequences' ends. */
#include "cuda/attn_fwd_params.h"
#include "flex/flex.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"
#include "sequence.h"

static int64_t round_up(int64_t x, int64_t y) { return (x + y - 1) / y * y; }

/* With a cache: how many rows an SM computes if work tiles of block_q rows have `heads` heads each. Packed sequences
 * count as many rows as they have on average. For num_splits = 1 the rows of one sequence and key head stand for them:
 * the rows of a strip raise their maximum together, and bits must not depend on the batch. */
static int64_t rows_of_an_sm(const fa_problem *p, int64_t block_q, int64_t heads, int sms) {
    const int64_t rows = block_q / heads, group = p->h / p->h_kv, width = sms > 0 ? sms : 1;
    const int64_t q_tiles = p->cu_seqlens_q ? p->total_q / rows + p->b : p->b * (round_up(p->len_q, rows) / rows);
    if (p->num_splits == 1 && !p->cu_seqlens_q) return round_up(p->len_q, rows) * group;
    return round_up(p->h / heads * q_tiles, width) / width * block_q;
}

/* As few heads as let SMs compute the fewest rows. Tiles that fill the GPU once end sooner if more SMs read the keys.
 * With 32 queries over 8192 keys, 32/8 heads, head_dim 128, an H100 took 69 us for 4 sequences with tiles of one head,
 * and 93 with tiles of four heads. For 16 sequences it took 259 and 195 us. A row strip has 16 rows. */
int fa_tile_heads(const fa_problem *p, int64_t block_q, int sms) {
    enum { STRIP = 16 };
    int64_t best = 1, fewest = INT64_MAX;
    if (!fa_reads_cache(p) || p->h_kv == 0) return 1;
    for (int64_t heads = 1; heads <= p->h / p->h_kv && STRIP * heads <= block_q; heads++) {
        if (p->h / p->h_kv % heads || block_q % (STRIP * heads)) continue;
        const int64_t rows = rows_of_an_sm(p, block_q, heads, sms);
        if (rows < fewest) best = heads, fewest = rows;
    }
    return (int)best;
}

/* Returns the cost of a sequence with this row's tiles, or of an SM's share of a cache. A tile is computed as a whole.
 * So is a step over keys, which matters with few keys. Short sequences wait for memory rather than for products. They
 * wait longest if a step needs more keys. An H100 with 64 sequences, 16 heads and head_dim 64 takes, for rows and keys
 * a step:
 *   length 100: 36.7 us with 192 rows and 128 keys, 29.3 with 128 rows and 64 keys;
 *   length 192: 49.5 us with 192 rows and 128 keys, 47.2 with 256 rows and 64 keys.
 * At head_dim 128 it takes, with 16 heads, 128 rows, and 128 or 64 keys a step:
 *   4 sequences of 4096 queries: 77 keys 74.7 and 58.7 us, 128 keys 73.0 and 58.5, 256 keys 82.0 and 89.3;
 *   80 sequences of length 200:  109.2 and 113.6 us. */
static int64_t cost_of(const fa_problem *p, const fa_fwd_sm90_columns *t, int sms) {
    enum { FEW_KEYS = 128, SHORT = 256 * 64 }; /* elements of a head's keys */
    const int64_t keys = p->len_kv < FEW_KEYS ? p->len_kv : FEW_KEYS, block_q = FA_ROWS_OF_A_WARPGROUP * t->wgs;
    const int64_t rows = fa_reads_cache(p) ? rows_of_an_sm(p, block_q, fa_tile_heads(p, block_q, sms), sms)
                                           : round_up(p->len_q, block_q);
    const int64_t cost = rows * round_up(keys, t->block_kv) * t->cost;
    return p->len_kv * t->d <= SHORT && t->block_kv > 64 ? 2 * cost : cost;
}

/* ---- order of tiles -------------------------------------------------------------------------------------------- */

/* Returns how many query heads are walked together. The keys and values of their key heads fill 32 MB of the L2. They
 * fill only 16 MB if more than 16 key heads fit. With many heads, the first tiles of a head are long done when its last
 * tiles read the same keys. With few heads, a launch ends with long tiles. Measured with a causal mask on an H100:
 *   TFLOPS, head_dim 256, length 16k:  1 head 645, 2 heads 691, 4 heads 694;
 *   TFLOPS, head_dim 256, length 4k:   4 heads 599, 8 heads 632, 16 heads 633.
 *   us, head_dim 128:  at 512 16 heads 109.4, 32 106.9, 64 106.6, 128 121.3; at 1k 135.6, 134.9, 147.1;
 *   us, head_dim 64:   at 512 16 heads 112.2, 64 110.0, 128 108.8; at 1k 16 164.6, 64 159.4. */
static int heads_in_group(const fa_problem *p) {
    const int64_t row_bytes = (p->d + p->d_v) * (int64_t)fa_dtype_bytes(p->dtype);
    const int64_t kv_bytes = row_bytes * (p->len_kv > 0 ? p->len_kv : 1), heads = p->b * p->h;
    int64_t kv_heads = 1;
    while (2 * kv_heads * kv_bytes <= (kv_heads < 16 ? 32 : 16) << 20) kv_heads *= 2;
    const int64_t group = kv_heads * (p->h / p->h_kv);
    return (int)(group < heads ? group : heads);
}

/* Do CTAs take their next work tile from a counter? They do not if each CTA has only one tile. They also do not if
 * tiles are alike, few, and so short that they end before the counter answers. Measured without and with the counter,
 * on an H100 with 64 sequences, 16 heads and head_dim 64:
 *   length 17 16.5 and 19.9 us;  length 128 32.2 and 34.3 us;  length 256 58.4 and 60.1 us.
 * With many tiles CTAs drift apart, and the counter evens out their ends. 128 tokens, 16 heads, head_dim 128:
 *   8 tiles a CTA 54.5 and 55.2 us;  16 tiles 99.9 and 98.8 us;  31 tiles 190.6 and 185.6 us. */
static bool is_dynamic(const fa_problem *p, int64_t q_tiles, int64_t tiles, int64_t ctas) {
    enum { SHORT = 256, FEW_TILES = 12 };
    const bool is_short = !p->cu_seqlens_q && q_tiles == 1 && p->len_kv <= SHORT && tiles <= FEW_TILES * ctas;
    return tiles > ctas && !is_short;
}

void fa_plan_fwd_order(const fa_problem *p, int64_t ctas, fa_plan *plan) {
    const int64_t tile_heads = plan->gpu.tile_heads > 1 ? plan->gpu.tile_heads : 1, heads = p->h / tile_heads;
    const int64_t rows = plan->block_q / tile_heads, q_tiles = (p->len_q + rows - 1) / rows;
    const int64_t most_tiles = p->cu_seqlens_q ? (p->total_q / rows + p->b) * heads : q_tiles * p->b * heads;
    plan->gpu.group_heads = heads_in_group(p);
    plan->gpu.is_dynamic = is_dynamic(p, q_tiles, most_tiles, ctas);
    plan->gpu.num_ctas = p->total_q > 0 ? (int)(most_tiles < ctas ? most_tiles : ctas) : 0;
}

/* ---- the plan -------------------------------------------------------------------------------------------------- */

const char *fa_plan_fwd_sm90(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    enum { WIDEST = 256, MOST_WALKS_BYTES = 256 << 20 };
    const bool reads_cache = fa_reads_cache(p);
    const unsigned features = fa_cuda_features(p) | (reads_cache ? FA_CACHE : 0u) | (fa_has_mods(p) ? FA_FLEX : 0u);
    const unsigned wanted = features & (FA_ALL_FEATURES | FA_CACHE | FA_FLEX);
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t batches = packed ? 1 : p->b;
    const char *why =
        fa_why_not_of_3(p, FA_OTHER_D_V | FA_CHUNKS | FA_USED_Q | (reads_cache ? FA_MIXED | FA_OTHER_NEW : 0));
    if (!why && reads_cache) why = fa_why_not_cache_of_sm90(p);
    if (!why && fa_prefers_key_parts(p)) why = "a generic kernel cuts the many keys of the few queries into parts";
    if (!why && p->flex) why = fa_why_not_mods_of_sm90(p, sizeof(fa_attn_fwd_params));
    if (why) return why;
    NEEDS(machine->gpu_capability == 90, "it is for compute capability 9.0 (Hopper), and this GPU has another");
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "it takes fp16 and bf16");
    NEEDS(p->h > 0, "it wants a query head");
    NEEDS(p->softcap <= FA_HOPPERS_SOFTCAP, FA_SOFTCAP_REASON);
    NEEDS(!p->wants_s_dmask, "it does not return the attention probabilities");
    NEEDS(!p->seqused_q || packed, "it reads seqused_q beside cu_seqlens_q only");
    NEEDS(p->d % 8 == 0 && p->d_v % 8 == 0, "it wants a head dimension that is a multiple of 8, of v too");
    NEEDS(p->d <= WIDEST && p->d_v <= WIDEST, "it has no tile for this head dimension");
    NEEDS(fa_suits_tma(p, &p->q, batches, p->total_q, p->h) &&
              (reads_cache || (fa_suits_tma(p, &p->k, batches, p->total_kv, p->h_kv) &&
                               fa_suits_tma(p, &p->v, batches, p->total_kv, p->h_kv))) &&
              (!p->o.data || fa_suits_tma(p, &p->o, batches, p->total_q, p->h)),
          "it wants q, k, v and out to start at multiples of 16 bytes, with strides that are multiples of 8 elements");
    NEEDS(fa_counts_in_32_bits(p, packed) && p->b * p->h * (p->len_q / 64 + 1) < INT32_MAX,
          "the problem has more rows than 2^30, or more tiles than 2^31");

    const fa_family *family = &fa_families[FA_FWD_SM90];
    int row = 0;
    for (; row < family->num_rows; row++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row);
        const int box = t->d % 64 == 0 && t->d_v % 64 == 0 ? 64 : 32;
        if (t->d < p->d || t->d_v < p->d_v)
            fa_rule_out(plan, family->rows[row].name, "its tiles have fewer columns than the heads");
        else if (p->cu_seqlens_q && !(fa_fills_boxes(p->d, t->d, box) && fa_fills_boxes(p->d_v, t->d_v, box)))
            fa_rule_out(plan, family->rows[row].name, FA_BOXES_REASON);
        else if (t->d % 64 != 0 && (p->d % 16 != 0 || p->d_v % 16 != 0))
            fa_rule_out(plan, family->rows[row].name,
                        "TMA is slow with its pieces of 64 bytes where rows begin amid sectors of 32");
        else if ((family->rows[row].serves & wanted) != wanted)
            fa_rule_out(plan, family->rows[row].name, "its tiles do not serve every option of the call");
        else
            break;
    }
    NEEDS(row < family->num_rows, "it has no tile for these head dimensions");
    for (int later = row + 1; later < family->num_rows; later++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row), *other = fa_fwd_sm90_row(later);
        if (other->d != t->d || other->d_v != t->d_v || (family->rows[later].serves & wanted) != wanted) continue;
        const bool is_better = cost_of(p, other, machine->gpu_sms) < cost_of(p, t, machine->gpu_sms);
        fa_rule_out(plan, family->rows[is_better ? row : later].name,
                    "its tiles reach further beyond the sequences' ends");
        if (is_better) row = later;
    }
    plan->gpu.family = FA_FWD_SM90;
    plan->gpu.row = row;
    plan->gpu.features = features;
    if (reads_cache) plan->workspace_bytes = fa_rotated_q_bytes(p);
    plan->block_q = FA_ROWS_OF_A_WARPGROUP * fa_fwd_sm90_row(row)->wgs;
    plan->block_kv = fa_fwd_sm90_row(row)->block_kv;
    plan->gpu.tile_heads = fa_tile_heads(p, plan->block_q, machine->gpu_sms);
    if (features & FA_FLEX) {
        NEEDS(fa_block_walks_bytes(p, plan) <= MOST_WALKS_BYTES, "its lists of tiles would take more than 256 MiB");
        plan->gpu.has_hidden = fa_hidden_bytes(p, plan) > 0;
        plan->workspace_bytes = fa_block_walks_at(p) + fa_block_walks_bytes(p, plan) + fa_hidden_bytes(p, plan);
        fa_plan_mods(p, plan);
    }
    fa_plan_fwd_order(p, (int64_t)machine->gpu_sms * fa_fwd_sm90_row(row)->ctas, plan);
    return NULL;
}
