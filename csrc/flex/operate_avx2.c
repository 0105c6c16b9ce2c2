/* The loops of an evaluator on AVX2. */
#include "cpu/macros.h"

#if FA_X86
#define FAST_MATH
#define VERBS      "cpu/vec_avx2.h"
#define OPERATIONS fa_flex_operations_avx2
#include "operate.h"

#include "cpu/vec_target_end.h"
#endif
