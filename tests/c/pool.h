/* Thread pools for the C tests. test_pool() distributes the indices over pool_threads POSIX threads in uneven ranges.
 * Every thread checks that a kernel restores the floating-point control state. */
#ifndef FA_TEST_POOL_H
#define FA_TEST_POOL_H

#include "cpu/dispatch.h"
#include "cpu/kvcache.h"
#include "cpu/reference.h"
#include "cpu/run.h"
#include "plan/cpu.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
static unsigned control_state(void) { return _mm_getcsr() & ~0x3fu; } /* all bits except the sticky exception flags */
#elif defined(__aarch64__)
static unsigned control_state(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (unsigned)mode | 1u << 31; /* never 0, which means that there is no such state */
}
#else
static unsigned control_state(void) { return 0; }
#endif

enum { MAX_POOL_THREADS = 8 };
static int pool_threads = 1;

typedef struct {
    int64_t begin, end;
    void (*fn)(int64_t, int64_t, void *);
    void *ctx;
} pool_range;

static void *pool_worker(void *arg) {
    pool_range *range = arg;
    unsigned before = control_state();
    range->fn(range->begin, range->end, range->ctx);
    if (control_state() != before) {
        printf("a kernel changed the floating-point control state: %x, was %x\n", control_state(), before);
        abort();
    }
    return NULL;
}

static int pool_fails_in = -1; /* the call that fails, counted from 0; -1: no call */

static bool pool_parallel_for(int64_t n, void (*fn)(int64_t, int64_t, void *), void *ctx) {
    if (pool_fails_in >= 0 && pool_fails_in-- == 0) return false;
    pool_range ranges[MAX_POOL_THREADS];
    pthread_t threads[MAX_POOL_THREADS];
    int64_t num_ranges = n < pool_threads ? n : pool_threads;
    for (int64_t i = 0; i < num_ranges; i++)
        ranges[i] = (pool_range){n * i / num_ranges, n * (i + 1) / num_ranges, fn, ctx};
    for (int64_t i = 1; i < num_ranges; i++)
        if (pthread_create(&threads[i], NULL, pool_worker, &ranges[i])) abort();
    if (num_ranges) pool_worker(&ranges[0]);
    for (int64_t i = 1; i < num_ranges; i++) pthread_join(threads[i], NULL);
    return true;
}

static const fa_pool test_pool = {pool_parallel_for};

/* Whether an instruction set has kernels for a dtype. If it has none, the plan takes a weaker one, which runs
 * anyway. */
static inline bool takes_dtype(fa_isa isa, fa_dtype dtype) {
    return dtype == FA_F64 ? isa == FA_ISA_REFERENCE : dtype == FA_BF16 || !fa_isa_is_for_bf16(isa);
}

/* Whether the run reports a failure, whichever call of the pool fails. */
static inline bool notices_a_failing_pool(const fa_problem *p, const fa_plan *plan, void *workspace) {
    const int many = 1000;
    pool_fails_in = many;
    bool good = fa_cpu_run(p, plan, workspace, &test_pool);
    const int num_calls = many - pool_fails_in;
    for (int n = 0; n < num_calls; n++) {
        pool_fails_in = n;
        good = !fa_cpu_run(p, plan, workspace, &test_pool) && good;
    }
    pool_fails_in = -1;
    return good && num_calls > 0;
}

#endif
