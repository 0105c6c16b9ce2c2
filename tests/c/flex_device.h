/* What texts of programs and cuda/flex_values.cuh need of CUDA, on a CPU. Besides, they need __float_as_uint,
 * __fmul_rn, max, __umulhi and both divisions of cuda_emulation.h, or the same under FLEX_DEVICE_ALONE. */
#ifndef FLEX_DEVICE_H
#define FLEX_DEVICE_H

/* The headers of C alone. Reading those of C++ takes as long as all the rest. */
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <string.h>

#ifdef FLEX_DEVICE_ALONE
#define DEVICE static inline
#define __device__
static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fdividef(float x, float y) { return x / y; }
static inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }
static inline int min(int x, int y) { return x < y ? x : y; }
static inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
#endif

static inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline double __longlong_as_double(long long bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* The digits of fp16 move to those of fp32. A denormal is a small integer. */
static inline float flex_from_f16(unsigned short bits) {
    const unsigned sign = (unsigned)(bits & 0x8000) << 16, exponent = bits & 0x7c00, digits = bits & 0x03ff;
    if (exponent == 0) return __uint_as_float(__float_as_uint((float)digits * 0x1p-24f) | sign);
    const unsigned wide = exponent == 0x7c00 ? 0x7f800000 : (exponent << 13) + (112u << 23);
    return __uint_as_float(sign | wide | digits << 13);
}
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
template <class T> static inline T __ldg(const T *x) { return *x; }
template <class T> static inline void atomicAdd(T *x, T value) { *x += value; }

#define FLEX_LIBDEVICE(name) \
    extern "C" inline float __nv_##name(float x) { return name(x); }
FLEX_LIBDEVICE(expf)
FLEX_LIBDEVICE(logf)
FLEX_LIBDEVICE(log2f)
FLEX_LIBDEVICE(log10f)
FLEX_LIBDEVICE(log1pf)
FLEX_LIBDEVICE(expm1f)
FLEX_LIBDEVICE(tanhf)
FLEX_LIBDEVICE(sinf)
FLEX_LIBDEVICE(cosf)
FLEX_LIBDEVICE(tanf)
FLEX_LIBDEVICE(erff)
#undef FLEX_LIBDEVICE

#endif
