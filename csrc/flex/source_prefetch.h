/* Text for what a score_mod reads of a pair of a query and a key alone, such as a bias of each pair. No other pair
 * needs the element, so nothing but an early request hides the time that memory takes. */
#ifndef FA_FLEX_SOURCE_PREFETCH_H
#define FA_FLEX_SOURCE_PREFETCH_H

#include "pairs.h"
#include "source_values.h"

/* Writes flex_prefetch of a score_mod that has such loads, for the last of them. Where fa_pair_of_bits and
 * fa_row_beside_pair find a load, flex_pair_bits, flex_pair_place and flex_row follow. The text is not wide. */
void fa_put_prefetch(const fa_writer *w, uint8_t *is_needed);

#endif
