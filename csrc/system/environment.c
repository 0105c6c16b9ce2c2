/* Keeps copies of environment variables. */
#include "environment.h"

#include <stdlib.h>
#include <string.h>

#include "lock.h"

enum { VALUE_BYTES = 1024 };

static const char *const names[FA_NUM_VARIABLES] = {
    [FA_FLASH_ATTN_CACHE_DIR] = "FLASH_ATTN_CACHE_DIR",
    [FA_FLASH_ATTN_NVRTC] = "FLASH_ATTN_NVRTC",
    [FA_CUDA_HOME] = "CUDA_HOME",
    [FA_HOME] = "HOME",
    [FA_XDG_CACHE_HOME] = "XDG_CACHE_HOME",
    [FA_LOCALAPPDATA] = "LOCALAPPDATA",
};
static char values[FA_NUM_VARIABLES][VALUE_BYTES]; /* "": the variable is unset, or too long for a path */
static bool was_read;
static fa_lock lock = FA_LOCK_INIT;

static void read_all(void) {
    for (int i = 0; i < FA_NUM_VARIABLES; i++) {
        const char *value = getenv(names[i]);
        const size_t bytes = value ? strlen(value) + 1 : 0;
        values[i][0] = '\0';
        if (bytes <= VALUE_BYTES) memcpy(values[i], value ? value : "", bytes);
    }
    was_read = true;
}

const char *fa_environment_too_long(void) {
    static const fa_variable own[] = {FA_FLASH_ATTN_CACHE_DIR, FA_FLASH_ATTN_NVRTC};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        const char *value = getenv(names[own[i]]);
        if (value && strlen(value) >= VALUE_BYTES) return names[own[i]];
    }
    return NULL;
}

void fa_environment_read(void) {
    fa_lock_acquire(&lock);
    read_all();
    fa_lock_release(&lock);
}

bool fa_environment_get(fa_variable variable, char *value, size_t room) {
    fa_lock_acquire(&lock);
    if (!was_read) read_all();
    const size_t bytes = strlen(values[variable]) + 1;
    const bool fits = bytes > 1 && bytes <= room;
    if (fits) memcpy(value, values[variable], bytes);
    fa_lock_release(&lock);
    return fits;
}
