/* Planner of attn_fwd_sm90. The planner takes the first rows of cuda/tiles.def that have room for the columns. Among
 * the rows that serve every feature, it takes the row that wastes least beyond the sequences' ends. */
#include "combination.h"
#include "cuda/attn_fwd_params.h"
#include "flex/flex.h"
#include "gpu_gather.h"
#include "gpu_planners.h"
#include "gpu_problem.h"
#include "kernel_table.h"
#include "sequence.h"

#include <math.h>

static int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }
static int64_t round_up(int64_t x, int64_t y) { return ceil_div(x, y) * y; }

/* Columns of a row in shared memory. */
enum { CHUNK = 64 };

/* ---- work tiles over a cache ------------------------------------------------------------------------------------- */

/* Microseconds of an H100 (cuda/measurements/decode.md): the first work tile of a CTA and each further one; the
 * combination of parts, of one element of the result, of each part, and of one element of a part. The memory brings
 * BYTES_OF_A_US bytes of the keys. */
static const double US_FIRST = 12, US_NEXT = 2, US_COMBINE = 3, US_ELEMENT = 7e-6, US_PART = 0.03,
                    US_ELEMENT_OF_PART = 2e-6, US_SHORTEST_STEP = 0.45, BYTES_OF_A_US = 2.6e6;

/* Microseconds of an SM for a row and a key, without a limit of power. In one chunk of columns the exponentials take
 * longer than the products. */
double fa_us_of_a_pair(const fa_fwd_sm90_columns *t) {
    const double products = 0.6e-6 * (double)round_up(t->d, CHUNK), exponentials = 55e-6;
    /* Where tiles are few, no other CTA of the SM hides the waits of one. */
    const int cost = t->ctas > 1 && t->short_cost > t->cost ? t->short_cost : t->cost;
    return (products > exponentials ? products : exponentials) * cost / 100;
}

/* Microseconds of an SM for a key and a whole work tile. Copies of single keys may take longer than the products
 * (cuda/measurements/decode.md, Single keys). Pairs of ALiBi as a mod take OF_MODS times as long as others. */
static double us_of_a_key(const fa_problem *p, const fa_fwd_sm90_columns *t) {
    const double OF_MODS = 1.6;
    const double rows = (double)(FA_ROWS_OF_A_WARPGROUP * t->wgs) * (fa_has_mods(p) ? OF_MODS : 1);
    const double pairs = rows * fa_us_of_a_pair(t);
    const double copies = fa_loads_single_keys(p) ? 7.7e-3 + 34e-6 * (double)(p->d + p->d_v) : 0;
    return pairs > copies ? pairs : copies;
}

/* Short pages come with all columns of their keys in one box of TMA, because many small boxes take longer than the
 * products. Boxes of 32 keys and more do not bind (cuda/measurements/decode.md, Prompts). */
static bool loads_whole_keys(const fa_problem *p, unsigned features) {
    enum { LONG = 32 };
    const unsigned wanted = (features & FA_ALL_FEATURES) | FA_WHOLE_KEYS;
    if (!p->paged || fa_loads_single_keys(p) || fa_cache_box(p, LONG) == LONG || !fa_has_groups(p)) return false;
    for (int row = 0; row < fa_families[FA_FWD_SM90].num_rows; row++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row);
        const unsigned serves = fa_families[FA_FWD_SM90].rows[row].serves;
        if (t->d == p->d && t->d_v == p->d_v && (serves & wanted) == wanted) return true;
    }
    return false;
}

const fa_fwd_sm90_columns *fa_fwd_sm90_row_of_cache(const fa_problem *p) {
    const unsigned wanted = fa_loads_single_keys(p) ? FA_SINGLE_KEYS : FA_CACHE;
    for (int row = 0; row < fa_families[FA_FWD_SM90].num_rows; row++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row);
        if (t->d >= p->d && t->d_v >= p->d_v && fa_families[FA_FWD_SM90].rows[row].serves & wanted) return t;
    }
    return NULL;
}

