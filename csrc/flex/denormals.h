/* The CPU engine runs with denormals as zeros (cpu/vec_avx512.h). Mods do not: x >= 1e-45 is false for 0. */
#ifndef FA_FLEX_DENORMALS_H
#define FA_FLEX_DENORMALS_H

#include <stdint.h>

/* Returns the mode for fa_restore_denormals. */
#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>

static inline unsigned fa_keep_denormals(void) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode & ~0x8040u); /* results are flushed (bit 15), operands read as zero (bit 6) */
    return mode;
}
static inline void fa_restore_denormals(unsigned mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__) && defined(__GNUC__)
static inline unsigned fa_keep_denormals(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"(mode & ~(UINT64_C(1) << 24)) : "memory"); /* operands and results */
    return (unsigned)mode;
}
static inline void fa_restore_denormals(unsigned mode) {
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)mode) : "memory");
}
#else
static inline unsigned fa_keep_denormals(void) { return 0; }
static inline void fa_restore_denormals(unsigned mode) { (void)mode; }
#endif

#endif
