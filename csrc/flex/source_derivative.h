/* The text of a derivative. */
#ifndef FA_FLEX_SOURCE_DERIVATIVE_H
#define FA_FLEX_SOURCE_DERIVATIVE_H

#include "flash_attn.h"
#include "source_values.h"

/* Writes flex_derivative and the functions of its scatters. */
fa_status fa_put_derivative(const fa_writer *w, fa_error *err);

/* The number of scatters; 0 without a program. */
int fa_num_parts(const fa_flex_program *p);

#endif
