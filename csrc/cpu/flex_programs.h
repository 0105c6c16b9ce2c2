/* The evaluators of one thread. */
#ifndef FA_CPU_FLEX_PROGRAMS_H
#define FA_CPU_FLEX_PROGRAMS_H

#include "flex/evaluate.h"
#include "flex/flex.h"
#include "flex/intervals.h"

/* NULL: there is no such program, or in a forward no derivative. */
typedef struct {
    fa_flex_evaluator *score, *mask, *derivative;
    fa_flex_intervals *mask_bounds; /* NULL: they would hardly tell anything */
    const fa_flex *flex;
} fa_flex_programs;

/* Makes the evaluators of a problem, whose lanes are queries or keys. Returns false without memory. A problem without
 * flex has none. */
bool fa_flex_make_programs(const fa_problem *problem, fa_isa isa, bool lanes_are_keys, fa_flex_programs *programs);
void fa_flex_free_programs(fa_flex_programs *programs);

#endif
