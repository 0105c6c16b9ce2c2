/* Straight-line CUDA C: one constant for each instruction. Operations with more than one operator are functions of
 * cuda/flex_values.cuh. */
#include "source.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "intervals.h"
#include "scatters.h"
#include "wide.h"

/* ---- text -------------------------------------------------------------------------------------------------------- */

typedef struct {
    char *data; /* owned */
    size_t length, room;
    bool is_lost; /* there was no memory */
} text;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void put(text *t, const char *format, ...) {
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

/* ---- words of flex_values ---------------------------------------------------------------------------------------- */

static int32_t capture_words(const fa_flex_program *p, int32_t capture) { return 1 + 2 * p->captures[capture].rank; }

/* The words of all captures before `capture`. */
static int32_t words_before(const fa_flex_program *p, int32_t capture) {
    int32_t words = 0;
    for (int32_t i = 0; i < capture; i++) words += capture_words(p, i);
    return words;
}

/* The words of captures and parameters. */
static int32_t program_words(const fa_flex_program *p) {
    return p ? words_before(p, p->num_captures) + p->num_params : 0;
}

size_t fa_flex_values_bytes(const fa_flex_program *score, const fa_flex_program *mask,
                            const fa_flex_program *derivative) {
    const int32_t words = program_words(score) + program_words(mask) + program_words(derivative) +
                          (derivative ? derivative->num_captures : 0);
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

/* ---- values of instructions -------------------------------------------------------------------------------------- */

typedef struct {
    text *t;
    const fa_flex_program *p;
    const fa_flex_interval *bounds; /* of each instruction */
    const uint8_t *is_exact;        /* of each instruction: an error of its last digits could grow */
    const fa_flex_trait *traits;    /* of each instruction of a derivative */
    int32_t words;                  /* where the program's words begin */
    bool is_wide;
    bool has_steps; /* of flex_exponent: the text has q_step and kv_step, and traits are those of the score_mod */
} writer;

static bool is_op(const fa_flex_instruction *x, fa_flex_op op) { return x->op == op; }

/* Does a value depend on nothing but b and h? */
static bool is_of_head(const fa_flex_program *p, int32_t idx) {
    return (p->instructions[idx].depends & ~(FA_FLEX_ON_B | FA_FLEX_ON_H)) == 0;
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
static void mark_exact(const fa_flex_program *p, uint8_t *is_exact) {
    memset(is_exact, 0, (size_t)p->num_instructions);
    for (int32_t idx = p->num_instructions - 1; idx >= 0; idx--) {
        const fa_flex_instruction *x = &p->instructions[idx];
        const bool needs = x->num_operands > 0 && (is_exact[idx] || jumps(p, x));
        for (int i = 0; needs && i < x->num_operands; i++) is_exact[x->operand[i]] = 1;
    }
}

/* Is the value of an integer kept in 32 bits? A float on the GPU may lie slightly outside of the bounds. So an integer
 * from a float needs some distance. */
static bool is_narrow(const writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    const fa_flex_interval bounds = w->bounds[idx];
    const bool is_from_float = is_op(x, FA_FLEX_convert) && w->p->instructions[x->operand[0]].result >= FA_FLEX_F32;
    const int64_t most = is_from_float ? 1 << 30 : INT32_MAX;
    return x->result == FA_FLEX_I64 && bounds.lo >= -most - 1 && bounds.hi <= most;
}

static const char *type_name(fa_flex_type type, bool is_int) {
    static const char *const names[] = {"bool", "long long", "float", "double"};
    return is_int ? "int" : names[type];
}

static const char *type_of(const writer *w, int32_t idx) {
    return type_name((fa_flex_type)w->p->instructions[idx].result, is_narrow(w, idx));
}

static const char *ints_name(bool is_int) { return type_name(FA_FLEX_I64, is_int); }

static void put_constant(text *t, const fa_flex_instruction *x, bool is_int) {
    if (x->type == FA_FLEX_BOOL)
        put(t, "%s", x->number.b ? "true" : "false");
    else if (x->type == FA_FLEX_F64)
        put(t, "__longlong_as_double(0x%016" PRIx64 "LL)", (uint64_t)x->number.i); /* its bits */
    else if (x->number.i == INT64_MIN)
        put(t, "-0x7fffffffffffffffLL - 1");
    else if (is_int)
        put(t, "(int)(%" PRId64 "LL)", x->number.i);
    else
        put(t, "%" PRId64 "LL", x->number.i);
}

static void put_param(const writer *w, const fa_flex_instruction *x) {
    const int32_t word = w->words + words_before(w->p, w->p->num_captures) + x->source;
    if (x->type == FA_FLEX_BOOL)
        put(w->t, "x.words[%d] != 0", word);
    else
        put(w->t, x->type == FA_FLEX_F64 ? "__longlong_as_double(x.words[%d])" : "x.words[%d]", word);
}

/* The place of an element. The strides are the capture's own, or those of a contiguous gradient. */
static void put_place(const writer *w, const fa_flex_instruction *x, bool is_contiguous) {
    const int32_t first = w->words + words_before(w->p, x->source) + 1;
    const int rank = w->p->captures[x->source].rank;
    const char *number = w->is_wide ? "" : "(int)";
    if (rank == 0) put(w->t, "0");
    for (int dim = 0; is_contiguous && dim + 1 < rank; dim++) put(w->t, "(");
    for (int dim = 0; dim < rank; dim++) {
        const int32_t size = first + 2 * dim;
        if (is_contiguous && dim > 0) put(w->t, " * %sx.words[%d] + ", number, size);
        if (!is_contiguous && dim > 0) put(w->t, " + ");
        put(w->t,
            w->bounds[x->operand[dim]].lo < 0 ? "flex_place(v%d, %sx.words[%d])" : "flex_limit(v%d, %sx.words[%d])",
            x->operand[dim], number, size);
        if (!is_contiguous) put(w->t, " * %sx.words[%d]", number, size + 1);
        if (is_contiguous && dim > 0) put(w->t, ")");
    }
}

static void put_load(const writer *w, const fa_flex_instruction *x) {
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
    const int dtype = w->p->captures[x->source].dtype;
    put(w->t, "%s%s<%s>(x.words[%d], ", loads[dtype].before, w->is_wide ? "flex_load_if" : "flex_load",
        loads[dtype].type, w->words + words_before(w->p, x->source));
    put_place(w, x, false);
    put(w->t, ")%s", loads[dtype].after);
}

/* Does a value change by the same from one pair to another, whichever they are? */
static bool has_constant_steps(const writer *w, int32_t idx) {
    return w->has_steps && w->traits[idx].is_linear && !is_of_head(w->p, idx);
}

static bool is_small(const writer *w, int32_t idx) {
    return is_narrow(w, idx) && w->bounds[idx].lo >= -FA_FLEX_SMALL && w->bounds[idx].hi <= FA_FLEX_SMALL;
}

/* The float of a small integer. With steps only one of many pairs has a conversion, and the others have a sum, which is
 * exact. */
static void put_float_of_small(const writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    if (has_constant_steps(w, idx)) {
        const fa_flex_trait *trait = &w->traits[idx];
        put(w->t, "flex_float_of_small(v%d - (%d * q_step + %d * kv_step)) + (float)(%d * q_step + %d * kv_step)", idx,
            trait->of_q, trait->of_kv, trait->of_q, trait->of_kv);
    } else if (w->has_steps && (is_op(x, FA_FLEX_abs) || is_op(x, FA_FLEX_neg)) && is_small(w, x->operand[0])) {
        put(w->t, is_op(x, FA_FLEX_abs) ? "flex_abs(" : "-(");
        put_float_of_small(w, x->operand[0]);
        put(w->t, ")");
    } else {
        put(w->t, "flex_float_of_small(v%d)", idx);
    }
}

static void put_convert(const writer *w, const fa_flex_instruction *x, const char *type) {
    const int32_t from = x->operand[0];
    if (x->type == FA_FLEX_BOOL)
        put(w->t, "v%d != 0", from);
    else if (x->type == FA_FLEX_I64 && w->p->instructions[from].result >= FA_FLEX_F32)
        put(w->t, "(%s)flex_int_from(v%d)", type, from);
    else if (x->type == FA_FLEX_F32 && is_small(w, from))
        put_float_of_small(w, from);
    else
        put(w->t, "(%s)v%d", type, from);
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
 * is_positive: the operands are not negative, and the second is not 0. */
static const char *form_of_ints(fa_flex_op op, bool is_int, bool is_positive) {
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
static void put_form(const writer *w, const fa_flex_instruction *x, const char *form, const char *cast) {
    for (const char *at = form; *at; at++) {
        if (*at != '%') {
            put(w->t, "%c", *at);
        } else if (*++at == '%') {
            put(w->t, "%%");
        } else {
            const int32_t operand = x->operand[*at - '1'];
            if (cast && strcmp(cast, type_of(w, operand)) != 0) put(w->t, "(%s)", cast);
            put(w->t, "v%d", operand);
        }
    }
}

static void put_ints(const writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    const fa_flex_op op = (fa_flex_op)x->op;
    bool is_int = is_narrow(w, idx) && op != FA_FLEX_pow && op != FA_FLEX_shift_left;
    for (int i = 0; i < x->num_operands; i++) is_int = is_int && is_narrow(w, x->operand[i]);
    const bool is_positive = w->bounds[x->operand[0]].lo >= 0 && w->bounds[x->operand[x->num_operands - 1]].lo > 0;
    const bool is_cast = is_narrow(w, idx) && !is_int;
    put(w->t, is_cast ? "(int)(" : "");
    put_form(w, x, form_of_ints(op, is_int, is_int && is_positive), ints_name(is_int));
    put(w->t, is_cast ? ")" : "");
}

static void put_value(const writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    const char *form = NULL;
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_b:
    case FA_FLEX_h:
    case FA_FLEX_q_idx:
    case FA_FLEX_kv_idx:
    case FA_FLEX_score:
    case FA_FLEX_grad: put(w->t, "%s", fa_flex_ops[x->op].name); return;
    case FA_FLEX_param: put_param(w, x); return;
    case FA_FLEX_constant: put_constant(w->t, x, is_narrow(w, idx)); return;
    case FA_FLEX_gather: put_load(w, x); return;
    case FA_FLEX_convert: put_convert(w, x, type_of(w, idx)); return;
    case FA_FLEX_scatter: put(w->t, "v%d", x->operand[x->num_operands - 1]); return;
    case FA_FLEX_where:
        put(w->t, "v%d ? (%s)v%d : (%s)v%d", x->operand[0], type_of(w, idx), x->operand[1], type_of(w, idx),
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
        form = form_of_reals((fa_flex_op)x->op, w->is_exact[idx], is_of_head(w->p, x->operand[x->num_operands - 1]));
    if (form)
        put_form(w, x, form, NULL);
    else
        put(w->t, "flex_%s(v%d)", fa_flex_ops[x->op].name, x->operand[0]);
}

static void put_instruction(const writer *w, int32_t idx) {
    put(w->t, "    const %s v%d = ", type_of(w, idx), idx);
    put_value(w, idx);
    put(w->t, ";\n");
}

/* ---- bounds ------------------------------------------------------------------------------------------------------ */

/* Names for cuda/flex_bounds.h. */
static void put_names(text *t) {
    put(t, "enum {\n    FA_FLEX_BOOL = %d, FA_FLEX_I64 = %d, FA_FLEX_F32 = %d, FA_FLEX_F64 = %d,\n", FA_FLEX_BOOL,
        FA_FLEX_I64, FA_FLEX_F32, FA_FLEX_F64);
    for (int code = 0; code < FA_FLEX_NUM_CODES; code++)
        if (fa_flex_ops[code].name) put(t, "    FA_FLEX_%s = %d,\n", fa_flex_ops[code].name, code);
#define FA_FLEX_DTYPE(enumerator, name, type, bytes) \
    put(t, "    FA_FLEX_OF_%s = %d,\n", #enumerator, (int)FA_FLEX_OF_##enumerator);
    FA_FLEX_DTYPES(FA_FLEX_DTYPE)
#undef FA_FLEX_DTYPE
    put(t, "};\n");
}

static void put_bounds_of_number(const writer *w, const fa_flex_instruction *x) {
    const bool is_param = is_op(x, FA_FLEX_param);
    put(w->t, x->type == FA_FLEX_F64 ? "bounds_of_real(" : "bounds_of_int(");
    if (is_param)
        put_param(w, x);
    else
        put_constant(w->t, x, false);
    put(w->t, ")");
}

static void put_bounds_of_gather(const writer *w, const fa_flex_instruction *x) {
    const int rank = w->p->captures[x->source].rank;
    put(w->t, "bounds_of_gather<%d, %d>(x.words + %d, {", w->p->captures[x->source].dtype, rank,
        w->words + words_before(w->p, x->source));
    for (int dim = 0; dim < rank; dim++) put(w->t, "%sb%d", dim > 0 ? ", " : "", x->operand[dim]);
    put(w->t, "})");
}

/* Writes a mask's bounds, for kernels that ask for them. */
static void put_bounds(const writer *w) {
    put(w->t, "#ifdef FLEX_BOUNDS\n");
    put_names(w->t);
    put(w->t, "#include \"flex_bounds.cuh\"\n\n"
              "DEVICE interval flex_mask_bounds(const flex_values &x, int b, int h, int q_idx, int q_last, int kv_idx, "
              "int kv_last) {\n");
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) {
        const fa_flex_instruction *x = &w->p->instructions[idx];
        put(w->t, "    const interval b%d = ", idx);
        switch ((fa_flex_op)x->op) {
        case FA_FLEX_b:
        case FA_FLEX_h: put(w->t, "of_ints(%s, %s)", fa_flex_ops[x->op].name, fa_flex_ops[x->op].name); break;
        case FA_FLEX_q_idx: put(w->t, "of_ints(q_idx, q_last)"); break;
        case FA_FLEX_kv_idx: put(w->t, "of_ints(kv_idx, kv_last)"); break;
        case FA_FLEX_param:
        case FA_FLEX_constant: put_bounds_of_number(w, x); break;
        case FA_FLEX_gather: put_bounds_of_gather(w, x); break;
        default: {
            const int32_t first = x->operand[0];
            put(w->t, "bound_op(%d, %d, %d, b%d, b%d, b%d)", x->op, x->type, w->p->instructions[first].result, first,
                x->operand[x->num_operands > 1 ? 1 : 0], x->operand[x->num_operands > 2 ? 2 : 0]);
        }
        }
        put(w->t, ";\n");
    }
    put(w->t, "    return b%d;\n}\n#endif\n\n", w->p->num_instructions - 1);
}

/* ---- gradients of captures --------------------------------------------------------------------------------------- */

static bool is_scatter(const writer *w, int32_t idx) { return fa_flex_is_scatter(&w->p->instructions[idx]); }

static int32_t value_of_scatter(const writer *w, int32_t idx) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    return x->operand[x->num_operands - 1];
}

/* Is this a scatter to an element that only b and h choose? */
static bool is_sum(const writer *w, int32_t idx) {
    return is_scatter(w, idx) && w->traits[idx].kind == FA_FLEX_OF_HEAD;
}

static void put_add(const writer *w, int32_t idx, const char *value) {
    const fa_flex_instruction *x = &w->p->instructions[idx];
    put(w->t, "    flex_add_to(x.words[%d], ", w->words + program_words(w->p) + x->source);
    put_place(w, x, true);
    put(w->t, ", %s%d);\n", value, idx);
}

static void put_sums(const writer *w) {
    int num = 0;
    put(w->t, "struct flex_sums {\n");
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_sum(w, idx)) {
            put(w->t, "    %s s%d;\n", type_of(w, idx), idx);
            num++;
        }
    put(w->t, "};\n#define FLEX_SUMS %d\n\n", num);
}

/* Marks what the places of the marked scatters need. */
static void mark_operands(const fa_flex_program *p, uint8_t *is_needed) {
    for (int32_t idx = p->num_instructions - 1; idx >= 0; idx--) {
        const fa_flex_instruction *x = &p->instructions[idx];
        const int of_place = x->num_operands - fa_flex_is_scatter(x);
        for (int i = 0; is_needed[idx] && i < of_place; i++) is_needed[x->operand[i]] = 1;
    }
}

/* Writes the marked instructions, but no scatter. */
static void put_needed(const writer *w, const uint8_t *is_needed) {
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_needed[idx] && !is_scatter(w, idx)) put_instruction(w, idx);
}

static void put_add_sums(const writer *w, uint8_t *is_needed) {
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) is_needed[idx] = is_sum(w, idx);
    mark_operands(w->p, is_needed);
    put(w->t, "DEVICE void flex_add_sums(const flex_values &x, const flex_sums &sums, int b, int h) {\n");
    put_needed(w, is_needed);
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_sum(w, idx)) put_add(w, idx, "sums.s");
    put(w->t, "}\n\n");
}

static int num_parts(const fa_flex_program *p) {
    int num = 0;
    for (int32_t idx = 0; p && idx < p->num_instructions; idx++) num += fa_flex_is_scatter(&p->instructions[idx]);
    return num;
}

/* Writes the functions of the parts beside flex_derivative. */
static void put_parts(const writer *w, uint8_t *is_needed) {
    static const char *const kinds[] = {"FLEX_OF_HEAD", "FLEX_OF_QUERY", "FLEX_OF_KEY", "FLEX_OF_DIFFERENCE",
                                        "FLEX_OF_PAIR"};
    int part = 0;
    put(w->t, "DEVICE constexpr flex_kind flex_kind_of(int part) {\n    return ");
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_scatter(w, idx)) put(w->t, "part == %d ? %s : ", part++, kinds[w->traits[idx].kind]);
    put(w->t, "FLEX_OF_PAIR;\n}\n\n"
              "template <int PART> DEVICE auto flex_place_of(const flex_values &x, int b, int h, int q_idx, "
              "int kv_idx) {\n");
    part = 0;
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) {
        if (!is_scatter(w, idx)) continue;
        memset(is_needed, 0, (size_t)w->p->num_instructions);
        is_needed[idx] = 1;
        mark_operands(w->p, is_needed);
        put(w->t, "    if constexpr (PART == %d) {\n", part++);
        put_needed(w, is_needed);
        put(w->t, "    return ");
        put_place(w, &w->p->instructions[idx], true);
        put(w->t, ";\n    }\n");
    }
    put(w->t, "}\n\n"
              "template <int PART, class T> DEVICE void flex_add_part(const flex_values &x, T place, float value) {\n");
    part = 0;
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++)
        if (is_scatter(w, idx))
            put(w->t, "    if constexpr (PART == %d) flex_add_to(x.words[%d], place, (%s)value);\n", part++,
                w->words + program_words(w->p) + w->p->instructions[idx].source, type_of(w, idx));
    put(w->t, "}\n\n");
}

