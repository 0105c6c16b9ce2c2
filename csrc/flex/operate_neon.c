/* The loops of an evaluator on Advanced SIMD. Compilers for 64-bit ARM use its instructions without a target. */
#include "cpu/macros.h"

#if FA_NEON
#define FAST_MATH
#define VERBS      "cpu/vec_neon.h"
#define OPERATIONS fa_flex_operations_neon
#include "operate.h"
#endif
