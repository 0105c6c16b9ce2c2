/* Environment variables that are looked at after the import.
 *
 * os.environ[...] = may move the memory that getenv returns, and calls run without Python's lock. So whoever holds the lock
 * reads the variables (at the import, before kernels are built ahead, and before one is loaded), and everyone
 * else takes copies of what was read. */
#ifndef FA_SYSTEM_ENVIRONMENT_H
#define FA_SYSTEM_ENVIRONMENT_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
    FA_FLASH_ATTN_CACHE_DIR,
    FA_FLASH_ATTN_NVRTC,
    FA_CUDA_HOME,
    FA_HOME,
    FA_XDG_CACHE_HOME,
    FA_LOCALAPPDATA,
    FA_NUM_VARIABLES
} fa_variable;

/* Nobody changes the environment meanwhile. */
void fa_environment_read(void);

/* A copy, as it was read last, or is now if it never was. False: unset, empty, or longer than there is room. */
bool fa_environment_get(fa_variable variable, char *value, size_t room);

#endif