/* ---- scores with something added --------------------------------------------------------------------------------- */

/* A score_mod may be the score plus terms that do not depend on the score. The walk through such a program goes from
 * the result to the score. */
typedef struct {
    int32_t idx;  /* the score, with the terms that are not yet taken */
    int32_t term; /* the value of the term taken last */
    bool is_subtracted;
} sum_walk;

static bool reads_score(const fa_flex_program *p, int32_t idx) {
    return p->instructions[idx].depends & FA_FLEX_ON_SCORE;
}

/* Takes a term. Returns false if there is none: idx is the score, or the rest is no such sum. */
static bool take_term(const fa_flex_program *p, sum_walk *walk) {
    const fa_flex_instruction *x = &p->instructions[walk->idx];
    if ((!is_op(x, FA_FLEX_add) && !is_op(x, FA_FLEX_sub)) || x->result != FA_FLEX_F32) return false;
    const int32_t first = x->operand[0], second = x->operand[1];
    if (reads_score(p, first) && !reads_score(p, second))
        *walk = (sum_walk){first, second, is_op(x, FA_FLEX_sub)};
    else if (is_op(x, FA_FLEX_add) && !reads_score(p, first) && reads_score(p, second))
        *walk = (sum_walk){second, first, false};
    else
        return false;
    return true;
}

