/* An fa_problem (../flash_attn.h) as the generic kernels see it: filled in C, read in CUDA. Only types that both sides lay
 * out alike. Members mean what they mean there; every array lies in the GPU's memory. */
#ifndef FA_CUDA_PROBLEM_H
#define FA_CUDA_PROBLEM_H

/* [b, row, h, d]; packed: stride_b = 0; a paged cache: stride_b from page to page. data NULL: absent. */
typedef struct {
    void *data;
    long long stride_b, stride_row, stride_h; /* of elements */
} fa_cuda_view;

/* One float per (b, h, row). */
typedef struct {
    float *data;
    long long stride_b, stride_h;
} fa_cuda_row_stats;

typedef struct {
    int b, h, h_kv, d;
    int len_q, len_kv;     /* dense: the lengths; packed: max_seqlen; kvcache: capacity for len_kv */
    int total_q, total_kv; /* packed: rows of the tensors, the bounds of every offset */

    fa_cuda_view q, k, v, o, dout, dq, dk, dv;
    fa_cuda_row_stats lse, softmax_d;
    int softmax_d_rows; /* allocated for one head, those that only round up included */

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
    int paged; /* k and v are pages; block_table may be NULL all the same, if it has no entries */
    long long block_table_stride;
    int block_table_cols, page_size, num_pages;
    int cache_rows; /* that cache_batch_idx may name */

    fa_cuda_view k_new, v_new;
    void *q_rotated; /* [b, len_q, h, d] contiguous; NULL: no rotary */
    const void *rotary_cos, *rotary_sin;
    int len_new, rotary_rows, rotary_dim, rotary_interleaved, rotary_q_by_row;

    int piece_bytes;  /* 16, 8, 4 or 2: every row of q, k, v, o and their gradients consists of such pieces, aligned */
    int zero_tensors; /* rows of packed outputs that belong to no sequence become zero */
    int num_tiles;    /* of the longest sequence: CTAs of one head */
} fa_cuda_problem;

#endif
