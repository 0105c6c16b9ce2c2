/* Planners of the decode kernel, on Hopper and before. The head dimension and the query rows of one key head decide the
 * row of cuda/tiles.def. The planner also decides how keys are split. */
#include "gpu_decode.h"

#include "cuda/attn_decode_params.h"
#include "flex/flex.h"
#include "gpu_gather.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"
#include "sequence.h"

static int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

/* The numbers of batches, rows and heads of a view. */
typedef struct {
    int64_t batches, rows, heads;
} extent;

/* Do all rows start at multiples of 16 bytes? The stride of a dimension with one element does not matter. */
static bool is_aligned(const fa_view *t, extent size) {
    return (uintptr_t)t->data % 16 == 0 && (size.batches <= 1 || t->stride_b % 8 == 0) &&
           (size.rows <= 1 || t->stride_row % 8 == 0) && (size.heads <= 1 || t->stride_h % 8 == 0);
}

/* The kernel addresses a cache in pieces of 16 bytes, with 32 bits. */
static bool fits_32_bits(const fa_view *t, extent size) {
    double last = 0;
    if (size.batches > 1) last += (double)(size.batches - 1) * (double)t->stride_b;
    if (size.rows > 1) last += (double)(size.rows - 1) * (double)t->stride_row;
    if (size.heads > 1) last += (double)(size.heads - 1) * (double)t->stride_h;
    return t->stride_b >= 0 && t->stride_row >= 0 && t->stride_h >= 0 && last / 8 < UINT32_MAX;
}

bool fa_decode_appends(const fa_problem *p, const fa_plan *plan) {
    const extent fresh = {p->b, p->len_new, p->h_kv};
    const int64_t rows = p->len_q * (p->h / p->h_kv);
    if (p->cu_seqlens_q || p->seqlens_rotary) return false; /* a packed sequence without queries has no CTA */
    if (!p->k_new.data || rows == 0 || rows > plan->block_q || p->len_new > FA_DECODE_MAX_NEW) return false;
    return is_aligned(&p->k_new, fresh) && is_aligned(&p->v_new, fresh) && fits_32_bits(&p->k_new, fresh) &&
           fits_32_bits(&p->v_new, fresh) && (uintptr_t)p->rotary_cos % 16 == 0 && (uintptr_t)p->rotary_sin % 16 == 0;
}

static fa_family_id family_of(const fa_plan *plan) { return (fa_family_id)plan->gpu.family; }

static int64_t round_up_256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

fa_decode_layout fa_decode_lay_out(const fa_problem *p, const fa_plan *plan) {
    const fa_gpu_decode_columns *t = fa_gpu_decode_row(family_of(plan), plan->gpu.row);
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t rows = p->len_q * (p->h / p->h_kv), block_q = plan->block_q;
    const int64_t q_tiles = packed ? 0 : ceil_div(rows, block_q), items = p->b * p->h_kv * q_tiles;
    /* If CTAs get equal shares, each share cuts at most two heads. num_splits cuts every head. */
    const int64_t parts = plan->num_splits == 0 ? 2 * FA_DECODE_MAX_CTAS : items * plan->num_splits;
    fa_decode_layout at = {.partial_rows = (int)(packed || rows > block_q ? block_q : rows),
                           .max_q_tiles = (int)q_tiles};
    at.num_counters = plan->num_splits == 1 ? 0 : plan->num_splits == 0 ? FA_DECODE_MAX_CTAS : items;
    const int64_t part_rows = plan->num_splits == 1 ? 0 : parts * at.partial_rows;
    at.partial_o = fa_decode_appends(p, plan) ? 0 : (size_t)round_up_256((int64_t)fa_rotated_q_bytes(p));
    at.counters = at.partial_o + (size_t)round_up_256(part_rows * FA_DECODE_PART_ROW(t->d) * 4);
    at.bytes = at.counters + (size_t)round_up_256(at.num_counters * 4);
    return at;
}

/* Few heads would be cut into many parts, and merging the parts through memory takes longer than reading them. So the
 * CTAs of a thread block cluster share the keys of a head, with one CTA on each SM.
 * A cluster stays with one sequence, and only the GPU knows the lengths. To even out the lengths, each head needs
 * several clusters, unless there is one sequence or all sequences are short.
 * Long streams of several heads need all CTAs. They get clusters of two, because as many CTAs fit on the GPU in
 * clusters of two as without clusters. */
