/* Each operation maps the bounds of its operands to bounds of its result. */
#include "intervals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/convert.h"
#include "integers.h"

typedef fa_flex_interval interval;

enum { PIECE = 64, MOST_SCANNED = 1024 }; /* elements of a capture */
typedef enum { HEAD, ROWS, KEYS, ROW, NUM_STEPS } step;

static interval of_ints(int64_t lo, int64_t hi) { return (interval){.lo = lo, .hi = hi}; }
static interval of_reals(double low, double high, bool nan) { return (interval){.low = low, .high = high, .nan = nan}; }

/* Nothing is known about a value of this type. */
static interval anything(uint8_t type) {
    if (type == FA_FLEX_BOOL) return of_ints(0, 1);
    if (type == FA_FLEX_I64) return of_ints(INT64_MIN, INT64_MAX);
    return of_reals(-INFINITY, INFINITY, true);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static interval hull(uint8_t type, interval a, interval b) {
    if (type == FA_FLEX_BOOL || type == FA_FLEX_I64) return of_ints(least(a.lo, b.lo), most(a.hi, b.hi));
    return of_reals(a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high, a.nan || b.nan);
}

/* ---- integers ---------------------------------------------------------------------------------------------------- */

/* Is the exact result of an operation surely an int64? A double is precise enough to ask for 2^62. */
static bool is_small(double x) { return fabs(x) < 0x1p62; }

static interval of_corners(interval a, interval b, int64_t (*f)(int64_t, int64_t)) {
    const int64_t w = f(a.lo, b.lo), x = f(a.lo, b.hi), y = f(a.hi, b.lo), z = f(a.hi, b.hi);
    return of_ints(least(least(w, x), least(y, z)), most(most(w, x), most(y, z)));
}

static interval multiply(interval a, interval b) {
    const double alo = (double)a.lo, ahi = (double)a.hi, blo = (double)b.lo, bhi = (double)b.hi;
    if (is_small(alo * blo) && is_small(alo * bhi) && is_small(ahi * blo) && is_small(ahi * bhi))
        return of_corners(a, b, fa_flex_mul_ints);
    return anything(FA_FLEX_I64);
}

static interval remainder_of(interval a, interval b) {
    if (b.lo > 0 && a.lo >= 0 && a.hi < b.lo) return a;
    if (b.lo == b.hi && b.lo > 0 && fa_flex_floor_divide(a.lo, b.lo) == fa_flex_floor_divide(a.hi, b.lo))
        return of_ints(fa_flex_remainder(a.lo, b.lo), fa_flex_remainder(a.hi, b.lo));
    /* The remainder lies between 0 and the divisor. */
    return of_ints(b.lo < 0 ? (b.lo == INT64_MIN ? INT64_MIN : b.lo + 1) : 0, b.hi > 0 ? b.hi - 1 : 0);
}

/* All bits up to the highest one of x >= 0. */
static int64_t all_bits(int64_t x) {
    int64_t bits = 0;
    while (bits < x) bits = bits * 2 + 1;
    return bits;
}

static interval shift_left(interval a, interval b) {
    if (b.lo != b.hi) return anything(FA_FLEX_I64);
    if (b.lo < 0 || b.lo > 63) return of_ints(0, 0);
    return b.lo < 62 ? multiply(a, of_ints((int64_t)1 << b.lo, (int64_t)1 << b.lo)) : anything(FA_FLEX_I64);
}

static interval wrapped(interval a, int64_t lo, int64_t hi) { return a.lo >= lo && a.hi <= hi ? a : of_ints(lo, hi); }

static interval bound_ints(fa_flex_op op, interval a, interval b) {
    const bool positive = a.lo >= 0 && b.lo >= 0, spans_0 = b.lo <= 0 && b.hi >= 0;
    switch (op) {
    case FA_FLEX_add:
        if (is_small((double)a.lo + (double)b.lo) && is_small((double)a.hi + (double)b.hi))
            return of_ints(a.lo + b.lo, a.hi + b.hi);
        break;
    case FA_FLEX_sub:
        if (is_small((double)a.lo - (double)b.hi) && is_small((double)a.hi - (double)b.lo))
            return of_ints(a.lo - b.hi, a.hi - b.lo);
        break;
    case FA_FLEX_mul: return multiply(a, b);
    case FA_FLEX_floor_divide:
        if (!spans_0 && a.lo > INT64_MIN) return of_corners(a, b, fa_flex_floor_divide);
        break;
    case FA_FLEX_trunc_divide:
        if (!spans_0 && a.lo > INT64_MIN) return of_corners(a, b, fa_flex_trunc_divide);
        break;
    case FA_FLEX_remainder: return remainder_of(a, b);
    case FA_FLEX_fmod:
        if (a.lo >= 0 && b.lo > 0) return remainder_of(a, b);
        break;
    case FA_FLEX_minimum: return of_ints(least(a.lo, b.lo), least(a.hi, b.hi));
    case FA_FLEX_maximum: return of_ints(most(a.lo, b.lo), most(a.hi, b.hi));
    case FA_FLEX_neg:
        if (a.lo > INT64_MIN) return of_ints(-a.hi, -a.lo);
        break;
    case FA_FLEX_abs:
        if (a.lo == INT64_MIN) break;
        return a.lo >= 0 ? a : a.hi <= 0 ? of_ints(-a.hi, -a.lo) : of_ints(0, most(-a.lo, a.hi));
    case FA_FLEX_sign: return of_ints((a.lo > 0) - (a.lo < 0), (a.hi > 0) - (a.hi < 0));
    case FA_FLEX_bit_and:
        if (positive) return of_ints(0, least(a.hi, b.hi));
        if (a.lo >= 0) return of_ints(0, a.hi);
        if (b.lo >= 0) return of_ints(0, b.hi);
        break;
    case FA_FLEX_bit_or:
        if (positive) return of_ints(most(a.lo, b.lo), all_bits(most(a.hi, b.hi)));
        break;
    case FA_FLEX_bit_xor:
        if (positive) return of_ints(0, all_bits(most(a.hi, b.hi)));
        break;
    case FA_FLEX_bit_not: return of_ints(~a.hi, ~a.lo);
    case FA_FLEX_shift_left: return shift_left(a, b);
    case FA_FLEX_shift_right:
        if (b.lo == b.hi) return of_ints(fa_flex_shift_right(a.lo, b.lo), fa_flex_shift_right(a.hi, b.lo));
        break;
    case FA_FLEX_wrap_u8: return wrapped(a, 0, UINT8_MAX);
    case FA_FLEX_wrap_i8: return wrapped(a, INT8_MIN, INT8_MAX);
    case FA_FLEX_wrap_i16: return wrapped(a, INT16_MIN, INT16_MAX);
    case FA_FLEX_wrap_i32: return wrapped(a, INT32_MIN, INT32_MAX);
    default: break;
    }
    return anything(FA_FLEX_I64);
}

static interval bound_bools(fa_flex_op op, interval a, interval b) {
    switch (op) {
    case FA_FLEX_bit_and: return of_ints(a.lo & b.lo, a.hi & b.hi);
    case FA_FLEX_bit_or: return of_ints(a.lo | b.lo, a.hi | b.hi);
    case FA_FLEX_bit_not: return of_ints(1 - a.hi, 1 - a.lo);
    default: /* xor */ return a.lo == a.hi && b.lo == b.hi ? of_ints(a.lo ^ b.lo, a.lo ^ b.lo) : of_ints(0, 1);
    }
}

/* ---- floats ------------------------------------------------------------------------------------------------------ */

/* Operations on fp32 are computed in fp64 and rounded. For sums, products, quotients and roots this gives the bits of
 * fp32. Rounding keeps the order, so bounds stay bounds. */
static interval rounded(uint8_t type, interval a) {
    return type == FA_FLEX_F32 ? of_reals((float)a.low, (float)a.high, a.nan) : a;
}

static bool is_finite(interval a) { return isfinite(a.low) && isfinite(a.high); }

static interval corners(double w, double x, double y, double z, bool nan) {
    return of_reals(fmin(fmin(w, x), fmin(y, z)), fmax(fmax(w, x), fmax(y, z)), nan);
}

static interval bound_reals(fa_flex_op op, interval a, interval b) {
    const bool nan = a.nan || b.nan, finite = is_finite(a) && is_finite(b);
    switch (op) {
    case FA_FLEX_add:
        if (finite) return of_reals(a.low + b.low, a.high + b.high, nan);
        break;
    case FA_FLEX_sub:
        if (finite) return of_reals(a.low - b.high, a.high - b.low, nan);
        break;
    case FA_FLEX_mul:
        if (finite) return corners(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high, nan);
        break;
    case FA_FLEX_divide:
        if (finite && (b.low > 0 || b.high < 0))
            return corners(a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high, nan);
        break;
    case FA_FLEX_minimum: return of_reals(fmin(a.low, b.low), fmin(a.high, b.high), nan);
    case FA_FLEX_maximum: return of_reals(fmax(a.low, b.low), fmax(a.high, b.high), nan);
    case FA_FLEX_neg: return of_reals(-a.high, -a.low, a.nan);
    case FA_FLEX_abs:
        if (a.low >= 0) return a;
        return of_reals(a.high <= 0 ? -a.high : 0, fmax(-a.low, a.high), a.nan);
    case FA_FLEX_sign:
        if (a.nan) return of_reals(-1, 1, false); /* the sign of a NaN is 0 */
        return of_reals((a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0), false);
    case FA_FLEX_sqrt:
        if (a.low >= 0) return of_reals(sqrt(a.low), sqrt(a.high), a.nan);
        break;
    case FA_FLEX_floor: return of_reals(floor(a.low), floor(a.high), a.nan);
    case FA_FLEX_ceil: return of_reals(ceil(a.low), ceil(a.high), a.nan);
    case FA_FLEX_round: return of_reals(rint(a.low), rint(a.high), a.nan);
    case FA_FLEX_trunc: return of_reals(trunc(a.low), trunc(a.high), a.nan);
    default: break; /* functions of libm need not keep the order */
    }
    return anything(FA_FLEX_F64);
}

/* ---- comparisons and conversions --------------------------------------------------------------------------------- */

static interval truth(bool surely, bool possibly) { return of_ints(surely, possibly); }

static interval compare(fa_flex_op op, uint8_t type, interval a, interval b) {
    interval equal;
    if (type == FA_FLEX_BOOL || type == FA_FLEX_I64) {
        if (op == FA_FLEX_lt) return truth(a.hi < b.lo, a.lo < b.hi);
        if (op == FA_FLEX_le) return truth(a.hi <= b.lo, a.lo <= b.hi);
        equal = truth(a.lo == a.hi && b.lo == b.hi && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi);
    } else {
        const bool sure = !a.nan && !b.nan;
        if (op == FA_FLEX_lt) return truth(sure && a.high < b.low, a.low < b.high);
        if (op == FA_FLEX_le) return truth(sure && a.high <= b.low, a.low <= b.high);
        equal = truth(sure && a.low == a.high && b.low == b.high && a.low == b.low, a.low <= b.high && b.low <= a.high);
    }
    return op == FA_FLEX_eq ? equal : of_ints(1 - equal.hi, 1 - equal.lo);
}

static interval convert(uint8_t from, uint8_t to, interval a) {
    const bool is_int = from == FA_FLEX_BOOL || from == FA_FLEX_I64;
    if (from == to) return a;
    if (to == FA_FLEX_BOOL) {
        const bool spans_0 = is_int ? a.lo <= 0 && a.hi >= 0 : a.low <= 0 && a.high >= 0;
        const bool is_0 = is_int ? a.lo == 0 && a.hi == 0 : a.low == 0 && a.high == 0 && !a.nan;
        return truth(!spans_0, !is_0);
    }
    if (to == FA_FLEX_I64) {
        if (is_int) return a;
        if (a.nan || a.low < -0x1p62 || a.high > 0x1p62) return anything(FA_FLEX_I64);
        return of_ints((int64_t)a.low, (int64_t)a.high);
    }
    if (!is_int) return rounded(to, a);
    if (to == FA_FLEX_F32) return of_reals((float)a.lo, (float)a.hi, false);
    return of_reals((double)a.lo, (double)a.hi, false);
}

static interval of_number(uint8_t type, fa_flex_number number) {
    if (type == FA_FLEX_BOOL) return of_ints(number.b, number.b);
    if (type == FA_FLEX_I64) return of_ints(number.i, number.i);
    return isnan(number.d) ? anything(type) : of_reals(number.d, number.d, false);
}

/* ---- captures ---------------------------------------------------------------------------------------------------- */

struct fa_flex_tables {
    interval *pieces[FA_FLEX_MAX_CAPTURES]; /* bounds of PIECE elements each, for long captures of rank 1 */
};

static interval of_element(fa_flex_dtype dtype, const void *data, int64_t at) {
    double real;
    int64_t integer;
    switch (dtype) {
    case FA_FLEX_OF_BOOL: integer = ((const uint8_t *)data)[at] != 0; return of_ints(integer, integer);
    case FA_FLEX_OF_U8: integer = ((const uint8_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I8: integer = ((const int8_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I16: integer = ((const int16_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I32: integer = ((const int32_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_I64: integer = ((const int64_t *)data)[at]; return of_ints(integer, integer);
    case FA_FLEX_OF_F16: real = (double)fa_f32_from_f16(((const uint16_t *)data)[at]); break;
    case FA_FLEX_OF_BF16: real = (double)fa_f32_from_bf16(((const uint16_t *)data)[at]); break;
    case FA_FLEX_OF_F32: real = (double)((const float *)data)[at]; break;
    default: real = ((const double *)data)[at]; break;
    }
    return isnan(real) ? anything(FA_FLEX_F64) : of_reals(real, real, false);
}

/* Elements [from, to] of a capture of rank 1. */
static interval of_elements(const fa_flex_bound *bound, int capture, int64_t from, int64_t to) {
    const fa_flex_dtype dtype = (fa_flex_dtype)bound->program->captures[capture].dtype;
    const fa_flex_capture *c = &bound->captures[capture];
    interval all = of_element(dtype, c->data, from * c->stride[0]);
    for (int64_t i = from + 1; i <= to; i++)
        all = hull((uint8_t)fa_flex_type_of(dtype), all, of_element(dtype, c->data, i * c->stride[0]));
    return all;
}

fa_flex_tables *fa_flex_tables_new(const fa_flex_bound *bound) {
    fa_flex_tables *t = calloc(1, sizeof *t);
    for (int i = 0; t && i < bound->program->num_captures; i++) {
        const int64_t size = bound->captures[i].size[0];
        if (bound->program->captures[i].rank != 1 || size <= MOST_SCANNED) continue;
        t->pieces[i] = malloc((size_t)((size + PIECE - 1) / PIECE) * sizeof *t->pieces[i]);
        if (!t->pieces[i]) {
            fa_flex_tables_free(t);
            return NULL;
        }
        for (int64_t at = 0; at < size; at += PIECE)
            t->pieces[i][at / PIECE] = of_elements(bound, i, at, least(at + PIECE, size) - 1);
    }
    return t;
}

void fa_flex_tables_free(fa_flex_tables *tables) {
    for (int i = 0; tables && i < FA_FLEX_MAX_CAPTURES; i++) free(tables->pieces[i]);
    free(tables);
}

/* Elements [from, to] of a long capture: whole pieces where they fit. */
static interval of_pieces(const fa_flex_bound *bound, const interval *pieces, int capture, int64_t from, int64_t to) {
    const uint8_t type = (uint8_t)fa_flex_type_of((fa_flex_dtype)bound->program->captures[capture].dtype);
    interval all = of_elements(bound, capture, from, from);
    while (from <= to) {
        if (from % PIECE == 0 && from + PIECE - 1 <= to) {
            all = hull(type, all, pieces[from / PIECE]);
            from += PIECE;
        } else {
            const int64_t end = least(from - from % PIECE + PIECE - 1, to);
            all = hull(type, all, of_elements(bound, capture, from, end));
            from = end + 1;
        }
    }
    return all;
}

/* The places that indices from lo to hi reach. */
static void places_of(interval index, int64_t size, int64_t *from, int64_t *to) {
    const bool wraps = index.lo < 0 && index.hi >= 0;
    *from = wraps ? 0 : fa_flex_place(index.lo, size);
    *to = wraps ? size - 1 : fa_flex_place(index.hi, size);
}

static interval gather(const fa_flex_bound *bound, const fa_flex_tables *tables, const fa_flex_instruction *x,
                       const interval *in) {
    const fa_flex_capture *c = &bound->captures[x->source];
    const fa_flex_dtype dtype = (fa_flex_dtype)bound->program->captures[x->source].dtype;
    int64_t from[FA_FLEX_MAX_RANK], to[FA_FLEX_MAX_RANK], at[FA_FLEX_MAX_RANK], volume = 1;
    if (!c->data) return (interval){0}; /* a load from an empty capture gives 0 */
    for (int dim = 0; dim < x->num_operands; dim++) {
        places_of(in[dim], c->size[dim], &from[dim], &to[dim]);
        at[dim] = from[dim];
        volume = volume > MOST_SCANNED ? volume : volume * least(to[dim] - from[dim] + 1, MOST_SCANNED + 1);
    }
    if (tables->pieces[x->source]) return of_pieces(bound, tables->pieces[x->source], x->source, from[0], to[0]);
    if (volume > MOST_SCANNED) return anything(x->result);
    interval all = {0};
    for (bool is_first = true;; is_first = false) {
        int64_t place = 0;
        for (int dim = 0; dim < x->num_operands; dim++) place += at[dim] * c->stride[dim];
        const interval element = of_element(dtype, c->data, place);
        all = is_first ? element : hull(x->result, all, element);
        int dim = x->num_operands - 1;
        while (dim >= 0 && ++at[dim] > to[dim]) {
            at[dim] = from[dim];
            dim--;
        }
        if (dim < 0) return all;
    }
}

/* ---- steps, as in evaluate.h ------------------------------------------------------------------------------------- */

struct fa_flex_intervals {
    const fa_flex_bound *bound;
    const fa_flex_tables *tables;
    interval *values;                  /* [num_instructions] */
    interval *rows[FA_FLEX_ROW_SLOTS]; /* [num_instructions], values of ROWS */
    int32_t *order;                    /* instructions, the steps one after the other */
    int32_t first[NUM_STEPS + 1];
    uint8_t *is_of_rows; /* [num_instructions] */
    interval index[4];
};

static step step_of(const fa_flex_instruction *x) {
    const bool on_q = x->depends & FA_FLEX_ON_Q, on_kv = x->depends & FA_FLEX_ON_KV;
    if (x->depends & FA_FLEX_ON_SCORE || (on_q && on_kv)) return ROW;
    return on_q ? ROWS : on_kv ? KEYS : HEAD;
}

/* An operation on values of the program. `in`: bounds of the operands. */
static interval bound_operation(const fa_flex_program *p, const fa_flex_instruction *x, const interval *in) {
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_constant: return of_number(x->type, x->number);
    case FA_FLEX_score:
    case FA_FLEX_grad: return anything(x->type);
    case FA_FLEX_scatter: return in[x->num_operands - 1];
    case FA_FLEX_convert: return convert(p->instructions[x->operand[0]].result, x->type, in[0]);
    case FA_FLEX_where: return in[0].lo ? in[1] : !in[0].hi ? in[2] : hull(x->type, in[1], in[2]);
    case FA_FLEX_eq:
    case FA_FLEX_ne:
    case FA_FLEX_lt:
    case FA_FLEX_le: return compare((fa_flex_op)x->op, x->type, in[0], in[1]);
    default: break;
    }
    if (x->type == FA_FLEX_BOOL) return bound_bools((fa_flex_op)x->op, in[0], in[1]);
    if (x->type == FA_FLEX_I64) return bound_ints((fa_flex_op)x->op, in[0], in[1]);
    return rounded(x->type, bound_reals((fa_flex_op)x->op, in[0], in[1]));
}

static interval bound_value(const fa_flex_intervals *v, const fa_flex_instruction *x, const interval *in) {
    const fa_flex_bound *bound = v->bound;
    switch ((fa_flex_op)x->op) {
    case FA_FLEX_b: return v->index[0];
    case FA_FLEX_h: return v->index[1];
    case FA_FLEX_q_idx: return v->index[2];
    case FA_FLEX_kv_idx: return v->index[3];
    case FA_FLEX_param: return of_number(x->type, bound->params[x->source]);
    case FA_FLEX_gather: return gather(bound, v->tables, x, in);
    default: return bound_operation(bound->program, x, in);
    }
}

/* `rows`: where values of ROWS are. */
static void run_step(fa_flex_intervals *v, step now, interval *rows) {
    const fa_flex_program *p = v->bound->program;
    for (int32_t i = v->first[now]; i < v->first[now + 1]; i++) {
        const fa_flex_instruction *x = &p->instructions[v->order[i]];
        interval in[FA_FLEX_MAX_OPERANDS];
        for (int j = 0; j < x->num_operands; j++) {
            const int32_t operand = x->operand[j];
            in[j] = v->is_of_rows[operand] ? rows[operand] : v->values[operand];
        }
        (now == ROWS ? rows : v->values)[v->order[i]] = bound_value(v, x, in);
    }
}

void fa_flex_bound_head(fa_flex_intervals *v, int64_t b, int64_t h) {
    v->index[0] = of_ints(b, b);
    v->index[1] = of_ints(h, h);
    run_step(v, HEAD, NULL);
}

void fa_flex_bound_rows(fa_flex_intervals *v, int slot, int64_t first, int64_t last) {
    v->index[2] = of_ints(first, last);
    run_step(v, ROWS, v->rows[slot]);
}

void fa_flex_bound_keys(fa_flex_intervals *v, int64_t first, int64_t last) {
    v->index[3] = of_ints(first, last);
    run_step(v, KEYS, NULL);
}

fa_flex_interval fa_flex_bound_block(fa_flex_intervals *v, int slot) {
    const fa_flex_program *p = v->bound->program;
    const int32_t last = p->num_instructions - 1;
    run_step(v, ROW, v->rows[slot]);
    return v->is_of_rows[last] ? v->rows[slot][last] : v->values[last];
}

fa_flex_intervals *fa_flex_intervals_new(const fa_flex_bound *bound, const fa_flex_tables *tables) {
    const fa_flex_program *p = bound->program;
    const size_t num = (size_t)p->num_instructions;
    fa_flex_intervals *v = calloc(1, sizeof *v);
    if (!v) return NULL;
    v->bound = bound;
    v->tables = tables;
    v->values = calloc(num * (FA_FLEX_ROW_SLOTS + 1), sizeof *v->values);
    v->order = malloc(num * sizeof *v->order);
    v->is_of_rows = malloc(num);
    if (!v->values || !v->order || !v->is_of_rows) {
        fa_flex_intervals_free(v);
        return NULL;
    }
    for (int slot = 0; slot < FA_FLEX_ROW_SLOTS; slot++) v->rows[slot] = v->values + num * (size_t)(slot + 1);
    for (size_t i = 0; i < num; i++) v->is_of_rows[i] = step_of(&p->instructions[i]) == ROWS;
    int32_t count = 0;
    for (int now = 0; now < NUM_STEPS; now++) {
        v->first[now] = count;
        for (int32_t idx = 0; idx < p->num_instructions; idx++)
            if (step_of(&p->instructions[idx]) == (step)now) v->order[count++] = idx;
    }
    v->first[NUM_STEPS] = count;
    return v;
}

void fa_flex_intervals_free(fa_flex_intervals *v) {
    if (!v) return;
    free(v->values);
    free(v->order);
    free(v->is_of_rows);
    free(v);
}

/* ---- whatever captures and parameters hold ----------------------------------------------------------------------- */

/* Every element of a dtype, and 0. */
static interval of_dtype(fa_flex_dtype dtype) {
    switch (dtype) {
    case FA_FLEX_OF_U8: return of_ints(0, UINT8_MAX);
    case FA_FLEX_OF_I8: return of_ints(INT8_MIN, INT8_MAX);
    case FA_FLEX_OF_I16: return of_ints(INT16_MIN, INT16_MAX);
    case FA_FLEX_OF_I32: return of_ints(INT32_MIN, INT32_MAX);
    default: return anything((uint8_t)fa_flex_type_of(dtype));
    }
}

void fa_flex_bound_always(const fa_flex_program *p, int64_t most_index, int64_t most_param, fa_flex_interval *values) {
    for (int32_t idx = 0; idx < p->num_instructions; idx++) {
        const fa_flex_instruction *x = &p->instructions[idx];
        interval in[FA_FLEX_MAX_OPERANDS];
        for (int i = 0; i < x->num_operands; i++) in[i] = values[x->operand[i]];
        switch ((fa_flex_op)x->op) {
        case FA_FLEX_b:
        case FA_FLEX_h:
        case FA_FLEX_q_idx:
        case FA_FLEX_kv_idx: values[idx] = of_ints(0, most_index); break;
        case FA_FLEX_param:
            values[idx] =
                x->type == FA_FLEX_I64 && most_param < INT64_MAX ? of_ints(-most_param, most_param) : anything(x->type);
            break;
        case FA_FLEX_gather: values[idx] = of_dtype((fa_flex_dtype)p->captures[x->source].dtype); break;
        default: values[idx] = bound_operation(p, x, in); break;
        }
    }
}
