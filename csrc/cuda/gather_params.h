/* The parameters of gather.cu. C code fills the struct, and CUDA code reads the struct. All types have the same layout
 * on both sides. */
#ifndef FA_GATHER_PARAMS_H
#define FA_GATHER_PARAMS_H

#include "cuda_problem.h"

/* A CTA copies so many keys of a sequence. So many rows behind the last key become zero: a key tile reads fewer. */
enum { FA_GATHER_WARPS = 4, FA_GATHER_KEYS = 8, FA_GATHER_ZEROS = 128 };

typedef struct {
    fa_cuda_problem problem; /* with pages */
    void *k, *v;             /* [b, rows, h_kv, d] and [b, rows, h_kv, d_v], contiguous */
    int *lengths;            /* [b] */
    int rows;                /* keys that fit in the pages of a sequence */
} fa_gather_params;

#endif
