/* What the text of a program needs (csrc/flex/source.h): loads of captures, and the arithmetic of csrc/flex/evaluate.c.
 * Integers are int where 32 bits suffice, else long long. A division of integers by 0 gives 0.
 *
 * NOTE: The kernels are compiled with --use_fast_math. A floor or a comparison would show an inexact quotient, and the
 * fast sine and logarithm are imprecise for most arguments. So the functions here name the precise forms themselves. */
#ifndef FA_FLEX_VALUES_CUH
#define FA_FLEX_VALUES_CUH

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

/* ---- captures --------------------------------------------------------------------------------------------------- */

/* The place of index i in a dimension: a negative index counts from the end, and then the place is clamped. */
DEVICE long long flex_place(long long i, long long size) {
    if (i < 0) i += size;
    return i < 0 ? 0 : i < size ? i : size - 1;
}

/* The same for an index that is not negative. */
DEVICE long long flex_limit(long long i, long long size) { return i < size ? i : size - 1; }

DEVICE long long flex_place(int i, long long size) { return flex_place((long long)i, size); }
DEVICE long long flex_limit(int i, long long size) { return flex_limit((long long)i, size); }

/* The same where all places have 32 bits. */
DEVICE int flex_place(int i, int size) {
    if (i < 0) i += size;
    return i < 0 ? 0 : i < size ? i : size - 1;
}
DEVICE int flex_place(long long i, int size) { return (int)flex_place(i, (long long)size); }
DEVICE int flex_limit(int i, int size) { return i < size ? i : size - 1; }
DEVICE int flex_limit(long long i, int size) { return i < size ? (int)i : size - 1; }

/* An element of a capture: through the read-only cache. NOTE: the load has no condition, so equal loads become one. A
 * condition made ALiBi load its slope 64 times in a step. With FLEX_MERGES_LOADS the compiler sees what is loaded, and
 * may merge more loads, but may also move a load behind a branch. */
#ifdef FLEX_MERGES_LOADS
template <class T> DEVICE T flex_load(long long address, long long place) { return ((const T *)address)[place]; }
#else
template <class T> DEVICE T flex_load(long long address, long long place) { return __ldg((const T *)address + place); }
#endif

/* The same where a capture may be without elements. It has the address 0, and then a 0 is loaded. NOTE: this load has
 * no condition, either. */
template <class T> DEVICE T flex_load_if(long long address, long long place) {
    static __device__ long long zero;
    return flex_load<T>(address ? address : (long long)&zero, address ? place : 0);
}

/* Two elements that lie side by side, the first at an even place. NOTE: unlike __ldg the statement is not volatile, so
 * that the loads of both elements become one. */