static bool is_sum_with_score(const fa_flex_program *p) {
    sum_walk walk = {p->num_instructions - 1, 0, false};
    while (take_term(p, &walk)) continue;
    const fa_flex_instruction *x = &p->instructions[walk.idx];
    return is_op(x, FA_FLEX_score) && x->result == FA_FLEX_F32;
}

/* A term as a product of two values. NOTE: the factor of a head comes first, and is multiplied by log2 e. So log2 e
 * costs no instruction of a pair. is_negative: the product is subtracted. */
typedef struct {
    int32_t of_head, other; /* of_head -1: 1 */
    bool is_negative;
} term_product;

static term_product product_of(const fa_flex_program *p, const sum_walk *walk) {
    term_product product = {-1, walk->term, walk->is_subtracted};
    const fa_flex_instruction *x = &p->instructions[walk->term];
    for (; is_op(x, FA_FLEX_neg); x = &p->instructions[product.other])
        product = (term_product){-1, x->operand[0], !product.is_negative};
    if (is_op(x, FA_FLEX_mul)) {
        const int of_head = is_of_head(p, x->operand[0]) ? 0 : 1;
        if (is_of_head(p, x->operand[of_head]))
            product.of_head = x->operand[of_head], product.other = x->operand[1 - of_head];
    }
    return product;
}

