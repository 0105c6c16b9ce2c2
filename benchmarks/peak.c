/* The peak of one core of this machine. Kernels are measured as a share of this peak. bench_cpu.py compiles this file
 * with -O3 -march=native.
 *
 * Independent accumulators in registers hide the latency of the multiply-add, and nothing touches memory. Two pipes and
 * a latency of 6 (Zen 5, pairs of bf16; fp32: 4) need more than twelve accumulators: 453 GFLOPS with 12, 482 with 14
 * and more. */
#include <immintrin.h>
#include <stddef.h>

#if defined(__AVX512F__)
typedef __m512 vec;
#define LANES            16
#define FMA(a, b, c)     _mm512_fmadd_ps(a, b, c)
#define SET(x)           _mm512_set1_ps(x)
#define NUM_ACCUMULATORS 16
#define EACH(X)          EACH_12(X) X(a12) X(a13) X(a14) X(a15)
#else
typedef __m256 vec;
#define LANES            8
#define FMA(a, b, c)     _mm256_fmadd_ps(a, b, c)
#define SET(x)           _mm256_set1_ps(x)
#define NUM_ACCUMULATORS 12 /* of 16 registers */
#define EACH(X)          EACH_12(X)
#endif

#define EACH_12(X) X(a0) X(a1) X(a2) X(a3) X(a4) X(a5) X(a6) X(a7) X(a8) X(a9) X(a10) X(a11)
/* The compiler must not know that all begin alike, or it computes one for all. */
#define DECLARE(acc)     \
    vec acc = SET(1.0f); \
    __asm__("" : "+v"(acc));
#define KEEP(acc) __asm__ volatile("" ::"v"(acc)); /* the compiler must believe that somebody reads it */

/* Floating point operations done. */
double peak_fma(size_t steps) {
    const vec factor = SET(0.999f), term = SET(1e-3f);
    EACH(DECLARE)
    for (size_t s = 0; s < steps; s++) {
#define STEP(acc) acc = FMA(acc, factor, term);
        EACH(STEP)
#undef STEP
    }
    EACH(KEEP)
    return 2.0 * LANES * NUM_ACCUMULATORS * (double)steps;
}

/* The same for pairs of bf16; 0 where the processor has no such product. */
double peak_bf16(size_t steps) {
#if defined(__AVX512BF16__)
    const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3c003c00), y = (__m512bh)_mm512_set1_epi32(0x3f003f00);
    EACH(DECLARE)
    for (size_t s = 0; s < steps; s++) {
#define STEP(acc) acc = _mm512_dpbf16_ps(acc, x, y);
        EACH(STEP)
#undef STEP
    }
    EACH(KEEP)
    return 4.0 * LANES * NUM_ACCUMULATORS * (double)steps;
#else
    (void)steps;
    return 0;
#endif
}
