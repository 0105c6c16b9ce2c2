/* Which builds of the test programs run only a part of the seeds. */
#ifndef FA_TEST_FEW_SEEDS_H
#define FA_TEST_FEW_SEEDS_H

/* With sanitizers a case takes eight times as long. Only one compiler runs all seeds, and others may run a part
 * (-DFEW_SEEDS). */
#if defined(FEW_SEEDS)
#elif defined(__has_feature)
#define FEW_SEEDS (__has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer))
#elif defined(__SANITIZE_ADDRESS__)
#define FEW_SEEDS 1
#else
#define FEW_SEEDS 0
#endif

#endif