/* Marks what the terms are computed from. */
static void mark_terms(const fa_flex_program *p, uint8_t *is_needed) {
    memset(is_needed, 0, (size_t)p->num_instructions);
    for (sum_walk walk = {p->num_instructions - 1, 0, false}; take_term(p, &walk);) {
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
 * pairs. There is room for few of them. Returns the number of those that the terms need. */
static int mark_head_values(const fa_flex_program *p, uint8_t *is_loaded, uint8_t *is_needed) {
    enum { MOST = 4 };
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        is_loaded[idx] = is_op(x, FA_FLEX_gather);
        for (int i = 0; i < x->num_operands; i++) is_loaded[idx] |= is_loaded[x->operand[i]];
    }
    for (int32_t idx = 0; idx < p->num_instructions; idx++)
        is_loaded[idx] &= p->instructions[idx].result == FA_FLEX_F32 && is_of_head(p, idx);
    mark_terms(p, is_needed);
    const int num = mark_pairs(p, is_needed, is_loaded);
    if (num <= MOST) return num;
    memset(is_loaded, 0, (size_t)p->num_instructions);
    return 0;
}

/* Are the sums of finite values finite, whatever the indices? is_needed: all that the terms are computed from. */
static bool is_finite(const fa_flex_program *p, const uint8_t *is_needed) {
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        if (!is_needed[idx] || x->result < FA_FLEX_F32 || is_of_head(p, idx)) continue;
        switch ((fa_flex_op)x->op) {
        case FA_FLEX_convert:
        case FA_FLEX_where:
        case FA_FLEX_add:
        case FA_FLEX_sub:
        case FA_FLEX_mul:
        case FA_FLEX_neg:
        case FA_FLEX_abs:
        case FA_FLEX_minimum:
        case FA_FLEX_maximum: break;
        default: return false; /* an element of a table may be anything */
        }
    }
    return true;
}

