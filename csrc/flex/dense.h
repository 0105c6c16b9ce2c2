/* Writes the result of a program for every batch, head, query and key. */
#ifndef FA_FLEX_DENSE_H
#define FA_FLEX_DENSE_H

#include "cpu/pool.h"
#include "program.h"

typedef struct {
    int64_t b, h, len_q, len_kv;
    int64_t first_q, first_kv; /* the indices of the first row and the first column */
    void *out;                 /* [b, h, len_q, len_kv], contiguous, elements of the result's type */
    const void *scores;        /* the same shape, contiguous, of the type that the program names, or NULL */
} fa_flex_grid;

/* FA_ENOMEM: there is no memory to work in, or the pool failed. */
fa_status fa_flex_evaluate(const fa_flex_bound *bound, const fa_flex_grid *grid, const fa_pool *pool, fa_error *err);

#endif
