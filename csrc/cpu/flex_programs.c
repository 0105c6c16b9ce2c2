#include "flex_programs.h"

static bool make(const fa_flex_bound *bound, fa_isa isa, fa_flex_evaluator **e) {
    *e = bound ? fa_flex_evaluator_new(bound, isa, false) : NULL;
    return *e || !bound;
}

bool fa_flex_make_programs(const fa_problem *p, fa_isa isa, fa_flex_programs *programs) {
    *programs = (fa_flex_programs){.flex = p->flex};
    if (!p->flex) return true;
    if (make(p->flex->score, isa, &programs->score) && make(p->flex->mask, isa, &programs->mask) &&
        make(p->pass == FA_BWD ? p->flex->derivative : NULL, isa, &programs->derivative))
        return true;
    fa_flex_free_programs(programs);
    return false;
}

void fa_flex_free_programs(fa_flex_programs *programs) {
    fa_flex_evaluator_free(programs->score);
    fa_flex_evaluator_free(programs->mask);
    fa_flex_evaluator_free(programs->derivative);
    *programs = (fa_flex_programs){.score = NULL};
}
