/* Score_mods that are the score plus something: how the terms are found. */
#ifndef FA_FLEX_SUMS_H
#define FA_FLEX_SUMS_H

#include "program.h"

/* A score_mod may be the score plus terms that do not depend on the score. The walk through such a program goes from
 * the result to the score. */
typedef struct {
    int32_t idx;  /* the score, with the terms that are not yet taken */
    int32_t term; /* the value of the term taken last */
    bool is_subtracted;
} fa_sum_walk;

/* Takes a term. Returns false if there is none: idx is the score, or the rest is no such sum. */
bool fa_take_term(const fa_flex_program *p, fa_sum_walk *walk);

/* The condition of `score + where(condition, -score, 0)`, which a row chooses: then its score is 0. -1: idx is not
 * this. */
int32_t fa_clearing_condition(const fa_flex_program *p, int32_t idx);

/* The score to which terms are added, or -1. */
int32_t fa_score_below_terms(const fa_flex_program *p);

/* Is a score_mod the score plus something of the indices? In place of the score there may be
 * `score + where(condition, -score, 0)`, which clears the scores of rows that the condition chooses. */
bool fa_is_sum_with_score(const fa_flex_program *p);

/* Is it such a sum, and does it clear scores? p may be NULL. */
bool fa_clears_scores(const fa_flex_program *p);

#endif
