/* Straight-line CUDA C: one constant for each instruction. Operations with more than one operator are functions of
 * cuda/flex_values.cuh. */
#include "source_values.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pairs.h"
#include "source_words.h"
#include "wide.h"

void fa_put(fa_text *t, const char *format, ...) {
    va_list values;
    va_start(values, format);
    const int length = vsnprintf(NULL, 0, format, values);
    va_end(values);
    if (t->is_lost || length < 0) return;
    if (t->length + (size_t)length + 1 > t->room) {
        const size_t room = 2 * t->room + (size_t)length + 4096;
        char *data = realloc(t->data, room);
        if (!data) {
            t->is_lost = true;
            return;
        }
        t->data = data;
        t->room = room;
    }
    va_start(values, format);
    vsnprintf(t->data + t->length, t->room - t->length, format, values);
    va_end(values);
    t->length += (size_t)length;
}

/* Does a small change of a float operand change the result by much? */
static bool jumps(const fa_flex_program *p, const fa_flex_instruction *x) {
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_floor_divide:
    case FA_FLEX_remainder:
    case FA_FLEX_fmod:
    case FA_FLEX_sign:
    case FA_FLEX_floor:
    case FA_FLEX_ceil:
    case FA_FLEX_round:
    case FA_FLEX_trunc: return true;
    default: return p->instructions[x->operand[0]].result >= FA_FLEX_F32 && x->result < FA_FLEX_F32;
    }
}

/* Marks every value that an operation with jumps needs. */
void fa_mark_exact(const fa_flex_program *p, uint8_t *is_exact) {
    memset(is_exact, 0, (size_t)p->num_instructions);
    for (int32_t idx = p->num_instructions - 1; idx >= 0; idx--) {
        const fa_flex_instruction *x = &p->instructions[idx];
        const bool needs = x->num_operands > 0 && (is_exact[idx] || jumps(p, x));
        for (int i = 0; needs && i < x->num_operands; i++) is_exact[x->operand[i]] = 1;
    }
}

/* Is the value of an integer kept in 32 bits? A float on the GPU may lie slightly outside of the bounds. So an integer
 * from a float needs some distance. */
static bool is_narrow(const fa_writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    const fa_flex_interval bounds = w->bounds[idx];
    const bool is_from_float = fa_is_op(x, FA_FLEX_convert) && w->p->instructions[x->operand[0]].result >= FA_FLEX_F32;
    const int64_t most = is_from_float ? 1 << 30 : INT32_MAX;
    return x->result == FA_FLEX_I64 && bounds.lo >= -most - 1 && bounds.hi <= most;
}

static const char *type_name(fa_flex_type type, bool is_int) {
    static const char *const names[] = {"bool", "long long", "float", "double"};
    return is_int ? "int" : names[type];
}

const char *fa_type_of(const fa_writer *w, int32_t idx) {
    return type_name((fa_flex_type)w->p->instructions[idx].result, is_narrow(w, idx));
}

static const char *ints_name(bool is_int) { return type_name(FA_FLEX_I64, is_int); }

void fa_put_constant(fa_text *t, const fa_flex_instruction *x, bool is_int) {
    if (x->type == FA_FLEX_BOOL)
        fa_put(t, "%s", x->number.b ? "true" : "false");
    else if (x->type == FA_FLEX_F64)
        fa_put(t, "__longlong_as_double(0x%016" PRIx64 "LL)", (uint64_t)x->number.i); /* its bits */
    else if (x->number.i == INT64_MIN)
        fa_put(t, "-0x7fffffffffffffffLL - 1");
    else if (is_int)
        fa_put(t, "(int)(%" PRId64 "LL)", x->number.i);
    else
        fa_put(t, "%" PRId64 "LL", x->number.i);
}

void fa_put_param(const fa_writer *w, const fa_flex_instruction *x) {
    const int32_t word = w->words + fa_flex_words_before(w->p, w->p->num_captures) + x->source;
    if (x->type == FA_FLEX_BOOL)
        fa_put(w->t, "x.words[%d] != 0", word);
    else
        fa_put(w->t, x->type == FA_FLEX_F64 ? "__longlong_as_double(x.words[%d])" : "x.words[%d]", word);
}

