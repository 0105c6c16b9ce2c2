/* The parameters of sinks.cu. C code fills the struct, and CUDA code reads the struct. All types have the same layout
 * on both sides. Strides count elements. */
#ifndef FA_SINKS_PARAMS_H
#define FA_SINKS_PARAMS_H

enum { FA_SINKS_WARPS = 8 };
enum { FA_SINKS_OF_F16, FA_SINKS_OF_BF16, FA_SINKS_OF_F32, FA_SINKS_OF_F64 };

typedef struct {
    void *out; /* [b, row, h, d] */
    long long out_stride_b, out_stride_row, out_stride_h;
    float *lse; /* [b, h, row] */
    long long lse_stride_b, lse_stride_h, lse_stride_row;
    const void *sinks; /* [h]; NULL: none */
    long long sinks_stride;
    int sinks_dtype, h;
    int lanes;          /* of a row: a power of two up to 32 */
    int pieces;         /* of 16 bytes in a row of out; 0: rows are not aligned to 16 bytes */
    long long rows, d;  /* rows of a sequence */
    long long num_rows; /* of all sequences and heads */
} fa_sinks_params;

#endif
