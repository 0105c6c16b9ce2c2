/* Checks of lengths and indices: between the shapes and the options, in this order. */
#ifndef FA_TORCH_LENGTHS_H
#define FA_TORCH_LENGTHS_H

#include "call.h"

fa_status check_lengths(const fa_call *c, fa_problem *p, fa_error *err);
fa_status check_append(const fa_call *c, fa_problem *p, fa_error *err);

/* The values inside length and index tensors, which lie in the host's memory. */
fa_status check_values(const fa_call *c, const fa_problem *p, fa_error *err);

#endif