DEVICE unsigned short flex_load_of_two(const unsigned short *two, bool is_second) {
    unsigned x;
    asm("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(two));
    return (unsigned short)(is_second ? x >> 16 : x);
}
DEVICE float flex_load_of_two(const float *two, bool is_second) {
    float x, y;
    asm("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "l"(two));
    return is_second ? y : x;
}
/* Element kv_idx of a row of `size` elements, an even number. `row` is the place of the row, and kv_step is a constant
 * as odd as kv_idx; -1: none is known. Behind the end lies an element of the row. */
template <class T> DEVICE T flex_load_in_pair(long long address, int row, int kv_idx, int kv_step, int size) {
    const int is_second = (kv_step < 0 ? kv_idx : kv_step) & 1;
    return flex_load_of_two((const T *)address + (row + min(kv_idx - is_second, size - 2)), is_second);
}

/* Where an element lies. */
template <class T> DEVICE const T *flex_address(long long address, int place) { return (const T *)address + place; }

/* Asks the L1 for 32 bytes with an element. */
template <class T> DEVICE void flex_ask_for(long long address, int place) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"((const T *)address + place));
}

/* One instruction, exact for denormals, too. The same by its bits would take ten. */
#ifdef __CUDACC__
DEVICE float flex_from_f16(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
#endif
DEVICE float flex_from_bf16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

/* Which pairs of a batch and head add to one element of a capture's gradient (csrc/flex/scatters.h). */
enum flex_kind { FLEX_OF_HEAD, FLEX_OF_QUERY, FLEX_OF_KEY, FLEX_OF_DIFFERENCE, FLEX_OF_PAIR };

/* Adds to an element of a capture's gradient, if that is wanted. With FLEX_HAS_EXACT_SUMS the address may want sums
 * that do not depend on an order. */
#ifdef FLEX_HAS_EXACT_SUMS
template <class T> DEVICE void flex_add_to(long long address, long long place, T value) {
    if (!address || value == T(0)) return;
    if ((unsigned long long)address >> 58)
        flex_add_exactly((unsigned long long)address, place, (double)value);
    else
        atomicAdd((T *)address + place, value);
}
#else
template <class T> DEVICE void flex_add_to(long long address, long long place, T value) {
    if (address && value != T(0)) atomicAdd((T *)address + place, value);
}
#endif

/* ---- integers --------------------------------------------------------------------------------------------------- */

DEVICE bool flex_is_int(long long x) { return x == (int)x; }

/* (float)x of an integer in [-2^22, 2^22], in two instructions of the usual rate. A conversion is slower. */
DEVICE float flex_float_of_small(int x) { return __uint_as_float(0x4b400000u + (unsigned)x) - 12582912.0f; }

DEVICE long long flex_wrap(unsigned long long x) { return (long long)x; }

DEVICE int flex_trunc_divide(int a, int b) { return b == 0 ? 0 : b == -1 ? (int)(0u - (unsigned)a) : a / b; }
DEVICE int flex_fmod(int a, int b) { return b == 0 || b == -1 ? 0 : a % b; }
/* Most values are small. A division of 32 bits takes a fraction of the time. */
DEVICE long long flex_trunc_divide(long long a, long long b) {
    if (flex_is_int(a) && flex_is_int(b) && b != -1) return flex_trunc_divide((int)a, (int)b);
    return b == 0 ? 0 : b == -1 ? flex_wrap(0ull - (unsigned long long)a) : a / b;
}
DEVICE long long flex_fmod(long long a, long long b) {
    if (flex_is_int(a) && flex_is_int(b)) return flex_fmod((int)a, (int)b);
    return b == 0 || b == -1 ? 0 : a % b;
}

/* Rounds down. T: int or long long. */
template <class T> DEVICE T flex_floor_divide(T a, T b) {
    const T rest = flex_fmod(a, b);
    return flex_trunc_divide(a, b) - (rest != 0 && (rest < 0) != (b < 0));
}
template <class T> DEVICE T flex_remainder(T a, T b) {
    const T rest = flex_fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

/* The same for a divisor that many pairs share: what follows from b alone is computed once for all of them. Without
 * signs, a times floor((2^32 - 1) / b) / 2^32 is less than a / b by at most 1. NOTE: the division has no condition.
 * Behind one the compiler would not move it out of a loop. */
DEVICE int flex_floor_divide_by(int a, int b) {
    const int flips_a = a >> 31, flips_b = b >> 31; /* ~x is -x - 1 */
    const unsigned divisor = (unsigned)((b ^ flips_b) - flips_b), factor = 0xffffffffu / max(divisor, 1u);
    const unsigned rest = (unsigned)(a ^ flips_a), quotient = __umulhi(rest, factor);
    const int floor = (int)(quotient + (rest - quotient * divisor >= divisor)) ^ flips_a; /* of a / |b| */
    const bool is_exact = a == floor * (int)divisor;
    return b == 0 ? 0 : (floor ^ flips_b) + (flips_b & (int)is_exact);
}
DEVICE int flex_remainder_by(int a, int b) {
    const int rest = a - flex_floor_divide_by(a, b) * b; /* without a condition, for the same reason */
    return b == 0 ? 0 : rest;
}

DEVICE long long flex_shift_left(long long a, long long b) {
    return b < 0 || b > 63 ? 0 : flex_wrap((unsigned long long)a << b);
}
DEVICE int flex_shift_right(int a, int b) { return a >> (b < 0 || b > 31 ? 31 : b); }
DEVICE long long flex_shift_right(long long a, long long b) { return a >> (b < 0 || b > 63 ? 63 : b); }

/* A negative exponent gives 0 unless a is 1 or -1. */
DEVICE long long flex_pow(long long a, long long b) {
    unsigned long long power = 1, factor = (unsigned long long)a;
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
    for (; b > 0; b >>= 1, factor *= factor)
        if (b & 1) power *= factor;
    return flex_wrap(power);
}

template <class T> DEVICE T flex_sign(T x) { return T((x > T(0)) - (x < T(0))); }

/* A value outside of the range of 64 bits, or a NaN, gives the least value. */
DEVICE long long flex_int_from(float x) {
    return x >= -0x1p63f && x < 0x1p63f ? (long long)x : -0x7fffffffffffffffLL - 1;
}
DEVICE long long flex_int_from(double x) {
    return x >= -0x1p63 && x < 0x1p63 ? (long long)x : -0x7fffffffffffffffLL - 1;
}

/* ---- floats ----------------------------------------------------------------------------------------------------- */

#define FLEX_LOG2_E 1.44269504088896340736f

/* log2 e times x, finite where x is. */
DEVICE float flex_times_log2_e(float x) {
    const float most = 3.402823466e38f, product = FLEX_LOG2_E * x;
    return fabsf(x) <= most ? fmaxf(-most, fminf(product, most)) : product;
}

/* A NaN of either operand is the result. */
template <class T> DEVICE T flex_minimum(T a, T b) { return a != a || a < b ? a : b; }
template <class T> DEVICE T flex_maximum(T a, T b) { return a != a || a > b ? a : b; }

/* A product that is rounded before it is added to something. The compiler may not make a fused multiply-add of it. */
DEVICE float flex_mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE double flex_mul(double a, double b) { return __dmul_rn(a, b); }
DEVICE float flex_divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE double flex_divide(double a, double b) { return a / b; }
/* A quotient whose error is at most 2 units in the last place. Many quotients have the same divisor, so its inverse is
 * computed once. A divisor whose inverse may be no normal float is moved by a power of two, and the quotient with it.
 * NOTE: there is no branch. With branches a thread computes the quotients of its registers one after the other. */
DEVICE float flex_ratio(float a, float b) {
    const float factor = fabsf(b) > 0x1p100f ? 0x1p-64f : fabsf(b) < 0x1p-100f ? 0x1p64f : 1.0f;
    return a * __fdividef(1.0f, b * factor) * factor;
}
DEVICE double flex_ratio(double a, double b) { return a / b; }
DEVICE float flex_sqrt(float x) { return __fsqrt_rn(x); }
DEVICE double flex_sqrt(double x) { return sqrt(x); }

/* The remainder of fp32 is exact in fp64, and is an fp32 again. */
DEVICE double flex_fmod(double a, double b) { return fmod(a, b); }
DEVICE float flex_fmod(float a, float b) { return (float)fmod((double)a, (double)b); }
DEVICE double flex_pow(double a, double b) { return pow(a, b); }
DEVICE float flex_pow(float a, float b) { return (float)pow((double)a, (double)b); }

template <class T> DEVICE T flex_real_remainder(T a, T b) {
    const T rest = flex_fmod(a, b);
    return rest != T(0) && (b < T(0)) != (rest < T(0)) ? rest + b : rest;
}

/* As Python and torch divide: the quotient fits the remainder. */
template <class T> DEVICE T flex_real_floor_divide(T a, T b) {
    if (b == T(0)) return flex_divide(a, b);
    const T rest = flex_fmod(a, b);
    T quotient = flex_divide(a - rest, b);
    if (rest != T(0) && (b < T(0)) != (rest < T(0))) quotient -= T(1);
    if (quotient == T(0)) return copysign(T(0), flex_divide(a, b));
    const T whole = floor(quotient);
    return quotient - whole > T(0.5) ? whole + T(1) : whole;
}

DEVICE float flex_abs(float x) { return fabsf(x); }
DEVICE double flex_abs(double x) { return fabs(x); }
DEVICE float flex_floor(float x) { return floorf(x); }
DEVICE double flex_floor(double x) { return floor(x); }
DEVICE float flex_ceil(float x) { return ceilf(x); }
DEVICE double flex_ceil(double x) { return ceil(x); }
DEVICE float flex_round(float x) { return rintf(x); }
DEVICE double flex_round(double x) { return rint(x); }
DEVICE float flex_trunc(float x) { return truncf(x); }
DEVICE double flex_trunc(double x) { return trunc(x); }

/* Functions of libdevice, which --use_fast_math does not replace. The fast exp2 has an error of 2 ulp. */
#define FLEX_FUNCTION(name, of_float)                         \
    extern "C" __device__ float of_float(float);              \
    DEVICE float flex_##name(float x) { return of_float(x); } \
    DEVICE double flex_##name(double x) { return name(x); }
FLEX_FUNCTION(exp, __nv_expf)
FLEX_FUNCTION(log, __nv_logf)
FLEX_FUNCTION(log2, __nv_log2f)
FLEX_FUNCTION(log10, __nv_log10f)
FLEX_FUNCTION(log1p, __nv_log1pf)
FLEX_FUNCTION(expm1, __nv_expm1f)
FLEX_FUNCTION(tanh, __nv_tanhf)
FLEX_FUNCTION(sin, __nv_sinf)
FLEX_FUNCTION(cos, __nv_cosf)
FLEX_FUNCTION(tan, __nv_tanf)
FLEX_FUNCTION(erf, __nv_erff)
#undef FLEX_FUNCTION
DEVICE float flex_exp2(float x) { return exp2f(x); }
DEVICE double flex_exp2(double x) { return exp2(x); }

#endif