/* The place of an element in its dimension. */
static void put_limit(const fa_writer *w, const fa_flex_instruction *x, int dim, int32_t size) {
    fa_put(w->t,
           w->bounds[x->operand[dim]].lo < 0 ? "flex_place(v%d, %sx.words[%d])" : "flex_limit(v%d, %sx.words[%d])",
           x->operand[dim], w->is_wide ? "" : "(int)", size);
}

/* The place of an element. The strides are the capture's own, or those of a contiguous gradient. */
void fa_put_place(const fa_writer *w, const fa_flex_instruction *x, bool is_contiguous) {
    const int32_t first = w->words + fa_flex_words_before(w->p, x->source) + 1;
    const int rank = w->p->captures[x->source].rank;
    const char *number = w->is_wide ? "" : "(int)";
    if (rank == 0) fa_put(w->t, "0");
    for (int dim = 0; is_contiguous && dim + 1 < rank; dim++) fa_put(w->t, "(");
    for (int dim = 0; dim < rank; dim++) {
        const int32_t size = first + 2 * dim;
        if (is_contiguous && dim > 0) fa_put(w->t, " * %sx.words[%d] + ", number, size);
        if (!is_contiguous && dim > 0) fa_put(w->t, " + ");
        put_limit(w, x, dim, size);
        if (!is_contiguous) fa_put(w->t, " * %sx.words[%d]", number, size + 1);
        if (is_contiguous && dim > 0) fa_put(w->t, ")");
    }
}

/* The part of the place that the first dimensions give. */
static void put_place_before(const fa_writer *w, const fa_flex_instruction *x, int dims) {
    const int32_t first = w->words + fa_flex_words_before(w->p, x->source) + 1;
    fa_put(w->t, "0");
    for (int dim = 0; dim < dims; dim++) {
        fa_put(w->t, " + ");
        put_limit(w, x, dim, first + 2 * dim);
        fa_put(w->t, " * (int)x.words[%d]", first + 2 * dim + 1);
    }
}

static const struct {
    const char *before, *type, *after;
} loads[] = {
    [FA_FLEX_OF_BOOL] = {"", "unsigned char", " != 0"},
    [FA_FLEX_OF_U8] = {"", "unsigned char", ""},
    [FA_FLEX_OF_I8] = {"", "signed char", ""},
    [FA_FLEX_OF_I16] = {"", "short", ""},
    [FA_FLEX_OF_I32] = {"", "int", ""},
    [FA_FLEX_OF_I64] = {"", "long long", ""},
    [FA_FLEX_OF_F16] = {"flex_from_f16(", "unsigned short", ")"},
    [FA_FLEX_OF_BF16] = {"flex_from_bf16(", "unsigned short", ")"},
    [FA_FLEX_OF_F32] = {"", "float", ""},
    [FA_FLEX_OF_F64] = {"", "double", ""},
};

const char *fa_load_type(int dtype) { return loads[dtype].type; }

static void put_load(const fa_writer *w, const fa_flex_instruction *x) {
    const int dtype = w->p->captures[x->source].dtype;
    const int32_t words = w->words + fa_flex_words_before(w->p, x->source);
    if (w->given_row >= 0 && x == &w->p->instructions[w->given_row]) {
        fa_put(w->t, "row");
        return;
    }
    if (w->given_bits >= 0 && x == &w->p->instructions[w->given_bits]) {
        fa_put(w->t, "%sbits%s", loads[dtype].before, loads[dtype].after);
        return;
    }
    if (w->has_pairs && fa_flex_reads_keys(w->p, x)) {
        const int last = w->p->captures[x->source].rank - 1;
        fa_put(w->t, "%sflex_load_in_pair<%s>(x.words[%d], ", loads[dtype].before, loads[dtype].type, words);
        put_place_before(w, x, last);
        fa_put(w->t, ", v%d, kv_step, (int)x.words[%d])%s", x->operand[last], words + 1 + 2 * last, loads[dtype].after);
        return;
    }
    fa_put(w->t, "%s%s<%s>(x.words[%d], ", loads[dtype].before, w->is_wide ? "flex_load_if" : "flex_load",
           loads[dtype].type, words);
    fa_put_place(w, x, false);
    fa_put(w->t, ")%s", loads[dtype].after);
}