/* Writes flex_head_values and flex_exponent of such a score_mod. The arrays have a flag for each instruction. */
static void put_exponent(const writer *w, uint8_t *is_needed, uint8_t *is_value) {
    const fa_flex_program *p = w->p;
    const int32_t num = p->num_instructions;
    put(w->t, "#define FLEX_HEAD_VALUES %d\n", mark_head_values(p, is_value, is_needed));
    mark_terms(p, is_needed);
    mark_pairs(p, is_needed, is_value);
    put(w->t, "#define FLEX_IS_FINITE   %d\n\n", is_finite(p, is_needed));
    for (int32_t idx = 0; idx < num; idx++) is_value[idx] &= is_needed[idx];
    memcpy(is_needed, is_value, (size_t)num);
    mark_operands(p, is_needed);
    put(w->t, "DEVICE void flex_head_values(const flex_values &x, float *values, int b, int h) {\n");
    put_needed(w, is_needed);
    int place = 0;
    for (int32_t idx = 0; idx < num; idx++)
        if (is_value[idx]) put(w->t, "    values[%d] = v%d;\n", place++, idx);
    put(w->t, "}\n\n"
              "DEVICE float flex_exponent(const flex_values &x, const float *values, float start, int b, int h, "
              "int q_idx, int kv_idx, int q_step, int kv_step) {\n");
    mark_terms(p, is_needed);
    mark_pairs(p, is_needed, is_value);
    place = 0;
    for (int32_t idx = 0; idx < num; idx++) {
        if (is_value[idx])
            put(w->t, "    const float v%d = values[%d];\n", idx, place++);
        else if (is_needed[idx])
            put_instruction(w, idx);
    }
    for (sum_walk walk = {num - 1, 0, false}; take_term(p, &walk);) {
        const term_product product = product_of(p, &walk);
        const char *sign = product.is_negative ? "-" : "";
        if (product.of_head >= 0)
            put(w->t, "    start = fmaf(%sFLEX_LOG2_E * v%d, v%d, start);\n", sign, product.of_head, product.other);
        else
            put(w->t, "    start = fmaf(%sFLEX_LOG2_E, v%d, start);\n", sign, product.other);
    }
    put(w->t, "    return start;\n}\n\n");
}

