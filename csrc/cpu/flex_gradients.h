/* Sums of the gradients of captures. A copy of the sums has an fp64 number for each element of each capture whose
 * gradient is wanted. Tasks add to their own copies, and the copies are added up in their order. */
#ifndef FA_CPU_FLEX_GRADIENTS_H
#define FA_CPU_FLEX_GRADIENTS_H

#include "flex/flex.h"

typedef struct {
    int64_t num;                      /* elements of a copy; 0: no gradient is wanted */
    int64_t at[FA_FLEX_MAX_CAPTURES]; /* first element of a capture; -1: its gradient is not wanted */
} fa_flex_sums;

fa_flex_sums fa_flex_sums_of(const fa_flex *flex);

/* Writes the address of each capture's sums in a copy, or NULL. */
void fa_flex_point_at_sums(const fa_flex *flex, const fa_flex_sums *sums, double *copy,
                           double *addresses[FA_FLEX_MAX_CAPTURES]);

/* Adds elements [begin, end) of all copies to the gradients. */
void fa_flex_add_sums(const fa_flex *flex, const fa_flex_sums *sums, const double *copies, int64_t num_copies,
                      int64_t begin, int64_t end);

#endif