double fa_us_of_cache(const fa_problem *p) {
    const double rows = (double)(p->b * p->h_kv) * (double)fa_cache_pages_of(p).capacity;
    return rows * (double)(p->d + p->d_v) * (double)fa_dtype_bytes(p->dtype) / BYTES_OF_A_US;
}

/* How a call over a cache is cut into work tiles. */
typedef struct {
    int heads; /* query heads of one key head that share a work tile */
    int parts; /* of the keys of a work tile */
    double us; /* as fa_us_of_fwd_sm90 */
} cache_tiles;

/* A call over a cache in work tiles of a row of the table, which `heads` heads share. */
typedef struct {
    int64_t tiles, key_tiles, width; /* work tiles of the batch; key tiles of the capacity; SMs */
    double us_of_key_tile;           /* of an SM for a work tile */
    double us_of_memory;             /* to read all keys */
    double us_of_parts, us_of_part;  /* to combine parts: beside them, and for each */
} cut;

/* Packed sequences count as many work tiles as they have on average. */
static cut cut_of(const fa_problem *p, const fa_fwd_sm90_columns *t, int64_t heads, int sms) {
    const int64_t block_q = FA_ROWS_OF_A_WARPGROUP * t->wgs, rows = block_q / heads;
    const int64_t q_tiles = p->cu_seqlens_q ? p->total_q / rows + p->b : p->b * ceil_div(p->len_q, rows);
    const double elements = (double)(p->total_q * p->h) * (double)p->d_v;
    const double us_of_step = (double)t->block_kv * us_of_a_key(p, t);
    return (cut){.tiles = p->h / heads * q_tiles,
                 .key_tiles = (fa_cache_pages_of(p).capacity - 1) / t->block_kv + 1,
                 .width = sms > 0 ? sms : 1,
                 .us_of_key_tile = us_of_step > US_SHORTEST_STEP ? us_of_step : US_SHORTEST_STEP,
                 .us_of_memory = fa_us_of_cache(p),
                 .us_of_parts = US_COMBINE + US_ELEMENT * elements,
                 .us_of_part = US_PART + US_ELEMENT_OF_PART * elements};
}

/* Of work and memory the shorter one overlaps with the longer one, but for a fifth at the begin and the end. */
static double us_of(const cut *x, int64_t parts) {
    const int64_t rounds = ceil_div(x->tiles * parts, x->width), steps = ceil_div(x->key_tiles, parts);
    const double work = (double)rounds * (US_NEXT + (double)steps * x->us_of_key_tile) - US_NEXT;
    const double most = work > x->us_of_memory ? work : x->us_of_memory, least = work + x->us_of_memory - most;
    return US_FIRST + most + least / 5 + (parts > 1 ? x->us_of_parts + x->us_of_part * (double)parts : 0);
}

/* The most parts that a call may have. The rows of all parts are counted in 32 bits. Parts of packed sequences would be
 * combined without knowing where the sequences end. */
static int64_t most_parts(const fa_problem *p, int64_t key_tiles) {
    enum { MOST_ROWS = 1 << 28 };
    const int64_t rows = p->total_q * p->h;
    int64_t most = !fa_reads_cache(p) || p->cu_seqlens_q || rows == 0 ? 1 : MOST_ROWS / rows;
    if (most > key_tiles) most = key_tiles;
    return most < 1 ? 1 : most < FA_MAX_PARTS ? most : FA_MAX_PARTS;
}

