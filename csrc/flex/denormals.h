/* The CPU engine runs with denormals as zeros (cpu/vec_avx512.h). Mods do not: x >= 1e-45 is false for 0. */
#ifndef FA_FLEX_DENORMALS_H
#define FA_FLEX_DENORMALS_H

/* Returns the mode for fa_restore_denormals. */
#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>

static inline unsigned fa_keep_denormals(void) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode & ~0x8040u); /* results are flushed (bit 15), operands read as zero (bit 6) */
    return mode;
}
static inline void fa_restore_denormals(unsigned mode) { _mm_setcsr(mode); }
#else
static inline unsigned fa_keep_denormals(void) { return 0; }
static inline void fa_restore_denormals(unsigned mode) { (void)mode; }
#endif

#endif
