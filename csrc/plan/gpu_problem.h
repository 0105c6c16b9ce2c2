/* Questions of the GPU planners about a problem, and their notes in a plan. */
#ifndef FA_PLAN_GPU_PROBLEM_H
#define FA_PLAN_GPU_PROBLEM_H

#include "kernel_table.h"

/* A planner begins with such lines. If the condition is false, the reason says why the kernel cannot serve the
 * problem. */
#define NEEDS(condition, reason)         \
    do {                                 \
        if (!(condition)) return reason; \
    } while (0)

/* Are scores something else than a positive scale times q.k? A scale below 1e-37 counts as something else, because it
 * is no normal float. Such a scale may become 0, and 0 times the -inf of a masked score is NaN. */
bool fa_changes_scores(const fa_problem *problem);

/* Is ALiBi all that happens to the scores and to P? Then it fits in the exponent of a backward. */
bool fa_has_alibi_alone(const fa_problem *problem);

/* Hopper's kernels compute softcap tanh(x / softcap) as a difference of two numbers as large as softcap. Above this
 * softcap, the error of a score would exceed 1e-4. */
#define FA_HOPPERS_SOFTCAP 1000
#define FA_SOFTCAP_REASON  "its scores lose their digits with a softcap above 1000"

/* The columns of a tile that holds q and k as well as v. */
static inline int64_t fa_columns(const fa_problem *p) { return p->d > p->d_v ? p->d : p->d_v; }

/* Does each of TMA's boxes begin among the tensor's d columns, if a tile has row_d columns in boxes of box_d? Beyond
 * the columns of a packed tensor TMA may touch memory that is not there (cuda/tensor_map.h). */
static inline bool fa_fills_boxes(int64_t d, int row_d, int box_d) { return d > (row_d - 1) / box_d * box_d; }
#define FA_BOXES_REASON "a box of its loads would lie beyond the columns of a packed tensor"

/* Hopper's kernels add positions, lengths and windows as 32-bit numbers. */
static inline bool fa_counts_in_32_bits(const fa_problem *p, bool packed) {
    const int64_t most = 1 << 30;
    if (packed) return p->total_q <= most && p->total_kv <= most;
    return p->len_q <= most && p->len_kv <= most && p->total_q < INT32_MAX && p->total_kv < INT32_MAX;
}

/* What flash-attn 3 adds to flash-attn 2. A kernel that knows some of these names the others. */
enum {
    FA_OTHER_D_V = 1,  /* v has other columns than k */
    FA_QV = 2,         /* qv.v joins the score */
    FA_CHUNKS = 4,     /* attention_chunk */
    FA_USED_Q = 8,     /* seqused_q */
    FA_E4M3_IN = 16,   /* q, k and v are float8_e4m3fn */
    FA_MIXED = 32,     /* packed queries beside a cache that is not packed */
    FA_OTHER_NEW = 64, /* packed new keys, or rotary positions of their own */
    FA_ALL_OF_3 = 127
};

/* Returns why a kernel that knows only the additions `knows` cannot serve the problem, or NULL. */
const char *fa_why_not_of_3(const fa_problem *problem, unsigned knows);

/* The features of kernel_table.h that the problem asks of a kernel for Hopper, its dtype among them. */
unsigned fa_cuda_features(const fa_problem *problem);

/* The same for the generic kernels. */
unsigned fa_any_features(const fa_problem *problem);

/* The user's functions in the kernels of a problem with flex, and their hash: 0 if there is no function. The derivative
 * belongs to the backward. plan NULL: all functions, whatever the kernels of a plan leave to others. */
fa_mods fa_mods_of(const fa_problem *problem, const fa_plan *plan);
uint64_t fa_mods_hash(const fa_mods *mods);

/* Does the backward add to gradients of captures? */
bool fa_wants_capture_gradients(const fa_problem *problem);

/* Bytes of the map of a block mask (cuda/flex_blocks.cuh), and of the walks and their order (cuda/flex_walks.cu) in a
 * plan's tiles. The map lies at the start of the workspace, and the walks at fa_block_walks_at. */
