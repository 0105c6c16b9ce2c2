/* A folder of files that processes share. A process may end at any moment, so only whole files appear and disappear. A
 * folder is used only if no other user can write to it. */
#ifndef FA_SYSTEM_FOLDER_H
#define FA_SYSTEM_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

#define FA_PATH_BYTES 1024

/* Kernels run with the rights of the process that loads them. So only the user and root may be able to write to a
 * folder of the user and to its files. A folder of the package is trusted like the package. A new folder of the user is
 * made with the folders above it, for the user alone. */
typedef enum { FA_FOLDER_OF_THE_PACKAGE, FA_FOLDER_OF_THE_USER, FA_NEW_FOLDER_OF_THE_USER } fa_folder_kind;

typedef struct {
    char path[FA_PATH_BYTES];
    fa_folder_kind kind;
    int handle; /* handle of the open folder; unused on Windows */
} fa_folder;

/* Opens a folder. Returns NULL on success, "" if the folder does not exist, or a text with the reason of the
 * failure. */
const char *fa_folder_open(fa_folder *folder, const char *path, fa_folder_kind kind);
void fa_folder_close(const fa_folder *folder);

/* Reads a whole file. The caller frees the content. NULL: the file does not exist, is longer than most_bytes, or other
 * users may have written it. Reading counts as a use, and trimming removes unused files first. */
char *fa_folder_read(const fa_folder *folder, const char *name, size_t most_bytes, size_t *bytes);

/* Writes a file of two parts. The new file replaces an old file of the same name in one step. Returns NULL, or a text
 * with the reason of the failure. After a failure nothing has changed. */
const char *fa_folder_write(const fa_folder *folder, const char *name, const void *head, size_t head_bytes,
                            const void *body, size_t body_bytes);

/* Calls visit with every file's name until visit returns false. */
void fa_folder_list(const fa_folder *folder, bool (*visit)(const char *name, void *context), void *context);

/* Removes the least recently used files until the rest takes at most most_bytes. Only files whose names are ours are
 * removed. A file stays if this process wrote it or if it was used within an hour. Old unfinished files are removed
 * too, because their processes have ended. */
void fa_folder_trim(const fa_folder *folder, bool (*is_ours)(const char *name), size_t most_bytes);

#endif
