#include "source_prefetch.h"

#include <string.h>

#include "source_words.h"

/* Does an instruction load an element at q_idx? Is kv_idx an index, too, as at_kv says? All other indices must be those
 * of the head, or numbers. */
static bool loads_at(const fa_flex_program *p, const fa_flex_instruction *x, bool at_kv) {
    bool has_q = false, has_kv = false;
    if (!fa_is_op(x, FA_FLEX_gather)) return false;
    for (int i = 0; i < x->num_operands; i++) {
        const fa_flex_instruction *index = &p->instructions[x->operand[i]];
        switch ((fa_flex_op)index->op) {
        case FA_FLEX_q_idx: has_q = true; break;
        case FA_FLEX_kv_idx: has_kv = true; break;
        case FA_FLEX_b:
        case FA_FLEX_h:
        case FA_FLEX_constant:
        case FA_FLEX_param: break;
        default: return false;
        }
    }
    return has_q && has_kv == at_kv;
}

static int count(const fa_flex_program *p, bool at_kv, int32_t *last) {
    int num = 0;
    for (int32_t idx = 0; p && idx < p->num_instructions; idx++)
        if (loads_at(p, &p->instructions[idx], at_kv)) num++, *last = idx;
    return num;
}

int fa_count_pair_loads(const fa_flex_program *p) {
    int32_t last;
    return count(p, true, &last);
}

int32_t fa_pair_of_bits(const fa_flex_program *p) {
    int32_t only;
    if (count(p, true, &only) != 1) return -1;
    const int dtype = p->captures[p->instructions[only].source].dtype;
    return dtype == FA_FLEX_OF_F16 || dtype == FA_FLEX_OF_BF16 ? only : -1;
}

int32_t fa_row_beside_pair(const fa_flex_program *p) {
    int32_t only;
    if (fa_pair_of_bits(p) < 0 || count(p, false, &only) != 1) return -1;
    return p->captures[p->instructions[only].source].dtype == FA_FLEX_OF_F32 ? only : -1;
}

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
    if (count(w->p, true, &pair) == 0) return;
    put_function(w, "void flex_prefetch(const flex_values &x, int b, int h, int q_idx, int kv_idx)", "flex_ask_for",
                 pair, is_needed);
    if (fa_pair_of_bits(w->p) < 0) return;
    put_function(w, "unsigned short flex_pair_bits(const flex_values &x, int b, int h, int q_idx, int kv_idx)",
                 "return flex_load", pair, is_needed);
    const int32_t row = fa_row_beside_pair(w->p);
    if (row >= 0)
        put_function(w, "float flex_row(const flex_values &x, int b, int h, int q_idx)", "return flex_load", row,
                     is_needed);
}
