/* What a product is asked for: C[row][lane] = sum_k A[row][k] . B[k][lane] over words, and what becomes of the sums. */
#ifndef FA_CPU_PRODUCT_ARGS_H
#define FA_CPU_PRODUCT_ARGS_H

#include "fetch.h"

typedef enum {
    PRODUCT_STORE,     /* C = acc: scores come without their scale, and who reads them multiplies */
    PRODUCT_STORE_MAX, /* the same; lane_max = max(lane_max, acc scale) over the rows. Not where PRODUCT_OVERLAPS */
    PRODUCT_ADD,       /* C += acc */
    PRODUCT_RESCALE,   /* C = C alpha + acc */
} product_epilogue;

typedef struct {
    const float *a; /* [rows][num_words], row stride a_stride */
    int64_t a_stride;
    const float *b; /* [num_words][num_vecs LANES], row stride b_stride */
    int64_t b_stride;
    float *c; /* [rows][num_vecs LANES], row stride c_stride */
    int64_t c_stride;
    int64_t rows, num_words;
    int num_vecs;
    const float *alpha; /* PRODUCT_RESCALE: [num_vecs LANES] */
    float scale;        /* PRODUCT_STORE_MAX: above 0 */
    float *lane_max;    /* PRODUCT_STORE_MAX: [num_vecs LANES] */
    fetch_queue *soon;  /* what to fetch meanwhile; NULL: nothing. Where PRODUCT_FETCHES is 0 nobody looks */
} product_args;

#endif
