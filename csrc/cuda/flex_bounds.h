/* Bounds of operations of programs (../flex/intervals.h), for C and for kernels. Each operation maps the bounds of its
 * operands to bounds of its result. Before this file the enumerators FA_FLEX_* of operations and types are declared. */
#ifndef FA_FLEX_BOUNDS_H
#define FA_FLEX_BOUNDS_H

#ifdef DEVICE /* a kernel's text, behind flex_values.cuh */
#define FLEX_FN        DEVICE
#define FLEX_INF       __longlong_as_double(0x7ff0000000000000LL)
#define FLEX_MUL(a, b) __dmul_rn(a, b) /* no part of a fused multiply-add, because the values have none */
typedef long long flex_int;
/* fa_flex_interval. */
struct interval {
    union {
        flex_int lo;
        double low;
    };
    union {
        flex_int hi;
        double high;
    };
    bool nan;
};
DEVICE flex_int fa_flex_mul_ints(flex_int a, flex_int b) { return a * b; }
DEVICE flex_int fa_flex_floor_divide(flex_int a, flex_int b) { return flex_floor_divide(a, b); }
DEVICE flex_int fa_flex_trunc_divide(flex_int a, flex_int b) { return flex_trunc_divide(a, b); }
DEVICE flex_int fa_flex_remainder(flex_int a, flex_int b) { return flex_remainder(a, b); }
DEVICE flex_int fa_flex_shift_right(flex_int a, flex_int b) { return flex_shift_right(a, b); }
#else /* behind flex/intervals.h and flex/integers.h */
#include <math.h>

#define FLEX_FN        static inline
#define FLEX_INF       ((double)INFINITY)
#define FLEX_MUL(a, b) ((a) * (b))
typedef int64_t flex_int;
typedef fa_flex_interval interval;
#endif
#define FLEX_MOST  ((flex_int)0x7fffffffffffffffLL)
#define FLEX_LEAST (-FLEX_MOST - 1)

FLEX_FN interval of_ints(flex_int lo, flex_int hi) {
    interval x;
    x.lo = lo, x.hi = hi, x.nan = false;
    return x;
}
FLEX_FN interval of_reals(double low, double high, bool nan) {
    interval x;
    x.low = low, x.high = high, x.nan = nan;
    return x;
}

/* Nothing is known about a value of this type. */
FLEX_FN interval anything(int type) {
    if (type == FA_FLEX_BOOL) return of_ints(0, 1);
    if (type == FA_FLEX_I64) return of_ints(FLEX_LEAST, FLEX_MOST);
    return of_reals(-FLEX_INF, FLEX_INF, true);
}

FLEX_FN flex_int least(flex_int a, flex_int b) { return a < b ? a : b; }
FLEX_FN flex_int most(flex_int a, flex_int b) { return a > b ? a : b; }

FLEX_FN interval hull(int type, interval a, interval b) {
    if (type == FA_FLEX_BOOL || type == FA_FLEX_I64) return of_ints(least(a.lo, b.lo), most(a.hi, b.hi));
    return of_reals(a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high, a.nan || b.nan);
}

/* ---- integers ---------------------------------------------------------------------------------------------------- */

/* Is the exact result of an operation surely an int64? A double is precise enough to ask for 2^62. */
FLEX_FN bool is_small(double x) { return fabs(x) < 0x1p62; }

FLEX_FN interval of_corners(interval a, interval b, flex_int (*f)(flex_int, flex_int)) {
    const flex_int w = f(a.lo, b.lo), x = f(a.lo, b.hi), y = f(a.hi, b.lo), z = f(a.hi, b.hi);
    return of_ints(least(least(w, x), least(y, z)), most(most(w, x), most(y, z)));
}

