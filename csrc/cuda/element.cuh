/* One element of a tensor: fp16, bf16 or fp32. The constants F32 and BF16 choose. */
#ifndef FA_ELEMENT_CUH
#define FA_ELEMENT_CUH

#include "ptx_sm80.cuh"

#if !defined(F32) || !defined(BF16)
#error "dtype: F32, or BF16, or fp16 with neither: 0 or 1"
#endif

#if F32
typedef float element;
DEVICE float to_float(element x) { return x; }
DEVICE element to_element(float x) { return x; }
#else
typedef u16 element;
DEVICE float to_float(element x) { return cvt_f32<BF16>(x); }
DEVICE element to_element(float x) { return cvt_16<BF16>(x); }
#endif

#endif
