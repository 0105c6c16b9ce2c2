/* Elements of any dtype, as numbers of fp64. */
#ifndef FA_CPU_ELEMENT_H
#define FA_CPU_ELEMENT_H

#include "convert.h"

static inline double fa_element(const void *data, fa_dtype dtype, int64_t at) {
    switch (dtype) {
    case FA_F16: return (double)fa_f32_from_f16(((const uint16_t *)data)[at]);
    case FA_BF16: return (double)fa_f32_from_bf16(((const uint16_t *)data)[at]);
    case FA_F64: return ((const double *)data)[at];
    default: return (double)((const float *)data)[at];
    }
}

static inline void fa_set_element(void *data, fa_dtype dtype, int64_t at, double x) {
    switch (dtype) {
    case FA_F16: ((uint16_t *)data)[at] = fa_f16_from_f32((float)x); break;
    case FA_BF16: ((uint16_t *)data)[at] = fa_bf16_from_f32((float)x); break;
    case FA_F64: ((double *)data)[at] = x; break;
    default: ((float *)data)[at] = (float)x; break;
    }
}

#endif
