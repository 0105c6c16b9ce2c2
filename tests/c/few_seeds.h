/* Which seeds a build of the test programs runs. One compiler runs all seeds. Other compilers (-DFEW_SEEDS=1) and
 * sanitizers run a quarter as many, and each has seeds of its own. Every width of the heads still comes up. An emulated
 * processor (-DFEW_SEEDS=3) runs one of twenty. */
#ifndef FA_TEST_FEW_SEEDS_H
#define FA_TEST_FEW_SEEDS_H

/* 0: all; 1, 2, 3: few seeds. With sanitizers a case takes eight times as long. */
#if defined(FEW_SEEDS)
#elif defined(__has_feature)
#define FEW_SEEDS (__has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer) ? 2 : 0)
#elif defined(__SANITIZE_ADDRESS__)
#define FEW_SEEDS 2
#else
#define FEW_SEEDS 0
#endif

enum { SEEDS_APART = 1300 }; /* a multiple of the number of head dimensions, so that they stay in the same order */

#define FIRST_SEED(seed) ((seed) + (uint64_t)FEW_SEEDS * SEEDS_APART)
#define NUM_SEEDS(num)   ((uint64_t)(num) / (FEW_SEEDS == 3 ? 20 : FEW_SEEDS ? 4 : 1))

#endif
