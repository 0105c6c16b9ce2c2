/* The text of a derivative, and of what its scatters add to the gradients of captures. */
#include "source_derivative.h"

#include <stdlib.h>
#include <string.h>

#include "source_words.h"

static bool is_scatter(const fa_writer *w, int32_t idx) { return fa_flex_is_scatter(&w->p->instructions[idx]); }

static int32_t value_of_scatter(const fa_writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    return x->operand[x->num_operands - 1];
}

/* Is this a scatter to an element that only b and h choose? */
static bool is_sum(const fa_writer *w, int32_t idx) {
    return is_scatter(w, idx) && w->traits[idx].kind == FA_FLEX_OF_HEAD;
}

/* Does the element of a scatter depend on b? */
static bool depends_on_b(const fa_writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    for (int i = 0; i + 1 < x->num_operands; i++)
        if (w->p->instructions[x->operand[i]].depends & FA_FLEX_ON_B) return true;
    return false;
}

static void put_add(const fa_writer *w, int32_t idx, const char *value) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    fa_put(w->t, "    flex_add_to(x.words[%d], ", w->words + fa_flex_program_words(w->p) + x->source);
    fa_put_place(w, x, true);
    fa_put(w->t, ", %s%d);\n", value, idx);
}

static void put_sums(const fa_writer *w) {
    int num = 0;
    fa_put(w->t, "struct flex_sums {\n");
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_sum(w, idx)) {
            fa_put(w->t, "    %s s%d;\n", fa_type_of(w, idx), idx);
            num++;
        }
    fa_put(w->t, "};\n#define FLEX_SUMS %d\n\n", num);
}

static void put_add_sums(const fa_writer *w, uint8_t *is_needed) {
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) is_needed[idx] = is_sum(w, idx);
    fa_mark_operands(w->p, is_needed);
    fa_put(w->t, "DEVICE void flex_add_sums(const flex_values &x, const flex_sums &sums, int b, int h) {\n");
    fa_put_needed(w, is_needed);
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_sum(w, idx)) put_add(w, idx, "sums.s");
    fa_put(w->t, "}\n\n");
}

int fa_num_parts(const fa_flex_program *p) {
    int num = 0;
    if (p && fa_flex_places_read_score(p)) return 0;
    for (int32_t idx = 0; p && idx < p->num_instructions; idx++) num += fa_flex_is_scatter(&p->instructions[idx]);
    return num;
}

/* Writes the functions of the parts beside flex_derivative. */
static void put_parts(const fa_writer *w, uint8_t *is_needed) {
    static const char *const kinds[] = {"FLEX_OF_HEAD", "FLEX_OF_QUERY", "FLEX_OF_KEY", "FLEX_OF_DIFFERENCE",
                                        "FLEX_OF_PAIR"};
    int part = 0;
    fa_put(w->t, "DEVICE constexpr flex_kind flex_kind_of(int part) {\n    return ");
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_scatter(w, idx)) fa_put(w->t, "part == %d ? %s : ", part++, kinds[w->traits[idx].kind]);
    fa_put(w->t, "FLEX_OF_PAIR;\n}\n\nDEVICE constexpr bool flex_place_has_b(int part) {\n    return ");
    part = 0;
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_scatter(w, idx)) fa_put(w->t, "part == %d ? %s : ", part++, depends_on_b(w, idx) ? "true" : "false");
    fa_put(w->t, "true;\n}\n\n"
                 "template <int PART> DEVICE auto flex_place_of(const flex_values &x, int b, int h, int q_idx, "
                 "int kv_idx) {\n");
    part = 0;
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) {
        if (!is_scatter(w, idx)) continue;
        memset(is_needed, 0, (size_t)w->p->num_instructions);
        is_needed[idx] = 1;
        fa_mark_operands(w->p, is_needed);
        fa_put(w->t, "    if constexpr (PART == %d) {\n", part++);
        fa_put_needed(w, is_needed);
        fa_put(w->t, "    return ");
        fa_put_place(w, &w->p->instructions[idx], true);
        fa_put(w->t, ";\n    }\n");
    }
    fa_put(w->t,
           "}\n\n"
           "template <int PART, class T> DEVICE void flex_add_part(const flex_values &x, T place, float value) {\n");
    part = 0;
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_scatter(w, idx))
            fa_put(w->t, "    if constexpr (PART == %d) flex_add_to(x.words[%d], place, (%s)value);\n", part++,
                   w->words + fa_flex_program_words(w->p) + w->p->instructions[idx].source, fa_type_of(w, idx));
    fa_put(w->t, "}\n\n");
}

static void put_body(const fa_writer *w) {
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) {
        fa_put_instruction(w, idx);
        if (is_sum(w, idx))
            fa_put(w->t, "    sums.s%d += v%d;\n", idx, idx);
        else if (is_scatter(w, idx))
            put_add(w, idx, "v");
    }
    fa_put(w->t, "    return (float)v%d;\n}\n\n", w->p->num_instructions - 1);
}

/* Writes a derivative that leaves the values of its scatters in `parts`. Their places are not computed. */
static void put_body_of_parts(const fa_writer *w, uint8_t *is_needed) {
    const int32_t num = w->p->num_instructions;
    const int32_t result = is_scatter(w, num - 1) ? value_of_scatter(w, num - 1) : num - 1;
    int part = 0;
    memset(is_needed, 0, (size_t)num);
    is_needed[result] = 1;
    for (int32_t idx = 0; idx < num; idx++)
        if (is_scatter(w, idx)) is_needed[value_of_scatter(w, idx)] = 1;
    fa_mark_operands(w->p, is_needed);
    fa_put_needed(w, is_needed);
    for (int32_t idx = 0; idx < num; idx++)
        if (is_scatter(w, idx)) fa_put(w->t, "    parts[%d] = (float)v%d;\n", part++, value_of_scatter(w, idx));
    fa_put(w->t, "    return (float)v%d;\n}\n\n", result);
}

fa_status fa_put_derivative(const fa_writer *w, fa_error *err) {
    static const char rest[] = "float score, float grad, int b, int h, int q_idx, int kv_idx) {\n";
    uint8_t *is_needed = malloc((size_t)w->p->num_instructions);
    if (!is_needed) return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    put_sums(w);
    fa_put(w->t, "DEVICE float flex_derivative(const flex_values &x, flex_sums &sums, %s", rest);
    put_body(w);
    put_add_sums(w, is_needed);
    fa_put(w->t,
           "DEVICE float flex_derivative(const flex_values &x, %s"
           "    flex_sums sums = {};\n"
           "    const float result = flex_derivative(x, sums, score, grad, b, h, q_idx, kv_idx);\n"
           "    flex_add_sums(x, sums, b, h);\n"
           "    return result;\n}\n\n",
           rest);
    if (fa_num_parts(w->p) > 0) {
        fa_put(w->t, "DEVICE float flex_derivative(const flex_values &x, float (&parts)[FLEX_PARTS], %s", rest);
        put_body_of_parts(w, is_needed);
        put_parts(w, is_needed);
    }
    free(is_needed);
    return FA_OK;
}
