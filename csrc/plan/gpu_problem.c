/* Questions of the GPU planners about a problem. */
#include "gpu_problem.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/cuda_flex.h"
#include "flex/flex.h"
#include "flex/pairs.h"
#include "flex/scatters.h"
#include "flex/source_words.h"
#include "flex/wide.h"
#include "sequence.h"
#include "system/hash.h"

static bool is_scaled_plainly(const fa_problem *p) { return p->scale >= 1e-37; }
bool fa_changes_scores(const fa_problem *p) { return p->softcap > 0 || p->alibi_slopes || !is_scaled_plainly(p); }

bool fa_has_alibi_alone(const fa_problem *p) {
    return p->alibi_slopes && !(p->softcap > 0) && !(p->dropout_p > 0) && !p->flex && is_scaled_plainly(p);
}

const char *fa_why_not_of_3(const fa_problem *p, unsigned knows) {
    const struct {
        unsigned addition;
        bool is_wanted;
        const char *why;
    } additions[] = {
        {FA_OTHER_D_V, p->d_v != p->d, "it takes v with as many columns as k"},
        {FA_QV, p->qv.data != NULL, "it takes no qv"},
        {FA_CHUNKS, p->attention_chunk > 0, "it has no attention_chunk"},
        {FA_USED_Q, p->seqused_q != NULL, "it reads no seqused_q"},
        {FA_E4M3_IN, p->dtype == FA_E4M3, "it takes no float8_e4m3fn"},
        {FA_MIXED, (p->cu_seqlens_q != NULL) != (p->cu_seqlens_k != NULL), "it takes no packed queries beside a cache"},
        {FA_OTHER_NEW, p->cu_seqlens_k_new || p->seqlens_rotary,
         "it takes no packed new keys and no rotary positions of their own"},
    };
    for (size_t i = 0; i < sizeof additions / sizeof *additions; i++)
        if (additions[i].is_wanted && !(knows & additions[i].addition)) return additions[i].why;
    return NULL;
}

unsigned fa_cuda_features(const fa_problem *p) {
    const bool windowed = p->window_left >= 0 || p->window_right >= 0 || p->attention_chunk > 0;
    const bool is_causal = p->window_left < 0 && p->window_right == 0 && p->attention_chunk == 0;
    return (is_causal  ? FA_CAUSAL
            : windowed ? FA_LOCAL
                       : 0u) |
           (p->cu_seqlens_q ? FA_VARLEN : 0u) | (fa_changes_scores(p) ? FA_SCORE : 0u) |
           (p->dropout_p > 0 ? FA_DROPOUT : 0u) | fa_dtype_feature(p->dtype);
}

unsigned fa_any_features(const fa_problem *p) {
    const bool is_of_3 = (p->pass == FA_FWD && p->of_3) || fa_why_not_of_3(p, 0);
    const unsigned of_flex = FA_OF_3 | FA_FLEX | (p->dropout_p > 0 ? FA_DROPOUT : 0u);
    return fa_dtype_feature(p->dtype) | (p->flex ? of_flex : is_of_3 ? FA_OF_3 : 0u);
}

enum { LARGEST_TILE = 1024 }; /* rows that a tile may have behind the end of its sequence */

static const fa_flex_program *program_of(const fa_flex_bound *bound) { return bound ? bound->program : NULL; }

/* Shared memory has room for what the pairs of a step read where a step has few rows and columns. */
static bool is_bwd_with_room(const fa_plan *plan) {
    if (!plan || plan->gpu.family != FA_BWD_SM90) return false;
    const fa_bwd_sm90_columns *t = fa_bwd_sm90_row(FA_BWD_SM90, plan->gpu.row);
    return t->d <= 64 && t->block_q <= 64;
}

