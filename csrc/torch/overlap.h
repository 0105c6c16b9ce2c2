/* Do two tensors share memory? Does a tensor overlap itself? */
#ifndef FA_TORCH_OVERLAP_H
#define FA_TORCH_OVERLAP_H

#include "call.h"

/* Checks a written tensor: no two of its elements may lie in one place. Expanded tensors and overlapping windows are
 * refused. The check is exact unless the strides do not fit together: then it may refuse a tensor without need. */
fa_status check_distinct_elements(const fa_tensor *t, fa_error *err);

/* Does any byte belong to an element of x and to an element of y? Views that interleave, such as q and k in a packed
 * qkv, share none. The answer is exact unless the strides of x and y do not fit together: then it may be a false yes.
 * An absent tensor shares nothing. */
bool share_memory(const fa_tensor *x, const fa_tensor *y);

/* Returns the number of pages from page 0 of x to page 0 of y, if both are parts of one pool: each page of x that lies
 * in y is a whole page of y. Otherwise, and if no page is shared, returns 0. */
int64_t pages_apart(const fa_tensor *x, const fa_tensor *y);

#endif
