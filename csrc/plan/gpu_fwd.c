/* What attn_fwd_sm90 asks for, and the row of cuda/tiles.def that it takes: of the first head dimension that has room, the
 * one that serves every feature and wastes least on rows and keys beyond the sequences' ends. */
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"

static int64_t round_up(int64_t x, int64_t y) { return (x + y - 1) / y * y; }

/* What a sequence costs with this row's tiles: they are computed as a whole, and so are steps over keys, which matters
 * where there are few. Short sequences wait for memory rather than for products, and longest where a step waits for more
 * keys: 64 sequences of 100, 16 heads, head_dim 64, on an H100: 192 rows and 128 keys a step 36.7 us, 128 rows and 64 keys
 * 29.3; of 192 49.5, and 256 rows and 64 keys 47.2. */
static int64_t cost_of_a_sequence(const fa_problem *p, const fa_fwd_sm90_columns *t) {
    enum { FEW_KEYS = 128, SHORT = 256 };
    const int64_t keys = p->len_kv < FEW_KEYS ? p->len_kv : FEW_KEYS;
    const int64_t cost = round_up(p->len_q, FA_ROWS_OF_A_WARPGROUP * t->wgs) * round_up(keys, t->block_kv) * t->cost;
    return p->len_kv <= SHORT && t->block_kv > 64 ? 2 * cost : cost;
}

/* ---- order of tiles -------------------------------------------------------------------------------------------- */

/* Query heads that are walked together. The keys and values of their key heads fill 32 MB of the L2, or 16 MB where more
 * than 16 key heads fit: with many heads, the first tiles of a head are long done when its last tiles want the same keys.
 * With fewer heads, a launch ends with long tiles. Causal on an H100, TFLOPS: head_dim 256 at length 16k 1 head 645, 2 691,
 * 4 694; at 4k 4 heads 599, 8 632, 16 633. In us: head_dim 128 at 512 16 heads 109.4, 32 106.9, 64 106.6, 128 121.3; at 1k
 * 135.6, 134.9, 147.1; head_dim 64 at 512 16 heads 112.2, 64 110.0, 128 108.8; at 1k 16 164.6, 64 159.4. */
static int heads_in_group(const fa_problem *p) {
    const int64_t kv_bytes = 4 * p->d * (p->len_kv > 0 ? p->len_kv : 1), heads = p->b * p->h;
    int64_t kv_heads = 1;
    while (2 * kv_heads * kv_bytes <= (kv_heads < 16 ? 32 : 16) << 20) kv_heads *= 2;
    const int64_t group = kv_heads * (p->h / p->h_kv);
    return (int)(group < heads ? group : heads);
}

/* CTAs take their next work tile from a counter, unless each CTA has only one. Nor do they where tiles are alike and so
 * short that the counter answers later than they end: 64 sequences of 17, 16 heads, head_dim 64, on an H100 16.5 us instead
 * of 19.9, of 128 32.2 instead of 34.3, of 256 58.4 instead of 60.1. */
static bool is_dynamic(const fa_problem *p, int64_t q_tiles, int64_t tiles, int64_t ctas) {
    enum { SHORT = 256 };
    const bool is_short = !p->cu_seqlens_q && q_tiles == 1 && p->len_kv <= SHORT;
    return tiles > ctas && !is_short;
}

static void choose_order(const fa_problem *p, int64_t ctas, fa_plan *plan) {
    const int64_t q_tiles = (p->len_q + plan->block_q - 1) / plan->block_q;
    const int64_t most_tiles = p->cu_seqlens_q ? (p->total_q / plan->block_q + p->b) * p->h : q_tiles * p->b * p->h;
    plan->gpu.group_heads = heads_in_group(p);
    plan->gpu.is_dynamic = is_dynamic(p, q_tiles, most_tiles, ctas);
    plan->gpu.num_ctas = p->total_q > 0 ? (int)(most_tiles < ctas ? most_tiles : ctas) : 0;
}

/* ---- the plan -------------------------------------------------------------------------------------------------- */

const char *fa_plan_fwd_sm90(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const unsigned features = fa_cuda_features(p), wanted = features & FA_ALL_FEATURES;
    const bool packed = p->cu_seqlens_q != NULL;
    NEEDS(machine->gpu_capability == 90, "it is for compute capability 9.0 (Hopper), and this GPU has another");
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "it takes fp16 and bf16");
    NEEDS(p->h > 0, "it wants a query head");
    NEEDS(p->softcap <= FA_HOPPERS_SOFTCAP, FA_SOFTCAP_REASON);
    NEEDS(!p->paged, "it reads no block_table");
    NEEDS(!p->leftpad_k && !p->cache_batch_idx && !p->k_new.data && !p->rotary_cos && (!p->seqused_k || packed),
          "it reads no KV cache");
    NEEDS(!p->wants_s_dmask, "it does not return the attention probabilities");
    NEEDS(p->d % 8 == 0, "it wants a head dimension that is a multiple of 8");
    NEEDS(fa_suits_tma(p, &p->q, p->total_q, p->h, packed) && fa_suits_tma(p, &p->k, p->total_kv, p->h_kv, packed) &&
              fa_suits_tma(p, &p->v, p->total_kv, p->h_kv, packed) &&
              (!p->o.data || fa_suits_tma(p, &p->o, p->total_q, p->h, packed)),
          "it wants q, k, v and out to start at multiples of 16 bytes, with strides that are multiples of 8 elements");
    NEEDS(p->total_q < INT32_MAX && p->total_kv < INT32_MAX && p->b * p->h * (p->len_q / 64 + 1) < INT32_MAX,
          "the problem has more rows or tiles than 2^31");

    const fa_family *family = &fa_families[FA_FWD_SM90];
    int row = 0;
    for (; row < family->num_rows; row++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row);
        if (t->d < p->d)
            fa_rule_out(plan, family->rows[row].name, "its tiles have fewer columns than the heads");
        else if (t->d % 64 != 0 && p->d % 16 != 0)
            fa_rule_out(plan, family->rows[row].name,
                        "TMA is slow with its pieces of 64 bytes where rows begin amid sectors of 32");
        else if ((family->rows[row].serves & wanted) != wanted)
            fa_rule_out(plan, family->rows[row].name, "its tiles do not serve every option of the call");
        else
            break;
    }
    for (int later = row + 1; later < family->num_rows; later++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row), *other = fa_fwd_sm90_row(later);
        if (other->d != t->d || (family->rows[later].serves & wanted) != wanted) continue;
        const bool is_better = cost_of_a_sequence(p, other) < cost_of_a_sequence(p, t);
        fa_rule_out(plan, family->rows[is_better ? row : later].name,
                    "its tiles reach further beyond the sequences' ends");
        if (is_better) row = later;
    }
    plan->gpu.family = FA_FWD_SM90;
    plan->gpu.row = row;
    plan->gpu.features = features;
    plan->block_q = FA_ROWS_OF_A_WARPGROUP * fa_fwd_sm90_row(row)->wgs;
    plan->block_kv = fa_fwd_sm90_row(row)->block_kv;
    choose_order(p, (int64_t)machine->gpu_sms * fa_fwd_sm90_row(row)->ctas, plan);
    return NULL;
}