fa_mods fa_mods_of(const fa_problem *p, const fa_plan *plan) {
    const fa_flex *flex = p->flex;
    const bool has_hidden = plan && plan->gpu.has_hidden;
    /* The generic kernel has the row maximum at hand, and looks when it runs whether the maximum is wanted. */
    const bool has_max = plan && plan->gpu.family == FA_FWD_SM90 && flex->max_scores.data;
    const fa_flex_bound *mask = has_hidden ? NULL : flex->mask;
    const fa_flex_bound *bounds[] = {flex->score, mask, p->pass == FA_BWD ? flex->derivative : NULL};
    const int64_t heads = p->b > p->h ? p->b : p->h, rows = p->len_q > p->len_kv ? p->len_q : p->len_kv;
    fa_mods mods = {.score = program_of(bounds[0]),
                    .mask = program_of(bounds[1]),
                    .derivative = program_of(bounds[2]),
                    .text = {.has_hidden = has_hidden, .has_max = has_max}};
    const int64_t most = flex->q_offset ? INT32_MAX : (heads > rows ? heads : rows) + LARGEST_TILE;
    for (int i = 0; i < 3; i++) mods.text.is_wide |= bounds[i] && fa_flex_is_wide(bounds[i], most);
    /* Hopper's kernels have a shorter text without a block mask. Without a function, one kernel serves both. */
    const bool has_functions = bounds[0] || bounds[1] || bounds[2];
    mods.text.no_blocks = has_functions && flex->block_q == 0 && plan && fa_families[plan->gpu.family].arch == 90;
    mods.text.has_pairs = plan && plan->gpu.family == FA_FWD_SM90 && !mods.text.is_wide && flex->score &&
                          fa_flex_has_pairs(flex->score, p->len_kv);
    const bool takes_octets = mods.text.has_pairs || (is_bwd_with_room(plan) && !mods.text.is_wide);
    mods.text.has_octets = takes_octets && flex->score && fa_flex_has_octets(flex->score, p->len_kv);
    /* Loads behind the branch to the exponents would come late (cuda/measurements/backward.md). */
    mods.text.has_exponent = plan && plan->gpu.family == FA_FWD_SM90 && flex->score && !has_max &&
                             !fa_loads_beside_pair(flex->score->program);
    return mods;
}

uint64_t fa_mods_hash(const fa_mods *mods) {
    const fa_flex_program *programs[] = {mods->score, mods->mask, mods->derivative};
    const fa_flex_text text = mods->text;
    uint64_t hashes[4] = {0, 0, 0,
                          text.is_wide + 2 * text.has_hidden + 4 * text.has_max + 8 * text.no_blocks +
                              16 * (uint64_t)text.has_pairs + 32 * (uint64_t)text.has_octets +
                              64 * (uint64_t)text.has_exponent};
    bool has_mods = text.has_hidden || text.has_max;
    for (int i = 0; i < 3; i++)
        if (programs[i]) hashes[i] = programs[i]->hash, has_mods = true;
    return has_mods ? fa_hash(0, hashes, sizeof hashes) : 0;
}

bool fa_wants_capture_gradients(const fa_problem *p) {
    if (!p->flex || !p->flex->derivative || !p->flex->gradients) return false;
    for (int i = 0; i < p->flex->derivative->program->num_captures; i++)
        if (p->flex->gradients[i]) return true;
    return false;
}

size_t fa_block_map_bytes(const fa_problem *p) {
    const fa_flex *flex = p->flex;
    return flex && flex->block_q > 0 ? (size_t)(flex->mask_b * flex->mask_h * flex->rows * flex->columns) : 0;
}

/* TMA copies hidden pairs, which lie behind. */
static size_t align_16(size_t bytes) { return (bytes + 15) / 16 * 16; }

size_t fa_block_walks_bytes(const fa_problem *p, const fa_plan *plan) {
    const int64_t q_tiles = (p->len_q + plan->block_q - 1) / plan->block_q;
    const int64_t kv_tiles = (p->len_kv + plan->block_kv - 1) / plan->block_kv;
    const bool owns_keys = p->pass == FA_BWD;
    const int64_t own = owns_keys ? kv_tiles : q_tiles, other = owns_keys ? q_tiles : kv_tiles;
    const int64_t ranks = owns_keys ? other * (own + 1) : 0;
    if (fa_block_map_bytes(p) == 0) return 0;
    return align_16((size_t)(p->flex->mask_b * p->flex->mask_h * (own * (1 + other + 2) + ranks)) * sizeof(int32_t));
}

