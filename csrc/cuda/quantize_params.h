/* Parameters of quantize. C code fills the struct, and CUDA code reads the struct. All types have the same layout on
 * both sides. */
#ifndef FA_QUANTIZE_PARAMS_H
#define FA_QUANTIZE_PARAMS_H

/* One of q, k and v. A piece is 2^log2_rows rows of a sequence and key head. A row has g heads. */
typedef struct {
    const void *x;                            /* [b, row, h, d]; packed: stride_b = 0 */
    long long stride_b, stride_row, stride_h; /* counted in elements */
    unsigned char *out;                       /* contiguous, the shape of x */
    float *descale;                           /* [b, h_kv]; is_per_tensor: one float */
    const int *cu_seqlens;                    /* [b + 1]; NULL: dense */
    int rows;                                 /* dense: of a sequence; packed: of the tensor */
    int g, d, rotates;
    int is_aligned; /* every row of x consists of aligned pieces of 8 elements */
    int log2_rows;
    int pieces_of_head; /* of a sequence and key head, in a dense tensor */
    int num_pieces;     /* some pieces of packed tensors are empty */
} fa_quantize_tensor;

typedef struct {
    fa_quantize_tensor tensors[3];
    int b, h_kv, is_per_tensor;
    int num_pieces;     /* of the three tensors */
    int lag;            /* pieces between the two passes; at least those of the largest group - 1 */
    unsigned *counters; /* pairs: the next ticket; for each group its maximum and its measured pieces. All begin as 0 */
    unsigned long long signs[4];
} fa_quantize_params;

#endif