/* Does a value change by the same from one pair to another, whichever they are? */
static bool has_constant_steps(const fa_writer *w, int32_t idx) {
    return w->has_steps && w->traits[idx].is_linear && !fa_is_of_head(w->p, idx);
}

static bool is_small(const fa_writer *w, int32_t idx) {
    return is_narrow(w, idx) && w->bounds[idx].lo >= -FA_FLEX_SMALL && w->bounds[idx].hi <= FA_FLEX_SMALL;
}

/* The float of a small integer. With steps only one of many pairs has a conversion, and the others have a sum, which is
 * exact. */
static void put_float_of_small(const fa_writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    if (has_constant_steps(w, idx)) {
        const fa_flex_trait *trait = &w->traits[idx];
        fa_put(w->t, "flex_float_of_small(v%d - (%d * q_step + %d * kv_step)) + (float)(%d * q_step + %d * kv_step)",
               idx, trait->of_q, trait->of_kv, trait->of_q, trait->of_kv);
    } else if (w->has_steps && (fa_is_op(x, FA_FLEX_abs) || fa_is_op(x, FA_FLEX_neg)) && is_small(w, x->operand[0])) {
        fa_put(w->t, fa_is_op(x, FA_FLEX_abs) ? "flex_abs(" : "-(");
        put_float_of_small(w, x->operand[0]);
        fa_put(w->t, ")");
    } else {
        fa_put(w->t, "flex_float_of_small(v%d)", idx);
    }
}

static void put_convert(const fa_writer *w, const fa_flex_instruction *x, const char *type) {
    const int32_t from = x->operand[0];
    if (x->type == FA_FLEX_BOOL)
        fa_put(w->t, "v%d != 0", from);
    else if (x->type == FA_FLEX_I64 && w->p->instructions[from].result >= FA_FLEX_F32)
        fa_put(w->t, "(%s)flex_int_from(v%d)", type, from);
    else if (x->type == FA_FLEX_F32 && is_small(w, from))
        put_float_of_small(w, from);
    else
        fa_put(w->t, "(%s)v%d", type, from);
}

/* How an operation is written. %1 and %2 are the operands. */
static const char *form_of_bools(fa_flex_op op) {
    switch (op) {
    case FA_FLEX_bit_and: return "%1 & %2";
    case FA_FLEX_bit_or: return "%1 | %2";
    case FA_FLEX_bit_xor: return "%1 != %2";
    default: return "!%1"; /* bit_not */
    }
}

static const char *form_of_comparison(fa_flex_op op) {
    switch (op) {
    case FA_FLEX_eq: return "%1 == %2";
    case FA_FLEX_ne: return "%1 != %2";
    case FA_FLEX_lt: return "%1 < %2";
    default: return "%1 <= %2"; /* le */
    }
}

/* is_int: operands and result have 32 bits, and so has the exact result. Else sums and products wrap around.
 * is_positive: the operands are not negative, and the second is not 0. is_shared: many pairs have the same divisor. */
