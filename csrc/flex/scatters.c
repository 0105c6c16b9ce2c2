#include "scatters.h"

#include <stdlib.h>

enum { INDICES = FA_FLEX_ON_Q | FA_FLEX_ON_KV | FA_FLEX_ON_SCORE, MOST_FACTOR = 1 << 20 };

static const fa_flex_instruction *operand_of(const fa_flex_program *p, const fa_flex_instruction *x, int i) {
    return &p->instructions[x->operand[i]];
}

/* value = a + sign b. */
static void add_linear(const fa_flex_trait *a, const fa_flex_trait *b, int32_t sign, fa_flex_trait *value) {
    value->of_q = a->of_q + sign * b->of_q, value->of_kv = a->of_kv + sign * b->of_kv;
    value->is_linear =
        a->is_linear && b->is_linear && abs(value->of_q) < MOST_FACTOR && abs(value->of_kv) < MOST_FACTOR;
}

/* value = number x. */
static void scale_linear(const fa_flex_trait *x, const fa_flex_instruction *number, fa_flex_trait *value) {
    const int64_t n = number->number.i;
    if (number->op != FA_FLEX_constant || n < -MOST_FACTOR || n > MOST_FACTOR) return;
    const int64_t of_q = n * x->of_q, of_kv = n * x->of_kv;
    if (!x->is_linear || llabs(of_q) >= MOST_FACTOR || llabs(of_kv) >= MOST_FACTOR) return;
    value->of_q = (int32_t)of_q, value->of_kv = (int32_t)of_kv, value->is_linear = true;
}

static void find_linear(const fa_flex_program *p, const fa_flex_instruction *x, const fa_flex_trait *traits,
                        fa_flex_trait *value) {
    static const fa_flex_trait zero = {.is_linear = true};
    const fa_flex_trait *a = &traits[x->operand[0]], *b = &traits[x->operand[1]];
    if (x->result != FA_FLEX_I64) return;
    value->is_linear = (x->depends & INDICES) == 0;
    if (value->is_linear) return;
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_q_idx: value->of_q = 1, value->is_linear = true; return;
    case FA_FLEX_kv_idx: value->of_kv = 1, value->is_linear = true; return;
    case FA_FLEX_add: add_linear(a, b, 1, value); return;
    case FA_FLEX_sub: add_linear(a, b, -1, value); return;
    case FA_FLEX_neg: add_linear(&zero, a, -1, value); return;
    case FA_FLEX_mul:
        scale_linear(a, operand_of(p, x, 1), value);
        if (!value->is_linear) scale_linear(b, operand_of(p, x, 0), value);
        return;
    default: return;
    }
}

static fa_flex_scatter_kind kind_of(const fa_flex_program *p, const fa_flex_instruction *x,
                                    const fa_flex_trait *traits) {
    uint8_t depends = 0;
    bool is_difference = true;
    for (int i = 0; i + 1 < x->num_operands; i++) {
        depends |= operand_of(p, x, i)->depends;
        is_difference = is_difference && traits[x->operand[i]].is_difference;
    }
    switch (depends & INDICES) {
    case 0: return FA_FLEX_OF_HEAD;
    case FA_FLEX_ON_Q: return FA_FLEX_OF_QUERY;
    case FA_FLEX_ON_KV: return FA_FLEX_OF_KEY;
    default: return is_difference ? FA_FLEX_OF_DIFFERENCE : FA_FLEX_OF_PAIR;
    }
}

bool fa_flex_places_read_score(const fa_flex_program *p) {
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        for (int i = 0; fa_flex_is_scatter(x) && i + 1 < x->num_operands; i++)
            if (operand_of(p, x, i)->depends & FA_FLEX_ON_SCORE) return true;
    }
    return false;
}

static fa_flex_trait trait_of(const fa_flex_program *p, int32_t idx, const fa_flex_trait *traits) {
    const fa_flex_instruction *x = &p->instructions[idx];
    fa_flex_trait value = {.reads_score = x->op == FA_FLEX_score};
    bool is_difference = x->num_operands > 0;
    for (int i = 0; i < x->num_operands; i++) {
        value.reads_score |= traits[x->operand[i]].reads_score;
        is_difference = is_difference && traits[x->operand[i]].is_difference;
    }
    find_linear(p, x, traits, &value);
    value.is_difference =
        (x->depends & INDICES) == 0 || is_difference || (value.is_linear && value.of_q + value.of_kv == 0);
    if (fa_flex_is_scatter(x)) value.kind = (uint8_t)kind_of(p, x, traits);
    return value;
}

fa_flex_trait *fa_flex_traits(const fa_flex_program *p) {
    fa_flex_trait *traits = malloc((size_t)p->num_instructions * sizeof *traits);
    for (int32_t idx = 0; traits && idx < p->num_instructions; idx++) traits[idx] = trait_of(p, idx, traits);
    return traits;
}

/* 0, or a 0 of another type. */
static bool is_zero(const fa_flex_program *p, const fa_flex_instruction *x) {
    while (x->op == FA_FLEX_convert) x = operand_of(p, x, 0);
    return x->op == FA_FLEX_constant && x->number.i == 0;
}

/* A derivative with scatters ends with where(grad != 0, result, 0), because its result is the last instruction. */
bool fa_flex_passes_gradient(const fa_flex_program *p) {
    const fa_flex_instruction *x = &p->instructions[p->num_instructions - 1];
    if (x->op == FA_FLEX_where && is_zero(p, operand_of(p, x, 2))) {
        const fa_flex_instruction *is_used = operand_of(p, x, 0);
        const bool asks_gradient = is_used->op == FA_FLEX_ne && operand_of(p, is_used, 0)->op == FA_FLEX_grad &&
                                   is_zero(p, operand_of(p, is_used, 1));
        if (asks_gradient) x = operand_of(p, x, 1);
    }
    return x->op == FA_FLEX_grad;
}
