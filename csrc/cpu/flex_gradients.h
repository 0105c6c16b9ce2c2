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

/* The number of copies, which follows from the sizes alone. The tasks are dealt out to the copies in equal shares, and
 * one thread at a time runs the tasks of a copy. The copies of large captures would take too much memory. NOTE: a
 * capture of more than 8M elements has one copy, so all tasks run one after the other. */
static inline int64_t fa_flex_num_copies(const fa_flex_sums *sums, int64_t num_tasks) {
    const int64_t most_elements = 8 << 20, most_copies = 64;
    int64_t num = sums->num > 0 ? most_elements / sums->num : 0;
    if (num < 1) num = 1;
    if (num > most_copies) num = most_copies;
    return num < num_tasks || num_tasks < 1 ? num : num_tasks;
}

/* Writes the address of each capture's sums in a copy, or NULL. */
void fa_flex_point_at_sums(const fa_flex *flex, const fa_flex_sums *sums, double *copy,
                           double *addresses[FA_FLEX_MAX_CAPTURES]);

/* Adds elements [begin, end) of all copies to the gradients. */
void fa_flex_add_sums(const fa_flex *flex, const fa_flex_sums *sums, const double *copies, int64_t num_copies,
                      int64_t begin, int64_t end);

#endif
