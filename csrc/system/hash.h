/* FNV-1a, a hash that tells damage and change, not malice. */
#ifndef FA_SYSTEM_HASH_H
#define FA_SYSTEM_HASH_H

#include <stddef.h>
#include <stdint.h>

static inline uint64_t fa_hash(uint64_t seed, const void *data, size_t bytes) {
    const unsigned char *x = data;
    uint64_t hash = seed ^ 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ x[i]) * 0x100000001b3u;
    return hash;
}

#endif
