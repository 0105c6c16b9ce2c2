/* The text of the loops for one instruction set. The file that includes this header may set VEC_TARGET (vec_target.h)
 * and FAST_MATH, and names its table in OPERATIONS.
 *
 * With FAST_MATH, exp, exp2, log, log2 and tanh of fp32 are the functions of fast_math.h, which vectorise. Otherwise
 * all functions are those of the C library. */
#ifndef FA_FLEX_OPERATE_H
#define FA_FLEX_OPERATE_H

/* gcc vectorises loops of any length at -O3 only, and selections only if comparisons need not trap. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,no-trapping-math")
#endif

#include "cpu/vec_target.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/convert.h"
#include "fast_math.h"
#include "integers.h"
#include "operations.h"

#define EACH(value)                                                             \
    for (int i = 0; i < n / FA_FLEX_GROUP * FA_FLEX_GROUP; i++) r[i] = (value); \
    return

/* Functions of one type are not inlined into `operate`. Otherwise every operation would set up the frame of the largest
 * one. */

/* Operations on fp32 and on fp64. */
#define REAL       float
#define CALL(name) name##f
#define FAST(name) FAST_FUNCTION(name)
#include "operations_real.def"
#undef REAL
#undef CALL
#undef FAST
#define REAL       double
#define CALL(name) name
#define FAST(name) name
#include "operations_real.def"
#undef REAL
#undef CALL
#undef FAST

OUTLINE void operate_ints(fa_flex_op op, int n, int64_t *restrict r, const int64_t *a, const int64_t *b) {
    switch (op) {
    case FA_FLEX_add: EACH(fa_flex_add_ints(a[i], b[i]));
    case FA_FLEX_sub: EACH(fa_flex_sub_ints(a[i], b[i]));
    case FA_FLEX_mul: EACH(fa_flex_mul_ints(a[i], b[i]));
    case FA_FLEX_floor_divide: EACH(fa_flex_floor_divide(a[i], b[i]));
    case FA_FLEX_trunc_divide: EACH(fa_flex_trunc_divide(a[i], b[i]));
    case FA_FLEX_remainder: EACH(fa_flex_remainder(a[i], b[i]));
    case FA_FLEX_fmod: EACH(fa_flex_fmod(a[i], b[i]));
    case FA_FLEX_minimum: EACH(a[i] < b[i] ? a[i] : b[i]);
    case FA_FLEX_maximum: EACH(a[i] > b[i] ? a[i] : b[i]);
    case FA_FLEX_pow: EACH(fa_flex_pow(a[i], b[i]));
    case FA_FLEX_neg: EACH(fa_flex_sub_ints(0, a[i]));
    case FA_FLEX_abs: EACH(a[i] < 0 ? fa_flex_sub_ints(0, a[i]) : a[i]);
    case FA_FLEX_sign: EACH((a[i] > 0) - (a[i] < 0));
    case FA_FLEX_bit_and: EACH(a[i] & b[i]);
    case FA_FLEX_bit_or: EACH(a[i] | b[i]);
    case FA_FLEX_bit_xor: EACH(a[i] ^ b[i]);
    case FA_FLEX_bit_not: EACH(~a[i]);
    case FA_FLEX_shift_left: EACH(fa_flex_shift_left(a[i], b[i]));
    case FA_FLEX_shift_right: EACH(fa_flex_shift_right(a[i], b[i]));
    case FA_FLEX_wrap_u8: EACH((uint8_t)a[i]);
    case FA_FLEX_wrap_i8: EACH((int8_t)a[i]);
    case FA_FLEX_wrap_i16: EACH((int16_t)a[i]);
    case FA_FLEX_wrap_i32: EACH((int32_t)a[i]);
    default: return; /* the decoder lets no other op pass */
    }
}

OUTLINE void operate_bools(fa_flex_op op, int n, uint8_t *restrict r, const uint8_t *a, const uint8_t *b) {
    switch (op) {
    case FA_FLEX_bit_and: EACH(a[i] & b[i]);
    case FA_FLEX_bit_or: EACH(a[i] | b[i]);
    case FA_FLEX_bit_xor: EACH(a[i] ^ b[i]);
    case FA_FLEX_bit_not: EACH(a[i] ^ 1);
    default: return; /* the decoder lets no other op pass */
    }
}

