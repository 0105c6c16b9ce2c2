/* The parameters of align.cu. C code fills the struct, and CUDA code reads the struct. All types have the same layout
 * on both sides. */
#ifndef FA_ALIGN_PARAMS_H
#define FA_ALIGN_PARAMS_H

#include "cuda_problem.h"

/* Each thread of a CTA moves so many pieces of 16 bytes. A launch moves up to so many tensors. */
enum { FA_ALIGN_THREADS = 256, FA_ALIGN_PIECES = 4, FA_ALIGN_TENSORS = 8 };

/* A tensor [b, rows, h, d] of elements of 2 bytes, and its copy. If all rows are equally far apart, they count as heads
 * of one row. */
typedef struct {
    fa_cuda_view own;
    void *copy;   /* contiguous */
    int num_rows; /* b * rows * h */
    int rows, h;
    int rows_of_cta;
    int unit_bytes; /* 2, 4, 8 or 16. Every row of the tensor consists of aligned units of so many bytes. */
    int units;      /* of a row of the tensor */
    int pieces;     /* of a row of the copy */
    fa_division by_pieces, by_rows, by_h;
} fa_align_tensor;

typedef struct {
    fa_align_tensor tensors[FA_ALIGN_TENSORS];
    int is_back; /* true: from the copies to the tensors */
} fa_align_params;

#endif