/* ---- functions --------------------------------------------------------------------------------------------------- */

typedef enum { SCORE, MASK, DERIVATIVE } part;

static void put_body(const writer *w, part of) {
    for (int32_t idx = 0; idx < w->p->num_instructions; idx++) {
        put_instruction(w, idx);
        if (is_sum(w, idx))
            put(w->t, "    sums.s%d += v%d;\n", idx, idx);
        else if (is_scatter(w, idx))
            put_add(w, idx, "v");
    }
    put(w->t, of == MASK ? "    return v%d != 0;\n}\n\n" : "    return (float)v%d;\n}\n\n", w->p->num_instructions - 1);
}

/* Writes a derivative that leaves the values of its scatters in `parts`. Their places are not computed. */
static void put_body_of_parts(const writer *w, uint8_t *is_needed) {
    const int32_t num = w->p->num_instructions;
    const int32_t result = is_scatter(w, num - 1) ? value_of_scatter(w, num - 1) : num - 1;
    int part = 0;
    memset(is_needed, 0, (size_t)num);
    is_needed[result] = 1;
    for (int32_t idx = 0; idx < num; idx++)
        if (is_scatter(w, idx)) is_needed[value_of_scatter(w, idx)] = 1;
    mark_operands(w->p, is_needed);
    put_needed(w, is_needed);
    for (int32_t idx = 0; idx < num; idx++)
        if (is_scatter(w, idx)) put(w->t, "    parts[%d] = (float)v%d;\n", part++, value_of_scatter(w, idx));
    put(w->t, "    return (float)v%d;\n}\n\n", result);
}