static bool reads(const fa_flex_bound *bound, fa_flex_op op) {
    for (int32_t i = 0; bound && i < bound->program->num_instructions; i++)
        if (bound->program->instructions[i].op == (uint8_t)op) return true;
    return false;
}

/* A long problem may take as much memory again as its q, k, v and out. These count as copies with aligned rows
 * (gpu_align.h), so that a problem has the limit of its copies. */
static int64_t most_hidden_bytes(const fa_problem *p) {
    const int64_t least = (int64_t)128 << 20, rows = p->b * (p->h * p->len_q + p->h_kv * p->len_kv);
    const int64_t bytes = rows * ((p->d + 7) / 8 * 8 + (p->d_v + 7) / 8 * 8) * 2;
    return bytes > least ? bytes : least;
}

size_t fa_hidden_bytes(const fa_problem *p, const fa_plan *plan) {
    enum { MOST_TILES = 1 << 14 }; /* of each side: four times a pair of tiles is an int */
    const fa_flex *flex = p->flex;
    if (fa_block_map_bytes(p) == 0 || flex->q_offset) return 0; /* an offset belongs to a batch, and not to a mask */
    if ((reads(flex->mask, FA_FLEX_b) && flex->mask_b < p->b) || (reads(flex->mask, FA_FLEX_h) && flex->mask_h < p->h))
        return 0;
    const int64_t own_tile = p->pass == FA_BWD ? plan->block_kv : plan->block_q;
    const int64_t other_tile = p->pass == FA_BWD ? plan->block_q : plan->block_kv;
    const int64_t own = ((p->pass == FA_BWD ? p->len_kv : p->len_q) + own_tile - 1) / own_tile;
    const int64_t other = ((p->pass == FA_BWD ? p->len_q : p->len_kv) + other_tile - 1) / other_tile;
    const int64_t bytes_of_pair = (FA_HIDDEN_WORDS(other_tile) * 2 * own_tile + 1) * (int64_t)sizeof(int32_t);
    const int64_t masks = flex->mask_b * flex->mask_h;
    const int64_t room = most_hidden_bytes(p) / bytes_of_pair / masks;
    return own <= MOST_TILES && other <= MOST_TILES && own * other <= room
               ? (size_t)(masks * (own * other * bytes_of_pair + (int64_t)sizeof(int32_t)))
               : 0;
}

const char *fa_why_not_blocks(const fa_problem *p) {
    const fa_flex *flex = p->flex;
    const int64_t most = 1 << 30;
    if (flex->block_q > 0 && (flex->mask_b > most || flex->mask_h > most || flex->rows > most || flex->columns > most))
        return "it counts blocks up to 2^30";
    return NULL;
}

bool fa_has_masks_in_groups(const fa_problem *p) {
    return p->h > p->h_kv && p->flex && p->flex->block_q > 0 && p->flex->mask_h > 1;
}

/* The fewest keys of a part. Tests have less. */
#ifndef FA_KEYS_OF_PART
#define FA_KEYS_OF_PART 512
#endif

bool fa_has_key_parts(const fa_problem *p) {
    enum { MOST_ROWS = 64 };
    const int64_t rows = p->lse.stride_h, of_b = p->lse.stride_b;
    return p->pass == FA_FWD && fa_has_mods(p) && !p->flex->max_scores.data && p->len_q > 0 && p->len_q <= MOST_ROWS &&
           p->len_kv >= 4 * FA_KEYS_OF_PART && p->d_v > 0 && p->d_v <= FA_MAX_HEAD_DIM &&
           (rows == p->len_q || p->h == 1) && (of_b == p->h * p->len_q || p->b == 1) && p->lse.stride_row <= 1;
}

bool fa_prefers_key_parts(const fa_problem *p) {
    enum { FEW_HEADS = 32 };
    return fa_has_key_parts(p) && p->b * p->h <= FEW_HEADS;
}

