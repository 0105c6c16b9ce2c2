/* Environment variables that are needed after the import.
 *
 * An assignment to os.environ may move the memory that getenv returns, and calls run without Python's lock. So the
 * variables are read under Python's lock and copied. They are read at the import, before kernels are built ahead, and
 * before a kernel is loaded. All other code uses the copies. */
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

/* The name of one of our own variables whose value is too long to be copied, or NULL. The caller holds Python's
 * lock. */
const char *fa_environment_too_long(void);

/* Reads all variables. The caller holds Python's lock, so the environment does not change meanwhile. */
void fa_environment_read(void);

/* Copies the value that was read last. If no value was read yet, all variables are read now. False: the variable is
 * unset, empty, or longer than `room`. */
bool fa_environment_get(fa_variable variable, char *value, size_t room);

#endif
