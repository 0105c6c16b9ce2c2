/* The text of flex_exponent: scores with something added. */
#include "source_exponent.h"

#include <string.h>

#include "sums.h"

/* A term as a product of two values. The factor of a head comes first. is_negative: the product is subtracted. */
typedef struct {
    int32_t of_head, other; /* of_head -1: 1 */
    bool is_negative;
} term_product;

static term_product product_of(const fa_flex_program *p, const fa_sum_walk *walk) {
    term_product product = {-1, walk->term, walk->is_subtracted};
    const fa_flex_instruction *x = &p->instructions[walk->term];
    for (; fa_is_op(x, FA_FLEX_neg); x = &p->instructions[product.other])
        product = (term_product){-1, x->operand[0], !product.is_negative};
    if (fa_is_op(x, FA_FLEX_mul)) {
        const int of_head = fa_is_of_head(p, x->operand[0]) ? 0 : 1;
        if (fa_is_of_head(p, x->operand[of_head]))
            product.of_head = x->operand[of_head], product.other = x->operand[1 - of_head];
    }
    return product;
}

/* Is a value an integer, whatever the indices? Then a product with it is 0, or at least as large as the factor. */
static bool is_integer(const fa_flex_program *p, int32_t idx) {
    const fa_flex_instruction *x = &p->instructions[idx];
    if (x->result < FA_FLEX_F32) return true;
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_constant:
        return x->number.d >= -1e9 && x->number.d <= 1e9 && x->number.d == (double)(int32_t)x->number.d;
    case FA_FLEX_convert:
    case FA_FLEX_neg:
    case FA_FLEX_abs: return is_integer(p, x->operand[0]);
    case FA_FLEX_add:
    case FA_FLEX_sub:
    case FA_FLEX_mul: return is_integer(p, x->operand[0]) && is_integer(p, x->operand[1]);
    default: return false;
    }
}

/* The number of terms, and the only one, if there is one. */
static int count_terms(const fa_flex_program *p, term_product *only) {
    int num = 0;
    for (fa_sum_walk walk = {p->num_instructions - 1, 0, false}; fa_take_term(p, &walk); num++)
        *only = product_of(p, &walk);
    return num;
}

/* Marks what the terms are computed from. */
static void mark_terms(const fa_flex_program *p, uint8_t *is_needed) {
    memset(is_needed, 0, (size_t)p->num_instructions);
    for (fa_sum_walk walk = {p->num_instructions - 1, 0, false}; fa_take_term(p, &walk);) {
        const term_product product = product_of(p, &walk);
        is_needed[product.other] = 1;
        if (product.of_head >= 0) is_needed[product.of_head] = 1;
    }
}

/* Marks what the marked instructions need, but not what the values of a head need. Returns the number of such values.
 */
static int mark_pairs(const fa_flex_program *p, uint8_t *is_needed, const uint8_t *is_of_head) {
    int num = 0;
    for (int32_t idx = p->num_instructions - 1; idx >= 0; idx--) {
        const fa_flex_instruction *x = &p->instructions[idx];
        if (!is_needed[idx]) continue;
        num += is_of_head[idx];
        for (int i = 0; i < x->num_operands && !is_of_head[idx]; i++) is_needed[x->operand[i]] = 1;
    }
    return num;
}

/* Marks the values of a head: floats that only b and h choose, and that come from memory. They are loaded once for all
 * pairs. There is room for few of them. */
static void mark_head_values(const fa_flex_program *p, uint8_t *is_loaded, uint8_t *is_needed) {
    enum { MOST = 4 };
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        is_loaded[idx] = fa_is_op(x, FA_FLEX_gather);
        for (int i = 0; i < x->num_operands; i++) is_loaded[idx] |= is_loaded[x->operand[i]];
    }
    for (int32_t idx = 0; idx < p->num_instructions; idx++)
        is_loaded[idx] &= p->instructions[idx].result == FA_FLEX_F32 && fa_is_of_head(p, idx);
    mark_terms(p, is_needed);
    if (mark_pairs(p, is_needed, is_loaded) > MOST) memset(is_loaded, 0, (size_t)p->num_instructions);
}

/* Does a value choose a float of the head for some pairs alone? These may all be hidden, and the float infinite. */
static bool chooses_of_head(const fa_flex_program *p, const fa_flex_instruction *x) {
    for (int i = 0; i < x->num_operands; i++)
        if (p->instructions[x->operand[i]].result >= FA_FLEX_F32 && fa_is_of_head(p, x->operand[i])) return true;
    return false;
}

/* Are the sums of finite values finite, whatever the indices? is_needed: all that the terms are computed from. */
static bool is_finite(const fa_flex_program *p, const uint8_t *is_needed) {
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        if (!is_needed[idx] || x->result < FA_FLEX_F32 || fa_is_of_head(p, idx)) continue;
        switch ((fa_flex_op)x->op) {
        case FA_FLEX_where:
        case FA_FLEX_minimum:
        case FA_FLEX_maximum:
            if (chooses_of_head(p, x)) return false;
            break;
        case FA_FLEX_convert:
        case FA_FLEX_add:
        case FA_FLEX_sub:
        case FA_FLEX_mul:
        case FA_FLEX_neg:
        case FA_FLEX_abs: break;
        default: return false; /* an element of a table may be anything */
        }
    }
    return true;
}