int fa_num_key_parts(const fa_problem *p, const fa_machine *machine) {
    enum { MOST_PARTS = 64, CTAS_OF_SM = 2 };
    if (!fa_has_key_parts(p) || p->b * p->h == 0) return 1;
    const int64_t wanted = CTAS_OF_SM * machine->gpu_sms / (p->b * p->h), most = p->len_kv / FA_KEYS_OF_PART;
    const int64_t parts = wanted < most ? wanted : most;
    return parts < 1 ? 1 : parts < MOST_PARTS ? (int)parts : MOST_PARTS;
}

size_t fa_key_parts_at(const fa_problem *p) {
    return (fa_rotated_q_bytes(p) + fa_block_map_bytes(p) + 255) / 256 * 256;
}

size_t fa_key_parts_bytes(const fa_problem *p, int num_parts) {
    return sizeof(float) * (size_t)(num_parts * p->b * p->h * p->len_q * (1 + p->d_v));
}

bool fa_wants_exact_sums(const fa_problem *p) { return p->deterministic && fa_wants_capture_gradients(p); }

size_t fa_exact_sums_at(const fa_problem *p) { return (fa_block_map_bytes(p) + 255) / 256 * 256; }

int64_t fa_count_capture(const fa_flex_bound *bound, int32_t capture) {
    int64_t num = 1;
    for (int dim = 0; dim < bound->program->captures[capture].rank; dim++) num *= bound->captures[capture].size[dim];
    return num;
}

size_t fa_exact_sums_bytes(const fa_problem *p) {
    int64_t num = 0;
    for (int32_t i = 0; i < p->flex->derivative->program->num_captures; i++)
        if (p->flex->gradients[i]) num += fa_count_capture(p->flex->derivative, i);
    return (size_t)num * sizeof(fa_cuda_exact_sum);
}

int fa_exact_sums_digits(const fa_problem *p) {
    const double pairs = (double)p->b * (double)p->h * (double)p->len_q * (double)p->len_kv;
    int digits = 62;
    for (double most = 1; most < pairs; most *= 2) digits--;
    return digits;
}

bool fa_has_mods(const fa_problem *p) {
    return p->flex && (p->flex->score || p->flex->mask || p->flex->block_q > 0 || p->flex->max_scores.data);
}

/* Does a value depend on nothing but b and h? */
static bool is_of_head(const fa_flex_program *p, int32_t idx) {
    return (p->instructions[idx].depends & ~(FA_FLEX_ON_B | FA_FLEX_ON_H)) == 0;
}

/* A division of integers by a number that all pairs share is a multiplication and some shifts. */
static bool has_shared_divisor(const fa_flex_program *p, const fa_flex_instruction *x) {
    return x->result == FA_FLEX_I64 && is_of_head(p, x->operand[1]);
}

/* A step computes the functions for 64 scores of a thread, in code without a loop. Long functions would take minutes to
 * compile, and would spill: a product of 16 captured pairs took 26 s. */
static bool is_short(const fa_flex_bound *bound) {
    enum { MOST = 64, CALL = 16, DOUBLE = 8, SCATTER = 8, DIVISION = 8, RATIO = 2 };
    int weight = 0;
    for (int32_t i = 0; bound && i < bound->program->num_instructions; i++) {
        const fa_flex_instruction *x = &bound->program->instructions[i];
        switch ((fa_flex_op)x->op) {
        case FA_FLEX_constant:
        case FA_FLEX_param:
        case FA_FLEX_b:
        case FA_FLEX_h:
        case FA_FLEX_q_idx:
        case FA_FLEX_kv_idx:
        case FA_FLEX_score: break;
        case FA_FLEX_add:
        case FA_FLEX_sub:
        case FA_FLEX_mul:
        case FA_FLEX_neg:
        case FA_FLEX_abs:
        case FA_FLEX_minimum:
        case FA_FLEX_maximum:
        case FA_FLEX_eq:
        case FA_FLEX_ne:
        case FA_FLEX_lt:
        case FA_FLEX_le:
        case FA_FLEX_where:
        case FA_FLEX_bit_and:
        case FA_FLEX_bit_or:
        case FA_FLEX_bit_xor:
        case FA_FLEX_bit_not:
        case FA_FLEX_shift_left:
        case FA_FLEX_shift_right:
        case FA_FLEX_convert: weight += x->result == FA_FLEX_F64 ? DOUBLE : 1; break;
        case FA_FLEX_gather: weight += 4; break;
        case FA_FLEX_scatter: weight += SCATTER; break;
        case FA_FLEX_divide:
            if (x->result == FA_FLEX_F32 && is_of_head(bound->program, x->operand[1])) {
                weight += RATIO;
                break;
            }
            /* fall through */
        case FA_FLEX_floor_divide:
        case FA_FLEX_remainder:
            if (has_shared_divisor(bound->program, x)) {
                weight += DIVISION;
                break;
            }
            /* fall through */
        default: weight += x->result == FA_FLEX_F64 ? DOUBLE * CALL : CALL;
        }
    }
    return weight <= MOST;
}

