/* Keeps cubins on disk, each in one file. Two folders are searched in this order:
 *   the cubins that ship beside the module, <name>-<key>.cubin;
 *   FLASH_ATTN_CACHE_DIR or the user's cache folder, <name>-<key>-<compiler>.cubin. New cubins are written here.
 *
 * <compiler> is NVRTC's release. So a kernel that an old release compiled wrongly is not used by a new release.
 * Environments with different releases can share a folder. Without NVRTC, cubins of any release are used.
 *
 * A file holds its key, its size and a hash of its name and content. A file that was cut off, damaged or renamed counts
 * as absent and is written again. */
#include "kernel_cache.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvrtc.h"
#include "plan/kernel_table.h"
#include "system/environment.h"
#include "system/hash.h"
#include "system/library.h"

#if !defined(FA_CACHE_MOST_BYTES)
#define FA_CACHE_MOST_BYTES ((size_t)1 << 30) /* all kernels of one release for one architecture take 0.1 GB */
#endif
enum { NAME_BYTES = 192, MOST_CUBIN_BYTES = 1 << 28 };
static const char magic[8] = "FACUBIN2";

typedef struct {
    char magic[8];
    uint64_t key, bytes, hash;
} header;

static header header_of(const char *name, uint64_t key, const char *data, size_t bytes) {
    header head = {.key = key, .bytes = bytes};
    memcpy(head.magic, magic, sizeof magic);
    head.hash = fa_hash(fa_hash(key, name, strlen(name)), data, bytes);
    return head;
}

/* ---- names ----------------------------------------------------------------------------------------------------- */

static void shipped_name(char *file, const char *name, uint64_t key) {
    snprintf(file, NAME_BYTES, "%s-%016llx.cubin", name, (unsigned long long)key);
}

static void kept_name(char *file, const char *name, uint64_t key, uint32_t compiler) {
    snprintf(file, NAME_BYTES, "%s-%016llx-%08x.cubin", name, (unsigned long long)key, (unsigned)compiler);
}

/* Skips "-" and this many hexadecimal digits. Without them, nothing is skipped. */
static const char *skip_number(const char *at, size_t digits) {
    const bool is_there = *at == '-' && strspn(at + 1, "0123456789abcdef") == digits;
    return is_there ? at + 1 + digits : at;
}

/* Does this version or an older version write files with such a name? The oldest names contain no compiler. */
static bool is_ours(const char *file) {
    const size_t name = strspn(file, "abcdefghijklmnopqrstuvwxyz0123456789_");
    const char *behind_key = skip_number(file + name, 16);
    bool is_kernel = strncmp(file, "attn_", 5) == 0; /* older versions had other names of this kind */
    for (int i = 0; i < FA_NUM_FAMILIES; i++)
        is_kernel = is_kernel || strncmp(file, fa_families[i].name, strlen(fa_families[i].name)) == 0;
    return is_kernel && name > 0 && behind_key > file + name && strcmp(skip_number(behind_key, 8), ".cubin") == 0;
}

/* ---- folders --------------------------------------------------------------------------------------------------- */

bool fa_cache_folder(char path[FA_PATH_BYTES]) {
    char root[FA_PATH_BYTES];
    if (fa_environment_get(FA_FLASH_ATTN_CACHE_DIR, path, FA_PATH_BYTES)) return true;
#if defined(_WIN32)
    const char *below = "flash_attn";
    if (!fa_environment_get(FA_LOCALAPPDATA, root, sizeof root)) return false;
#else
    const char *below = "flash_attn";
    if (!fa_environment_get(FA_XDG_CACHE_HOME, root, sizeof root)) {
        below = ".cache/flash_attn";
        if (!fa_environment_get(FA_HOME, root, sizeof root)) return false;
    }
#endif
    return (size_t)snprintf(path, FA_PATH_BYTES, "%s/%s", root, below) < FA_PATH_BYTES;
}

/* Warns once that compiled kernels are not kept. */
static void warn(const char *attempt, const char *path, const char *why) {
    static atomic_flag has_warned = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&has_warned)) return;
    fprintf(stderr,
            "flash_attn: compiled kernels are not kept: %s%s%s%s; set FLASH_ATTN_CACHE_DIR to a folder that you and "
            "nobody else can write to\n",
            attempt, path, *why ? ": " : "", why);
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

static bool read_cubin(const fa_folder *folder, const char *file, const char *name, uint64_t key, fa_blob *cubin) {
    header head;
    size_t bytes = 0;
    char *content = fa_folder_read(folder, file, MOST_CUBIN_BYTES, &bytes);
    if (!content) return false;
    if (bytes > sizeof head) {
        const header want = header_of(name, key, content + sizeof head, bytes - sizeof head);
        memcpy(&head, content, sizeof head);
        if (memcmp(&head, &want, sizeof head) == 0) {
            memmove(content, content + sizeof head, bytes - sizeof head);
            *cubin = (fa_blob){content, bytes - sizeof head};
            return true;
        }
    }
    free(content);
    return false;
}

