/* A folder of files that processes share, each of which may end at any moment: whole files appear and go, and only a folder
 * that nobody else can write to is used. */
#ifndef FA_SYSTEM_FOLDER_H
#define FA_SYSTEM_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

#define FA_PATH_BYTES 1024

/* Kernels run with the rights of whoever loads them. So nobody but the user and root may be able to write to a folder of the
 * user or to a file in it; one of the package is as good as the package. A new one is made with the folders above it, for the
 * user alone. */
typedef enum { FA_FOLDER_OF_THE_PACKAGE, FA_FOLDER_OF_THE_USER, FA_NEW_FOLDER_OF_THE_USER } fa_folder_kind;

typedef struct {
    char path[FA_PATH_BYTES];
    fa_folder_kind kind;
    int handle; /* of the open folder; Windows: unused */
} fa_folder;

/* NULL: it is open; "": it is not there; or the words that say what is wrong with it. */
const char *fa_folder_open(fa_folder *folder, const char *path, fa_folder_kind kind);
void fa_folder_close(const fa_folder *folder);

/* A file as a whole, which is the caller's to free; NULL: there is none, it is longer than most_bytes, or others may have
 * written it. What is read was used: trimming takes other files first. */
char *fa_folder_read(const fa_folder *folder, const char *name, size_t most_bytes, size_t *bytes);

/* Writes a file of two parts, which then replaces the one of that name in one step. NULL, or the words that say why not:
 * then nothing has changed. */
const char *fa_folder_write(const fa_folder *folder, const char *name, const void *head, size_t head_bytes,
                            const void *body, size_t body_bytes);

/* Calls visit with every name, until it returns false. */
void fa_folder_list(const fa_folder *folder, bool (*visit)(const char *name, void *context), void *context);

/* Removes the files that were not used for longest until the others take most_bytes; only files whose names are ours, no
 * file that this process wrote or that was used within an hour. Unfinished files of processes that ended go, too. */
void fa_folder_trim(const fa_folder *folder, bool (*is_ours)(const char *name), size_t most_bytes);

#endif
