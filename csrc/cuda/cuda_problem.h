/* The generic kernels read an fa_problem (../flash_attn.h) in this form. C code fills the struct, and CUDA code
 * reads the struct. All types have the same layout on both sides. Each member means the same as in fa_problem. Every
 * array lies in the GPU's memory. */
#ifndef FA_CUDA_PROBLEM_H
#define FA_CUDA_PROBLEM_H

#include "division.h"
#include "sinks_params.h"

/* [b, row, h, d]; packed: stride_b = 0; a paged cache: stride_b from page to page. data NULL: absent. */
typedef struct {
    void *data;
    long long stride_b, stride_row, stride_h; /* counted in elements */
} fa_cuda_view;

/* One factor per sequence and key head; data NULL: 1. */
typedef struct {
    const float *data;
    long long stride_b, stride_h;
} fa_cuda_descale;

/* One float per (b, h, row). */
typedef struct {
    float *data;
    long long stride_b, stride_h;
} fa_cuda_row_stats;

typedef struct {
    int b, h, h_kv, d;
    int len_q, len_kv;     /* dense: the lengths; packed: max_seqlen; kvcache: len_kv is the capacity */
    int total_q, total_kv; /* packed: rows of the tensors, the bounds of every offset */

    fa_cuda_view q, k, v, o, dout, dq, dk, dv;
    fa_cuda_row_stats lse, softmax_d;
    int softmax_d_rows; /* allocated rows of one head; some rows only round up the size */

    float scale, softcap;          /* softcap 0: off */
    int window_left, window_right; /* -1: unlimited */
    const float *alibi_slopes;
    long long alibi_stride_b;

    const unsigned long long *rng_state; /* seed and offset; NULL: no dropout */
    int keep_max;
    float keep_scale; /* 1 / (1 - dropout_p) */
    void *s_dmask;
    long long s_dmask_rows, s_dmask_cols;

    const int *cu_seqlens_q, *cu_seqlens_k, *seqused_k, *leftpad_k, *cache_batch_idx, *block_table;
    int paged; /* true: k and v are pages; a table without entries may be NULL */
    long long block_table_stride;
    int block_table_cols, page_size, num_pages;
    int cache_rows; /* rows that cache_batch_idx may name */

    fa_cuda_view k_new, v_new;
    void *q_rotated; /* [b, len_q, h, d] contiguous; NULL: no rotary */
    const void *rotary_cos, *rotary_sin;
    int len_new, rotary_rows, rotary_dim, rotary_interleaved, rotary_q_by_row;

    /* 16, 8, 4 or 2. Every row of q, k, v, o and their gradients consists of aligned pieces of so many bytes. */
    int piece_bytes;
    int zero_tensors;   /* true: rows of packed outputs that belong to no sequence become zero */
    int num_tiles;      /* tiles of the longest sequence: CTAs of one head */
    int leaves_long;    /* attn_bwd_short, packed: another kernel takes sequences that are longer than a unit */
    int unit_sequences; /* attn_bwd_short with a user's functions: sequences of a unit, one after the other */
    int group_heads;    /* attn_fwd_sm80, attn_bwd_sm80: heads that are walked together (task_order.cuh) */
    float empty_lse;    /* lse of a row that sees no key */
    fa_cuda_sinks sinks;

    /* Additions of flash-attn 3. Kernels without the feature OF_3 read none of these members. */
    int d_v;             /* columns of v, o, qv, dout and dv */
    int num_v_blocks;    /* blocks of as many columns as the kernel's tiles have */
    int attention_chunk; /* 0: off */
    fa_cuda_view qv;
    fa_cuda_descale q_descale, k_descale, v_descale; /* of e4m3 */
    const int *seqused_q, *cu_seqlens_k_new, *seqlens_rotary;
    int total_new;   /* packed: rows of k_new, the bound of cu_seqlens_k_new */
    int rotary_e4m3; /* true: cos and sin are e4m3, otherwise they have the dtype of o */

    /* Programmable attention. With several parts the keys of a sequence are cut into as many. Each part has an o and an
     * lse of its own. */
    int num_parts;
    float *part_o, *part_lse; /* [part, b, h, row, d_v] and [part, b, h, row] */

    fa_division by_page_size; /* attn_fwd_sm80 alone divides so */
} fa_cuda_problem;

/* attn_fwd_sm80 keeps the places of the keys of so many key tiles of a cache in shared memory, of 4 bytes each. */
#define FA_PLACE_TILES_SM80(stages) ((stages) == 1 ? 8 : 4)

#endif