#define COMPARE_ALL(name, element)                                                                     \
    OUTLINE void name(fa_flex_op op, int n, uint8_t *restrict r, const element *a, const element *b) { \
        switch (op) {                                                                                  \
        case FA_FLEX_eq: EACH(a[i] == b[i]);                                                           \
        case FA_FLEX_ne: EACH(a[i] != b[i]);                                                           \
        case FA_FLEX_lt: EACH(a[i] < b[i]);                                                            \
        default: EACH(a[i] <= b[i]);                                                                   \
        }                                                                                              \
    }
COMPARE_ALL(compare_bools, uint8_t)
COMPARE_ALL(compare_ints, int64_t)
COMPARE_ALL(compare_floats, float)
COMPARE_ALL(compare_doubles, double)

static void compare(const fa_flex_operation *o) {
    const fa_flex_op op = (fa_flex_op)o->x->op;
    switch (o->x->type) {
    case FA_FLEX_BOOL: compare_bools(op, o->n, o->r, o->in[0], o->in[1]); return;
    case FA_FLEX_I64: compare_ints(op, o->n, o->r, o->in[0], o->in[1]); return;
    case FA_FLEX_F32: compare_floats(op, o->n, o->r, o->in[0], o->in[1]); return;
    default: compare_doubles(op, o->n, o->r, o->in[0], o->in[1]); return;
    }
}

/* As x86 converts: a value outside of int64's range, or a NaN, gives the least value. */
static int64_t int_from(double x) { return x >= -0x1p63 && x < 0x1p63 ? (int64_t)x : INT64_MIN; }

#define CONVERT_FROM(name, element, is_int)                                  \
    OUTLINE void name(fa_flex_type to, int n, void *out, const element *a) { \
        if (to == FA_FLEX_BOOL) {                                            \
            uint8_t *restrict r = out;                                       \
            EACH(a[i] != 0);                                                 \
        } else if (to == FA_FLEX_I64) {                                      \
            int64_t *restrict r = out;                                       \
            EACH(is_int ? (int64_t)a[i] : int_from((double)a[i]));           \
        } else if (to == FA_FLEX_F32) {                                      \
            float *restrict r = out;                                         \
            EACH((float)a[i]);                                               \
        } else {                                                             \
            double *restrict r = out;                                        \
            EACH((double)a[i]);                                              \
        }                                                                    \
    }
CONVERT_FROM(convert_bools, uint8_t, true)
CONVERT_FROM(convert_ints, int64_t, true)
CONVERT_FROM(convert_floats, float, false)
CONVERT_FROM(convert_doubles, double, false)

static void convert(const fa_flex_operation *o) {
    const fa_flex_type to = (fa_flex_type)o->x->type;
    switch (o->from) {
    case FA_FLEX_BOOL: convert_bools(to, o->n, o->r, o->in[0]); return;
    case FA_FLEX_I64: convert_ints(to, o->n, o->r, o->in[0]); return;
    case FA_FLEX_F32: convert_floats(to, o->n, o->r, o->in[0]); return;
    default: convert_doubles(to, o->n, o->r, o->in[0]); return;
    }
}

#define CHOOSE(name, element)                                                                                \
    OUTLINE void name(int n, element *restrict r, const uint8_t *c, const element *yes, const element *no) { \
        EACH(c[i] ? yes[i] : no[i]);                                                                         \
    }
CHOOSE(choose_bools, uint8_t)
CHOOSE(choose_ints, int64_t)
CHOOSE(choose_floats, float)
CHOOSE(choose_doubles, double)

static void choose(const fa_flex_operation *o) {
    switch (o->x->type) {
    case FA_FLEX_BOOL: choose_bools(o->n, o->r, o->in[0], o->in[1], o->in[2]); return;
    case FA_FLEX_I64: choose_ints(o->n, o->r, o->in[0], o->in[1], o->in[2]); return;
    case FA_FLEX_F32: choose_floats(o->n, o->r, o->in[0], o->in[1], o->in[2]); return;
    default: choose_doubles(o->n, o->r, o->in[0], o->in[1], o->in[2]); return;
    }
}