/* f is a division of integers, which gives 0 for a divisor of 0. The least int64 has no quotient by -1. */
FLEX_FN interval divide_ints(interval a, interval b, flex_int (*f)(flex_int, flex_int)) {
    const interval below = of_ints(b.lo, least(b.hi, -1)), above = of_ints(most(b.lo, 1), b.hi);
    if (a.lo == FLEX_LEAST) return anything(FA_FLEX_I64);
    if (b.hi < 0) return of_corners(a, below, f);
    if (b.lo > 0) return of_corners(a, above, f);
    interval x = of_ints(0, 0);
    if (b.lo < 0) x = hull(FA_FLEX_I64, x, of_corners(a, below, f));
    if (b.hi > 0) x = hull(FA_FLEX_I64, x, of_corners(a, above, f));
    return x;
}

FLEX_FN interval multiply(interval a, interval b) {
    const double alo = (double)a.lo, ahi = (double)a.hi, blo = (double)b.lo, bhi = (double)b.hi;
    if (is_small(alo * blo) && is_small(alo * bhi) && is_small(ahi * blo) && is_small(ahi * bhi))
        return of_corners(a, b, fa_flex_mul_ints);
    return anything(FA_FLEX_I64);
}

FLEX_FN interval remainder_of(interval a, interval b) {
    if (b.lo > 0 && a.lo >= 0 && a.hi < b.lo) return a;
    if (b.lo == b.hi && b.lo > 0 && fa_flex_floor_divide(a.lo, b.lo) == fa_flex_floor_divide(a.hi, b.lo))
        return of_ints(fa_flex_remainder(a.lo, b.lo), fa_flex_remainder(a.hi, b.lo));
    /* The remainder lies between 0 and the divisor. */
    return of_ints(b.lo < 0 ? (b.lo == FLEX_LEAST ? FLEX_LEAST : b.lo + 1) : 0, b.hi > 0 ? b.hi - 1 : 0);
}

/* All bits up to the highest one of x >= 0. */
FLEX_FN flex_int all_bits(flex_int x) {
    flex_int bits = 0;
    while (bits < x) bits = bits * 2 + 1;
    return bits;
}

FLEX_FN interval shift_left(interval a, interval b) {
    if (b.lo != b.hi) return anything(FA_FLEX_I64);
    if (b.lo < 0 || b.lo > 63) return of_ints(0, 0);
    return b.lo < 62 ? multiply(a, of_ints((flex_int)1 << b.lo, (flex_int)1 << b.lo)) : anything(FA_FLEX_I64);
}

FLEX_FN interval wrapped(interval a, flex_int lo, flex_int hi) {
    return a.lo >= lo && a.hi <= hi ? a : of_ints(lo, hi);
}

FLEX_FN interval bound_ints(int op, interval a, interval b) {
    const bool positive = a.lo >= 0 && b.lo >= 0;
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
    case FA_FLEX_floor_divide: return divide_ints(a, b, fa_flex_floor_divide);
    case FA_FLEX_trunc_divide: return divide_ints(a, b, fa_flex_trunc_divide);
    case FA_FLEX_remainder: return remainder_of(a, b);
    case FA_FLEX_fmod:
        if (a.lo >= 0 && b.lo > 0) return remainder_of(a, b);
        return of_ints(least(a.lo, 0), most(a.hi, 0));
    case FA_FLEX_minimum: return of_ints(least(a.lo, b.lo), least(a.hi, b.hi));
    case FA_FLEX_maximum: return of_ints(most(a.lo, b.lo), most(a.hi, b.hi));
    case FA_FLEX_neg:
        if (a.lo > FLEX_LEAST) return of_ints(-a.hi, -a.lo);
        break;
    case FA_FLEX_abs:
        if (a.lo == FLEX_LEAST) break;
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
    case FA_FLEX_wrap_u8: return wrapped(a, 0, 255);
    case FA_FLEX_wrap_i8: return wrapped(a, -128, 127);
    case FA_FLEX_wrap_i16: return wrapped(a, -32768, 32767);
    case FA_FLEX_wrap_i32: return wrapped(a, -2147483647 - 1, 2147483647);
    default: break;
    }
    return anything(FA_FLEX_I64);
}