const char *fa_why_no_room_for_mods(const fa_problem *p, size_t parameter_bytes) {
    const fa_mods mods = fa_mods_of(p, NULL);
    const size_t values_bytes = fa_flex_values_bytes(mods.score, mods.mask, mods.derivative);
    NEEDS(parameter_bytes + sizeof(fa_cuda_flex) + values_bytes <= FA_MOST_PARAMETER_BYTES,
          "its parameters have no room for so many captured tensors and numbers");
    return NULL;
}

const char *fa_why_not_mods_of_sm90(const fa_problem *p, size_t parameter_bytes) {
    const char *why = fa_why_no_room_for_mods(p, parameter_bytes);
    if (why) return why;
    NEEDS(is_short(p->flex->score) && is_short(p->flex->derivative), FA_LONG_MODS_REASON);
    NEEDS(!fa_changes_scores(p), "with mods it wants a scale that is positive");
    return fa_why_not_blocks(p);
}

const char *fa_why_not_short_mods(const fa_problem *p, size_t parameter_bytes) {
    const char *why = fa_why_not_mods_of_sm90(p, parameter_bytes);
    if (why) return why;
    NEEDS(is_short(p->flex->mask), FA_LONG_MODS_REASON);
    return NULL;
}

const char *fa_plan_mask_of_sm90(const fa_problem *p, fa_plan *plan) {
    enum { MOST_WALKS_BYTES = 256 << 20 };
    NEEDS(fa_block_walks_bytes(p, plan) <= MOST_WALKS_BYTES, "its lists of tiles would take more than 256 MiB");
    plan->gpu.has_hidden = fa_hidden_bytes(p, plan) > 0;
    NEEDS(plan->gpu.has_hidden || is_short(p->flex->mask), FA_LONG_MODS_REASON);
    return NULL;
}

const char *fa_why_not_captures_of_sm90(const fa_problem *p) {
    enum { MOST_WIDE = 2 }; /* parts with a sum for each row or diagonal of a thread */
    if (!fa_wants_capture_gradients(p)) return NULL;
    NEEDS(!p->deterministic, FA_CAPTURES_ORDER_REASON);
    const fa_flex_program *derivative = p->flex->derivative->program;
    NEEDS(!fa_flex_places_read_score(derivative), "the score chooses an element of a captured tensor's gradient");
    fa_flex_trait *traits = fa_flex_traits(derivative);
    NEEDS(traits, "there is no memory to look at the gradients of captured tensors");
    int num_wide = 0;
    bool is_double = false;
    for (int32_t i = 0; i < derivative->num_instructions; i++) {
        const fa_flex_instruction *x = &derivative->instructions[i];
        if (!fa_flex_is_scatter(x)) continue;
        is_double |= x->result == FA_FLEX_F64;
        num_wide += traits[i].kind == FA_FLEX_OF_QUERY || traits[i].kind == FA_FLEX_OF_DIFFERENCE;
    }
    free(traits);
    NEEDS(!is_double, "it adds up gradients of captured tensors in fp32, and one of the tensors is fp64");
    NEEDS(num_wide <= MOST_WIDE, "it has no registers for so many gradients of captured tensors");
    return NULL;
}

