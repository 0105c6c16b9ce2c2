/* dlopen and its like, on POSIX and on Windows. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* dladdr */
#endif
#include "library.h"

#include <stdio.h>
#include <string.h>

#if defined(_WIN32)
#include <windows.h>

void *fa_library_open(const char *name) { return (void *)LoadLibraryA(name); }

void *fa_library_loaded(const char *name) { return (void *)GetModuleHandleA(name); }

void *fa_library_symbol(void *library, const char *symbol) { return (void *)GetProcAddress((HMODULE)library, symbol); }

bool fa_library_path(const void *address, char *path, size_t room) {
    HMODULE module;
    return GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                              (LPCSTR)address, &module) &&
           GetModuleFileNameA(module, path, (DWORD)room) < room;
}
#else
#include <dlfcn.h>

void *fa_library_open(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }

void *fa_library_loaded(const char *name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }

void *fa_library_symbol(void *library, const char *symbol) { return dlsym(library, symbol); }

bool fa_library_path(const void *address, char *path, size_t room) {
    Dl_info info;
    return dladdr(address, &info) && info.dli_fname && (size_t)snprintf(path, room, "%s", info.dli_fname) < room;
}
#endif

bool fa_path_cut(char *path) {
    char *slash = strrchr(path, '/'), *backslash = strrchr(path, '\\');
    if (backslash && (!slash || backslash > slash)) slash = backslash;
    if (!slash) return false;
    *slash = '\0';
    return true;
}

bool fa_module_folder(char *path, size_t room) {
    static const char here = 0;
    if (!fa_library_path(&here, path, room)) return false;
    return fa_path_cut(path) || (size_t)snprintf(path, room, ".") < room;
}
