/* Text for what a score_mod reads of a pair of a query and a key alone, such as a bias of each pair. No other pair
 * needs the element, so nothing but an early request hides the time that memory takes. */
#ifndef FA_FLEX_SOURCE_PREFETCH_H
#define FA_FLEX_SOURCE_PREFETCH_H

#include "source_values.h"

/* The number of loads at [.., q_idx, .., kv_idx]. Their other indices are those of the head, or numbers. p may be NULL.
 */
int fa_count_pair_loads(const fa_flex_program *p);

/* The only such load, if its elements have 16 bits. Beside it, the only load at [.., q_idx, ..] alone, if that is of
 * fp32. Negative: there is none, or there are several. p may be NULL. */
int32_t fa_pair_of_bits(const fa_flex_program *p);
int32_t fa_row_beside_pair(const fa_flex_program *p);

/* Writes flex_prefetch of a score_mod that has such loads, for the last of them. Where fa_pair_of_bits and
 * fa_row_beside_pair find a load, flex_pair_bits and flex_row follow. The text is not wide. */
void fa_put_prefetch(const fa_writer *w, uint8_t *is_needed);

#endif