static void choose_clusters(const fa_problem *p, fa_plan *plan, int64_t tiles, const fa_machine *machine) {
    enum { SHORT = 32, CLUSTERS_OF_A_HEAD = 4, FEW_HEADS = 4, LONG_BYTES = 128 << 20 };
    const int64_t heads = p->b * p->h_kv, bytes = heads * tiles * plan->block_kv * p->d * 4;
    const int64_t wanted = heads * (p->b == 1 || tiles <= SHORT ? 1 : CLUSTERS_OF_A_HEAD);
    const bool is_long = heads > FEW_HEADS && bytes > LONG_BYTES;
    if (!fa_gpu_decode_row(family_of(plan), plan->gpu.row)->is_hopper || p->cu_seqlens_q || plan->num_splits != 0 ||
        plan->block_q > 16 || p->len_q * (p->h / p->h_kv) > plan->block_q || p->b > FA_DECODE_CLUSTER_BATCH ||
        (is_long && p->b > 1))
        return;
    const int most = machine->gpu_sms * (is_long ? fa_gpu_decode_row(family_of(plan), plan->gpu.row)->ctas : 1);
    const int ctas = most < FA_DECODE_MAX_CTAS ? most : FA_DECODE_MAX_CTAS;
    for (int cluster = is_long ? 2 : FA_DECODE_MAX_CLUSTER; cluster > 1 && plan->gpu.cluster == 0; cluster /= 2)
        if (wanted <= ctas / cluster) plan->gpu.cluster = cluster, plan->gpu.num_clusters = ctas / cluster;
}

/* Plans a launch with a row of tiles.def. The launch has as many CTAs as fit on the GPU at once. A group of `lanes`
 * CTAs reads neighbouring heads side by side. `lanes` is the largest number that leaves at most one CTA in 32 unused.
 * Batch 16, cache 2048, 32 key heads: 8 lanes take 183 us, 32 lanes 177 (cuda/measurements/decode.md). With clusters,
 * every head has the same number of clusters. */
static fa_decode_launch launch_of(const fa_problem *p, const fa_plan *plan, int row, const fa_machine *machine) {
    const int fit = (machine->gpu_sms > 0 ? machine->gpu_sms : 1) * fa_gpu_decode_row(family_of(plan), row)->ctas;
    const int ctas = fit < FA_DECODE_MAX_CTAS ? fit : FA_DECODE_MAX_CTAS;
    fa_decode_launch launch = {.row = row, .lanes = 1};
    for (int lanes = 1; lanes <= p->h_kv && lanes <= ctas; lanes++)
        if (p->h_kv % lanes == 0 && ctas % lanes * 32 <= ctas) launch.lanes = lanes;
    launch.groups = plan->gpu.cluster > 0 ? plan->gpu.num_clusters / (int)p->h_kv : ctas / launch.lanes;
    return launch;
}

/* Returns the row of the lowest tile that has room for d columns and `rows` query rows. If no tile has room for all
 * rows, this is the row of the highest tile. Of tiles that are as high it is the first one that fits an SM. */
static int row_of(const fa_machine *machine, fa_family_id id, int64_t d, int64_t rows) {
    int row = -1;
    for (int i = 0; i < fa_families[id].num_rows; i++) {
        const fa_gpu_decode_columns *t = fa_gpu_decode_row(id, i), *lower = row < 0 ? NULL : fa_gpu_decode_row(id, row);
        if (t->d < d || (lower && (t->d != lower->d || t->warps_q == lower->warps_q)) ||
            !fa_row_fits_sm(id, i, machine->gpu_capability))
            continue;
        row = i;
        if (rows <= 16 * t->warps_q) break;
    }
    return row;
}

/* A prompt needs a high tile. Packed sequences of few rows beside the prompt need a low tile. They get a launch of
 * their own. */
static void choose_launches(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    const int row = plan->gpu.row, low = row_of(machine, family_of(plan), p->d, 1);
    const bool wants_both = p->cu_seqlens_q && p->b > 1 && low != row && p->len_q * (p->h / p->h_kv) > plan->block_q;
    plan->gpu.decode = launch_of(p, plan, row, machine);
    if (wants_both) plan->gpu.decode_low = launch_of(p, plan, low, machine);
}

