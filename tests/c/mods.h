/* Mods as programs and as functions in C. The programs are written by hand, word by word (flex/program.h). */
#ifndef FA_TEST_MODS_H
#define FA_TEST_MODS_H

#include "flex/flex.h"
#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORDS = 512 };

/* What the mods read. Lengths of captures fit every problem of the test. */
typedef struct {
    int32_t *document;         /* [len] */
    float *slope, *bias, *rel; /* [h], [h][len_q][len_kv], [2 len] */
    double *slope_64;          /* slope for problems of fp64 */
    int64_t len, len_q, len_kv, h;
    double param;
} mod_values;

typedef struct {
    uint32_t words[MOST_WORDS];
    int num_words, num_instructions;
    fa_flex_program program;
    fa_flex_capture captures[4];
    fa_flex_number params[1];
    fa_flex_bound bound;
} mod_program;

static void put_word(mod_program *m, uint32_t word) {
    assert(m->num_words < MOST_WORDS);
    m->words[m->num_words++] = word;
}

/* Every program has the same captures and one parameter. */
static void begin_program(mod_program *m, const mod_values *v, bool is_double) {
    memset(m, 0, sizeof *m);
    const uint32_t dtype = is_double ? FA_FLEX_OF_F64 : FA_FLEX_OF_F32;
    const uint32_t header[] = {FA_FLEX_MAGIC,  4, 1,          0, FA_FLEX_OF_I32, 1, dtype, 1, FA_FLEX_OF_F32, 3,
                               FA_FLEX_OF_F32, 1, FA_FLEX_F64};
    for (size_t i = 0; i < sizeof header / 4; i++) put_word(m, header[i]);
    m->captures[0] = (fa_flex_capture){v->document, {v->len}, {1}};
    m->captures[1] = (fa_flex_capture){is_double ? (void *)v->slope_64 : (void *)v->slope, {v->h}, {1}};
    m->captures[2] = (fa_flex_capture){v->bias, {v->h, v->len_q, v->len_kv}, {v->len_q * v->len_kv, v->len_kv, 1}};
    m->captures[3] = (fa_flex_capture){v->rel, {2 * v->len}, {1}};
    if (v->len_q * v->len_kv == 0) m->captures[2].data = NULL;
    m->params[0].d = v->param;
}

/* Appends an instruction with `num` more words. */
static uint32_t put(mod_program *m, fa_flex_op op, fa_flex_type type, int num, ...) {
    va_list more;
    va_start(more, num);
    put_word(m, (uint32_t)op | (uint32_t)type << 8);
    for (int i = 0; i < num; i++) put_word(m, va_arg(more, uint32_t));
    va_end(more);
    m->words[3]++;
    return (uint32_t)m->num_instructions++;
}
#define B FA_FLEX_BOOL
#define I FA_FLEX_I64

static uint32_t put_number(mod_program *m, double number) {
    uint32_t bits[2];
    memcpy(bits, &number, sizeof bits);
    return put(m, FA_FLEX_constant, FA_FLEX_F64, 2, bits[0], bits[1]);
}
static uint32_t put_integer(mod_program *m, int64_t number) {
    uint32_t bits[2];
    memcpy(bits, &number, sizeof bits);
    return put(m, FA_FLEX_constant, I, 2, bits[0], bits[1]);
}

static void end_program(mod_program *m) {
    fa_error err = {""};
    if (fa_flex_decode(m->words, (size_t)m->num_words * 4, &m->program, &err) != FA_OK) {
        printf("%s\n", err.text);
        abort();
    }
    m->bound = (fa_flex_bound){&m->program, m->captures, m->params};
}

/* ---- mask_mods ----------------------------------------------------------------------------------------------- */

enum { NO_MASK, CAUSAL, DOCUMENT, WINDOW, NOTHING, NUM_MASKS };