static const char *form_of_ints(fa_flex_op op, bool is_int, bool is_positive, bool is_shared) {
    if (is_shared && op == FA_FLEX_floor_divide) return "flex_floor_divide_by(%1, %2)";
    if (is_shared && op == FA_FLEX_remainder) return "flex_remainder_by(%1, %2)";
    switch (op) {
    case FA_FLEX_add: return is_int ? "%1 + %2" : "flex_wrap((unsigned long long)%1 + (unsigned long long)%2)";
    case FA_FLEX_sub: return is_int ? "%1 - %2" : "flex_wrap((unsigned long long)%1 - (unsigned long long)%2)";
    case FA_FLEX_mul: return is_int ? "%1 * %2" : "flex_wrap((unsigned long long)%1 * (unsigned long long)%2)";
    case FA_FLEX_neg: return is_int ? "-%1" : "flex_wrap(0ull - (unsigned long long)%1)";
    case FA_FLEX_abs: return is_int ? "%1 < 0 ? -%1 : %1" : "%1 < 0 ? flex_wrap(0ull - (unsigned long long)%1) : %1";
    case FA_FLEX_floor_divide: return is_positive ? "%1 / %2" : "flex_floor_divide(%1, %2)";
    case FA_FLEX_trunc_divide: return is_positive ? "%1 / %2" : "flex_trunc_divide(%1, %2)";
    case FA_FLEX_remainder: return is_positive ? "%1 %% %2" : "flex_remainder(%1, %2)";
    case FA_FLEX_fmod: return is_positive ? "%1 %% %2" : "flex_fmod(%1, %2)";
    case FA_FLEX_minimum: return "%1 < %2 ? %1 : %2";
    case FA_FLEX_maximum: return "%1 > %2 ? %1 : %2";
    case FA_FLEX_pow: return "flex_pow(%1, %2)";
    case FA_FLEX_sign: return "flex_sign(%1)";
    case FA_FLEX_bit_and: return "%1 & %2";
    case FA_FLEX_bit_or: return "%1 | %2";
    case FA_FLEX_bit_xor: return "%1 ^ %2";
    case FA_FLEX_bit_not: return "~%1";
    case FA_FLEX_shift_left: return "flex_shift_left(%1, %2)";
    case FA_FLEX_shift_right: return "flex_shift_right(%1, %2)";
    case FA_FLEX_wrap_u8: return "(unsigned char)%1";
    case FA_FLEX_wrap_i8: return "(signed char)%1";
    case FA_FLEX_wrap_i16: return "(short)%1";
    default: return "(int)%1"; /* wrap_i32 */
    }
}

/* is_exact: A fused multiply-add or a product with 1 / b would not give the digits of the CPU.
 * is_uniform: the second operand is the same for all pairs of a head. */
static const char *form_of_reals(fa_flex_op op, bool is_exact, bool is_uniform) {
    switch (op) {
    case FA_FLEX_add: return "%1 + %2";
    case FA_FLEX_sub: return "%1 - %2";
    case FA_FLEX_mul: return is_exact ? "flex_mul(%1, %2)" : "%1 * %2";
    case FA_FLEX_divide: return is_uniform && !is_exact ? "flex_ratio(%1, %2)" : "flex_divide(%1, %2)";
    case FA_FLEX_floor_divide: return "flex_real_floor_divide(%1, %2)";
    case FA_FLEX_remainder: return "flex_real_remainder(%1, %2)";
    case FA_FLEX_fmod: return "flex_fmod(%1, %2)";
    case FA_FLEX_minimum: return "flex_minimum(%1, %2)";
    case FA_FLEX_maximum: return "flex_maximum(%1, %2)";
    case FA_FLEX_pow: return "flex_pow(%1, %2)";
    case FA_FLEX_neg: return "-%1";
    default: return NULL; /* a function of one operand with the op's name */
    }
}

/* Writes a form. Operands get the type `cast`, if there is one. */
static void put_form(const fa_writer *w, const fa_flex_instruction *x, const char *form, const char *cast) {
    for (const char *at = form; *at; at++) {
        if (*at != '%') {
            fa_put(w->t, "%c", *at);
        } else if (*++at == '%') {
            fa_put(w->t, "%%");
        } else {
            const int32_t operand = x->operand[*at - '1'];
            if (cast && strcmp(cast, fa_type_of(w, operand)) != 0) fa_put(w->t, "(%s)", cast);
            fa_put(w->t, "v%d", operand);
        }
    }
}