/* Few tiles are cut into as many parts as fill the SMs once, or a few times. */
static cache_tiles best_parts(const fa_problem *p, const fa_fwd_sm90_columns *t, int64_t heads, int sms) {
    enum { MOST_ROUNDS = 4 };
    const cut x = cut_of(p, t, heads, sms);
    const int64_t most = most_parts(p, x.key_tiles);
    cache_tiles best = {(int)heads, 1, us_of(&x, 1)};
    for (int64_t rounds = 1; rounds <= MOST_ROUNDS && x.tiles > 0 && best.parts < most; rounds++) {
        const int64_t wanted = rounds * x.width / x.tiles;
        if (wanted <= 1) continue;
        const int64_t steps = ceil_div(x.key_tiles, wanted < most ? wanted : most),
                      parts = ceil_div(x.key_tiles, steps);
        const double us = us_of(&x, parts);
        if (us < best.us) best = (cache_tiles){(int)heads, (int)parts, us};
    }
    return best;
}

/* For num_splits = n the rows of one sequence and key head decide. The rows of a strip raise their maximum together,
 * and bits must not depend on the batch. They do where all parts together would have more than 2^28 rows. */
static cache_tiles given_parts(const fa_problem *p, const fa_fwd_sm90_columns *t, int64_t heads) {
    const cut x = cut_of(p, t, heads, 1);
    const int64_t block_q = FA_ROWS_OF_A_WARPGROUP * t->wgs, most = most_parts(p, x.key_tiles);
    const int64_t group = p->h_kv > 0 ? p->h / p->h_kv : 1, rows = round_up(p->len_q, block_q / heads) * group;
    return (cache_tiles){(int)heads, (int)(p->num_splits < most ? p->num_splits : most),
                         (double)rows / (double)block_q * us_of_a_key(p, t)};
}

/* Few queries would leave most rows of a work tile empty. So heads of one key head share it, as few as save time. A row
 * strip has 16 rows. */
static cache_tiles tiles_of_cache(const fa_problem *p, const fa_fwd_sm90_columns *t, int sms) {
    enum { STRIP = 16 };
    const int64_t block_q = FA_ROWS_OF_A_WARPGROUP * t->wgs, group = p->h_kv > 0 ? p->h / p->h_kv : 1;
    const bool is_given = p->num_splits > 0 && !p->cu_seqlens_q;
    const int64_t most_heads = fa_reads_cache(p) ? group : 1;
    cache_tiles best = {1, 1, HUGE_VAL};
    for (int64_t heads = 1; heads <= most_heads && STRIP * heads <= block_q; heads++) {
        if (group % heads || block_q % (STRIP * heads)) continue;
        const cache_tiles x = is_given ? given_parts(p, t, heads) : best_parts(p, t, heads, sms);
        if (x.us < best.us) best = x;
    }
    return best;
}

/* A dense call has few work tiles over many keys. Its time depends on how many SMs have a work tile. An H100 takes for
 * one sequence of 1024 queries and keys, 8 heads of 128 columns, causal, 23.5 us with tiles of 128 rows and 20.0 with
 * tiles of 64 (cuda/measurements/decode.md, Few work tiles). */
static bool has_few_tiles(const fa_problem *p, int sms) {
    enum { MANY_KEYS = 512, ROWS = 64, OF_SM = 4 };
    return p->num_splits == 0 && !p->cu_seqlens_q && !p->cu_seqlens_k && p->len_kv >= MANY_KEYS && p->h > 0 &&
           !fa_has_more_than_mods(p) && p->b * p->h * ceil_div(p->len_q, ROWS) <= OF_SM * (int64_t)sms;
}

/* The length that decides for packed sequences, of which the host knows the longest one and the mean. That is the mean,
 * unless some are so much longer that most of the work is theirs: it grows with the square of a length. */
static int64_t usual_length(int64_t longest, int64_t total, int64_t b) {
    enum { ALIKE = 4 };
    const int64_t mean = b > 0 ? total / b : longest;
    return mean < longest && longest <= ALIKE * mean ? mean : longest;
}

/* How many rows or keys are computed of a sequence, in tiles of so many. Packed sequences end amid tiles. */
static int64_t computed(int64_t longest, int64_t usual, int64_t of_tile) {
    const int64_t most = round_up(longest, of_tile), of_usual = usual + of_tile / 2;
    return usual < longest && of_usual < most ? of_usual : most;
}

