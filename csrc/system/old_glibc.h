/* Lets an extension that is compiled with a new glibc run on glibc 2.27 and newer, which manylinux_2_28 has.
 *
 * requirements/wheels.py includes this header before every C file. No other build needs it. glibc keeps the old
 * versions of its functions, and the linker takes the newest version unless it is told otherwise. The old versions do
 * the same: exp and its kin came again in 2.29 with another rule for errno, which nobody here reads. dlopen and its kin
 * moved from libdl to libc in 2.34. fstat and fstatat became functions of their own in 2.33. old_glibc.c makes them of
 * what they were before.
 * NOTE: no system header may be included here, because the C files define macros that choose what headers declare. */
#ifndef FA_SYSTEM_OLD_GLIBC_H
#define FA_SYSTEM_OLD_GLIBC_H

#if defined(__linux__) && defined(FA_OLD_GLIBC)

#if defined(__x86_64__)
#define FA_FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define FA_FIRST_GLIBC "GLIBC_2.17"
#else
#error "the first glibc of this processor is not known"
#endif

#define FA_OLD_VERSION(function) __asm__(".symver " #function ", " #function "@" FA_FIRST_GLIBC)
FA_OLD_VERSION(exp);
FA_OLD_VERSION(exp2);
FA_OLD_VERSION(log);
FA_OLD_VERSION(log2);
FA_OLD_VERSION(pow);
FA_OLD_VERSION(dladdr);
FA_OLD_VERSION(dlopen);
FA_OLD_VERSION(dlsym);

struct stat;
extern int fstat(int file, struct stat *info) __asm__("fa_old_fstat");
extern int fstatat(int folder, const char *name, struct stat *info, int flags) __asm__("fa_old_fstatat");

#endif
#endif