void fa_plan_mods(const fa_problem *p, fa_plan *plan) {
    if (!p->flex) return;
    const fa_mods mods = fa_mods_of(p, plan);
    plan->gpu.mods = fa_mods_hash(&mods);
}

bool fa_is_flex_cache(const fa_problem *p) { return p->flex && (p->flex->q_offset || p->seqused_k || p->paged); }

bool fa_has_more_than_mods(const fa_problem *p) {
    return p->flex && (p->flex->block_q > 0 || p->flex->max_scores.data);
}

bool fa_reads_cache(const fa_problem *p) {
    const bool packed = p->cu_seqlens_q != NULL;
    return p->is_whole_cache || fa_is_flex_cache(p) || p->paged || p->leftpad_k || p->cache_batch_idx ||
           p->k_new.data || p->rotary_cos || (p->seqused_k && !packed) || (packed && !p->cu_seqlens_k);
}

fa_cache_pages fa_cache_pages_of(const fa_problem *p) {
    const bool has_rows = !p->cache_batch_idx || p->cache_rows > 0;
    const int64_t rows = p->cache_rows > p->b ? p->cache_rows : p->b;
    if (p->paged)
        return (fa_cache_pages){has_rows ? p->num_pages : 0, p->page_size, p->block_table_cols * p->page_size};
    return (fa_cache_pages){has_rows ? rows : 0, p->len_kv, p->len_kv};
}

int fa_cache_box(const fa_problem *p, int block_kv) {
    int64_t box = block_kv, rest = p->paged ? p->page_size : 0;
    while (rest != 0) {
        const int64_t next = box % rest;
        box = rest, rest = next;
    }
    return (int)box;
}

bool fa_loads_single_keys(const fa_problem *p) { return p->paged && fa_cache_box(p, 32) % FA_GROUP != 0; }

int64_t fa_groups_of_page(const fa_problem *p, const fa_view *t) {
    return (p->num_pages > 1 ? t->stride_b / t->stride_row : p->page_size) / FA_GROUP;
}

static bool of_groups(const fa_problem *p, const fa_view *t) {
    if (t->stride_row <= 0 || p->num_pages >= INT32_MAX) return false;
    if (p->num_pages > 1) {
        const int64_t rows = t->stride_b / t->stride_row; /* from a page to the next one */
        if (t->stride_b % t->stride_row || rows % FA_GROUP || rows < p->page_size) return false;
    }
    return fa_groups_of_page(p, t) < INT32_MAX / (p->num_pages + 1);
}

bool fa_has_groups(const fa_problem *p) { return p->num_pages > 0 && of_groups(p, &p->k) && of_groups(p, &p->v); }

/* Offsets count pieces of 16 bytes, and the last number stands for no key. */
static bool offsets_fit_32_bits(const fa_view *t, fa_cache_pages pages) {
    if (pages.num == 0 || pages.size == 0) return true;
    if (t->stride_b < 0 || t->stride_row < 0) return false;
    const double last =
        (double)(pages.num - 1) * (double)t->stride_b + (double)(pages.size - 1) * (double)t->stride_row;
    return last / 8 < UINT32_MAX - 1.0;
}

