/* Compiler words that the kernels need, for compilers that have them. */
#ifndef FA_CPU_MACROS_H
#define FA_CPU_MACROS_H

#include <stdbool.h>

/* The kernels for x86-64 vector units exist: the processor fits and the compiler knows per-function targets. */
#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define FA_X86 1
#else
#define FA_X86 0
#endif

/* The compiler also knows the tiles of AMX. */
#if FA_X86 && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define FA_AMX 1
#else
#define FA_AMX 0
#endif

/* PREFETCH: a hint to fetch a line of memory; any address will do.
 * INLINE: part of the caller whatever its size; constant arguments select variants. OUTLINE: never part of it: loops that
 * want all registers for themselves. UNROLL: a loop over registers. */
#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(p) __builtin_prefetch(p)
#else
#define PREFETCH(p) ((void)(p))
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
