/* The words of flex_values: where they lie, and what is in them. */
#include "source_words.h"

#include <string.h>

static int32_t capture_words(const fa_flex_program *p, int32_t capture) { return 1 + 2 * p->captures[capture].rank; }

/* The words of all captures before `capture`. */
int32_t fa_flex_words_before(const fa_flex_program *p, int32_t capture) {
    int32_t words = 0;
    for (int32_t i = 0; i < capture; i++) words += capture_words(p, i);
    return words;
}

/* The words of captures and parameters. */
int32_t fa_flex_program_words(const fa_flex_program *p) {
    return p ? fa_flex_words_before(p, p->num_captures) + p->num_params : 0;
}

size_t fa_flex_values_bytes(const fa_flex_program *score, const fa_flex_program *mask,
                            const fa_flex_program *derivative) {
    const int32_t words = fa_flex_program_words(score) + fa_flex_program_words(mask) +
                          fa_flex_program_words(derivative) + (derivative ? derivative->num_captures : 0);
    return sizeof(int64_t) * (size_t)(words > 0 ? words : 1);
}

static int64_t *fill_words(const fa_flex_bound *bound, int64_t *word) {
    const fa_flex_program *p = bound->program;
    for (int32_t i = 0; i < p->num_captures; i++) {
        const fa_flex_capture *c = &bound->captures[i];
        *word++ = (int64_t)(intptr_t)c->data;
        for (int dim = 0; dim < p->captures[i].rank; dim++) {
            *word++ = c->size[dim];
            *word++ = c->stride[dim];
        }
    }
    for (int32_t i = 0; i < p->num_params; i++, word++) {
        if (p->params[i] == FA_FLEX_BOOL)
            *word = bound->params[i].b;
        else
            memcpy(word, &bound->params[i], sizeof *word);
    }
    return word;
}

void fa_flex_fill_values(const fa_flex_bound *score, const fa_flex_bound *mask, const fa_flex_bound *derivative,
                         fa_flex_gradients gradients, void *values) {
    int64_t *word = values;
    *word = 0;
    if (score) word = fill_words(score, word);
    if (mask) word = fill_words(mask, word);
    if (!derivative) return;
    word = fill_words(derivative, word);
    for (int32_t i = 0; i < derivative->program->num_captures; i++)
        *word++ = gradients ? (int64_t)(intptr_t)gradients[i] : 0;
}