static void operate(const fa_flex_operation *o) {
    const fa_flex_op op = (fa_flex_op)o->x->op;
    switch (op) {
    case FA_FLEX_convert: convert(o); return;
    case FA_FLEX_where: choose(o); return;
    case FA_FLEX_eq:
    case FA_FLEX_ne:
    case FA_FLEX_lt:
    case FA_FLEX_le: compare(o); return;
    default: break;
    }
    switch (o->x->type) {
    case FA_FLEX_BOOL: operate_bools(op, o->n, o->r, o->in[0], o->in[1]); return;
    case FA_FLEX_I64: operate_ints(op, o->n, o->r, o->in[0], o->in[1]); return;
    case FA_FLEX_F32: operate_realf(op, o->n, o->r, o->in[0], o->in[1]); return;
    default: operate_real(op, o->n, o->r, o->in[0], o->in[1]); return;
    }
}

/* Copies one element to all places. */
static void fill(fa_flex_type type, int n, void *out, const void *element) {
    if (type == FA_FLEX_BOOL) {
        memset(out, *(const uint8_t *)element, (size_t)n);
    } else if (type == FA_FLEX_F32) {
        float *restrict r = out;
        const float value = *(const float *)element;
        EACH(value);
    } else { /* int64 and fp64 */
        int64_t *restrict r = out, value;
        memcpy(&value, element, sizeof value);
        EACH(value);
    }
}

static void count(int n, int64_t *restrict r, int64_t first) { EACH(first + i); }

/* ---- captures ---------------------------------------------------------------------------------------------------- */

static void add_places(int n, int64_t *restrict r, const int64_t *index, int64_t size, int64_t stride) {
    EACH(r[i] + fa_flex_place(index[i], size) * stride);
}

/* Places of elements of a contiguous tensor. */
static void place(const fa_flex_operation *o, const fa_flex_capture *c, int rank, int64_t *at) {
    int64_t stride = 1;
    memset(at, 0, (size_t)o->n * sizeof *at);
    for (int dim = rank - 1; dim >= 0; stride *= c->size[dim--]) add_places(o->n, at, o->in[dim], c->size[dim], stride);
}

/* at NULL: the elements lie one behind the other. Then a step other than 0 asks for FA_FLEX_GROUP lines, one behind the
 * other in `data`, of lanes that lie `step` apart. */
#define LOAD(name, element, of, result)                                                                 \
    static void name(int n, result *restrict r, const element *data, const int64_t *at, int64_t step) { \
        if (at) {                                                                                       \
            EACH((result)of(data[at[i]]));                                                              \
        }                                                                                               \
        if (step == 0) {                                                                                \
            EACH((result)of(data[i]));                                                                  \
        }                                                                                               \
        for (int lane = 0; lane < n; lane++, data += step)                                              \
            for (int line = 0; line < FA_FLEX_GROUP; line++)                                            \
                r[line * FA_FLEX_MOST_LANES + lane] = (result)of(data[line]);                           \
    }
#define IS_TRUE(x) ((x) != 0)
LOAD(load_bools, uint8_t, IS_TRUE, uint8_t)
LOAD(load_u8, uint8_t, , int64_t)
LOAD(load_i8, int8_t, , int64_t)
LOAD(load_i16, int16_t, , int64_t)
LOAD(load_i32, int32_t, , int64_t)
LOAD(load_f16, uint16_t, fa_f32_from_f16, float)
LOAD(load_bf16, uint16_t, fa_f32_from_bf16, float)
LOAD(load_f32, float, , float)
LOAD(load_words, int64_t, , int64_t)

#define FA_FLEX_DTYPE(enumerator, name, type, bytes) bytes,
static const int8_t bytes_of[] = {FA_FLEX_DTYPES(FA_FLEX_DTYPE)};
#undef FA_FLEX_DTYPE