const char *fa_why_not_cache_of_sm90(const fa_problem *p) {
    enum { MOST = 1 << 30 };
    const fa_cache_pages pages = fa_cache_pages_of(p);
    if (p->flex) {
        NEEDS(p->flex->block_q == 0, "it takes no block mask beside a KV cache");
        NEEDS(!p->flex->max_scores.data, "it keeps no maximum of scores beside a KV cache");
        NEEDS(!fa_has_mods(p) || !fa_loads_single_keys(p), "with mods it wants pages of a multiple of 8 keys");
        NEEDS(p->len_q < MOST - LARGEST_TILE, "with mods it counts queries of a KV cache up to 2^30");
    }
    NEEDS(!(p->paged && p->leftpad_k), "it takes no left padding beside a block table");
    NEEDS(p->paged || !p->cu_seqlens_k || !fa_reads_cache(p),
          "of packed keys it takes no left padding, and no lengths beside dense queries");
    NEEDS(!fa_loads_single_keys(p) || (offsets_fit_32_bits(&p->k, pages) && offsets_fit_32_bits(&p->v, pages)),
          "it wants pages of a multiple of 8 keys, or pages within 64 GiB");
    NEEDS(pages.num < INT32_MAX && pages.size < MOST && pages.capacity < MOST && p->len_new < MOST &&
              p->total_new < INT32_MAX && p->cache_rows < INT32_MAX && p->rotary_rows <= INT32_MAX,
          "it counts keys of a KV cache up to 2^30");
    NEEDS(fa_suits_tma(p, &p->k, pages.num, pages.size, p->h_kv) &&
              fa_suits_tma(p, &p->v, pages.num, pages.size, p->h_kv),
          "it wants the cache to start at a multiple of 16 bytes, with strides that are multiples of 8 elements");
    return NULL;
}

bool fa_wants_cache_of_sm80(const fa_problem *p) {
    return p->paged || p->leftpad_k || p->cache_batch_idx || p->k_new.data || p->len_new > 0 || p->rotary_cos ||
           fa_why_not_of_3(p, 0);
}

const char *fa_why_not_cache_of_sm80(const fa_problem *p) {
    enum { MOST = 1 << 30 };
    const bool is_packed = p->cu_seqlens_k && !p->paged;
    const fa_cache_pages of_cache = fa_cache_pages_of(p),
                         pages = is_packed ? (fa_cache_pages){1, p->total_kv, p->total_kv} : of_cache;
    /* With num_splits = 1 the choice must not depend on the batch, which is the number of pages of a dense cache. */
    const bool has_one_page = is_packed || (p->paged && pages.num == 1);
    NEEDS(pages.num > 0, "the KV cache has no key");
    NEEDS(pages.num < INT32_MAX && pages.size < MOST && pages.capacity < MOST && p->len_new < MOST &&
              p->total_new < INT32_MAX && p->cache_rows < INT32_MAX && p->rotary_rows <= INT32_MAX,
          "it counts keys of a KV cache up to 2^30");
    NEEDS((has_one_page || p->k.stride_b == p->v.stride_b) && (pages.size <= 1 || p->k.stride_row == p->v.stride_row),
          "it wants a KV cache whose k and v have the same strides");
    NEEDS(offsets_fit_32_bits(&p->k, pages), "it addresses up to 64 GiB of keys and of values");
    NEEDS(fa_suits_tma(p, &p->k, pages.num, pages.size, p->h_kv) &&
              fa_suits_tma(p, &p->v, pages.num, pages.size, p->h_kv),
          "it wants the cache to start at a multiple of 16 bytes, with strides that are multiples of 8 elements");
    return NULL;
}

bool fa_allows_kernel(const fa_machine *machine, const char *name) {
    const char *words = machine->gpu_kernels; /* separated by commas */
    if (!words) return true;
    while (words) {
        const size_t length = strcspn(words, ",");
        for (const char *at = name; *at; at++)
            if (strncmp(at, words, length) == 0) return true;
        words = words[length] ? words + length + 1 : NULL;
    }
    return false;
}

void fa_rule_out(fa_plan *plan, const char *kernel, const char *reason) {
    if (plan->num_ruled_out == FA_MAX_RULED_OUT) return;
    plan->ruled_out[plan->num_ruled_out++] = (fa_ruled_out){kernel, reason};
}

uint64_t fa_offsets_of(const fa_view *t, int64_t element_bytes, int64_t batches, int64_t rows, int64_t heads) {
    const int64_t strides =
        (batches > 1 ? t->stride_b : 0) | (rows > 1 ? t->stride_row : 0) | (heads > 1 ? t->stride_h : 0);
    return (uintptr_t)t->data | (uint64_t)(strides * element_bytes);
}