static fa_status put_derivative(const writer *w, fa_error *err) {
    static const char rest[] = "float score, float grad, int b, int h, int q_idx, int kv_idx) {\n";
    uint8_t *is_needed = malloc((size_t)w->p->num_instructions);
    if (!is_needed) return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    put_sums(w);
    put(w->t, "DEVICE float flex_derivative(const flex_values &x, flex_sums &sums, %s", rest);
    put_body(w, DERIVATIVE);
    put_add_sums(w, is_needed);
    put(w->t,
        "DEVICE float flex_derivative(const flex_values &x, %s"
        "    flex_sums sums = {};\n"
        "    const float result = flex_derivative(x, sums, score, grad, b, h, q_idx, kv_idx);\n"
        "    flex_add_sums(x, sums, b, h);\n"
        "    return result;\n}\n\n",
        rest);
    if (num_parts(w->p) > 0) {
        put(w->t, "DEVICE float flex_derivative(const flex_values &x, float (&parts)[FLEX_PARTS], %s", rest);
        put_body_of_parts(w, is_needed);
        put_parts(w, is_needed);
    }
    free(is_needed);
    return FA_OK;
}

/* Only a derivative has gradients, and a mask has no score. */
static fa_status check(const fa_flex_program *p, part of, fa_error *err) {
    static const char *const names[] = {"score", "mask", "derivative"};
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        const bool is_of_derivative = is_op(x, FA_FLEX_grad) || is_op(x, FA_FLEX_scatter);
        if ((of != DERIVATIVE && is_of_derivative) || (of == MASK && is_op(x, FA_FLEX_score)))
            return fa_fail(err, FA_EINVAL, "the program of the %s has the op %s", names[of], fa_flex_ops[x->op].name);
    }
    return FA_OK;
}