static void load(fa_flex_dtype dtype, int n, void *r, const void *data, const int64_t *at, int64_t step) {
    switch (dtype) {
    case FA_FLEX_OF_BOOL: load_bools(n, r, data, at, step); return;
    case FA_FLEX_OF_U8: load_u8(n, r, data, at, step); return;
    case FA_FLEX_OF_I8: load_i8(n, r, data, at, step); return;
    case FA_FLEX_OF_I16: load_i16(n, r, data, at, step); return;
    case FA_FLEX_OF_I32: load_i32(n, r, data, at, step); return;
    case FA_FLEX_OF_F16: load_f16(n, r, data, at, step); return;
    case FA_FLEX_OF_BF16: load_bf16(n, r, data, at, step); return;
    case FA_FLEX_OF_F32: load_f32(n, r, data, at, step); return;
    default: load_words(n, r, data, at, step); return; /* int64 and fp64 */
    }
}

/* The places of a gather whose indices grow evenly: first + i step for element i. */
typedef struct {
    int64_t first, step;
} even_places;

/* Finds the places for this line and `more` further lines. Returns whether no index is negative or beyond its
 * dimension. */
static bool find_even_places(const fa_flex_operation *o, const fa_flex_capture *c, int more, even_places *at) {
    *at = (even_places){0, 0};
    for (int dim = 0; dim < o->x->num_operands; dim++) {
        const int64_t index = *(const int64_t *)o->in[dim], size = c->size[dim], slope = o->slope[dim];
        const int64_t to_end = slope * (o->n - 1), down = more ? (int64_t)more * o->turned->slope[dim] : 0;
        const int64_t low = (to_end < 0 ? to_end : 0) + (down < 0 ? down : 0);
        const int64_t high = (to_end > 0 ? to_end : 0) + (down > 0 ? down : 0);
        const bool moves = slope != 0 || down != 0;
        if (moves && !(index >= -low && index < size - high)) return false;
        at->first += (moves ? index : fa_flex_place(index, size)) * c->stride[dim];
        at->step += slope * c->stride[dim];
    }
    return true;
}

static bool lines_follow(const fa_flex_operation *o, const fa_flex_capture *c) {
    int64_t step = 0;
    for (int dim = 0; dim < o->x->num_operands; dim++) step += o->turned->slope[dim] * c->stride[dim];
    return step == 1;
}

/* Copies the line from those that were turned, or turns the next ones first. false: the line cannot come this way. */
static bool take_turned(const fa_flex_operation *o, const fa_flex_capture *c, fa_flex_dtype dtype,
                        const even_places *at) {
    fa_flex_turned *t = o->turned;
    const size_t bytes = o->x->result == FA_FLEX_BOOL ? 1 : o->x->result == FA_FLEX_F32 ? 4 : 8;
    const char *data = (const char *)c->data + at->first * bytes_of[dtype];
    int64_t line = t->at ? (data - t->at) / bytes_of[dtype] : -1;
    if (!t->at || data < t->at || line >= FA_FLEX_GROUP || t->step != at->step || t->n != o->n) {
        even_places all;
        if (at->step == 0 || !lines_follow(o, c) || !find_even_places(o, c, FA_FLEX_GROUP - 1, &all)) return false;
        if (!t->values && !(t->values = malloc(FA_FLEX_GROUP * FA_FLEX_MOST_LANES * bytes))) return false;
        load(dtype, o->n, t->values, data, NULL, at->step);
        t->at = data, t->step = at->step, t->n = o->n, line = 0;
    }
    memcpy(o->r, (const char *)t->values + (size_t)line * FA_FLEX_MOST_LANES * bytes, (size_t)o->n * bytes);
    return true;
}

static void gather(const fa_flex_operation *o, const fa_flex_capture *c, fa_flex_dtype dtype) {
    int64_t at[FA_FLEX_MOST_LANES];
    even_places even;
    if (o->is_even && find_even_places(o, c, 0, &even)) {
        if (even.step == 1) {
            load(dtype, o->n, o->r, (const char *)c->data + even.first * bytes_of[dtype], NULL, 0);
            return;
        }
        if (o->turned && take_turned(o, c, dtype, &even)) return;
    }
    memset(at, 0, (size_t)o->n * sizeof *at);
    for (int dim = 0; dim < o->x->num_operands; dim++) add_places(o->n, at, o->in[dim], c->size[dim], c->stride[dim]);
    load(dtype, o->n, o->r, c->data, at, 0);
}

const fa_flex_operations OPERATIONS = {operate, gather, place, fill, count};

#endif