FLEX_FN interval bound_bools(int op, interval a, interval b) {
    switch (op) {
    case FA_FLEX_bit_and: return of_ints(a.lo & b.lo, a.hi & b.hi);
    case FA_FLEX_bit_or: return of_ints(a.lo | b.lo, a.hi | b.hi);
    case FA_FLEX_bit_not: return of_ints(1 - a.hi, 1 - a.lo);
    default: /* xor */ return a.lo == a.hi && b.lo == b.hi ? of_ints(a.lo ^ b.lo, a.lo ^ b.lo) : of_ints(0, 1);
    }
}

/* ---- floats ------------------------------------------------------------------------------------------------------ */

/* A number on its way through fp32. GCC 12 drops the rounding of two such numbers that it stores together, unless each
 * is volatile. */
#ifdef __CUDACC__
typedef float flex_rounding;
#else
typedef volatile float flex_rounding;
#endif

/* Operations on fp32 are computed in fp64 and rounded. For sums, products, quotients and roots this gives the bits of
 * fp32. Rounding keeps the order, so bounds stay bounds. */
FLEX_FN interval rounded(int type, interval a) {
    if (type != FA_FLEX_F32) return a;
    const flex_rounding low = (float)a.low, high = (float)a.high;
    return of_reals(low, high, a.nan);
}

FLEX_FN bool is_number(double x) { return fabs(x) < FLEX_INF; }

FLEX_FN bool is_finite(interval a) { return is_number(a.low) && is_number(a.high); }

FLEX_FN interval corners(double w, double x, double y, double z, bool nan) {
    return of_reals(fmin(fmin(w, x), fmin(y, z)), fmax(fmax(w, x), fmax(y, z)), nan);
}

FLEX_FN interval bound_reals(int op, interval a, interval b) {
    const bool nan = a.nan || b.nan, finite = is_finite(a) && is_finite(b);
    switch (op) {
    case FA_FLEX_add:
        if (finite) return of_reals(a.low + b.low, a.high + b.high, nan);
        break;
    case FA_FLEX_sub:
        if (finite) return of_reals(a.low - b.high, a.high - b.low, nan);
        break;
    case FA_FLEX_mul:
        if (finite)
            return corners(FLEX_MUL(a.low, b.low), FLEX_MUL(a.low, b.high), FLEX_MUL(a.high, b.low),
                           FLEX_MUL(a.high, b.high), nan);
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

FLEX_FN interval truth(bool surely, bool possibly) { return of_ints(surely, possibly); }

FLEX_FN interval compare(int op, int type, interval a, interval b) {
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

FLEX_FN interval convert(int from, int to, interval a) {
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
        return of_ints((flex_int)a.low, (flex_int)a.high);
    }
    if (!is_int) return rounded(to, a);
    if (to == FA_FLEX_F32) {
        const flex_rounding low = (float)a.lo, high = (float)a.hi;
        return of_reals(low, high, false);
    }
    return of_reals((double)a.lo, (double)a.hi, false);
}

/* ---- any operation ----------------------------------------------------------------------------------------------- */

/* An operation of computed values. `from` is the type of the first operand. Missing operands may be anything. */
FLEX_FN interval bound_op(int op, int type, int from, interval a, interval b, interval c) {
    switch (op) {
    case FA_FLEX_convert: return convert(from, type, a);
    case FA_FLEX_where: return a.lo ? b : !a.hi ? c : hull(type, b, c);
    case FA_FLEX_eq:
    case FA_FLEX_ne:
    case FA_FLEX_lt:
    case FA_FLEX_le: return compare(op, type, a, b);
    default: break;
    }
    if (type == FA_FLEX_BOOL) return bound_bools(op, a, b);
    if (type == FA_FLEX_I64) return bound_ints(op, a, b);
    return rounded(type, bound_reals(op, a, b));
}

#endif
