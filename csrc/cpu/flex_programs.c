#include "flex_programs.h"

static bool make(const fa_flex_bound *bound, fa_isa isa, bool lanes_are_keys, fa_flex_evaluator **e) {
    *e = bound ? fa_flex_evaluator_new(bound, isa, lanes_are_keys) : NULL;
    return *e || !bound;
}

/* Bounds of an element that both the query and the key choose would be those of many elements. */
static bool has_bounds(const fa_flex_bound *mask) {
    const uint8_t both = FA_FLEX_ON_Q | FA_FLEX_ON_KV;
    for (int32_t i = 0; mask && i < mask->program->num_instructions; i++) {
        const fa_flex_instruction *x = &mask->program->instructions[i];
        if (x->op == FA_FLEX_gather && (x->depends & both) == both) return false;
    }
    return mask != NULL;
}

bool fa_flex_make_programs(const fa_problem *p, fa_isa isa, bool lanes_are_keys, fa_flex_programs *programs) {
    *programs = (fa_flex_programs){.flex = p->flex};
    if (!fa_flex_of(p)) return true;
    if (has_bounds(p->flex->mask)) programs->mask_bounds = fa_flex_intervals_new(p->flex->mask, NULL);
    if (make(p->flex->score, isa, lanes_are_keys, &programs->score) &&
        make(p->flex->mask, isa, lanes_are_keys, &programs->mask) &&
        make(p->pass == FA_BWD ? p->flex->derivative : NULL, isa, lanes_are_keys, &programs->derivative))
        return true;
    fa_flex_free_programs(programs);
    return false;
}

void fa_flex_free_programs(fa_flex_programs *programs) {
    fa_flex_evaluator_free(programs->score);
    fa_flex_evaluator_free(programs->mask);
    fa_flex_evaluator_free(programs->derivative);
    fa_flex_intervals_free(programs->mask_bounds);
    *programs = (fa_flex_programs){.score = NULL};
}
