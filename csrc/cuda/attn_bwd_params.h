/* The parameters of the backward kernels on Hopper. The host fills the struct in C, and the kernels read the struct in
 * CUDA. All types have the same layout on both sides. */
#ifndef FA_ATTN_BWD_PARAMS_H
#define FA_ATTN_BWD_PARAMS_H

#include "tensor_map.h"

/* The product 2 x FA_HEADS_INVERSE(heads) has 64 bits. Its upper 32 bits are x / heads, where x heads < 2^31. */
#define FA_HEADS_INVERSE(heads) ((1u << 31) / (unsigned)(heads) + 1)

/* Columns of the sums of dQ, for a tile of d columns. Behind whole chunks of 64 they are at least 32: a warp's result
 * in 16 bits is a box of TMA, and takes the place of the warp's sums. */
#define FA_SLAB_COLUMNS(d) ((d) % 64 > 0 && (d) % 64 < 32 ? (d) / 64 * 64 + 32 : (d))
/* Columns of a box of dQ, which is what one warpgroup has of its rows, and at most a chunk. */
#define FA_DQ_BOX(d, block_q) ((block_q) == 64 && (d) <= 64 ? 32 : 64)

/* A tensor [b, row, h, d] that is accessed without TMA. Strides count elements. Packed tensors have stride_b 0. */
typedef struct {
    void *data;
    long long stride_b, stride_row, stride_h;
} fa_bwd_tensor;

/* The array holds one float per row. */
typedef struct {
    float *data;
    long long stride_b, stride_h;
} fa_bwd_row_stats;

typedef struct {
    fa_tensor_map q, k, v, dout; /* read by the main kernel */
    fa_tensor_map dq_rows, dk_tiles,
        dv_tiles; /* attn_bwd_sm90 writes the gradients that are asked for: boxes of 16 rows, whole tiles */
    fa_bwd_tensor o, dout_rows;      /* read by attn_bwd_prep */
    fa_bwd_tensor dq, dk, dv;        /* data NULL: not asked for */
    fa_bwd_row_stats lse, softmax_d; /* natural log of the row sums, an infinity for a row that sees no key; dO . O */

    /* The workspace consists of slabs of BLOCK_Q query rows of one head. Slab i of head n has number n num_slabs + i.
     * Dense problems have b h heads, and the slabs of each sequence begin at 0. Packed problems have h heads, and
     * slab_begin gives the first slab of a sequence. */
    float *stats;    /* [slab, 2, BLOCK_Q] log2 of the row sums, then dO . O; 16 rows at a time in lanes' order */
    float *dq_sums;  /* [slab, warpgroup, register / 4, thread, 4] as the accumulators lie in registers */
    unsigned *turns; /* [slab, 2] number of key tiles that have added to the slab; 1 if a row of the slab sees no key.
                           Above 128 columns: number of key tiles that have added to each CTA's half */
    float *kv_sums;  /* [cut tile, warp, register / 4, lane, 4] dK, then dV of a warp's 16 keys */
    unsigned *kv_turns;     /* [cut tile, warp] number of pieces that have added to the sums */
    unsigned *tile_counter; /* number of the next work tile to take */
    int num_slabs;          /* per head */

    int b, h, h_kv, d;
    int heads_per_tile;                     /* query heads of a key head, or of one piece of a key head */
    unsigned heads_inverse;                 /* FA_HEADS_INVERSE(heads_per_tile) */
    int len_q, len_kv;                      /* packed: total_q and total_kv, the bounds of every offset */
    const int *cu_seqlens_q, *cu_seqlens_k; /* [b + 1], packed only */

    int num_kv_tiles; /* dense: key tiles of one sequence */
    int num_tiles;    /* dense: num_whole + num_cut pieces */
    int num_whole;    /* whole tiles, which come first */
    int num_cut;      /* cut tiles, which come last; see CUTS_QUERIES and CUTS_HEADS */
    int pieces;       /* pieces of each cut tile */
    int in_order; /* 1: all key tiles add to dQ in their order; 0: key tiles between first and last add in any order */
    int converts; /* causal, up to 64 columns. 1: a converter makes dQ of the sums; 0: the warpgroups make dQ */
    int group_heads; /* longest-first order: number of key heads walked together, so that their queries stay in L2 */

    float scale_log2;              /* scores times scale_log2 are exponents of 2 */
    float score_scale;             /* softcap and ALiBi: S = K Q^T is first multiplied by score_scale */
    float scale;                   /* scale of the scores; dQ and dK are multiplied by scale at the end */
    float softcap;                 /* 0: off */
    int window_left, window_right; /* -1: unlimited; causal is right = 0 */
    const float *alibi_slopes;     /* [h], or [b, h] with alibi_stride_b; NULL: none */
    long long alibi_stride_b;

    const unsigned long long *rng_state; /* dropout: (seed, offset) in device memory */
    int keep_max;                        /* a byte of the generator keeps its element iff byte <= keep_max */
    float keep_scale;                    /* 1 / (1 - p); 1 without dropout */
    int d_v;                             /* columns of v, o and dO */

    fa_bwd_row_stats dlse; /* the gradient of the LSE; data NULL: 0 */
    /* With a block mask [masks, query tiles, num_kv_tiles + 1] (flex_walks.cu). NULL: there is none. */
    const unsigned *ranks;
    int mask_b, mask_h; /* masks: mask_b mask_h */

    int softmax_d_rows; /* allocated rows of one head of softmax_d; some rows may only round up the size */
    int short_rows;     /* packed: attn_bwd_short takes sequences of up to so many queries and keys; 0: none */
} fa_attn_bwd_params;

#endif
