/* The cache of cubins on disk. */
#ifndef FA_GPU_KERNEL_CACHE_H
#define FA_GPU_KERNEL_CACHE_H

#include "kernel_source.h"
#include "system/folder.h"

/* Finds the cubin of a variant. A file that is damaged or belongs to another variant counts as absent. */
bool fa_cache_read(const char *name, uint64_t key, fa_blob *cubin);

/* Finds the folder of the user's cubins, which need not exist. False: there is no home folder. */
bool fa_cache_folder(char path[FA_PATH_BYTES]);

/* Keeps a cubin. False: the cubin could not be kept. The first failure prints a warning. */
bool fa_cache_write(const char *name, uint64_t key, const fa_blob *cubin);

#endif
