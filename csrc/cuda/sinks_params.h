/* The sinks of a call as a forward reads them, and the parameters of sinks.cu and sinks_grad.cu. C code fills the
 * structs, and CUDA code reads the structs. All types have the same layout on both sides. Strides count elements. */
#ifndef FA_SINKS_PARAMS_H
#define FA_SINKS_PARAMS_H

enum { FA_SINKS_WARPS = 8, FA_SINKS_GRAD_WARPS = 16 };
enum { FA_SINKS_OF_F16, FA_SINKS_OF_BF16, FA_SINKS_OF_F32, FA_SINKS_OF_F64 };

typedef struct {
    const void *data; /* [h]; NULL: none */
    long long stride;
    int dtype;
} fa_cuda_sink_values;

typedef struct {
    float *data; /* [b, h, row]; NULL: 0 */
    long long stride_b, stride_h, stride_row;
} fa_cuda_sink_rows;

/* What the epilogue of a forward reads. */
typedef struct {
    fa_cuda_sink_values values;
    fa_cuda_sink_rows shift; /* was subtracted from the scores of a row */
} fa_cuda_sinks;

typedef struct {
    fa_cuda_sink_values sinks;
    void *out; /* [b, row, h, d] */
    long long out_stride_b, out_stride_row, out_stride_h;
    fa_cuda_sink_rows lse;
    fa_cuda_sink_rows shift; /* was subtracted from the scores of a row */
    int h;
    int lanes;          /* of a row: a power of two up to 32 */
    int pieces;         /* of 16 bytes in a row of out; 0: rows are not aligned to 16 bytes */
    long long rows, d;  /* rows of a sequence */
    long long num_rows; /* of all sequences and heads */
} fa_sinks_params;

typedef struct {
    fa_cuda_sink_values sinks;
    fa_cuda_sink_rows lse, delta, shift;
    void *gradient; /* [h] contiguous, in the dtype of sinks */
    const int *end; /* rows from here on belong to no sequence; NULL: all rows belong to one */
    long long b, rows;
} fa_sinks_grad_params;

#endif