/* Do the results of a derivative follow from `grad` and the indices alone? */
static bool has_factor(const fa_flex_program *p, const fa_flex_trait *traits) {
    bool reads_score = false;
    for (int32_t idx = 0; idx < p->num_instructions; idx++)
        reads_score |= fa_flex_is_scatter(&p->instructions[idx]) && traits[idx].reads_score;
    return reads_score || !fa_flex_passes_gradient(p);
}

/* words: those of flex_values that belong to earlier programs. p NULL: there is no such program. traits: of a
 * derivative, or of a score_mod that gets flex_exponent. */
static fa_status put_program(text *t, const fa_flex_program *p, part of, int32_t words, bool is_wide,
                             const fa_flex_trait *traits, fa_error *err) {
    if (!p) return FA_OK;
    fa_status status = check(p, of, err);
    if (status != FA_OK) return status;
    const size_t num = (size_t)p->num_instructions;
    fa_flex_interval *bounds = malloc(num * sizeof *bounds + 3 * num);
    if (!bounds) return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    uint8_t *is_exact = (uint8_t *)(bounds + num), *is_needed = is_exact + num;
    fa_flex_bound_always(p, is_wide ? INT32_MAX : FA_FLEX_SMALL - 1, is_wide ? INT64_MAX : FA_FLEX_MOST_PARAM, bounds);
    mark_exact(p, is_exact);
    writer w = {t, p, bounds, is_exact, traits, words, is_wide, false};
    if (of == DERIVATIVE) {
        status = put_derivative(&w, err);
    } else {
        put(t, of == MASK ? "DEVICE bool flex_mask(const flex_values &x, int b, int h, int q_idx, int kv_idx) {\n"
                          : "DEVICE float flex_score(const flex_values &x, float score, int b, int h, int q_idx, "
                            "int kv_idx) {\n");
        put_body(&w, of);
        if (of == MASK) put_bounds(&w);
        if (of == SCORE && traits) {
            w.has_steps = true;
            put_exponent(&w, is_needed, is_needed + num);
        }
    }
    free(bounds);
    return status;
}

fa_status fa_flex_source(const fa_flex_program *score, const fa_flex_program *mask, const fa_flex_program *derivative,
                         bool is_wide, bool has_hidden, bool has_max, bool no_blocks, char **out, fa_error *err) {
    const size_t words = fa_flex_values_bytes(score, mask, derivative) / sizeof(int64_t);
    const int32_t of_score = program_words(score), of_mask = program_words(mask);
    fa_flex_trait *traits = derivative ? fa_flex_traits(derivative) : NULL, *of_adder = NULL;
    text t = {0};
    *out = NULL;
    if (derivative && !traits) return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    const bool has_factors = derivative && has_factor(derivative, traits);
    const bool adds = score && derivative && !has_factors && is_sum_with_score(score);
    if (adds && !(of_adder = fa_flex_traits(score))) {
        free(traits);
        return fa_fail(err, FA_ENOMEM, "no memory for the text of a program");
    }
    put(&t, "#include \"flex_values.cuh\"\n\n");
    put(&t,
        "#define FLEX_SCORE      %d\n#define FLEX_MASK       %d\n#define FLEX_DERIVATIVE %d\n"
        "#define FLEX_FACTOR     %d\n#define FLEX_PARTS      %d\n#define FLEX_HIDDEN     %d\n"
        "#define FLEX_MAX        %d\n#define FLEX_BLOCKS     %d\n#define FLEX_ADDS       %d\n\n",
        score != NULL, mask != NULL, derivative != NULL, has_factors, num_parts(derivative), has_hidden, has_max,
        !no_blocks, adds);
    put(&t, "struct flex_values {\n    long long words[%zu];\n};\n\n", words);
    fa_status status = put_program(&t, score, SCORE, 0, is_wide, of_adder, err);
    if (status == FA_OK) status = put_program(&t, mask, MASK, of_score, is_wide, NULL, err);
    if (status == FA_OK) status = put_program(&t, derivative, DERIVATIVE, of_score + of_mask, is_wide, traits, err);
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