/* Returns the cost of a sequence with this row's tiles, or the time of a call over a cache or of few tiles, whose cut
 * goes to *tiles. A tile is
 * computed as a whole. So is a step over keys, which matters with few keys. Short sequences wait for memory rather than
 * for products.
 * They wait longest if a step needs more keys. An H100 with 64 sequences, 16 heads and head_dim 64 takes, for rows and
 * keys a step:
 *   length 100: 36.7 us with 192 rows and 128 keys, 29.3 with 128 rows and 64 keys;
 *   length 192: 49.5 us with 192 rows and 128 keys, 47.2 with 256 rows and 64 keys.
 * At head_dim 128 it takes, with 16 heads, 128 rows, and 128 or 64 keys a step:
 *   4 sequences of 4096 queries: 77 keys 74.7 and 58.7 us, 128 keys 73.0 and 58.5, 256 keys 82.0 and 89.3;
 *   80 sequences of length 200:  109.2 and 113.6 us.
 * Two CTAs of 128 rows on an SM hide each other's waits (cuda/measurements/forward.md, Two CTAs of an SM).
 * Rows that begin amid sectors of 32 bytes are loaded slowly. With long sequences loads then bind tiles of 128 rows. */
static double cost_of(const fa_problem *p, const fa_fwd_sm90_columns *t, int sms, cache_tiles *tiles) {
    enum { FEW_KEYS = 128, SHORT = 256 * 64, LONG = 512, IN_SECTORS = 16 }; /* SHORT: elements of a head's keys */
    const bool has_few = has_few_tiles(p, sms);
    *tiles = fa_reads_cache(p) || has_few ? tiles_of_cache(p, t, sms) : (cache_tiles){1, 1, HUGE_VAL};
    if (fa_reads_cache(p)) return tiles->us;
    const bool is_slow = (p->d % IN_SECTORS || p->d_v % IN_SECTORS) && p->len_kv > LONG && t->wgs < 3;
    if (has_few) return tiles->us * (is_slow ? 1.3 : 1);
    const int64_t usual_q = p->cu_seqlens_q ? usual_length(p->len_q, p->total_q, p->b) : p->len_q;
    const int64_t usual_kv = p->cu_seqlens_k ? usual_length(p->len_kv, p->total_kv, p->b) : p->len_kv;
    const int64_t rows = computed(p->len_q, usual_q, FA_ROWS_OF_A_WARPGROUP * t->wgs);
    const int64_t keys = computed(p->len_kv, usual_kv, t->block_kv);
    const int cost = usual_kv * round_up(t->d, CHUNK) <= SHORT ? t->short_cost : t->cost;
    return (double)(rows * (keys < FEW_KEYS ? keys : FEW_KEYS) * cost) * (is_slow ? 1.3 : 1);
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
    const int64_t most_tiles = plan->num_splits * heads * (p->cu_seqlens_q ? p->total_q / rows + p->b : q_tiles * p->b);
    plan->gpu.group_heads = heads_in_group(p);
    plan->gpu.is_dynamic = is_dynamic(p, q_tiles, most_tiles, ctas);
    plan->gpu.num_ctas = p->total_q > 0 ? (int)(most_tiles < ctas ? most_tiles : ctas) : 0;
}

/* ---- the row of the table -------------------------------------------------------------------------------------- */

/* Returns NULL if a row's tiles serve the call, or the reason why not. */
static const char *why_not_row(const fa_problem *p, int row, unsigned features) {
    const unsigned wanted = features & (FA_ALL_FEATURES | FA_CACHE | FA_SINGLE_KEYS | FA_WHOLE_KEYS | FA_FLEX);
    const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row);
    const int box = fa_fwd_sm90_box(t);
    NEEDS(t->d >= p->d && t->d_v >= p->d_v, "its tiles have fewer columns than the heads");
    NEEDS(!p->cu_seqlens_q || (fa_fills_boxes(p->d, t->d, box) && fa_fills_boxes(p->d_v, t->d_v, box)),
          FA_BOXES_REASON);
    NEEDS(box > 32 || (p->d % 16 == 0 && p->d_v % 16 == 0),
          "TMA is slow with its pieces of 64 bytes where rows begin amid sectors of 32");
    NEEDS(!(features & FA_WHOLE_KEYS) || (t->d == p->d && t->d_v == p->d_v),
          "its tiles have more columns than the heads, and TMA fills no columns of a box with whole keys");
    NEEDS((fa_families[FA_FWD_SM90].rows[row].serves & wanted) == wanted,
          "its tiles do not serve every option of the call");
    return NULL;
}

