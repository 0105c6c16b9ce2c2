/* Compiler extensions that the kernels need, and their replacements for compilers without them. */
#ifndef FA_CPU_MACROS_H
#define FA_CPU_MACROS_H

#include <stdbool.h>

/* FA_X86: the processor is x86-64 and the compiler knows per-function targets, so the kernels for vector units
 * exist. */
#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define FA_X86 1
#else
#define FA_X86 0
#endif

/* FA_AMX: the compiler also knows the tiles of AMX. */
#if FA_X86 && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define FA_AMX 1
#else
#define FA_AMX 0
#endif

/* FA_NEON: the processor is a 64-bit ARM in its usual byte order, so it has Advanced SIMD, and the compiler knows the
 * GNU extensions. FA_NEON_BF16: the compiler also has intrinsics for products of bf16, in functions with that target.
 * clang before 16 has them only if the whole file is compiled for such a processor. */
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__)
#define FA_NEON 1
#else
#define FA_NEON 0
#endif
#if FA_NEON && (defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || (defined(__clang__) && __clang_major__ >= 16) || \
                (!defined(__clang__) && __GNUC__ >= 10))
#define FA_NEON_BF16 1
#else
#define FA_NEON_BF16 0
#endif

/* PREFETCH is a hint to fetch a cache line. Any address is allowed.
 * INLINE functions become part of the caller whatever their size, and their constant arguments select variants.
 * OUTLINE functions are never inlined, so that their loops have all registers for themselves.
 * UNROLL unrolls a loop over registers.
 * TRAILING_ZEROS counts the zeros behind the lowest bit of a 64-bit number that is not 0. */
#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(p)       __builtin_prefetch(p)
#define TRAILING_ZEROS(x) __builtin_ctzll(x)
#else
#define PREFETCH(p)       ((void)(p))
#define TRAILING_ZEROS(x) fa_trailing_zeros(x)
static inline int fa_trailing_zeros(unsigned long long x) {
    int zeros = 0;
    for (; !(x & 1); x >>= 1) zeros++;
    return zeros;
}
#endif

#if defined(__clang__)
#define INLINE  static inline __attribute__((always_inline))
#define OUTLINE static __attribute__((noinline, unused))
#define UNROLL  _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define INLINE  static inline __attribute__((always_inline))
#define OUTLINE static __attribute__((noinline, unused))
#define UNROLL  _Pragma("GCC unroll 16")
#else
#define INLINE  static inline
#define OUTLINE static
#define UNROLL
#endif

#endif