/* Does NVRTC know the value? */
static bool is_constant(const fa_flex_program *p, int32_t idx) {
    while (p->instructions[idx].num_operands == 1 && !fa_is_op(&p->instructions[idx], FA_FLEX_gather))
        idx = p->instructions[idx].operand[0];
    return fa_is_op(&p->instructions[idx], FA_FLEX_constant);
}

static void put_ints(const fa_writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    const fa_flex_op op = (fa_flex_op)x->op;
    bool is_int = is_narrow(w, idx) && op != FA_FLEX_pow && op != FA_FLEX_shift_left;
    for (int i = 0; i < x->num_operands; i++) is_int = is_int && is_narrow(w, x->operand[i]);
    const bool is_positive = w->bounds[x->operand[0]].lo >= 0 && w->bounds[x->operand[x->num_operands - 1]].lo > 0;
    const bool is_cast = is_narrow(w, idx) && !is_int;
    const int32_t divisor = x->operand[x->num_operands - 1];
    const bool is_shared = is_int && fa_is_of_head(w->p, divisor) && !is_constant(w->p, divisor);
    fa_put(w->t, is_cast ? "(int)(" : "");
    put_form(w, x, form_of_ints(op, is_int, is_int && is_positive, is_shared), ints_name(is_int));
    fa_put(w->t, is_cast ? ")" : "");
}

static void put_value(const fa_writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    const char *form = NULL;
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_b:
    case FA_FLEX_h:
    case FA_FLEX_q_idx:
    case FA_FLEX_kv_idx:
    case FA_FLEX_score:
    case FA_FLEX_grad: fa_put(w->t, "%s", fa_flex_ops[x->op].name); return;
    case FA_FLEX_param: fa_put_param(w, x); return;
    case FA_FLEX_constant: fa_put_constant(w->t, x, is_narrow(w, idx)); return;
    case FA_FLEX_gather: put_load(w, x); return;
    case FA_FLEX_convert: put_convert(w, x, fa_type_of(w, idx)); return;
    case FA_FLEX_scatter: fa_put(w->t, "v%d", x->operand[x->num_operands - 1]); return;
    case FA_FLEX_where:
        fa_put(w->t, "v%d ? (%s)v%d : (%s)v%d", x->operand[0], fa_type_of(w, idx), x->operand[1], fa_type_of(w, idx),
               x->operand[2]);
        return;
    case FA_FLEX_eq:
    case FA_FLEX_ne:
    case FA_FLEX_lt:
    case FA_FLEX_le: put_form(w, x, form_of_comparison((fa_flex_op)x->op), NULL); return;
    default: break;
    }
    if (x->type == FA_FLEX_I64) {
        put_ints(w, idx);
        return;
    }
    if (x->type == FA_FLEX_BOOL)
        form = form_of_bools((fa_flex_op)x->op);
    else
        form = form_of_reals((fa_flex_op)x->op, w->is_exact[idx], fa_is_of_head(w->p, x->operand[x->num_operands - 1]));
    if (form)
        put_form(w, x, form, NULL);
    else
        fa_put(w->t, "flex_%s(v%d)", fa_flex_ops[x->op].name, x->operand[0]);
}

void fa_put_instruction(const fa_writer *w, int32_t idx) {
    fa_put(w->t, "    const %s v%d = ", fa_type_of(w, idx), idx);
    put_value(w, idx);
    fa_put(w->t, ";\n");
}

/* Marks what the places of the marked scatters need. */
void fa_mark_operands(const fa_flex_program *p, uint8_t *is_needed) {
    for (int32_t idx = p->num_instructions - 1; idx >= 0; idx--) {
        const fa_flex_instruction *x = &p->instructions[idx];
        const int of_place = x->num_operands - fa_flex_is_scatter(x);
        for (int i = 0; is_needed[idx] && i < of_place; i++) is_needed[x->operand[i]] = 1;
    }
}

/* Writes the marked instructions, but no scatter. */
void fa_put_needed(const fa_writer *w, const uint8_t *is_needed) {
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_needed[idx] && !fa_flex_is_scatter(&w->p->instructions[idx])) fa_put_instruction(w, idx);
}