static bool mask_of(int mod, const mod_values *v, int64_t b, int64_t h, int64_t i, int64_t j) {
    switch (mod) {
    case CAUSAL: return i >= j;
    case DOCUMENT: return v->document[i] == v->document[j] && i >= j;
    case WINDOW: return i - j <= 3 + 5 * h && (j + b) % 7 != 0;
    case NOTHING: return false;
    default: return true;
    }
}

static void make_mask(mod_program *m, int mod, const mod_values *v) {
    begin_program(m, v, false);
    const uint32_t b = put(m, FA_FLEX_b, I, 0), h = put(m, FA_FLEX_h, I, 0), i = put(m, FA_FLEX_q_idx, I, 0),
                   j = put(m, FA_FLEX_kv_idx, I, 0);
    if (mod == CAUSAL) put(m, FA_FLEX_le, I, 2, j, i);
    if (mod == DOCUMENT) {
        const uint32_t same =
            put(m, FA_FLEX_eq, I, 2, put(m, FA_FLEX_gather, I, 2, 0u, i), put(m, FA_FLEX_gather, I, 2, 0u, j));
        put(m, FA_FLEX_bit_and, B, 2, same, put(m, FA_FLEX_le, I, 2, j, i));
    }
    if (mod == WINDOW) {
        const uint32_t width =
            put(m, FA_FLEX_add, I, 2, put_integer(m, 3), put(m, FA_FLEX_mul, I, 2, h, put_integer(m, 5)));
        const uint32_t near = put(m, FA_FLEX_le, I, 2, put(m, FA_FLEX_sub, I, 2, i, j), width);
        const uint32_t rest = put(m, FA_FLEX_remainder, I, 2, put(m, FA_FLEX_add, I, 2, j, b), put_integer(m, 7));
        put(m, FA_FLEX_bit_and, B, 2, near, put(m, FA_FLEX_ne, I, 2, rest, put_integer(m, 0)));
    }
    if (mod == NOTHING) put(m, FA_FLEX_lt, I, 2, i, put_integer(m, 0));
    end_program(m);
}

/* ---- score_mods and their derivatives ------------------------------------------------------------------------ */

/* ADDS is BIAS in fp32, as attn_bias gives it, which the kernels know (cpu/flex_bias.h). In fp64 it is BIAS. */
enum { NO_SCORE, SOFTCAP, SLOPE, BIAS, REL, HIDES, TIMES, ADDS, NUM_SCORES };

/* *factor receives the derivative. */
static double score_of(int mod, const mod_values *v, double s, int64_t h, int64_t i, int64_t j, double *factor) {
    *factor = 1;
    switch (mod) {
    case SOFTCAP: *factor = 1 - tanh(s / 2) * tanh(s / 2); return 2 * tanh(s / 2);
    case SLOPE: return s + v->slope[h] * (double)(j - i);
    case ADDS:
    case BIAS: return s + v->bias[(h * v->len_q + i) * v->len_kv + j];
    case REL: return s + v->rel[j - i + v->len];
    case HIDES: *factor = (i + j) % 5 != 0; return (i + j) % 5 == 0 ? -INFINITY : s;
    case TIMES: *factor = v->param; return s * v->param;
    default: return s;
    }
}

/* The gradient of the capture that the mod reads. */
static void add_gradient(int mod, const mod_values *v, double ds, int64_t h, int64_t i, int64_t j, double *slope,
                         double *bias, double *rel) {
    if (mod == SLOPE) slope[h] += ds * (double)(j - i);
    if (mod == BIAS || mod == ADDS) bias[(h * v->len_q + i) * v->len_kv + j] += ds;
    if (mod == REL) rel[j - i + v->len] += ds;
}

