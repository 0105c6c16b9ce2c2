/* Sums of the gradients of captures. A copy of the sums has an fp64 number for each element of each capture whose
 * gradient is wanted. Tasks add to their own copies, and the copies are added up in their order. If every pair has an
 * element of its own, as a bias of each pair has, there is nothing to add up, and tasks write the gradient itself. */
#ifndef FA_CPU_FLEX_GRADIENTS_H
#define FA_CPU_FLEX_GRADIENTS_H

#include "flex/flex.h"

typedef struct {
    bool is_wanted;                    /* some gradient is */
    int64_t num;                       /* elements of a copy; 0: none is needed */
    int64_t at[FA_FLEX_MAX_CAPTURES];  /* first element of a capture; -1: it has no sums */
    bool is_own[FA_FLEX_MAX_CAPTURES]; /* every pair has an element of its own */
    bool by_head, by_key;              /* heads, keys have elements of their own in all captures with sums */
} fa_flex_sums;

/* owns: captures may have no sums because every pair has its own element. */
fa_flex_sums fa_flex_sums_of(const fa_problem *p, bool owns);

/* Tasks of one chain run one after the other. Tasks of two chains never add to the same element, because they have
 * other heads or other ranges of keys, which are indices of all captures. */
static inline int64_t fa_flex_num_chains(const fa_problem *p, const fa_flex_sums *sums, int64_t ranges) {
    return (sums->by_head ? p->h_kv : 1) * (sums->by_key ? ranges : 1);
}

/* The number of copies, which follows from the sizes alone. The tasks are dealt out to the copies in equal shares, and
 * one thread at a time runs a chain of the tasks of a copy. The copies of large captures would take too much memory.
 * With several chains a copy takes some tasks of each, because clearing and adding up a copy is work, too. NOTE: a
 * capture of more than 8M elements has one copy. If it has one chain, too, all tasks run one after the other. */
static inline int64_t fa_flex_num_copies(const fa_flex_sums *sums, int64_t num_tasks, int64_t num_chains) {
    const int64_t most_elements = 8 << 20, most_workers = 64, tasks_of_chain = num_chains > 1 ? 4 : 1;
    int64_t num = sums->num > 0 ? most_elements / sums->num : 0;
    const int64_t most = (most_workers + num_chains - 1) / num_chains,
                  useful = num_tasks / (tasks_of_chain * num_chains);
    if (num > most) num = most;
    if (num > useful) num = useful;
    return num < 1 ? 1 : num;
}

/* Writes where scatters to each capture add. copy may be NULL if sums->num is 0. */
void fa_flex_point_at_sums(const fa_flex *flex, const fa_flex_sums *sums, double *copy,
                           fa_flex_sums_at places[FA_FLEX_MAX_CAPTURES]);

/* Adds elements [begin, end) of all copies to the gradients. */
void fa_flex_add_sums(const fa_flex *flex, const fa_flex_sums *sums, const double *copies, int64_t num_copies,
                      int64_t begin, int64_t end);

#endif
