/* The arguments of a product C[row][lane] = sum_k A[row][k] . B[k][lane] over words, and the kinds of its epilogue. */
#ifndef FA_CPU_PRODUCT_ARGS_H
#define FA_CPU_PRODUCT_ARGS_H

#include "fetch.h"

typedef enum {
    PRODUCT_STORE,     /* C = acc. Scores are stored without their scale, and their reader multiplies */
    PRODUCT_STORE_MAX, /* C = acc, lane_max = max(lane_max, acc scale) over the rows. Not with PRODUCT_OVERLAPS */
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
    fetch_queue *soon;  /* pieces to prefetch; NULL: none. Ignored if PRODUCT_FETCHES is 0 */
} product_args;

#endif