static unsigned features_of(const fa_problem *p) {
    const unsigned features = fa_cuda_features(p);
    unsigned of_cache = fa_reads_cache(p) ? FA_CACHE : 0u;
    if (of_cache && fa_loads_single_keys(p))
        of_cache |= FA_SINGLE_KEYS;
    else if (of_cache && loads_whole_keys(p, features))
        of_cache |= FA_WHOLE_KEYS;
    return features | of_cache | (fa_has_mods(p) ? FA_FLEX : 0u);
}

/* A row of the table, or -1, and how its work tiles are cut over a cache or where they are few. */
typedef struct {
    int row;
    cache_tiles tiles;
} choice;

/* Returns the row that costs least. The first row that serves the call says how many chunks of columns it needs. Rows
 * of as many chunks are compared. `known`: the choice, if it was made before. The plan, if there is one, takes down why
 * rows are ruled out. */
static choice choose_row(const fa_problem *p, unsigned features, int sms, const choice *known, fa_plan *plan) {
    const fa_family *family = &fa_families[FA_FWD_SM90];
    choice best = {0};
    for (const char *why; best.row < family->num_rows && (why = why_not_row(p, best.row, features)); best.row++)
        if (plan) fa_rule_out(plan, family->rows[best.row].name, why);
    if (best.row == family->num_rows) return (choice){.row = -1};
    const fa_fwd_sm90_columns *first = fa_fwd_sm90_row(best.row);
    double least = known ? 0 : cost_of(p, first, sms, &best.tiles);
    for (int row = best.row + 1; row < family->num_rows; row++) {
        const fa_fwd_sm90_columns *t = fa_fwd_sm90_row(row);
        if (ceil_div(t->d, CHUNK) != ceil_div(first->d, CHUNK) ||
            ceil_div(t->d_v, CHUNK) != ceil_div(first->d_v, CHUNK))
            continue;
        if (why_not_row(p, row, features)) continue;
        if (!(features & FA_FLEX) && !family->chooses(row, features)) continue; /* as the lists of kernels say */
        choice other = {.row = row};
        const double cost = known ? 0 : cost_of(p, t, sms, &other.tiles);
        const bool is_better = known ? row == known->row : cost < least;
        if (plan)
            fa_rule_out(plan, family->rows[is_better ? best.row : row].name,
                        "its tiles cost more for these lengths and head dimensions");
        if (is_better) best = other, least = cost;
    }
    return known ? *known : best;
}

/* Microseconds of the call with the chosen row. */
static double us_of_choice(const fa_problem *p, choice x, int sms) {
    if (x.row < 0) return HUGE_VAL;
    return x.tiles.us < HUGE_VAL ? x.tiles.us : tiles_of_cache(p, fa_fwd_sm90_row(x.row), sms).us;
}

/* Few queries over many keys leave rows of a work tile empty, and SMs without a work tile. If it is faster, the keys of
 * a dense call count as a cache: heads share work tiles, and keys are cut into parts. Returns the problem to plan, p or
 * *changed, and its row where that was chosen on the way (else -1). NOTE: most calls must leave early, because the host
 * plans each call. */