size_t fa_block_map_bytes(const fa_problem *problem);
static inline size_t fa_block_walks_at(const fa_problem *problem) {
    return (fa_block_map_bytes(problem) + 15) / 16 * 16;
}
size_t fa_block_walks_bytes(const fa_problem *problem, const fa_plan *plan);

/* Bytes of the pairs that are hidden (cuda/flex_hidden.cu), and of the list of their tiles. They lie behind the walks.
 * 0: the kernels of the plan compute the mask_mod themselves, because there is no block mask, or heads with one block
 * mask have other results of the mask_mod, or the bits would take more than 128 MiB and more than q, k, v and out. */
size_t fa_hidden_bytes(const fa_problem *problem, const fa_plan *plan);

/* In the backward the own tiles are those of keys. Query heads of one key head that have masks of their own are walked
 * through in tiles of their own. */
bool fa_has_masks_in_groups(const fa_problem *problem);

/* Can the generic forward cut the keys of the problem into parts? It can where few queries with mods have many keys.
 * The number of parts depends on the GPU, and is 1 if there are CTAs enough. */
bool fa_has_key_parts(const fa_problem *problem);
int fa_num_key_parts(const fa_problem *problem, const fa_machine *machine);

/* Would a kernel without parts leave most of any GPU idle? The answer is the same for all GPUs. */
bool fa_prefers_key_parts(const fa_problem *problem);

/* Where the results of the parts lie in the workspace, and their bytes. */
size_t fa_key_parts_at(const fa_problem *problem);
size_t fa_key_parts_bytes(const fa_problem *problem, int num_parts);

/* The sums of the generic backward for gradients of captures whose bits must not depend on an order
 * (cuda/flex_exact_sums.cuh): whether they are wanted, where they lie in the workspace, and their bytes. digits: the
 * binary digits of each part of a sum, so that a sum of all pairs has 63. */
bool fa_wants_exact_sums(const fa_problem *problem);
size_t fa_exact_sums_at(const fa_problem *problem);
size_t fa_exact_sums_bytes(const fa_problem *problem);
int fa_exact_sums_digits(const fa_problem *problem);
int64_t fa_count_capture(const fa_flex_bound *bound, int32_t capture); /* its elements */

/* Does the problem have functions or a block mask, or does it want max_scores? Programmable attention with nothing to
 * program is plain. */
bool fa_has_mods(const fa_problem *problem);

/* Why do the captured tensors and numbers not fit behind a kernel's other parameters? NULL: they do. */
const char *fa_why_no_room_for_mods(const fa_problem *problem, size_t parameter_bytes);

/* Why can a kernel for Hopper not take the functions and the block mask? NULL: it can, if fa_plan_mask_of_sm90 agrees.
 * parameter_bytes: the size of its other parameters. */
const char *fa_why_not_mods_of_sm90(const fa_problem *problem, size_t parameter_bytes);

/* Why can a kernel of short sequences not take the functions and the block mask? NULL: it can. */
const char *fa_why_not_short_mods(const fa_problem *problem, size_t parameter_bytes);
#define FA_LONG_MODS_REASON "the mods are long, and would spill in its registers"

/* Decides whether the kernel of a plan with tiles reads bits of hidden pairs. Why can it not take the mask_mod? */
const char *fa_plan_mask_of_sm90(const fa_problem *problem, fa_plan *plan);

/* Why can Hopper's backward not add to the gradients of captures? NULL: it can, or none are wanted. */
const char *fa_why_not_captures_of_sm90(const fa_problem *problem);
#define FA_CAPTURES_ORDER_REASON \
    "it adds to the gradients of captured tensors in any order, so they are not deterministic"

/* Why can no kernel read the problem's block mask? NULL: kernels can. */
const char *fa_why_not_blocks(const fa_problem *problem);

/* Notes in the plan which functions the kernels of a problem have. */
void fa_plan_mods(const fa_problem *problem, fa_plan *plan);

/* Has programmable attention offsets, lengths or pages? */
bool fa_is_flex_cache(const fa_problem *problem);

/* Has programmable attention a block mask, or wants it the largest scores? Hopper's forward has both only where it
 * reads no cache. */
bool fa_has_more_than_mods(const fa_problem *problem);

