/* The text of flex_exponent. */
#ifndef FA_FLEX_SOURCE_EXPONENT_H
#define FA_FLEX_SOURCE_EXPONENT_H

#include "source_values.h"

/* Writes flex_head_values and flex_exponent of such a score_mod. The arrays have a flag for each instruction. */
void fa_put_exponent(const fa_writer *w, uint8_t *is_needed, uint8_t *is_value);

#endif
