/* Programmable attention: what a problem has besides its tensors (fa_problem.flex).
 *
 *   s = scale q.k                                        fp32; fp64 if the tensors are fp64
 *   s = score_mod(s, b, h, i, j)                         in every pair that is computed
 *   s = -inf   unless the pair's block is full, or it is partial and mask_mod(b, h, i, j) is true
 *   o = (z softmax(s)) v      lse = ln sum exp(s)      max_scores = max s      a row that sees no key: 0, -inf, -inf
 *
 * Here h is the query head. j counts from 0 in its sequence, and i from q_offset[b]. A pair of score -inf is masked. z
 * is that of dropout (cpu/dropout.h), whose rows count from 0.
 * The backward:
 *
 *   delta = dout.o - dlse      ds = p (z dout.v - delta)      of s before the score_mod: derivative(s, ds, b, h, i, j)
 *
 * The tensors of the problem are dense. In a forward, k and v may be pages, and seqused_k may say how many keys there
 * are. The problem has no window, softcap, slopes, append or rotary of its own. */
#ifndef FA_FLEX_FLEX_H
#define FA_FLEX_FLEX_H

#include "program.h"

/* What is seen of a block: nothing, what the mask_mod allows, or everything. */
enum { FA_FLEX_MOST_KEY = 576 }; /* words that a kernel's parameters have room for, and what else walks depend on */

typedef enum { FA_FLEX_EMPTY, FA_FLEX_PARTIAL, FA_FLEX_FULL } fa_flex_kind;

/* For each row of blocks how many blocks are listed, and which ones, in any order. Places behind the number may hold
 * anything. A block outside of the mask is no block. Strides count elements. */
typedef struct {
    const int32_t *num;    /* [mask_b, mask_h, rows]; NULL: there is no such list */
    const int32_t *blocks; /* [mask_b, mask_h, rows, columns] */
    int64_t num_stride[3], blocks_stride[4];
} fa_flex_list;

/* Where gradients of the captures of `derivative` go: [captures], each contiguous in the capture's shape, fp32, or fp64
 * if the capture is fp64. The backward adds to them. NULL: not wanted. */
typedef void *const *fa_flex_gradients;

/* The walks of a block mask that stays as it is from call to call, in memory that outlives the calls. Two calls with
 * the same key have the same walks. The caller gives key and data of an earlier call, if there was one.
 * fa_cuda_find_kept_walks fills in the rest for this call. `bytes` is 0 if its walks cannot be kept or take more than
 * most_bytes, and otherwise the caller gives so much memory if it is_wanted. */
typedef struct {
    int64_t key[FA_FLEX_MOST_KEY];
    size_t num_key, bytes, most_bytes;
    void *data;     /* in the GPU's memory; NULL: none yet */
    void *owner;    /* of memory that the caller made for this call */
    bool is_wanted; /* the earlier call had other walks, or there was none */
} fa_kept_walks;

typedef struct fa_flex {
    const fa_flex_bound *score;      /* the score_mod; NULL: the score stays */
    const fa_flex_bound *mask;       /* the mask_mod; NULL: everything is allowed */
    const fa_flex_bound *derivative; /* of the score_mod, in the backward; NULL: 1 */
    fa_flex_gradients gradients;

    /* The block mask of batch b and head h is that of b % mask_b and h % mask_h. Rows of blocks have block_q queries,
     * columns have block_kv keys; rows block_q >= len_q and columns block_kv >= len_kv. block_q 0: there is no block
     * mask, and all pairs lie in partial blocks. */
    int64_t mask_b, mask_h, rows, columns, block_q, block_kv;
    fa_flex_list partial, full;

    const int32_t *q_offset; /* [b] what the mods add to the row of a query; NULL: 0 */
    fa_kept_walks *kept;     /* of a block mask that stays as it is, on a GPU; NULL: nothing is kept */
    bool blocks_have_offset; /* the rows of the block mask count from 0, too: query i lies in row i + q_offset[b] */

    fa_row_stats max_scores; /* forward: written if there is data */
    fa_row_stats dlse;       /* backward: the gradient of lse; data NULL: 0 */
} fa_flex;

/* What the CPU engine asks for in place of problem->flex. flash_attn_3 has no mods, and is compiled with FA_NO_FLEX
 * (extension.py). So its compiler leaves out what serves them. */
static inline const fa_flex *fa_flex_of(const fa_problem *problem) {
#ifdef FA_NO_FLEX
    (void)problem;
    return NULL;
#else
    return problem->flex;
#endif
}

/* What the mods call query 0 of a batch. */
static inline int64_t fa_flex_first_query(const fa_flex *f, int64_t b_idx) {
    return f->q_offset ? f->q_offset[b_idx] : 0;
}

#endif