/* Would attn_fwd_sm90 compute the queries of a cache faster? This kernel divides its tiles into equal shares. A tile of
 * 64 rows takes as long as `cost` tiles of 128 rows of the other kernel. us_beside is the time of its start and of the
 * merging of parts. Few tiles with many keys have most parts (cuda/measurements/decode.md, Prompts). The other kernel
 * needs us_before. The choice for num_splits = n does not depend on the batch, unless the queries are packed: the host
 * knows their mean length only. */
static bool is_prompt_of_sm90(const fa_problem *p, const fa_machine *machine, const fa_plan *plan, double us_before) {
    enum { FEW_ROWS = 16, FEW_QUERIES = 64, US_START = 12, US_MERGE = 8, MANY_KEYS = 2048, FEW_TILES = 16 };
    const double cost = p->d <= 64 ? 2 : p->d <= 128 ? 2.5 : 5;
    const fa_fwd_sm90_columns *t = fa_fwd_sm90_row_of_cache(p);
    const int64_t rows = p->len_q * (p->h / p->h_kv), block_q = plan->block_q, keys = fa_cache_pages_of(p).capacity;
    const bool packed = p->cu_seqlens_q != NULL;
    if (!t || rows <= FEW_ROWS || (packed && p->total_q < FEW_QUERIES * p->b)) return false;
    if (!fa_counts_in_32_bits(p, packed)) return false;   /* The other kernel would refuse the call. */
    const bool may_be_cut = fa_reads_cache(p) && !packed; /* by the other kernel */
    if (p->num_splits > 1 && !may_be_cut) return false;
    const double us_of_row = cost * 128 / 64 * fa_us_of_a_pair(t); /* of an SM, for a key */
    const double us_of_other = us_before + fa_us_of_fwd_sm90(p, machine->gpu_sms);
    if (p->num_splits > 0 && !packed) return us_of_other < (double)(ceil_div(rows, block_q) * block_q) * us_of_row;
    const int64_t q_tiles = packed ? p->total_q * (p->h / p->h_kv) / block_q + p->b : p->b * ceil_div(rows, block_q);
    const int64_t tiles = q_tiles * p->h_kv, sms = machine->gpu_sms > 0 ? machine->gpu_sms : 1;
    const double us_of_work = (double)(tiles * block_q) * (double)keys * us_of_row / (double)sms;
    const double few_keys = keys < MANY_KEYS ? (double)keys / MANY_KEYS : 1;
    const double us_beside =
        US_START + US_MERGE * few_keys * (tiles > FEW_TILES ? (double)FEW_TILES / (double)tiles : 1);
    const double us_of_memory = fa_us_of_cache(p);
    const double most = us_of_work > us_of_memory ? us_of_work : us_of_memory;
    return us_of_other < us_beside + most + (us_of_work + us_of_memory - most) / 5;
}

/* Would attn_fwd_sm80 compute the queries of a cache faster? Its tiles have 128 queries of one head, and most of them
 * may be empty. A tile of this kernel takes as long as `cost` times 64 of their rows, also if it has 32 rows. An SM
 * that has one of the other kernel's tiles instead of two takes 3/4 of the time of two (cuda/measurements/sm80.md,
 * Prompts). The choice for num_splits = 1 does not depend on the batch, unless the queries are packed: the host knows
 * their mean length only. */
static bool is_prompt_of_sm80(const fa_problem *p, const fa_machine *machine, const fa_plan *plan,
                              const fa_plan *other) {
    enum { ROWS_OF_A_TILE = 64, US_START = 5 };
    const double cost = p->d <= 64 ? 2.3 : p->d <= 128 ? 1.9 : 1.6, us_of_row = 1.6e-6 * (double)p->d; /* for a key */
    if (p->num_splits > 1) return false;
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t group = p->h / p->h_kv, keys = fa_cache_pages_of(p).capacity, block_q = plan->block_q;
    const int64_t of_sequence = p->h_kv * ceil_div(p->len_q * group, block_q) * ROWS_OF_A_TILE,
                  of_other = p->h * ceil_div(p->len_q, other->block_q) * other->block_q;
    if (p->num_splits == 1 && !packed) return (double)of_other < cost * (double)of_sequence;
    const int64_t rows = packed ? p->h_kv * (p->total_q * group / block_q + p->b) * ROWS_OF_A_TILE : p->b * of_sequence;
    const int64_t rows_of_other =
        packed ? p->h * (p->total_q / other->block_q + p->b) * other->block_q : p->b * of_other;
    const double sms = machine->gpu_sms > 0 ? machine->gpu_sms : 1, us_of_memory = fa_us_of_cache(p);
    const double us_of_work = cost * (double)rows / sms * (double)keys * us_of_row;
    /* Above 128 columns warps without rows leave their SM to the others. */
    const double filled = p->d > 128 && p->len_q <= other->block_q / 2 ? 0.65 : 1;
    const double least_rows = (fa_fwd_sm80_row(other->gpu.row)->ctas > 1 ? 1.5 : 1) * other->block_q;
    const double rows_of_sm = (double)rows_of_other / sms;
    const double us_of_other = (rows_of_sm > least_rows ? rows_of_sm : least_rows) * filled * (double)keys * us_of_row;
    return us_of_other < US_START + (us_of_work > us_of_memory ? us_of_work : us_of_memory);
}

