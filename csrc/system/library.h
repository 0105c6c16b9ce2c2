/* Finds shared libraries that are loaded or on disk, and the library that holds this code. */
#ifndef FA_SYSTEM_LIBRARY_H
#define FA_SYSTEM_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

/* Loads a library by name or path, for the life of the process. NULL: there is no such library. */
void *fa_library_open(const char *name);

/* Returns the library if the process has already loaded it, otherwise NULL. */
void *fa_library_loaded(const char *name);

/* Returns a function or variable of a library or of the libraries that it needs. NULL: there is no such symbol. */
void *fa_library_symbol(void *library, const char *symbol);

/* Finds the file of the library that holds this address. False: the file is unknown, or its path is longer than
 * `room`. */
bool fa_library_path(const void *address, char *path, size_t room);

/* Cuts a path behind its last folder: "/a/b.so" becomes "/a". False: the path names no folder. */
bool fa_path_cut(char *path);

/* Finds the folder from which this module was loaded. False: the folder is unknown. */
bool fa_module_folder(char *path, size_t room);

#endif
