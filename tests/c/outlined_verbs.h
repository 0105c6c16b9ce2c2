/* The vector vocabulary VERBS as functions that are not inlined. A compiler then needs half to two thirds of the time
 * for kernels in portable C. Sanitizers check the memory of a verb in one place. All other code is the code of the
 * library. */
#ifndef FA_TEST_OUTLINED_VERBS_H
#define FA_TEST_OUTLINED_VERBS_H

#include "cpu/macros.h"

#pragma push_macro("INLINE")
#undef INLINE
#define INLINE OUTLINE
#include VERBS
#pragma pop_macro("INLINE")

#endif
