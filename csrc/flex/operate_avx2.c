/* The loops of an evaluator on AVX2. */
#include "cpu/macros.h"

#if FA_X86
#define VEC_TARGET "avx2,fma,f16c"
#define FAST_MATH
#define OPERATIONS fa_flex_operations_avx2
#include "operate.h"

#include "cpu/vec_target_end.h"
#endif
