/* The text of a mask's bounds over ranges of queries and keys. */
#ifndef FA_FLEX_SOURCE_BOUNDS_H
#define FA_FLEX_SOURCE_BOUNDS_H

#include "source_values.h"

/* Writes flex_mask_bounds, for kernels that ask for it. */
void fa_put_bounds(const fa_writer *w);

#endif