/* If the only term is a distance times a slope of the head: the slope. It becomes a value of the head, times log2 e, so
 * that the term is one operation of a pair. -1: the terms are others. */
static int32_t mark_slope(const fa_flex_program *p, uint8_t *is_value, uint8_t *is_needed) {
    term_product only = {-1, 0, false};
    if (count_terms(p, &only) != 1 || only.of_head < 0 || !is_integer(p, only.other)) return -1;
    mark_terms(p, is_needed);
    mark_pairs(p, is_needed, is_value);
    for (int32_t idx = 0; idx < p->num_instructions; idx++)
        for (int i = 0; is_needed[idx] && !is_value[idx] && i < p->instructions[idx].num_operands; i++)
            if (p->instructions[idx].operand[i] == only.of_head) return -1; /* The distance reads the slope, too. */
    is_value[only.of_head] = 1;
    return only.of_head;
}

/* Writes the sum of start and log2 e times the terms. The terms are added up first, because large ones may cancel each
 * other, and start would keep the rounding of each. slope: of mark_slope. */
static void put_sum(const fa_writer *w, int32_t slope) {
    const fa_flex_program *p = w->p;
    bool has_sum = false;
    if (slope >= 0) {
        term_product only;
        count_terms(p, &only);
        fa_put(w->t, "    return fmaf(%sv%d, v%d, start);\n}\n\n", only.is_negative ? "-" : "", slope, only.other);
        return;
    }
    for (fa_sum_walk walk = {p->num_instructions - 1, 0, false}; fa_take_term(p, &walk); has_sum = true) {
        const term_product product = product_of(p, &walk);
        const char *sign = product.is_negative ? "-" : "", *before = has_sum ? "sum = " : "float sum = ";
        if (product.of_head < 0)
            fa_put(w->t, "    %s%s%sv%d;\n", before, has_sum ? "sum + " : "", sign, product.other);
        else if (has_sum)
            fa_put(w->t, "    sum = fmaf(%sv%d, v%d, sum);\n", sign, product.of_head, product.other);
        else
            fa_put(w->t, "    float sum = %sv%d * v%d;\n", sign, product.of_head, product.other);
    }
    fa_put(w->t, has_sum ? "    return fmaf(FLEX_LOG2_E, sum, start);\n}\n\n" : "    return start;\n}\n\n");
}

/* Writes flex_score_factor, which has no pair to count steps from. */
static void put_score_factor(const fa_writer *of_pairs, uint8_t *is_needed) {
    fa_writer of_rows = *of_pairs, *w = &of_rows;
    w->has_steps = false;
    const int32_t condition = fa_clearing_condition(w->p, fa_score_below_terms(w->p));
    fa_put(w->t, "DEVICE float flex_score_factor(const flex_values &x, int b, int h, int q_idx, float row) {\n");
    if (condition >= 0) {
        memset(is_needed, 0, (size_t)w->p->num_instructions);
        is_needed[condition] = 1;
        fa_mark_operands(w->p, is_needed);
        fa_put_needed(w, is_needed);
        fa_put(w->t, "    return v%d ? 0.0f : 1.0f;\n}\n\n", condition);
    } else {
        fa_put(w->t, "    return 1.0f;\n}\n\n");
    }
}

/* Writes flex_head_values, flex_score_factor and flex_exponent of such a score_mod. The arrays have a flag for each
 * instruction. */
void fa_put_exponent(const fa_writer *w, uint8_t *is_needed, uint8_t *is_value) {
    const fa_flex_program *p = w->p;
    const int32_t num = p->num_instructions;
    mark_head_values(p, is_value, is_needed);
    const int32_t slope = mark_slope(p, is_value, is_needed);
    mark_terms(p, is_needed);
    fa_put(w->t, "#define FLEX_HEAD_VALUES %d\n", mark_pairs(p, is_needed, is_value));
    /* A hidden pair's score is -inf, and 0 in place of that would be NaN. */
    fa_put(w->t, "#define FLEX_IS_FINITE   %d\n\n", !fa_clears_scores(p) && is_finite(p, is_needed));
    for (int32_t idx = 0; idx < num; idx++) is_value[idx] &= is_needed[idx];
    memcpy(is_needed, is_value, (size_t)num);
    fa_mark_operands(p, is_needed);
    fa_put(w->t, "DEVICE void flex_head_values(const flex_values &x, float *values, int b, int h) {\n");
    fa_put_needed(w, is_needed);
    int place = 0;
    for (int32_t idx = 0; idx < num; idx++)
        if (is_value[idx])
            fa_put(w->t, idx == slope ? "    values[%d] = flex_times_log2_e(v%d);\n" : "    values[%d] = v%d;\n",
                   place++, idx);
    fa_put(w->t, "}\n\n");
    put_score_factor(w, is_needed);
    fa_put(w->t,
           "DEVICE float flex_exponent(const flex_values &x, const float *values, float start, int b, int h, "
           "int q_idx, int kv_idx, int q_step, int kv_step%s) {\n",
           w->given_bits >= 0 ? ", unsigned short bits, float row" : "");
    mark_terms(p, is_needed);
    mark_pairs(p, is_needed, is_value);
    place = 0;
    for (int32_t idx = 0; idx < num; idx++) {
        if (is_value[idx])
            fa_put(w->t, "    const float v%d = values[%d];\n", idx, place++);
        else if (is_needed[idx])
            fa_put_instruction(w, idx);
    }
    put_sum(w, slope);
}
