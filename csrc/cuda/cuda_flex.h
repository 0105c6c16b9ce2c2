/* Programmable attention (../flex/flex.h) as the kernels read it. C code fills the structs, and CUDA code reads them.
 * All types have the same layout on both sides. Every array lies in the GPU's memory. */
#ifndef FA_CUDA_FLEX_H
#define FA_CUDA_FLEX_H

#include "cuda_problem.h"

#define FA_MOST_PARAMETER_BYTES 4096 /* every driver takes so many */

/* fa_flex_list. num NULL: there is no such list. */
typedef struct {
    const int *num;    /* [mask_b, mask_h, rows] */
    const int *blocks; /* [mask_b, mask_h, rows, columns] */
    long long num_stride[3], blocks_stride[4];
} fa_cuda_block_list;

/* The lists of a block mask, and the map that is made of them (flex_map.cuh). */
typedef struct {
    fa_cuda_block_list partial, full;
    unsigned char *kinds; /* [mask_b, mask_h, rows, columns] */
    int mask_b, mask_h, rows, columns;
    int kind_of_partial; /* what a partial block becomes: FULL_BLOCK if there is no mask_mod */
} fa_cuda_flex_blocks;

enum { FA_FLEX_CLASSIFY_THREADS = 128 }; /* of a CTA of flex_classify.cu and flex_lists.cu */
enum { FA_FLEX_BLOCKS_THREADS = 128, FA_FLEX_WALKS_THREADS = 512, FA_FLEX_HIDDEN_THREADS = 128 }; /* of a CTA */
enum { FA_FLEX_ROWS_THREADS = 128 }; /* of flex_walks.cu without a map */
/* flex_walks.cu: a warp has room for a row of so many blocks. */
enum { FA_FLEX_WALKS_COLUMNS = 2048, FA_FLEX_WALKS_SHARED_BYTES = FA_FLEX_WALKS_THREADS / 32 * FA_FLEX_WALKS_COLUMNS };

/* An element of the gradient of a captured tensor, while its parts are added in any order (flex_exact_sums.cuh). */
typedef struct {
    long long sum; /* of the parts, in units of 2^-digits of `exponent` */
    int exponent;  /* 1 + the exponent of the largest part, as a double has it; 0: there is no part */
    int seen;      /* infinite parts and NaN */
} fa_cuda_exact_sum;

/* The parameters of flex_exact_sums.cu. */
enum { FA_FLEX_SUMS_THREADS = 256 };
typedef struct {
    const fa_cuda_exact_sum *sums; /* [num] */
    void *gradient;                /* [num] float; double if is_double */
    long long num;
    int digits, is_double;
} fa_cuda_exact_sums;

/* The parameters of flex_classify.cu. The members of flex_values follow, as many words as the mask_mod needs. */
typedef struct {
    unsigned char *kinds; /* [b, h, rows, columns] */
    int b, h, len_q, len_kv, block_q, block_kv, rows, columns;
    int per_cta, unused; /* blocks of a CTA, at most FA_FLEX_CLASSIFY_THREADS */
} fa_cuda_flex_classification;

/* fa_flex_lists. num_q NULL: the columns are not wanted. */
typedef struct {
    int *num_kv, *kv, *num_q, *q;
} fa_cuda_block_places;

/* The parameters of flex_lists.cu. */
typedef struct {
    const unsigned char *kinds; /* [heads, rows, columns] */
    fa_cuda_block_places partial, full;
    long long heads;
    int rows, columns;
} fa_cuda_flex_lists;

/* What a kernel reads behind its other parameters. The members of flex_values follow, as many words as the user's
 * functions need. */
typedef struct {
    const unsigned char *kinds; /* [mask_b, mask_h, rows, columns] block_kind of flex.cuh; NULL: no block mask */
    int mask_b, mask_h, rows, columns, block_q, block_kv;
    fa_cuda_row_stats max_scores, dlse; /* data NULL: not wanted, and 0 */
    const int *q_offset;                /* [b] what the mods add to the row of a query; NULL: 0 */
    const int *block_offset;            /* [b] the row of the block mask where query 0 lies; NULL: 0 */
    int most_offset;                    /* the block mask has rows for offsets up to here */
    /* Hopper's kernels (flex_walks.cu): the walk of each own tile, and the order of the own tiles; NULL: ascending. */
    const int *walks, *order;
    /* The pairs of these tiles that are hidden (flex_hidden.cu); NULL: the mods say so. */
    const unsigned *hidden;
} fa_cuda_flex;

/* Words of a thread of Hopper's kernels for the pairs of two tiles. Two threads have one row of the own side, and each
 * has a pair in every second row of the other side. */
#define FA_HIDDEN_WORDS(other_tile) (((other_tile) / 2 + 31) / 32)

/* The phases of flex_walks.cu. */
enum { FA_FLEX_MAP_PHASE, FA_FLEX_WALKS_PHASE, FA_FLEX_ORDER_PHASE, FA_FLEX_RANKS_PHASE };

/* The parameters of flex_walks.cu and, with the members of flex_values behind, of flex_hidden.cu. Own tiles walk over
 * other tiles. The own side is that of the queries, or of the keys. */
typedef struct {
    fa_cuda_flex flex;
    fa_cuda_flex_blocks blocks; /* kinds NULL: there is no map, and the walks are made of the lists */
    int *walks;                 /* [mask_b mask_h, own_tiles, 1 + other_tiles] */
    int *nums;                  /* [mask_b mask_h, own_tiles] the numbers of the walks once more, side by side */
    int *order;                 /* [mask_b mask_h, own_tiles]; NULL: ascending */
    unsigned *ranks;            /* [mask_b mask_h, other_tiles, own_tiles + 1]; NULL: not wanted */
    unsigned *hidden;           /* [mask_b mask_h, own_tiles, other_tiles, FA_HIDDEN_WORDS(other_tile), 2 own_tile] */
    int *pairs;                 /* [mask_b mask_h, 1 + own_tiles other_tiles]; NULL: not wanted */
    int own_len, own_tile, own_tiles, other_len, other_tile, other_tiles;
    int own_keys; /* the own side is that of the keys */
    /* A block has 1 << shift tiles of a side. Negative: the tiles of some side may lie in several blocks. */
    int own_shift, other_shift;
    /* The order keeps that of the own tiles if it can: heads whose tiles begin together, all heads, and the CTAs that
     * work at a time. group_heads 0: the longest walks come first. */
    int group_heads, num_heads, ctas;
    int first_phase, last_phase;
    int ctas_of_mask; /* CTAs of a cluster, which takes one mask after another; 0: all CTAs take each mask together */
} fa_cuda_flex_walks;

#endif
