/* Finds the blocks of a mask that are empty, full or partial, and lists them as torch's BlockMask does. */
#ifndef FA_FLEX_CLASSIFY_H
#define FA_FLEX_CLASSIFY_H

#include "cpu/pool.h"
#include "flex.h"

/* The lists of one kind: for each row of blocks the number of its blocks, and their places in ascending order. The
 * places of all other blocks follow, in ascending order, too. Of the columns the same, unless num_q and q are NULL. */
typedef struct {
    int32_t *num_kv; /* [b, h, rows] */
    int32_t *kv;     /* [b, h, rows, columns] */
    int32_t *num_q;  /* [b, h, columns] */
    int32_t *q;      /* [b, h, columns, rows] */
} fa_flex_lists;

typedef struct {
    int64_t b, h, len_q, len_kv, block_q, block_kv;
    const int32_t *q_offset; /* [b] what the mask_mod adds to a row, on the CPU only; NULL: 0 */
    fa_flex_lists partial, full;
    /* How many blocks were evaluated element by element, because their bounds did not tell. Set by fa_flex_classify. */
    int64_t num_evaluated;
} fa_flex_blocks;

/* The program's result must be bool. Blocks behind the last row or column are never full. FA_ENOMEM: there is no memory
 * to work in, or the pool failed. */
fa_status fa_flex_classify(const fa_flex_bound *bound, fa_flex_blocks *blocks, const fa_pool *pool, fa_error *err);

#endif
