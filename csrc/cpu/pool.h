/* The threads that the engine works with. */
#ifndef FA_CPU_POOL_H
#define FA_CPU_POOL_H

#include <stdbool.h>
#include <stdint.h>

/* Somebody else's threads: torch's pool in the extension, pthreads or none in the C tests. fn gets every index of
 * [0, n) exactly once, in ranges of any size, and must neither throw nor call torch. false: the threads could not be had,
 * and nobody knows which indices ran. */
typedef struct {
    bool (*parallel_for)(int64_t n, void (*fn)(int64_t begin, int64_t end, void *ctx), void *ctx);
} fa_pool;

#endif