static const fa_problem *as_planned(const fa_problem *p, int sms, fa_problem *changed, choice *made) {
    made->row = -1;
    if (fa_reads_cache(p) || !has_few_tiles(p, sms) || p->dropout_p > 0 || p->wants_s_dmask || p->pass != FA_FWD)
        return p;
    *changed = *p;
    changed->is_whole_cache = true;
    *made = choose_row(p, features_of(p), sms, NULL, NULL);
    const choice other = choose_row(changed, features_of(changed), sms, NULL, NULL);
    if (us_of_choice(changed, other, sms) >= 0.95 * us_of_choice(p, *made, sms) || fa_why_not_cache_of_sm90(changed))
        return p;
    *made = other;
    return changed;
}

double fa_us_of_fwd_sm90(const fa_problem *problem, int sms) {
    fa_problem changed;
    choice made;
    const fa_problem *p = as_planned(problem, sms, &changed, &made);
    if (made.row < 0) made = choose_row(p, features_of(p), sms, NULL, NULL);
    return us_of_choice(p, made, sms);
}

/* ---- the plan -------------------------------------------------------------------------------------------------- */

/* `known`: the row, if it was chosen before. */
static const char *plan_fwd(const fa_problem *p, const fa_machine *machine, const choice *known, fa_plan *plan) {
    enum { WIDEST = 256 };
    const bool reads_cache = fa_reads_cache(p);
    const unsigned features = features_of(p);
    const bool packed = p->cu_seqlens_q != NULL;
    const int64_t batches = packed ? 1 : p->b;
    const char *why =
        fa_why_not_of_3(p, FA_OTHER_D_V | FA_CHUNKS | FA_USED_Q | (reads_cache ? FA_MIXED | FA_OTHER_NEW : 0));
    if (!why && reads_cache) why = fa_why_not_cache_of_sm90(p);
    if (!why && !reads_cache && fa_prefers_key_parts(p))
        why = "a generic kernel cuts the many keys of the few queries into parts";
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

    const choice found = choose_row(p, features, machine->gpu_sms, known, plan);
    const int row = found.row;
    NEEDS(row >= 0, "it has no tile for these head dimensions");
    plan->gpu.family = FA_FWD_SM90;
    plan->gpu.row = row;
    plan->gpu.features = features;
    if (reads_cache) plan->workspace_bytes = fa_rotated_q_bytes(p);
    plan->block_q = FA_ROWS_OF_A_WARPGROUP * fa_fwd_sm90_row(row)->wgs;
    plan->block_kv = fa_fwd_sm90_row(row)->block_kv;
    plan->gpu.tile_heads = 1;
    if (reads_cache) {
        plan->gpu.tile_heads = found.tiles.heads, plan->num_splits = found.tiles.parts;
        if (plan->num_splits > 1) plan->workspace_bytes = fa_key_parts_at(p) + fa_key_parts_bytes(p, plan->num_splits);
    }
    if (features & FA_FLEX) {
        if ((why = fa_plan_mask_of_sm90(p, plan)) != NULL) return why;
        if (!reads_cache)
            plan->workspace_bytes = fa_block_walks_at(p) + fa_block_walks_bytes(p, plan) + fa_hidden_bytes(p, plan);
        fa_plan_mods(p, plan);
    }
    fa_plan_fwd_order(p, (int64_t)machine->gpu_sms * fa_fwd_sm90_row(row)->ctas, plan);
    return NULL;
}

const char *fa_plan_fwd_sm90(const fa_problem *problem, const fa_machine *machine, fa_plan *plan) {
    fa_problem changed;
    choice made;
    const fa_problem *p = as_planned(problem, machine->gpu_sms, &changed, &made);
    if (!fa_gathers(p, machine)) return plan_fwd(p, machine, made.row < 0 ? NULL : &made, plan);
    const fa_problem gathered = fa_gathered(p, NULL);
    const char *why = plan_fwd(&gathered, machine, NULL, plan);
    if (why) return why;
    plan->gpu.gathers = true;
    plan->workspace_bytes = (plan->workspace_bytes + 255) / 256 * 256 + fa_gather_bytes(p);
    return NULL;
}