/* Does attn_fwd_sm90 take the mods of the problem, if it has any? Some are too long. */
static bool fwd_sm90_takes_mods(const fa_problem *p, const fa_machine *machine) {
    fa_plan other = {.num_splits = 1};
    return !p->flex || !fa_plan_fwd_sm90(p, machine, &other);
}

/* Would other kernels compute the queries faster? The tiles of the generic kernels have 128 queries of one head, which
 * read the keys fewer times. They are slower if most rows of their tiles would be empty, or if their tiles would not
 * fill the GPU. A tile of this kernel takes as long as 64 of their rows, also if it has 32 rows
 * (cuda/measurements/sm80.md, Prompts). For num_splits = 1 only the rows count, because the choice must not depend on
 * the batch. */
static bool is_prompt(const fa_problem *p, const fa_machine *machine, fa_family_id id, const fa_plan *plan) {
    enum { QUERIES = 128, ROWS_OF_A_TILE = 64 };
    const int64_t rows = p->len_q * (p->h / p->h_kv), others = p->h * ceil_div(p->len_q, QUERIES);
    const bool is_allowed = id == FA_DECODE_SM90 && fa_allows_kernel(machine, "attn_fwd_sm90");
    const bool reads_pages = id == FA_DECODE_SM90 && !fa_why_not_cache_of_sm90(p);
    if (is_allowed && fa_gathers(p, machine)) {
        const fa_problem gathered = fa_gathered(p, NULL);
        if (is_prompt_of_sm90(&gathered, machine, plan, fa_us_of_gather(p)) && fwd_sm90_takes_mods(p, machine))
            return true;
    } else if (is_allowed && reads_pages && is_prompt_of_sm90(p, machine, plan, 0) && fwd_sm90_takes_mods(p, machine)) {
        return true;
    }
    if (reads_pages || p->flex) return false;
    fa_plan other = {.num_splits = 1};
    if (rows > plan->block_q && fa_allows_kernel(machine, "attn_fwd_sm80") && !fa_plan_fwd_sm80(p, machine, &other))
        return is_prompt_of_sm80(p, machine, plan, &other);
    return p->num_splits <= 1 && !p->cu_seqlens_q && rows > plan->block_q &&
           others * QUERIES <= p->h_kv * ceil_div(rows, plan->block_q) * ROWS_OF_A_TILE &&
           (p->num_splits == 1 || p->b * others * 4 >= (int64_t)machine->gpu_sms * 3);
}

static const char *why_not_mods(const fa_problem *p) {
    NEEDS(p->flex->block_q == 0, "it takes no block mask");
    NEEDS(!p->flex->max_scores.data, "it keeps no maximum of scores");
    return fa_why_no_room_for_mods(p, sizeof(fa_attn_decode_params));
}