/* Do the keys lie in a KV cache, whose lengths only the GPU knows? Keys of programmable queries with offsets count as
 * such, because Hopper's forward knows the offsets where it reads caches. */
bool fa_reads_cache(const fa_problem *problem);

/* The pages of a KV cache: their number, the keys of a page, and the keys that a sequence has room for. A cache without
 * a block table has a page for each of its rows. A cache or a table without rows has no pages. */
typedef struct {
    int64_t num, size, capacity;
} fa_cache_pages;
fa_cache_pages fa_cache_pages_of(const fa_problem *problem);

/* The most keys of a key tile that one load of TMA can bring: a load must not cross the end of a page. */
int fa_cache_box(const fa_problem *problem, int block_kv);

/* Does Hopper's forward load the keys one by one, because TMA cannot load key tiles in such boxes? */
bool fa_loads_single_keys(const fa_problem *problem);

/* TMA's swizzle repeats after so many rows. Keys that are loaded whole lie in groups of as many. */
enum { FA_GROUP = 8 };

/* Do the keys of all pages of K, and of V, form groups of 8 that are equally far apart? TMA then finds a page's keys by
 * the number of their group. */
bool fa_has_groups(const fa_problem *problem);

/* Groups of 8 keys from a page of K or V to the next one. */
int64_t fa_groups_of_page(const fa_problem *problem, const fa_view *tensor);

/* Why can Hopper's forward not read the problem's KV cache? NULL: it can. */
const char *fa_why_not_cache_of_sm90(const fa_problem *problem);

/* Does attn_fwd_sm80 need its text for KV caches, which also knows what flash-attn 3 adds to lengths and to the mask?
 * Why can that text not read the problem's keys? NULL: it can. */
bool fa_wants_cache_of_sm80(const fa_problem *problem);
const char *fa_why_not_cache_of_sm80(const fa_problem *problem);

/* Does FLASH_ATTN_CUDA_KERNEL allow the kernel? Its name then contains one of the variable's words. */
bool fa_allows_kernel(const fa_machine *machine, const char *name);

void fa_rule_out(fa_plan *plan, const char *kernel, const char *reason);

/* Low bits that are zero in the result are zero in the address of every row. The stride of a dimension with one element
 * does not matter. */
uint64_t fa_offsets_of(const fa_view *tensor, int64_t element_bytes, int64_t batches, int64_t rows, int64_t heads);

/* Can TMA walk over the tensor? TMA needs addresses and strides that are multiples of 16 bytes. A packed tensor is one
 * batch. num_rows counts the rows of all batches. */
bool fa_suits_tma(const fa_problem *problem, const fa_view *tensor, int64_t num_batches, int64_t num_rows,
                  int64_t num_heads);

/* Does this hold for all tensors of a backward, and for its gradients? */
bool fa_suits_16_bytes(const fa_problem *problem);
#define FA_16_BYTES_REASON                                                                                        \
    "it wants all tensors and gradients to start at multiples of 16 bytes, with strides that are multiples of 8 " \
    "elements"

/* The bytes of shared memory that the CTAs of an SM can have on a GPU of this compute capability. FA_RESERVED_BYTES of
 * each CTA's belong to the driver. */
enum { FA_RESERVED_BYTES = 1024 };
int fa_shared_bytes_of_sm(int capability);

/* Has an SM shared memory for the CTAs of a row of a family before Hopper? */
bool fa_row_fits_sm(fa_family_id family, int row, int capability);

/* Beside a cache attn_fwd_sm80 keeps the places of keys in shared memory. Has an SM room for them in a CTA of the row?
 * Where rows suit two CTAs, there may then be one. */
bool fa_has_room_for_places(int row, unsigned features, int capability);

/* Does a plan on a GPU of this compute capability ever take the row for these features? Rows before Hopper compete if
 * they have as many columns, and in decode as many warps_q. Plans take the first of them that fits an SM. */
bool fa_row_is_taken(fa_family_id family, int row, unsigned features, int capability);

/* The first row of FA_FWD_SM80 or FA_BWD_SM80 that has room for the heads, and whose CTAs have room on an SM; num_rows
 * if there is none. */
int fa_first_row_of_sm80(const fa_problem *problem, const fa_machine *machine, fa_family_id family);

#endif
