/* Cubins on disk. */
#ifndef FA_GPU_KERNEL_CACHE_H
#define FA_GPU_KERNEL_CACHE_H

#include "kernel_source.h"

/* A file that is absent, damaged or another variant's is not found. */
bool fa_cache_read(const char *name, uint64_t key, fa_blob *cubin);
bool fa_cache_write(const char *name, uint64_t key, const fa_blob *cubin); /* false, after one warning: not kept */

#endif
