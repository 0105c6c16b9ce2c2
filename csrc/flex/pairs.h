/* A capture that a score_mod reads at [.., kv_idx], such as a bias of each query and key, has its elements of two keys
 * side by side. A thread of Hopper's forward has scores of keys 2 n and 2 n + 1, and one load brings what both
 * read. In eights, 16 aligned bytes, the elements come through shared memory (cuda/pair_octets.cuh), in the
 * backward, too. */
#ifndef FA_FLEX_PAIRS_H
#define FA_FLEX_PAIRS_H

#include "program.h"

/* Is an instruction such a load? */
bool fa_flex_reads_keys(const fa_flex_program *p, const fa_flex_instruction *x);

/* Are there such loads, and do all of them find two elements in one aligned place, for all keys up to len_kv? */
bool fa_flex_has_pairs(const fa_flex_bound *bound, int64_t len_kv);

/* The number of loads at [.., q_idx, .., kv_idx], and the last of them. Their other indices are those of the head, or
 * numbers. p may be NULL. */
int fa_count_pair_loads(const fa_flex_program *p, int32_t *last);

/* The only such load, if its elements have 16 bits. Beside it, the only load at [.., q_idx, ..] alone, if that is of
 * fp32. Negative: there is none, or there are several. p may be NULL. */
int32_t fa_pair_of_bits(const fa_flex_program *p);
int32_t fa_row_beside_pair(const fa_flex_program *p);

/* Does fa_pair_of_bits find a load, and are the elements of keys 8 n to 8 n + 7 16 aligned bytes, for all keys up to
 * len_kv? */
bool fa_flex_has_octets(const fa_flex_bound *bound, int64_t len_kv);

/* Does a score_mod load something of a query or a key, beside what fa_pair_of_bits and fa_row_beside_pair find? p may
 * be NULL. */
bool fa_loads_beside_pair(const fa_flex_program *p);

#endif
