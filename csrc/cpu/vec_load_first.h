/* vec_load_first for types of less than 32 bits, where an instruction set has no masked loads of them. */
#ifndef FA_CPU_VEC_LOAD_FIRST_H
#define FA_CPU_VEC_LOAD_FIRST_H

#ifndef LANES
#include "vec_scalar.h"
#endif

#ifndef VEC_LOADS_FIRST
#if WORD_ELEMS == 1
INLINE vec vec_load_e4m3_first(const void *p, int64_t n) {
    uint8_t byte[LANES] = {0};
    memcpy(byte, p, (size_t)n);
    return vec_load_e4m3(byte);
}
#endif
INLINE vec vec_load_f16_first(const void *p, int64_t n) {
    uint16_t half[LANES] = {0};
    memcpy(half, p, (size_t)n * sizeof *half);
    return vec_load_f16(half);
}
INLINE vec vec_load_bf16_first(const void *p, int64_t n) {
    uint16_t half[LANES] = {0};
    memcpy(half, p, (size_t)n * sizeof *half);
    return vec_load_bf16(half);
}
#endif

#endif
