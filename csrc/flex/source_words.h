/* The words of a flex_values in the text of source.h. */
#ifndef FA_FLEX_SOURCE_WORDS_H
#define FA_FLEX_SOURCE_WORDS_H

#include "flex.h"

/* sizeof(flex_values) in the text: at least 8. */
size_t fa_flex_values_bytes(const fa_flex_program *score, const fa_flex_program *mask,
                            const fa_flex_program *derivative);

/* Writes the bytes of a flex_values, aligned to 8. A program that does not exist is NULL. gradients: as in fa_flex, of
 * the captures of `derivative`. Nothing is added to a gradient that is NULL. */
void fa_flex_fill_values(const fa_flex_bound *score, const fa_flex_bound *mask, const fa_flex_bound *derivative,
                         fa_flex_gradients gradients, void *values);

/* The words that belong to the captures before `capture`, and to all captures and parameters. */
int32_t fa_flex_words_before(const fa_flex_program *p, int32_t capture);
int32_t fa_flex_program_words(const fa_flex_program *p);

#endif
