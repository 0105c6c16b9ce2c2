#include "sums.h"

static bool reads_score(const fa_flex_program *p, int32_t idx) {
    return p->instructions[idx].depends & FA_FLEX_ON_SCORE;
}

bool fa_take_term(const fa_flex_program *p, fa_sum_walk *walk) {
    const fa_flex_instruction *x = &p->instructions[walk->idx];
    if ((!fa_is_op(x, FA_FLEX_add) && !fa_is_op(x, FA_FLEX_sub)) || x->result != FA_FLEX_F32) return false;
    const int32_t first = x->operand[0], second = x->operand[1];
    if (reads_score(p, first) && !reads_score(p, second))
        *walk = (fa_sum_walk){first, second, fa_is_op(x, FA_FLEX_sub)};
    else if (fa_is_op(x, FA_FLEX_add) && !reads_score(p, first) && reads_score(p, second))
        *walk = (fa_sum_walk){second, first, false};
    else
        return false;
    return true;
}

static bool is_score(const fa_flex_program *p, int32_t idx) {
    const fa_flex_instruction *x = &p->instructions[idx];
    if (fa_is_op(x, FA_FLEX_where) && x->operand[1] == x->operand[2]) /* detached */
        return is_score(p, x->operand[1]);
    return fa_is_op(x, FA_FLEX_score) && x->result == FA_FLEX_F32;
}

static bool is_zero(const fa_flex_program *p, int32_t idx) {
    const fa_flex_instruction *x = &p->instructions[idx];
    while (fa_is_op(x, FA_FLEX_convert)) x = &p->instructions[x->operand[0]];
    return fa_is_op(x, FA_FLEX_constant) && (x->result == FA_FLEX_F32 || x->result == FA_FLEX_F64) && x->number.d == 0;
}

int32_t fa_clearing_condition(const fa_flex_program *p, int32_t idx) {
    const fa_flex_instruction *x = &p->instructions[idx];
    if (!fa_is_op(x, FA_FLEX_add) || x->result != FA_FLEX_F32 || !is_score(p, x->operand[0])) return -1;
    const fa_flex_instruction *where = &p->instructions[x->operand[1]];
    if (!fa_is_op(where, FA_FLEX_where) || !is_zero(p, where->operand[2])) return -1;
    const fa_flex_instruction *negative = &p->instructions[where->operand[1]];
    const bool is_of_row = !(p->instructions[where->operand[0]].depends & (FA_FLEX_ON_KV | FA_FLEX_ON_SCORE));
    const bool clears = fa_is_op(negative, FA_FLEX_neg) && is_score(p, negative->operand[0]);
    return is_of_row && clears ? where->operand[0] : -1;
}

int32_t fa_score_below_terms(const fa_flex_program *p) {
    fa_sum_walk walk = {p->num_instructions - 1, 0, false};
    while (fa_take_term(p, &walk)) continue;
    return is_score(p, walk.idx) || fa_clearing_condition(p, walk.idx) >= 0 ? walk.idx : -1;
}

bool fa_is_sum_with_score(const fa_flex_program *p) { return fa_score_below_terms(p) >= 0; }

bool fa_clears_scores(const fa_flex_program *p) {
    const int32_t score = p ? fa_score_below_terms(p) : -1;
    return score >= 0 && fa_clearing_condition(p, score) >= 0;
}
