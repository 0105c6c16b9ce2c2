/* What the host hands to the backward kernels: filled in C, read in CUDA. Only types that both sides lay out alike. */
#ifndef FA_ATTN_BWD_PARAMS_H
#define FA_ATTN_BWD_PARAMS_H

#include "tensor_map.h"

/* 2 x times it, of 64 bits the upper 32, is x / heads, where x heads < 2^31. */
#define FA_HEADS_INVERSE(heads) ((1u << 31) / (unsigned)(heads) + 1)

/* A tensor [b, row, h, d] without TMA; strides count elements, packed tensors have stride_b 0. */
typedef struct {
    void *data;
    long long stride_b, stride_row, stride_h;
} fa_bwd_tensor;

/* One float per row. */
typedef struct {
    float *data;
    long long stride_b, stride_h;
} fa_bwd_row_stats;

typedef struct {
    fa_tensor_map q, k, v, dout; /* what the main kernel reads */
    fa_tensor_map dq_rows, dk_tiles,
        dv_tiles;                    /* what attn_bwd_sm90 writes, where it is asked for: 16 rows, whole tiles */
    fa_bwd_tensor o, dout_rows;      /* what attn_bwd_prep reads */
    fa_bwd_tensor dq, dk, dv;        /* data NULL: not asked for */
    fa_bwd_row_stats lse, softmax_d; /* natural log of the row sums, an infinity for a row that sees no key; dO . O */

    /* The workspace, by slabs of BLOCK_Q query rows of one head: slab number i of head n is number n num_slabs + i.
     * Dense: head n of b h, and a sequence's slabs begin at 0. Packed: head n of h; see slab_begin. */
    float *stats;       /* [slab, 2, BLOCK_Q] log2 of the row sums, then dO . O; 16 rows at a time in lanes' order */
    float *dq_sums;     /* [slab, warpgroup, register / 4, thread, 4] as the accumulators lie in registers */
    unsigned *turns;    /* [slab, 2] how many key tiles have added to the slab, and 1 if a row of it sees nothing;
                           above 128 columns: how many to each CTA's half */
    float *kv_sums;     /* [cut tile, warp, register / 4, lane, 4] dK, then dV of a warp's 16 keys */
    unsigned *kv_turns; /* [cut tile, warp] how many pieces have added to it */
    unsigned *tile_counter; /* the next tile that nobody has taken */
    int num_slabs;          /* per head */

    int b, h, h_kv, d;
    int heads_per_tile;                     /* query heads of a key head, or of one of its pieces */
    unsigned heads_inverse;                 /* FA_HEADS_INVERSE(heads_per_tile) */
    int len_q, len_kv;                      /* dense; packed: the bounds total_q and total_kv of every offset */
    const int *cu_seqlens_q, *cu_seqlens_k; /* [b + 1], packed only */

    int num_kv_tiles; /* dense: key tiles of one sequence */
    int num_tiles;    /* dense: num_whole + num_cut pieces */
    int num_whole;    /* the first ones */
    int num_cut;      /* the others: each is cut along the queries ... */
    int pieces;       /* ... into so many */
    int in_order;     /* all key tiles add to dQ in their order; 0: those between the first and the last in any */
    int converts;     /* causal, up to 64 columns: a converter makes dQ of the sums; 0: the warpgroups do */
    int group_heads;  /* longest-first order: key heads that are walked together, so that their queries stay in L2 */

    float scale_log2;              /* scores times this are exponents of 2 */
    float score_scale;             /* softcap and ALiBi: what S = K Q^T is multiplied by first */
    float scale;                   /* of the scores: what dQ and dK are multiplied by at the end */
    float softcap;                 /* 0: off */
    int window_left, window_right; /* -1: unlimited; causal is right = 0 */
    const float *alibi_slopes;     /* [h], or [b, h] with alibi_stride_b; NULL: none */
    long long alibi_stride_b;

    const unsigned long long *rng_state; /* dropout: (seed, offset) in device memory */
    int keep_max;                        /* a byte of the generator keeps its element iff byte <= keep_max */
    float keep_scale;                    /* 1 / (1 - p); 1 without dropout */
} fa_attn_bwd_params;

#endif
