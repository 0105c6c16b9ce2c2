/* Bounds of the values of a program while its indices run over ranges.
 *
 *   fa_flex_bound_head    b and h
 *   fa_flex_bound_rows    a range of q_idx, kept in one of the slots
 *   fa_flex_bound_keys    a range of kv_idx
 *   fa_flex_bound_block   the result for the rows of a slot and the keys
 *   fa_flex_bound_is_same behind it: whether no result depends on which of the keys it is
 *
 * Bounds are never too narrow. They may be too wide, because each operation sees only the bounds of its operands. */
#ifndef FA_FLEX_INTERVALS_H
#define FA_FLEX_INTERVALS_H

#include "program.h"

#define FA_FLEX_ROW_SLOTS 17

/* All values of a type lie between the bounds. bool and int64 use lo and hi, fp32 and fp64 use low and high. */
typedef struct {
    union {
        int64_t lo;
        double low;
    };
    union {
        int64_t hi;
        double high;
    };
    bool nan; /* a value of fp32 or fp64 may be NaN */
} fa_flex_interval;

typedef struct fa_flex_intervals fa_flex_intervals;

/* Bounds of pieces of long captures, for ranges of many indices. NULL: no memory. */
typedef struct fa_flex_tables fa_flex_tables;
fa_flex_tables *fa_flex_tables_new(const fa_flex_bound *bound);
void fa_flex_tables_free(fa_flex_tables *tables);

/* One thread uses an object. `bound` and `tables` must outlive it. With tables NULL bounds of more than a thousand
 * elements are those of the dtype. Returns NULL without memory. */
fa_flex_intervals *fa_flex_intervals_new(const fa_flex_bound *bound, const fa_flex_tables *tables);
void fa_flex_intervals_free(fa_flex_intervals *v);

void fa_flex_bound_head(fa_flex_intervals *v, int64_t b, int64_t h);
void fa_flex_bound_rows(fa_flex_intervals *v, int slot, int64_t first, int64_t last);
void fa_flex_bound_keys(fa_flex_intervals *v, int64_t first, int64_t last);
fa_flex_interval fa_flex_bound_block(fa_flex_intervals *v, int slot);
bool fa_flex_bound_is_same(fa_flex_intervals *v, int slot);

/* Bounds of all values [num_instructions] for indices from 0 to most_index and integer parameters from -most_param to
 * most_param, whatever captures hold. INT64_MAX: any parameter. */
void fa_flex_bound_always(const fa_flex_program *p, int64_t most_index, int64_t most_param, fa_flex_interval *values);

#endif
