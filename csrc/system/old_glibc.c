/* fstat and fstatat for glibc before 2.33. Only wheels for old systems contain them (old_glibc.h). */
#include "old_glibc.h"

#if defined(__linux__) && defined(FA_OLD_GLIBC)

/* The version of struct stat, which glibc calls _STAT_VER. */
#if defined(__x86_64__)
enum { STAT_VERSION = 1 };
#else
enum { STAT_VERSION = 0 };
#endif

extern int __fxstat(int version, int file, struct stat *info);
extern int __fxstatat(int version, int folder, const char *name, struct stat *info, int flags);

#define HIDDEN __attribute__((visibility("hidden")))

HIDDEN int fstat(int file, struct stat *info) { return __fxstat(STAT_VERSION, file, info); }

HIDDEN int fstatat(int folder, const char *name, struct stat *info, int flags) {
    return __fxstatat(STAT_VERSION, folder, name, info, flags);
}

#else
typedef int fa_no_old_glibc; /* ISO C wants a declaration in every file */
#endif
