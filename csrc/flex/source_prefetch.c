#include "source_prefetch.h"

#include <string.h>

#include "source_words.h"

/* Writes a function that computes the place of a load. `head` is its first line. */
static void put_function(const fa_writer *w, const char *head, const char *call, int32_t load, uint8_t *is_needed) {
    const fa_flex_instruction *x = &w->p->instructions[load];
    const int dtype = w->p->captures[x->source].dtype;
    memset(is_needed, 0, (size_t)w->p->num_instructions);
    for (int i = 0; i < x->num_operands; i++) is_needed[x->operand[i]] = 1;
    fa_put(w->t, "DEVICE %s {\n", head);
    fa_put_needed(w, is_needed);
    fa_put(w->t, "    %s<%s>(x.words[%d], ", call, fa_load_type(dtype),
           w->words + fa_flex_words_before(w->p, x->source));
    fa_put_place(w, x, false);
    fa_put(w->t, ");\n}\n\n");
}

void fa_put_prefetch(const fa_writer *w, uint8_t *is_needed) {
    int32_t pair;
    if (fa_count_pair_loads(w->p, &pair) == 0) return;
    put_function(w, "void flex_prefetch(const flex_values &x, int b, int h, int q_idx, int kv_idx)", "flex_ask_for",
                 pair, is_needed);
    if (fa_pair_of_bits(w->p) < 0) return;
    put_function(w, "unsigned short flex_pair_bits(const flex_values &x, int b, int h, int q_idx, int kv_idx)",
                 "return flex_load", pair, is_needed);
    put_function(w, "const unsigned short *flex_pair_place(const flex_values &x, int b, int h, int q_idx, int kv_idx)",
                 "return flex_address", pair, is_needed);
    const int32_t row = fa_row_beside_pair(w->p);
    if (row >= 0)
        put_function(w, "float flex_row(const flex_values &x, int b, int h, int q_idx)", "return flex_load", row,
                     is_needed);
}
