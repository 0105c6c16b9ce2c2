/* Sums whose bits do not depend on the order of their parts. A sum of floats depends on its order, a sum of integers
 * does not. So the backward runs twice. The first pass finds the largest exponent of the parts of each element.
 * The second pass adds the parts as integers, in units of 2^-digits of this exponent. flex_exact_sums.cu makes floating
 * numbers of the sums.
 *
 * The address of such sums says in its highest 6 bits which pass it is: 1, or the digits of the second pass. No address
 * of memory has these bits. */
#ifndef FA_FLEX_EXACT_SUMS_CUH
#define FA_FLEX_EXACT_SUMS_CUH

#include "cuda_flex.h"

#define FLEX_HAS_EXACT_SUMS

enum { PLUS_INF_SEEN = 1, MINUS_INF_SEEN = 2, NAN_SEEN = 4 };
enum { INFINITE_EXPONENT = 0x7ff, EXPONENT_BIAS = 1022 }; /* a finite number of exponent e is below 2^(e - bias) */

/* NOTE: a function of its own, because calls without deterministic=True should not pay for its registers. */
__device__ __noinline__ void flex_add_exactly(unsigned long long address, long long place, double part) {
    const int digits = (int)(address >> 58), exponent = (int)(__double2hiint(part) >> 20) & INFINITE_EXPONENT;
    fa_cuda_exact_sum *sum = (fa_cuda_exact_sum *)(address << 6 >> 6) + place;
    if (digits > 1) {
        const int unit = digits + EXPONENT_BIAS - (sum->exponent - 1);
        const double integer = exponent == INFINITE_EXPONENT ? 0 : ldexp(part, unit);
        atomicAdd((unsigned long long *)&sum->sum, (unsigned long long)__double2ll_rn(integer));
    } else if (exponent == INFINITE_EXPONENT) {
        atomicOr(&sum->seen, part != part ? NAN_SEEN : part > 0 ? PLUS_INF_SEEN : MINUS_INF_SEEN);
    } else {
        atomicMax(&sum->exponent, exponent + 1);
    }
}

#endif