bool fa_suits_tma(const fa_problem *p, const fa_view *t, int64_t num_batches, int64_t num_rows, int64_t num_heads) {
    return fa_offsets_of(t, (int64_t)fa_dtype_bytes(p->dtype), num_batches, num_rows, num_heads) % 16 == 0;
}

static bool suits(const fa_problem *p, const fa_view *t, bool is_query) {
    return !t->data || fa_suits_tma(p, t, p->cu_seqlens_q ? 1 : p->b, is_query ? p->total_q : p->total_kv,
                                    is_query ? p->h : p->h_kv);
}

bool fa_suits_16_bytes(const fa_problem *p) {
    return suits(p, &p->q, true) && suits(p, &p->k, false) && suits(p, &p->v, false) && suits(p, &p->o, true) &&
           suits(p, &p->dout, true) && suits(p, &p->dq, true) && suits(p, &p->dk, false) && suits(p, &p->dv, false);
}

int fa_shared_bytes_of_sm(int capability) {
    const int kib = capability == 80 || capability == 87            ? 164
                    : capability / 10 >= 9 && capability / 10 <= 11 ? 228
                                                                    : 100;
    return kib * 1024;
}

/* A row of a family before Hopper, or of the decode kernels. Rows with as many columns and the same warps_q compete. */
typedef struct {
    int d, warps_q, ctas, shared_bytes;
} row_before_hopper;

static bool is_before_hopper(fa_family_id id) {
    return id == FA_FWD_SM80 || id == FA_BWD_SM80 || id == FA_BWD_DQ_SM80 || id == FA_DECODE_SM80;
}

static row_before_hopper row_of(fa_family_id id, int row) {
    /* FA_BWD_DQ_SM80 runs after FA_BWD_SM80, with the same rows. */
    const int bytes = fa_families[id == FA_BWD_DQ_SM80 ? FA_BWD_SM80 : id].rows[row].shared_bytes;
    if (id == FA_FWD_SM80) return (row_before_hopper){fa_fwd_sm80_row(row)->d, 0, fa_fwd_sm80_row(row)->ctas, bytes};
    if (id == FA_BWD_SM80 || id == FA_BWD_DQ_SM80)
        return (row_before_hopper){fa_bwd_sm80_row(row)->d, 0, fa_bwd_sm80_row(row)->ctas, bytes};
    const fa_gpu_decode_columns *t = fa_gpu_decode_row(id, row);
    return (row_before_hopper){t->d, t->warps_q, t->ctas, bytes};
}

bool fa_row_fits_sm(fa_family_id id, int row, int capability) {
    const row_before_hopper r = row_of(id, row);
    return r.ctas * (r.shared_bytes + FA_RESERVED_BYTES) <= fa_shared_bytes_of_sm(capability);
}

bool fa_has_room_for_places(int row, unsigned features, int capability) {
    const fa_variant variant = {FA_FWD_SM80, row, features, capability, 0, NULL};
    return fa_variant_shared_bytes(variant) + FA_RESERVED_BYTES <= fa_shared_bytes_of_sm(capability);
}

bool fa_row_is_taken(fa_family_id id, int row, unsigned features, int capability) {
    if (!is_before_hopper(id)) return true;
    if (id == FA_FWD_SM80 && !fa_has_room_for_places(row, features, capability)) return false;
    const row_before_hopper r = row_of(id, row);
    for (int i = 0; i < row; i++) {
        const row_before_hopper other = row_of(id, i);
        if (other.d == r.d && other.warps_q == r.warps_q && fa_families[id].chooses(i, features) &&
            fa_row_fits_sm(id, i, capability))
            return false;
    }
    return fa_row_fits_sm(id, row, capability);
}

int fa_first_row_of_sm80(const fa_problem *p, const fa_machine *machine, fa_family_id id) {
    const fa_family *family = &fa_families[id];
    int row = 0;
    while (row < family->num_rows &&
           !(row_of(id, row).d >= p->d && family->chooses(row, fa_cuda_features(p) & family->knows) &&
             fa_row_fits_sm(id, row, machine->gpu_capability)))
        row++;
    return row;
}
