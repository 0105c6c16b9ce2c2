/* The text of the loops for one instruction set. The file that includes this header may set FAST_MATH. It names the
 * vocabulary of vectors (../cpu/vec_scalar.h) in VERBS and its table in OPERATIONS.
 *
 * With FAST_MATH, exp, exp2, log, log2 and tanh of fp32 are the functions of fast_math.h, which vectorise. Otherwise
 * all functions are those of the C library. */
#ifndef FA_FLEX_OPERATE_H
#define FA_FLEX_OPERATE_H

/* gcc vectorises loops of any length at -O3 only, and selections only if comparisons need not trap. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,no-trapping-math")
#endif

#ifndef VERBS
#define VERBS "cpu/vec_scalar.h"
#endif
#include VERBS

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/convert.h"
#include "fast_math.h"
#include "integers.h"
#include "operations.h"
#include "turn.h"

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

/* Places of the elements of a tensor of `rank` dimensions. */
static void place(const fa_flex_operation *o, int rank, const int64_t *size, const int64_t *stride, int64_t *at) {
    memset(at, 0, (size_t)o->n * sizeof *at);
    for (int dim = 0; dim < rank; dim++) add_places(o->n, at, o->in[dim], size[dim], stride[dim]);
}

/* at NULL: the elements lie one behind the other. Of elements that are not used nothing is read. */
#define LOAD(name, element, of, result)                                                             \
    static void name(int n, int used, result *restrict r, const element *data, const int64_t *at) { \
        if (at) {                                                                                   \
            EACH((result)of(data[at[i]]));                                                          \
        }                                                                                           \
        if (used == n) {                                                                            \
            EACH((result)of(data[i]));                                                              \
        }                                                                                           \
        for (int i = 0; i < n; i++) r[i] = i < used ? (result)of(data[i]) : 0;                      \
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

/* Lines, as turn.h turns those of other types. */
#define TURN(name, element)                                                                                \
    static void name(int64_t *r, const element *data, int64_t step, int n, int used, int lines) {          \
        for (int lane = 0; lane < n; lane++)                                                               \
            for (int line = 0; line < lines; line++)                                                       \
                r[line * FA_FLEX_MOST_LANES + lane] = lane < used ? (int64_t)data[lane * step + line] : 0; \
    }
TURN(turn_u8, uint8_t)
TURN(turn_i8, int8_t)
TURN(turn_i16, int16_t)
TURN(turn_i32, int32_t)
TURN(turn_words, int64_t)

#define FA_FLEX_DTYPE(enumerator, name, type, bytes) bytes,
static const int8_t bytes_of[] = {FA_FLEX_DTYPES(FA_FLEX_DTYPE)};
#undef FA_FLEX_DTYPE

static void load(fa_flex_dtype dtype, const fa_flex_operation *o, const void *data, const int64_t *at) {
    const int n = o->n, used = o->used;
    switch (dtype) {
    case FA_FLEX_OF_BOOL: load_bools(n, used, o->r, data, at); return;
    case FA_FLEX_OF_U8: load_u8(n, used, o->r, data, at); return;
    case FA_FLEX_OF_I8: load_i8(n, used, o->r, data, at); return;
    case FA_FLEX_OF_I16: load_i16(n, used, o->r, data, at); return;
    case FA_FLEX_OF_I32: load_i32(n, used, o->r, data, at); return;
    case FA_FLEX_OF_F16: load_f16(n, used, o->r, data, at); return;
    case FA_FLEX_OF_BF16: load_bf16(n, used, o->r, data, at); return;
    case FA_FLEX_OF_F32: load_f32(n, used, o->r, data, at); return;
    default: load_words(n, used, o->r, data, at); return; /* int64 and fp64 */
    }
}

/* Where the elements of lanes lie that grow evenly. */
static void spread_places(int n, int64_t *at, int64_t step) {
    for (int lane = 0; lane < n; lane++) at[lane] = lane * step;
}

/* Loads the lines of `turned`. */
static void load_turned(fa_flex_dtype dtype, const fa_flex_operation *o, const void *data) {
    const fa_flex_turned *t = o->turned;
    int64_t at[FA_FLEX_MOST_LANES];
    spread_places(o->n, at, t->step);
    switch (dtype) {
    case FA_FLEX_OF_BOOL: turn_bytes(t->values, data, t->step, o->n, o->used, t->num_lines); return;
    case FA_FLEX_OF_U8: turn_u8(t->values, data, t->step, o->n, o->used, t->num_lines); return;
    case FA_FLEX_OF_I8: turn_i8(t->values, data, t->step, o->n, o->used, t->num_lines); return;
    case FA_FLEX_OF_I16: turn_i16(t->values, data, t->step, o->n, o->used, t->num_lines); return;
    case FA_FLEX_OF_I32: turn_i32(t->values, data, t->step, o->n, o->used, t->num_lines); return;
    case FA_FLEX_OF_F16:
    case FA_FLEX_OF_BF16:
    case FA_FLEX_OF_F32:
        turn_floats(t->values, FA_FLEX_MOST_LANES, data, at, o->n, o->used, t->num_lines, dtype);
        return;
    default: turn_words(t->values, data, t->step, o->n, o->used, t->num_lines); return; /* int64 and fp64 */
    }
}

/* The places of an operation whose indices grow evenly: first + i step for element i, and lines that lie one behind the
 * other. */
typedef struct {
    int64_t first, step;
    int num_lines; /* this line and further ones; 1 unless lines lie one behind the other */
} even_places;

/* Returns whether no index of the used elements is negative or beyond its dimension. */
static bool find_even_places(const fa_flex_operation *o, int rank, const int64_t *sizes, const int64_t *strides,
                             even_places *at) {
    int64_t num_lines = FA_FLEX_GROUP, line_step = 0;
    *at = (even_places){0, 0, 1};
    for (int dim = 0; dim < rank; dim++) {
        const int64_t index = *(const int64_t *)o->in[dim], size = sizes[dim], slope = o->slope[dim];
        const int64_t along = o->turned ? o->turned->slope[dim] : 0, to_end = slope * (o->used - 1);
        const int64_t low = to_end < 0 ? to_end : 0, high = to_end > 0 ? to_end : 0;
        const bool moves = slope != 0 || along != 0;
        if (moves && !(index >= -low && index < size - high)) return false;
        const int64_t room = along > 0   ? (size - high - 1 - index) / along
                             : along < 0 ? (index + low) / -along
                                         : num_lines;
        if (room + 1 < num_lines) num_lines = room + 1;
        at->first += (moves ? index : fa_flex_place(index, size)) * strides[dim];
        at->step += slope * strides[dim];
        line_step += along * strides[dim];
    }
    if (o->turned && line_step == 1) at->num_lines = (int)num_lines;
    return true;
}

static size_t bytes_of_type(fa_flex_type type) { return type == FA_FLEX_BOOL ? 1 : type == FA_FLEX_F32 ? 4 : 8; }

static bool has_memory(const fa_flex_operation *o) {
    fa_flex_turned *t = o->turned;
    if (!t->values) t->values = malloc(FA_FLEX_GROUP * FA_FLEX_MOST_LANES * bytes_of_type((fa_flex_type)o->x->result));
    return t->values;
}

/* Returns the line among those that were turned, or turns the next ones first. NULL: the line cannot come this way. */
static const void *turned_line(const fa_flex_operation *o, const fa_flex_capture *c, fa_flex_dtype dtype,
                               const even_places *at) {
    fa_flex_turned *t = o->turned;
    const size_t bytes = bytes_of_type((fa_flex_type)o->x->result);
    int64_t line = at->first - t->at;
    if (line < 0 || line >= t->num_lines || t->step != at->step || t->used != o->used) {
        if (at->step == 0 || at->num_lines == 1 || !has_memory(o)) return NULL;
        t->at = at->first, t->step = at->step, t->used = o->used, t->num_lines = at->num_lines, line = 0;
        load_turned(dtype, o, (const char *)c->data + at->first * bytes_of[dtype]);
    }
    return (const char *)t->values + (size_t)line * FA_FLEX_MOST_LANES * bytes;
}

static void gather(const fa_flex_operation *o, const fa_flex_capture *c, fa_flex_dtype dtype) {
    int64_t at[FA_FLEX_MOST_LANES];
    even_places even;
    const int rank = o->x->num_operands;
    if (o->is_even && find_even_places(o, rank, c->size, c->stride, &even)) {
        if (even.step == 1) {
            load(dtype, o, (const char *)c->data + even.first * bytes_of[dtype], NULL);
            return;
        }
        const void *line = o->turned ? turned_line(o, c, dtype, &even) : NULL;
        if (line) {
            memcpy(o->r, line, (size_t)o->n * bytes_of_type((fa_flex_type)o->x->result));
            return;
        }
    }
    place(o, rank, c->size, c->stride, at);
    load(dtype, o, c->data, at);
}

/* Returns the captured elements of fp32 of *num_lines lines, this one first, or NULL unless they are read by lines. */
static const float *gather_lines(const fa_flex_operation *o, const fa_flex_capture *c, fa_flex_dtype dtype,
                                 int *num_lines) {
    even_places even;
    *num_lines = 1;
    if (!o->is_even || !find_even_places(o, o->x->num_operands, c->size, c->stride, &even)) return NULL;
    if (even.step == 1) {
        load(dtype, o, (const char *)c->data + even.first * bytes_of[dtype], NULL);
        return o->r;
    }
    const float *line = o->turned ? turned_line(o, c, dtype, &even) : NULL;
    const int64_t rest = line ? o->turned->at + o->turned->num_lines - even.first : 1;
    *num_lines =
        least((int)rest, even.num_lines); /* other indices may have turned lines beyond those inside for these */
    return line;
}

static void add_waiting(const fa_flex_operation *o, fa_flex_sums_at to) {
    fa_flex_turned *t = o->turned;
    if (!t || t->num_lines == 0) return;
    int64_t at[FA_FLEX_MOST_LANES];
    spread_places(t->used, at, t->step);
    add_turned(to.fp64 ? to.fp64 + t->at : NULL, to.fp32 ? to.fp32 + t->at : NULL, at, t->values, FA_FLEX_MOST_LANES,
               t->used, t->num_lines);
    t->num_lines = 0;
}

/* Puts the line behind those that wait. Returns false if it cannot wait. */
static bool put_turned(const fa_flex_operation *o, const even_places *at, const float *values, fa_flex_sums_at to) {
    fa_flex_turned *t = o->turned;
    const bool follows = t->num_lines > 0 && at->first == t->at + t->num_lines && at->step == t->step;
    if (!follows || t->used != o->used || t->num_lines == FA_FLEX_GROUP) {
        add_waiting(o, to);
        if (at->step == 0 || at->num_lines == 1 || !has_memory(o)) return false;
        t->at = at->first, t->step = at->step, t->used = o->used;
    }
    memcpy((float *)t->values + t->num_lines++ * FA_FLEX_MOST_LANES, values, (size_t)o->n * sizeof *values);
    return true;
}

/* Several sums at once, because each addition waits for the one before. */
static double sum_of(const float *values, int num) {
    double parts[FA_FLEX_GROUP] = {0}, sum = 0;
    int i = 0;
    for (; i + FA_FLEX_GROUP <= num; i += FA_FLEX_GROUP)
        for (int k = 0; k < FA_FLEX_GROUP; k++) parts[k] += (double)values[i + k];
    for (int k = 0; k < FA_FLEX_GROUP; k++) sum += parts[k];
    for (; i < num; i++) sum += (double)values[i];
    return sum;
}

/* Zeros are not added at places of their own, so that lanes without a gradient do not matter. */
static bool scatter(const fa_flex_operation *o, const fa_flex_capture *c, int rank, fa_flex_sums_at to,
                    bool only_even) {
    int64_t stride[FA_FLEX_MAX_RANK], at[FA_FLEX_MOST_LANES], num = 1;
    const bool is_double = o->x->result == FA_FLEX_F64;
    const float *values = o->in[rank];
    even_places even;
    for (int dim = rank - 1; dim >= 0; num *= c->size[dim--]) stride[dim] = num;
    if (!is_double && o->is_even && find_even_places(o, rank, c->size, stride, &even)) {
        if (even.step == 0) {
            const double sum = sum_of(values, o->used);
            if (to.fp64)
                to.fp64[even.first] += sum;
            else
                to.fp32[even.first] += (float)sum;
            return true;
        }
        if (even.step == 1) {
            for (int i = 0; to.fp64 && i < o->used; i++) to.fp64[even.first + i] += (double)values[i];
            for (int i = 0; to.fp32 && i < o->used; i++) to.fp32[even.first + i] += values[i];
            return true;
        }
        if (o->turned && put_turned(o, &even, values, to)) return true;
    }
    if (only_even) return false;
    place(o, rank, c->size, stride, at);
    for (int i = 0; i < o->used; i++) {
        const double value = is_double ? ((const double *)o->in[rank])[i] : (double)values[i];
        if (value == 0) continue;
        if (to.fp64)
            to.fp64[at[i]] += value;
        else
            to.fp32[at[i]] += (float)value;
    }
    return true;
}

/* ---- biases of tiles --------------------------------------------------------------------------------------------- */

static void load_bias(const fa_flex_lines *l, const void *data, fa_flex_dtype dtype, float *values) {
    if (l->along == 1) {
        turn_floats(values, l->stride, data, l->at, l->num_lanes, l->num_lanes, l->num_lines, dtype);
        return;
    }
    for (int lane = 0; lane < l->num_lanes; lane++)
        for (int line = 0; line < l->num_lines; line++) {
            const int64_t at = l->at[lane] + line * l->along;
            float *to = values + line * l->stride + lane;
            if (dtype == FA_FLEX_OF_F32)
                *to = ((const float *)data)[at];
            else if (dtype == FA_FLEX_OF_F16)
                *to = fa_f32_from_f16(((const uint16_t *)data)[at]);
            else
                *to = fa_f32_from_bf16(((const uint16_t *)data)[at]);
        }
}

static void add_to_bias(const fa_flex_lines *l, fa_flex_sums_at to, const float *values) {
    if (l->along == 1) {
        add_turned(to.fp64, to.fp32, l->at, values, l->stride, l->num_lanes, l->num_lines);
        return;
    }
    for (int lane = 0; lane < l->num_lanes; lane++)
        for (int line = 0; line < l->num_lines; line++) {
            const int64_t at = l->at[lane] + line * l->along;
            const float value = values[line * l->stride + lane];
            if (to.fp64)
                to.fp64[at] += (double)value;
            else
                to.fp32[at] += value;
        }
}

const fa_flex_operations OPERATIONS = {operate, gather, gather_lines, scatter,    add_waiting,
                                       fill,    count,  load_bias,    add_to_bias};

#endif
