/* The threads of the engine. */
#ifndef FA_CPU_POOL_H
#define FA_CPU_POOL_H

#include <stdbool.h>
#include <stdint.h>

/* The caller's threads: torch's pool in the extension, pthreads or no threads in the C tests. parallel_for passes every
 * index of [0, n) to fn exactly once, in ranges of any size. fn must neither throw nor call torch. parallel_for returns
 * false if no threads are available. Then some indices may have run and others not. */
typedef struct {
    bool (*parallel_for)(int64_t n, void (*fn)(int64_t begin, int64_t end, void *ctx), void *ctx);
} fa_pool;

#endif
