/* Shared libraries: those that are loaded already, those on disk, and the one that this code is in. */
#ifndef FA_SYSTEM_LIBRARY_H
#define FA_SYSTEM_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

/* Loads a library by name or path. NULL: it is not there. It stays for the life of the process. */
void *fa_library_open(const char *name);

/* The same library if the process has loaded it before, else NULL. */
void *fa_library_loaded(const char *name);

/* A function or variable of a library or of the libraries that it needs. NULL: there is none. */
void *fa_library_symbol(void *library, const char *symbol);

/* The file of the library that holds this address. False: unknown, or longer than there is room. */
bool fa_library_path(const void *address, char *path, size_t room);

/* Cuts a path behind its last folder: "/a/b.so" becomes "/a". False: the path names no folder. */
bool fa_path_cut(char *path);

/* The folder from which this module was loaded. False: unknown. */
bool fa_module_folder(char *path, size_t room);

#endif
