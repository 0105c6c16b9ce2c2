/* The text of a call's programs: macros, and a function of each program. */
#include "source.h"

#include <stdlib.h>

#include "intervals.h"
#include "source_bounds.h"
#include "source_derivative.h"
#include "source_exponent.h"
#include "source_prefetch.h"
#include "source_values.h"
#include "source_words.h"
#include "sums.h"
#include "wide.h"

/* Do the results of a derivative follow from `grad` and the indices alone? */
static bool has_factor(const fa_flex_program *p, const fa_flex_trait *traits) {
    bool reads_score = false;
    for (int32_t idx = 0; idx < p->num_instructions; idx++)
        reads_score |= fa_flex_is_scatter(&p->instructions[idx]) && traits[idx].reads_score;
    return reads_score || !fa_flex_passes_gradient(p);
}

typedef enum { SCORE, MASK, DERIVATIVE } part;

static void put_body(const fa_writer *w, part of) {
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) fa_put_instruction(w, idx);
    fa_put(w->t, of == MASK ? "    return v%d != 0;\n}\n\n" : "    return (float)v%d;\n}\n\n",
           w->p->num_instructions - 1);
}

/* Only a derivative has gradients, and a mask has no score. */
static fa_status check(const fa_flex_program *p, part of, fa_error *err) {
    static const char *const names[] = {"score", "mask", "derivative"};
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        const bool is_of_derivative = fa_is_op(x, FA_FLEX_grad) || fa_is_op(x, FA_FLEX_scatter);
        if ((of != DERIVATIVE && is_of_derivative) || (of == MASK && fa_is_op(x, FA_FLEX_score)))
            return fa_fail(err, FA_EINVAL, "the program of the %s has the op %s", names[of], fa_flex_ops[x->op].name);
    }
    return FA_OK;
}

/* words: those of flex_values that belong to earlier programs. p NULL: there is no such program. traits: of a
 * derivative, or of a score_mod that gets flex_exponent. */
static fa_status put_program(fa_text *t, const fa_flex_program *p, part of, int32_t words, fa_flex_text text,
                             const fa_flex_trait *traits, fa_error *err) {
    const bool is_wide = text.is_wide;
    if (!p) return FA_OK;
    fa_status status = check(p, of, err);
    if (status != FA_OK) return status;
    const size_t num = (size_t)p->num_instructions;
    fa_flex_interval *bounds = malloc(num * sizeof *bounds + 3 * num);
    if (!bounds) return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    uint8_t *is_exact = (uint8_t *)(bounds + num), *is_needed = is_exact + num;
    fa_flex_bound_always(p, is_wide ? INT32_MAX : FA_FLEX_SMALL - 1, is_wide ? INT64_MAX : FA_FLEX_MOST_PARAM, bounds);
    fa_mark_exact(p, is_exact);
    fa_writer w = {t, p, bounds, is_exact, traits, words, is_wide, of == SCORE && text.has_pairs, -1, -1, false};
    if (of == DERIVATIVE) {
        status = fa_put_derivative(&w, err);
    } else {
        fa_put(t, of == MASK ? "DEVICE bool flex_mask(const flex_values &x, int b, int h, int q_idx, int kv_idx) {\n"
                             : "DEVICE float flex_score(const flex_values &x, float score, int b, int h, int q_idx, "
                               "int kv_idx, int kv_step = -1) {\n");
        put_body(&w, of);
        w.has_pairs = false;
        if (of == SCORE && !is_wide) {
            fa_put_prefetch(&w, is_needed);
            w.given_bits = fa_pair_of_bits(p), w.given_row = fa_row_beside_pair(p);
        }
        if (w.given_bits >= 0) {
            fa_put(
                t,
                "DEVICE float flex_score_of(const flex_values &x, unsigned short bits, float row, float score, int b, "
                "int h, int q_idx, int kv_idx) {\n");
            put_body(&w, of);
        }
        if (of == MASK) fa_put_bounds(&w);
        if (of == SCORE && traits) {
            w.has_steps = true;
            fa_put_exponent(&w, is_needed, is_needed + num);
        }
    }
    free(bounds);
    return status;
}

fa_status fa_flex_source(const fa_flex_program *score, const fa_flex_program *mask, const fa_flex_program *derivative,
                         fa_flex_text of, char **out, fa_error *err) {
    enum { MANY = 100 };
    const size_t words = fa_flex_values_bytes(score, mask, derivative) / sizeof(int64_t);
    int32_t last_pair;
    const int32_t of_score = fa_flex_program_words(score), of_mask = fa_flex_program_words(mask);
    fa_flex_trait *traits = derivative ? fa_flex_traits(derivative) : NULL, *of_adder = NULL;
    fa_text t = {0};
    *out = NULL;
    if (derivative && !traits) return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    const bool has_factors = derivative && has_factor(derivative, traits);
    /* A backward that clears scores is faster in two passes, scores, then exponents. Beside octets it has the registers
     * for one (cuda/measurements/backward.md). */
    const bool wants_exponent =
        derivative ? !has_factors && (of.has_octets || !fa_clears_scores(score)) : of.has_exponent;
    const bool adds = score && wants_exponent && fa_is_sum_with_score(score);
    if (adds && !(of_adder = fa_flex_traits(score))) {
        free(traits);
        return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    }
    fa_put(&t, "#include \"flex_values.cuh\"\n\n");
    fa_put(&t,
           "#define FLEX_SCORE      %d\n#define FLEX_MASK       %d\n#define FLEX_DERIVATIVE %d\n"
           "#define FLEX_FACTOR     %d\n#define FLEX_PARTS      %d\n#define FLEX_HIDDEN     %d\n"
           "#define FLEX_MAX        %d\n#define FLEX_BLOCKS     %d\n#define FLEX_ADDS       %d\n"
           "#define FLEX_LONG_MASK  %d\n#define FLEX_PREFETCHES %d\n"
           "#define FLEX_PAIR_BITS  %d\n#define FLEX_ROW        %d\n#define FLEX_OCTETS     %d\n\n",
           score != NULL, mask != NULL, derivative != NULL, has_factors, fa_num_parts(derivative), of.has_hidden,
           of.has_max, !of.no_blocks, adds, mask && mask->num_instructions > MANY,
           !of.is_wide && fa_count_pair_loads(score, &last_pair) > 0, !of.is_wide && fa_pair_of_bits(score) >= 0,
           !of.is_wide && fa_row_beside_pair(score) >= 0, of.has_octets);
    fa_put(&t, "struct flex_values {\n    long long words[%zu];\n};\n\n", words);
    fa_status status = put_program(&t, score, SCORE, 0, of, of_adder, err);
    if (status == FA_OK) status = put_program(&t, mask, MASK, of_score, of, NULL, err);
    if (status == FA_OK) status = put_program(&t, derivative, DERIVATIVE, of_score + of_mask, of, traits, err);
    free(traits);
    free(of_adder);
    if (status == FA_OK && t.is_lost) status = fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    if (status != FA_OK) {
        free(t.data);
        t.data = NULL;
    }
    *out = t.data;
    return status;
}