/* The search for a cubin of any compiler. */
typedef struct {
    const fa_folder *folder;
    const char *name;
    uint64_t key;
    fa_blob *cubin;
    bool is_found;
} search;

static bool try_file(const char *file, void *context) {
    search *s = context;
    char start[NAME_BYTES];
    const int same = snprintf(start, sizeof start, "%s-%016llx", s->name, (unsigned long long)s->key);
    if (strncmp(file, start, (size_t)same) == 0 && strcmp(skip_number(file + same, 8), ".cubin") == 0)
        s->is_found = read_cubin(s->folder, file, s->name, s->key, s->cubin);
    return !s->is_found;
}

static bool read_kept(const fa_folder *folder, const char *name, uint64_t key, fa_blob *cubin) {
    const fa_nvrtc *nvrtc;
    fa_error unused;
    if (fa_nvrtc_get(&nvrtc, &unused) == FA_OK) {
        char file[NAME_BYTES];
        kept_name(file, name, key, nvrtc->identity);
        return read_cubin(folder, file, name, key, cubin);
    }
    search s = {folder, name, key, cubin, false};
    fa_folder_list(folder, try_file, &s);
    return s.is_found;
}

static bool read_shipped(const char *name, uint64_t key, fa_blob *cubin) {
    static const char *const places[] = {"flash_attn/cubins", "cubins"}; /* of flash_attn_2_cuda, of flash_attn_3._C */
    char path[FA_PATH_BYTES], module[FA_PATH_BYTES - 32], file[NAME_BYTES];
    bool is_found = false;
    if (!fa_module_folder(module, sizeof module)) return false;
    shipped_name(file, name, key);
    for (size_t i = 0; i < sizeof places / sizeof *places && !is_found; i++) {
        fa_folder folder;
        snprintf(path, sizeof path, "%s/%s", module, places[i]);
        if (fa_folder_open(&folder, path, FA_FOLDER_OF_THE_PACKAGE)) continue;
        is_found = read_cubin(&folder, file, name, key, cubin);
        fa_folder_close(&folder);
    }
    return is_found;
}

bool fa_cache_read(const char *name, uint64_t key, fa_blob *cubin) {
    char path[FA_PATH_BYTES];
    fa_folder folder;
    *cubin = (fa_blob){0};
    if (read_shipped(name, key, cubin)) return true;
    if (!fa_cache_folder(path)) return false;
    const char *why = fa_folder_open(&folder, path, FA_FOLDER_OF_THE_USER);
    if (why) {
        if (*why) warn("cannot use ", path, why);
        return false;
    }
    const bool is_found = read_kept(&folder, name, key, cubin);
    fa_folder_close(&folder);
    return is_found;
}

/* ---- writing --------------------------------------------------------------------------------------------------- */

/* The cache is trimmed after the first file of a process, and again after each STEP bytes. */
static bool is_time_to_trim(size_t bytes) {
    enum { STEP = FA_CACHE_MOST_BYTES / 32 };
    static atomic_size_t num_bytes;
    const size_t before = atomic_fetch_add(&num_bytes, bytes);
    return before == 0 || before / STEP != (before + bytes) / STEP;
}

static const char *write_kept(const char *path, const char *name, uint64_t key, const fa_blob *cubin) {
    const fa_nvrtc *nvrtc;
    fa_folder folder;
    fa_error unused;
    char file[NAME_BYTES];
    if (fa_nvrtc_get(&nvrtc, &unused) != FA_OK) return "nobody knows what compiled them";
    const char *why = fa_folder_open(&folder, path, FA_NEW_FOLDER_OF_THE_USER);
    if (why) return why;
    const header head = header_of(name, key, cubin->data, cubin->bytes);
    kept_name(file, name, key, nvrtc->identity);
    why = fa_folder_write(&folder, file, &head, sizeof head, cubin->data, cubin->bytes);
    if (!why && is_time_to_trim(cubin->bytes)) fa_folder_trim(&folder, is_ours, FA_CACHE_MOST_BYTES);
    fa_folder_close(&folder);
    return why;
}

bool fa_cache_write(const char *name, uint64_t key, const fa_blob *cubin) {
    char path[FA_PATH_BYTES];
    if (!fa_cache_folder(path)) {
        warn("there is no home folder", "", "");
        return false;
    }
    const char *why = write_kept(path, name, key, cubin);
    if (why) warn("cannot write to ", path, why);
    return !why;
}
