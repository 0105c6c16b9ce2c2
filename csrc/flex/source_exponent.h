/* The text of flex_exponent. */
#ifndef FA_FLEX_SOURCE_EXPONENT_H
#define FA_FLEX_SOURCE_EXPONENT_H

#include "source_values.h"

/* Is a score_mod the score plus something of the indices? In place of the score there may be
 * `score + where(condition, -score, 0)`, which clears the scores of rows that the condition chooses. */
bool fa_is_sum_with_score(const fa_flex_program *p);

/* Is it such a sum, and does it clear scores? p may be NULL. */
bool fa_clears_scores(const fa_flex_program *p);

/* Writes flex_head_values and flex_exponent of such a score_mod. The arrays have a flag for each instruction. */
void fa_put_exponent(const fa_writer *w, uint8_t *is_needed, uint8_t *is_value);

#endif
