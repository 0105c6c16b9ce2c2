/* Cubins on disk, one file for each: <name>-<key>.cubin. First in the folder that ships beside the module, then in
 * FLASH_ATTN_CACHE_DIR or the user's cache folder, which is also written to.
 *
 * A file says its key, its size and a hash of its content: one that was cut off or damaged counts as absent and is
 * written anew. Files appear by renaming, so readers in other processes see all of one or nothing. */
#include "kernels.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lock.h"

#if defined(_WIN32)
#include <direct.h>
#include <process.h>
#define make_folder(path) _mkdir(path)
#define process_id()      _getpid()
#else
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>
#define make_folder(path) mkdir(path, 0777)
#define process_id()      getpid()
#endif

enum { PATH_BYTES = 1024, MAX_FILES = 512 };
static const char magic[8] = "FACUBIN1";

typedef struct {
    char magic[8];
    uint64_t key, bytes, hash;
} header;

/* FNV-1a: damage and change, not malice. */
uint64_t fa_hash(uint64_t seed, const void *data, size_t bytes) {
    const unsigned char *x = data;
    uint64_t hash = seed ^ 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ x[i]) * 0x100000001b3u;
    return hash;
}

/* ---- folders --------------------------------------------------------------------------------------------------- */

static bool user_folder(char *path, size_t room) {
    const char *own = getenv("FLASH_ATTN_CACHE_DIR");
    if (own && *own) return (size_t)snprintf(path, room, "%s", own) < room;
#if defined(_WIN32)
    const char *root = getenv("LOCALAPPDATA"), *below = "flash_attn";
#else
    const char *root = getenv("XDG_CACHE_HOME"), *below = "flash_attn";
    if (!root || !*root) root = getenv("HOME"), below = ".cache/flash_attn";
#endif
    return root && *root && (size_t)snprintf(path, room, "%s/%s", root, below) < room;
}

static void make_folders(const char *path) {
    char part[PATH_BYTES];
    for (size_t i = 1; path[i - 1] && i < sizeof part; i++)
        if (path[i] == '/' || path[i] == '\0') {
            memcpy(part, path, i);
            part[i] = '\0';
            make_folder(part);
        }
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

static bool read_file(const char *folder, const char *name, uint64_t key, fa_blob *cubin) {
    char path[PATH_BYTES + 128];
    header head;
    snprintf(path, sizeof path, "%s/%s-%016llx.cubin", folder, name, (unsigned long long)key);
    FILE *file = fopen(path, "rb");
    if (!file) return false;
    *cubin = (fa_blob){0};
    bool is_good = fread(&head, sizeof head, 1, file) == 1 && memcmp(head.magic, magic, sizeof magic) == 0 &&
                   head.key == key && head.bytes > 0 && head.bytes < 1 << 28;
    if (is_good) {
        cubin->bytes = (size_t)head.bytes;
        cubin->data = malloc(cubin->bytes);
        is_good = cubin->data && fread(cubin->data, 1, cubin->bytes, file) == cubin->bytes &&
                  fa_hash(0, cubin->data, cubin->bytes) == head.hash;
    }
    fclose(file);
    if (!is_good) {
        free(cubin->data);
        *cubin = (fa_blob){0};
    }
    return is_good;
}

bool fa_cache_read(const char *name, uint64_t key, fa_blob *cubin) {
    char folder[PATH_BYTES], module[PATH_BYTES - 32];
    if (fa_module_folder(module, sizeof module)) {
        snprintf(folder, sizeof folder, "%s/flash_attn/cubins", module);
        if (read_file(folder, name, key, cubin)) return true;
    }
    return user_folder(folder, sizeof folder) && read_file(folder, name, key, cubin);
}

/* ---- writing --------------------------------------------------------------------------------------------------- */

#if !defined(_WIN32)
/* Beyond MAX_FILES the file that was not written to for longest goes: old versions of sources, long since unused. */
static void drop_oldest(const char *folder) {
    char path[PATH_BYTES + 300], oldest[PATH_BYTES + 300] = "";
    time_t oldest_time = 0;
    int num_files = 0;
    DIR *listing = opendir(folder);
    if (!listing) return;
    for (struct dirent *entry; (entry = readdir(listing));) {
        struct stat info;
        if (!strstr(entry->d_name, ".cubin")) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (stat(path, &info) != 0) continue;
        num_files++;
        if (!oldest[0] || info.st_mtime < oldest_time) {
            oldest_time = info.st_mtime;
            memcpy(oldest, path, sizeof oldest);
        }
    }
    closedir(listing);
    if (num_files > MAX_FILES) remove(oldest);
}
#else
static void drop_oldest(const char *folder) { (void)folder; }
#endif

static bool write_file(const char *folder, const char *name, uint64_t key, const fa_blob *cubin) {
    static atomic_uint num_written;
    char path[PATH_BYTES + 128], temporary[PATH_BYTES + 192];
    header head = {.key = key, .bytes = cubin->bytes, .hash = fa_hash(0, cubin->data, cubin->bytes)};
    memcpy(head.magic, magic, sizeof magic);
    make_folders(folder);
    snprintf(path, sizeof path, "%s/%s-%016llx.cubin", folder, name, (unsigned long long)key);
    snprintf(temporary, sizeof temporary, "%s.%ld.%u.new", path, (long)process_id(), atomic_fetch_add(&num_written, 1));
    FILE *file = fopen(temporary, "wb");
    if (!file) return false;
    bool is_good =
        fwrite(&head, sizeof head, 1, file) == 1 && fwrite(cubin->data, 1, cubin->bytes, file) == cubin->bytes;
    is_good = fclose(file) == 0 && is_good;
#if defined(_WIN32)
    remove(path);
#endif
    is_good = is_good && rename(temporary, path) == 0;
    if (!is_good) remove(temporary);
    return is_good;
}

/* False, and the first time a warning: what was compiled is not kept. */
bool fa_cache_write(const char *name, uint64_t key, const fa_blob *cubin) {
    static atomic_flag has_warned = ATOMIC_FLAG_INIT;
    char folder[PATH_BYTES] = "";
    if (user_folder(folder, sizeof folder) && write_file(folder, name, key, cubin)) {
        drop_oldest(folder);
        return true;
    }
    if (!atomic_flag_test_and_set(&has_warned))
        fprintf(stderr,
                "flash_attn: compiled kernels are not kept: %s%s; set FLASH_ATTN_CACHE_DIR to a folder that can be "
                "written to\n",
                folder[0] ? "cannot write to " : "there is no home folder", folder);
    return false;
}
