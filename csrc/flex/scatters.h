/* Which indices choose the element that a scatter of a derivative adds to. A kernel adds up what goes to one element
 * before it goes to memory, so it asks which pairs of a tile share an element. */
#ifndef FA_FLEX_SCATTERS_H
#define FA_FLEX_SCATTERS_H

#include "program.h"

/* All pairs of one batch and head share the element: all of them, those of one query, those of one key, those of one
 * difference of query and key, or not even those. */
typedef enum {
    FA_FLEX_OF_HEAD,
    FA_FLEX_OF_QUERY,
    FA_FLEX_OF_KEY,
    FA_FLEX_OF_DIFFERENCE,
    FA_FLEX_OF_PAIR,
    FA_FLEX_NUM_KINDS
} fa_flex_scatter_kind;

/* What is known of an instruction's value.
 *
 * is_linear      The value is of_q q_idx + of_kv kv_idx, plus something of b, h and parameters.
 * is_difference  The value depends on q_idx and kv_idx by q_idx - kv_idx alone, and not on the score.
 * reads_score    The value depends on the score, beside the gradient. */
typedef struct {
    int32_t of_q, of_kv;
    bool is_linear, is_difference, reads_score;
    uint8_t kind; /* of a scatter: fa_flex_scatter_kind */
} fa_flex_trait;

/* Returns a trait for each instruction, which the caller frees. NULL: there is no memory. */
fa_flex_trait *fa_flex_traits(const fa_flex_program *p);

static inline bool fa_flex_is_scatter(const fa_flex_instruction *x) { return x->op == FA_FLEX_scatter; }

/* Does the score choose an element that a scatter adds to? */
bool fa_flex_places_read_score(const fa_flex_program *p);

/* Is the result of a derivative the gradient that it reads? */
bool fa_flex_passes_gradient(const fa_flex_program *p);

#endif