static void make_score(mod_program *m, int mod, const mod_values *v, bool is_double, bool is_derivative) {
    const fa_flex_type f = is_double ? FA_FLEX_F64 : FA_FLEX_F32;
    if (mod == ADDS && is_double) mod = BIAS;
    begin_program(m, v, is_double);
    const uint32_t h = put(m, FA_FLEX_h, I, 0), i = put(m, FA_FLEX_q_idx, I, 0), j = put(m, FA_FLEX_kv_idx, I, 0),
                   s = put(m, FA_FLEX_score, f, 0);
    const uint32_t grad = is_derivative ? put(m, FA_FLEX_grad, f, 0) : s, back = put(m, FA_FLEX_sub, I, 2, j, i);
    if (mod == SOFTCAP) {
        const uint32_t two = put(m, FA_FLEX_convert, f, 1, put_number(m, 2)),
                       t = put(m, FA_FLEX_tanh, f, 1, put(m, FA_FLEX_divide, f, 2, s, two));
        if (is_derivative)
            put(m, FA_FLEX_mul, f, 2, grad,
                put(m, FA_FLEX_sub, f, 2, put(m, FA_FLEX_convert, f, 1, put_number(m, 1)),
                    put(m, FA_FLEX_mul, f, 2, t, t)));
        else
            put(m, FA_FLEX_mul, f, 2, t, two);
    }
    if (mod == SLOPE) {
        const uint32_t distance = put(m, FA_FLEX_convert, f, 1, back);
        if (is_derivative)
            put(m, FA_FLEX_scatter, f, 3, 1u, h, put(m, FA_FLEX_mul, f, 2, grad, distance));
        else
            put(m, FA_FLEX_add, f, 2, s, put(m, FA_FLEX_mul, f, 2, put(m, FA_FLEX_gather, f, 2, 1u, h), distance));
    }
    if (mod == BIAS || mod == REL) {
        const uint32_t at = put(m, FA_FLEX_add, I, 2, back, put_integer(m, v->len)),
                       small = put(m, FA_FLEX_convert, FA_FLEX_F32, 1, grad);
        if (is_derivative && mod == BIAS) put(m, FA_FLEX_scatter, FA_FLEX_F32, 5, 2u, h, i, j, small);
        if (is_derivative && mod == REL) put(m, FA_FLEX_scatter, FA_FLEX_F32, 3, 3u, at, small);
        if (!is_derivative) {
            const uint32_t value = mod == BIAS ? put(m, FA_FLEX_gather, FA_FLEX_F32, 4, 2u, h, i, j)
                                               : put(m, FA_FLEX_gather, FA_FLEX_F32, 2, 3u, at);
            put(m, FA_FLEX_add, f, 2, s, put(m, FA_FLEX_convert, f, 1, value));
        }
    }
    if (mod == ADDS && is_derivative) {
        put(m, FA_FLEX_scatter, FA_FLEX_F32, 5, 2u, h, i, j, grad);
        put(m, FA_FLEX_grad, f, 0); /* the result */
    }
    if (mod == ADDS && !is_derivative) put(m, FA_FLEX_add, f, 2, s, put(m, FA_FLEX_gather, f, 4, 2u, h, i, j));
    if (mod == HIDES) {
        const uint32_t rest = put(m, FA_FLEX_remainder, I, 2, put(m, FA_FLEX_add, I, 2, i, j), put_integer(m, 5));
        const uint32_t other = put(m, FA_FLEX_convert, f, 1, put_number(m, is_derivative ? 0 : -INFINITY));
        put(m, FA_FLEX_where, f, 3, put(m, FA_FLEX_eq, I, 2, rest, put_integer(m, 0)), other, grad);
    }
    if (mod == TIMES)
        put(m, FA_FLEX_mul, f, 2, grad, put(m, FA_FLEX_convert, f, 1, put(m, FA_FLEX_param, FA_FLEX_F64, 1, 0u)));
    if (is_derivative && (mod == SLOPE || mod == BIAS || mod == REL))
        put(m, FA_FLEX_mul, f, 2, grad, put(m, FA_FLEX_convert, f, 1, put_number(m, 1)));
    end_program(m);
}

#undef B
#undef I
#endif