static const char *plan_decode(const fa_problem *p, const fa_machine *machine, fa_family_id id, fa_plan *plan) {
    enum { MANY_ROWS = 64, MANY_KEYS = 256 };
    const bool packed = p->cu_seqlens_q != NULL, packed_keys = p->cu_seqlens_k && !p->paged;
    const int64_t rows = p->len_q * (p->h / p->h_kv);
    const bool has_cache = p->paged || p->leftpad_k || p->cache_batch_idx || p->k_new.data ||
                           (p->seqused_k && !packed) || (packed && !p->cu_seqlens_k) || fa_is_flex_cache(p);
    const extent queries = {packed ? 1 : p->b, packed ? p->total_q : p->len_q, p->h};
    const extent cache = {p->paged               ? p->num_pages
                          : packed_keys          ? 1
                          : p->cache_rows > p->b ? p->cache_rows
                                                 : p->b,
                          p->paged      ? p->page_size
                          : packed_keys ? p->total_kv
                                        : p->len_kv,
                          p->h_kv};
    const char *why = fa_why_not_of_3(p, FA_CHUNKS | FA_MIXED | FA_OTHER_NEW);
    if (!why && p->flex) why = why_not_mods(p);
    if (why) return why;
    NEEDS(!p->cu_seqlens_k_new, "it takes no packed new keys");
    NEEDS(id != FA_DECODE_SM90 || machine->gpu_capability == 90,
          "it is for compute capability 9.0 (Hopper), and this GPU has another");
    NEEDS(p->dtype == FA_F16 || p->dtype == FA_BF16, "it takes fp16 and bf16");
    NEEDS(p->h > 0, "it wants a query head");
    NEEDS(p->softcap <= FA_HOPPERS_SOFTCAP, FA_SOFTCAP_REASON);
    NEEDS(p->dropout_p == 0 && !p->s_dmask, "it has no dropout");
    NEEDS(has_cache || (rows <= MANY_ROWS && p->len_kv >= MANY_KEYS), "it is for few queries over many keys");
    NEEDS(p->d % 8 == 0, "it wants a head dimension that is a multiple of 8");
    NEEDS(p->rotary_rows <= INT32_MAX, "it counts rows of the rotary tables up to 2^31");
    NEEDS(is_aligned(&p->q, queries) && is_aligned(&p->k, cache) && is_aligned(&p->v, cache) &&
              (!p->o.data || is_aligned(&p->o, queries)),
          "it wants q, k, v and out to start at multiples of 16 bytes, with strides that are multiples of 8 elements");
    NEEDS(fits_32_bits(&p->k, cache) && fits_32_bits(&p->v, cache), "it addresses up to 64 GB of keys and of values");

    const int row = row_of(machine, id, p->d, rows);
    const fa_gpu_decode_columns *t = fa_gpu_decode_row(id, row);
    plan->gpu.family = id;
    plan->gpu.row = row;
    plan->gpu.features = fa_dtype_feature(p->dtype) | (fa_has_mods(p) ? FA_FLEX : 0u);
    plan->block_q = 16 * t->warps_q;
    plan->block_kv = FA_DECODE_WARP_KEYS(t->d, t->warps_q) * t->warps_q * t->teams;
    NEEDS(!is_prompt(p, machine, id, plan), "other kernels compute so many queries faster");

    const int64_t capacity = packed_keys ? p->total_kv : p->paged ? p->block_table_cols * p->page_size : p->len_kv;
    const int64_t tiles = capacity > 0 ? ceil_div(capacity, plan->block_kv) : 1;
    const int64_t q_tiles =
        packed ? ceil_div(p->total_q * (p->h / p->h_kv), plan->block_q) + p->b : p->b * ceil_div(rows, plan->block_q);
    NEEDS(capacity < INT32_MAX / 2 && p->total_q < INT32_MAX / 2 && q_tiles < INT32_MAX / 2 / p->h_kv / tiles,
          "the problem has more tiles than 2^30");
    /* Only the GPU knows the number of query tiles of a packed problem. So more than one split becomes 0, and the
     * kernel divides the keys into equal shares. */
    plan->num_splits = (int)(p->num_splits < tiles ? p->num_splits : tiles);
    if (plan->num_splits > 1 && (packed || q_tiles * p->h_kv > INT32_MAX / plan->num_splits)) plan->num_splits = 0;
    choose_clusters(p, plan, tiles, machine);
    choose_launches(p, machine, plan);
    fa_plan_mods(p, plan);
    plan->workspace_bytes = fa_decode_lay_out(p, plan).bytes;
    return NULL;
}

const char *fa_plan_decode_sm90(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    return plan_decode(p, machine, FA_DECODE_SM90, plan);
}

const char *fa_plan_decode_sm80(const fa_problem *p, const fa_machine *machine, fa_plan *plan) {
    return plan_decode(p, machine, FA_DECODE_SM80, plan);
}
