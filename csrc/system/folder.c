/* Folders and files on POSIX and on Windows. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares openat and related functions under -std=c11 */
#endif
#include "folder.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "lock.h"

enum { NAME_BYTES = 256 };

#if !defined(_WIN32)
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- folders --------------------------------------------------------------------------------------------------- */

/* Returns the error of the first folder that could not be made, or 0. */
static int make_folders(const char *path) {
    char part[FA_PATH_BYTES];
    int why = 0;
    for (size_t i = 1; path[i - 1] && i < sizeof part; i++)
        if (path[i] == '/' || path[i] == '\0') {
            memcpy(part, path, i);
            part[i] = '\0';
            if (mkdir(part, 0700) != 0 && errno != EEXIST && why == 0) why = errno;
        }
    return why;
}

/* Checks the open folder or file. All later steps use the same handle, so the folder or file cannot be exchanged
 * meanwhile. */
static const char *why_not_trusted(fa_folder_kind kind, int handle) {
    struct stat info;
    if (kind == FA_FOLDER_OF_THE_PACKAGE) return NULL;
    if (fstat(handle, &info) != 0) return strerror(errno);
    if (info.st_uid != geteuid() && info.st_uid != 0) return "it belongs to another user";
    if (info.st_mode & (S_IWGRP | S_IWOTH)) return "others may write to it";
    return NULL;
}

const char *fa_folder_open(fa_folder *folder, const char *path, fa_folder_kind kind) {
    const bool make = kind == FA_NEW_FOLDER_OF_THE_USER;
    if ((size_t)snprintf(folder->path, sizeof folder->path, "%s", path) >= sizeof folder->path)
        return "its path is too long";
    const int why_not_made = make ? make_folders(path) : 0;
    folder->handle = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder->handle < 0 && errno == ENOENT) return make ? strerror(why_not_made ? why_not_made : ENOENT) : "";
    if (folder->handle < 0) return strerror(errno);
    folder->kind = kind;
    const char *why = why_not_trusted(kind, folder->handle);
    if (why) close(folder->handle);
    return why;
}

void fa_folder_close(const fa_folder *folder) { close(folder->handle); }

void fa_folder_list(const fa_folder *folder, bool (*visit)(const char *name, void *context), void *context) {
    const int handle = openat(folder->handle, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = handle < 0 ? NULL : fdopendir(handle);
    if (!listing && handle >= 0) close(handle);
    if (!listing) return;
    for (struct dirent *entry; (entry = readdir(listing)) && visit(entry->d_name, context);) {}
    closedir(listing);
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

static bool is_ahead_of_the_clock(time_t time_of_file) { return time_of_file > time(NULL) + 3600; }

/* Notes the use of a file whose time is old. A time in the future is replaced too, because a clock was set. */
static void note_use(int file, const struct stat *info) {
    enum { DAY = 24 * 3600 };
    if (info->st_mtime + DAY < time(NULL) || is_ahead_of_the_clock(info->st_mtime)) futimens(file, NULL);
}

static bool read_all(int file, char *to, size_t bytes) {
    while (bytes > 0) {
        const ssize_t got = read(file, to, bytes);
        if (got == 0 || (got < 0 && errno != EINTR)) return false;
        if (got > 0) to += got, bytes -= (size_t)got;
    }
    return true;
}

char *fa_folder_read(const fa_folder *folder, const char *name, size_t most_bytes, size_t *bytes) {
    struct stat info;
    char *content = NULL;
    const int file = openat(folder->handle, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return NULL;
    if (fstat(file, &info) == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size <= most_bytes &&
        !why_not_trusted(folder->kind, file)) {
        *bytes = (size_t)info.st_size;
        content = malloc(*bytes + 1);
        if (content && !read_all(file, content, *bytes)) {
            free(content);
            content = NULL;
        }
        if (content) note_use(file, &info);
    }
    close(file);
    return content;
}

/* ---- writing --------------------------------------------------------------------------------------------------- */

/* Draws the digits of an unfinished file's name: .<name>.<process>.<16 digits>.new. Machines or containers may share a
 * folder, and their process numbers may be equal. So the digits make the name unique, and an existing file is never
 * opened. */
static uint64_t draw(void) {
    static _Atomic uint64_t num_drawn;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t parts[] = {(uint64_t)now.tv_sec, (uint64_t)now.tv_nsec, (uint64_t)getpid(),
                              atomic_fetch_add(&num_drawn, 1), (uint64_t)(uintptr_t)&parts};
    uint64_t drawn = 0;
    const int random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (random >= 0) {
        if (!read_all(random, (char *)&drawn, sizeof drawn)) drawn = 0;
        close(random);
    }
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) drawn = (drawn ^ parts[i]) * 0x9e3779b97f4a7c15u;
    return drawn;
}

static bool is_unfinished(const char *name) {
    const size_t length = strlen(name);
    return name[0] == '.' && length > 22 && strcmp(name + length - 4, ".new") == 0 && name[length - 21] == '.' &&
           strspn(name + length - 20, "0123456789abcdef") == 16;
}

static int create(const fa_folder *folder, const char *name, char *unfinished) {
    int file = -1;
    for (int i = 0; i < 8 && file < 0; i++) {
        snprintf(unfinished, NAME_BYTES, ".%s.%ld.%016llx.new", name, (long)getpid(), (unsigned long long)draw());
        file = openat(folder->handle, unfinished, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file < 0 && errno != EEXIST) break;
    }
    return file;
}

static bool write_all(int file, const char *from, size_t bytes) {
    while (bytes > 0) {
        const ssize_t put = write(file, from, bytes);
        if (put < 0 && errno != EINTR) return false;
        if (put > 0) from += put, bytes -= (size_t)put;
    }
    return true;
}

/* The content reaches the disk before the name. So after a crash of the machine, a file is complete or absent. */
static bool write_once(const fa_folder *folder, const char *name, const void *head, size_t head_bytes, const void *body,
                       size_t body_bytes) {
    char unfinished[NAME_BYTES];
    const int file = create(folder, name, unfinished);
    if (file < 0) return false;
    bool is_good = write_all(file, head, head_bytes) && write_all(file, body, body_bytes) && fsync(file) == 0;
    int why = errno;
    if (close(file) != 0 && is_good) is_good = false, why = errno;
    if (is_good && renameat(folder->handle, unfinished, folder->handle, name) != 0) is_good = false, why = errno;
    if (!is_good) unlinkat(folder->handle, unfinished, 0);
    errno = why;
    return is_good;
}

static void note_written(const char *name);

const char *fa_folder_write(const fa_folder *folder, const char *name, const void *head, size_t head_bytes,
                            const void *body, size_t body_bytes) {
    bool is_good = write_once(folder, name, head, head_bytes, body, body_bytes);
    /* Another process with a wrong clock may have removed the unfinished file as too old. */
    if (!is_good && errno == ENOENT) is_good = write_once(folder, name, head, head_bytes, body, body_bytes);
    if (is_good) note_written(name);
    return is_good ? NULL : strerror(errno);
}

/* ---- trimming -------------------------------------------------------------------------------------------------- */

/* Hashes of the names that this process wrote. */
static uint64_t *written;
static size_t num_written;
static fa_lock lock = FA_LOCK_INIT;

static uint64_t hash_of(const char *name) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
    return hash;
}

static bool was_written(uint64_t hash) {
    size_t i = 0;
    while (i < num_written && written[i] != hash) i++;
    return i < num_written;
}

/* If memory is short, the name is not noted. Then only the hour without removal protects the file. */
static void note_written(const char *name) {
    const uint64_t hash = hash_of(name);
    fa_lock_acquire(&lock);
    if (!was_written(hash)) {
        uint64_t *more = realloc(written, (num_written + 1) * sizeof *more);
        if (more) written = more, written[num_written++] = hash;
    }
    fa_lock_release(&lock);
}

typedef struct {
    char name[NAME_BYTES];
    time_t used;
    uint64_t bytes;
} cached_file;

typedef struct {
    const fa_folder *folder;
    bool (*is_ours)(const char *name);
    time_t now;
    cached_file *files; /* files that may be removed */
    size_t num, room;
    uint64_t bytes; /* bytes of all our files */
} survey;

enum { SAFE_SECONDS = 3600 };

static bool survey_file(const char *name, void *context) {
    survey *s = context;
    struct stat info;
    if ((!s->is_ours(name) && !is_unfinished(name)) || strlen(name) >= NAME_BYTES ||
        fstatat(s->folder->handle, name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode))
        return true;
    if (is_ahead_of_the_clock(info.st_mtime)) /* a clock was set; the file's age starts now */
        utimensat(s->folder->handle, name, NULL, AT_SYMLINK_NOFOLLOW);
    if (is_unfinished(name)) {
        if (info.st_mtime + SAFE_SECONDS < s->now) unlinkat(s->folder->handle, name, 0);
        return true;
    }
    s->bytes += (uint64_t)info.st_size;
    if (info.st_mtime + SAFE_SECONDS >= s->now || was_written(hash_of(name))) return true;
    if (s->num == s->room) {
        cached_file *more = realloc(s->files, (2 * s->room + 64) * sizeof *more);
        if (!more) return false;
        s->files = more, s->room = 2 * s->room + 64;
    }
    cached_file *file = &s->files[s->num++];
    snprintf(file->name, sizeof file->name, "%s", name);
    file->used = info.st_mtime, file->bytes = (uint64_t)info.st_size;
    return true;
}

static int by_use(const void *x, const void *y) {
    const time_t used_x = ((const cached_file *)x)->used, used_y = ((const cached_file *)y)->used;
    return (used_x > used_y) - (used_x < used_y);
}

void fa_folder_trim(const fa_folder *folder, bool (*is_ours)(const char *name), size_t most_bytes) {
    survey s = {.folder = folder, .is_ours = is_ours, .now = time(NULL)};
    fa_lock_acquire(&lock);
    fa_folder_list(folder, survey_file, &s);
    if (s.num > 0 && s.bytes > most_bytes) qsort(s.files, s.num, sizeof *s.files, by_use);
    for (size_t i = 0; i < s.num && s.bytes > most_bytes; i++)
        if (unlinkat(folder->handle, s.files[i].name, 0) == 0) s.bytes -= s.files[i].bytes;
    fa_lock_release(&lock);
    free(s.files);
}

#else

/* ---- Windows --------------------------------------------------------------------------------------------------- */

/* A user's folder inherits the rights of the folder above. Nothing is trimmed. */

#include <direct.h>
#include <io.h>
#include <process.h>

const char *fa_folder_open(fa_folder *folder, const char *path, fa_folder_kind kind) {
    const bool make = kind == FA_NEW_FOLDER_OF_THE_USER;
    char part[FA_PATH_BYTES];
    if ((size_t)snprintf(folder->path, sizeof folder->path, "%s", path) >= sizeof folder->path)
        return "its path is too long";
    for (size_t i = 1; make && path[i - 1] && i < sizeof part; i++)
        if (path[i] == '/' || path[i] == '\\' || path[i] == '\0') {
            memcpy(part, path, i);
            part[i] = '\0';
            _mkdir(part);
        }
    return _access(path, 0) == 0 ? NULL : make ? strerror(errno) : "";
}

void fa_folder_close(const fa_folder *folder) { (void)folder; }

void fa_folder_list(const fa_folder *folder, bool (*visit)(const char *name, void *context), void *context) {
    char pattern[FA_PATH_BYTES + 8];
    struct _finddata_t found;
    snprintf(pattern, sizeof pattern, "%s/*", folder->path);
    const intptr_t listing = _findfirst(pattern, &found);
    if (listing == -1) return;
    while (visit(found.name, context) && _findnext(listing, &found) == 0) {}
    _findclose(listing);
}

static void path_of(const fa_folder *folder, const char *name, char path[FA_PATH_BYTES + NAME_BYTES]) {
    snprintf(path, FA_PATH_BYTES + NAME_BYTES, "%s/%s", folder->path, name);
}

char *fa_folder_read(const fa_folder *folder, const char *name, size_t most_bytes, size_t *bytes) {
    char path[FA_PATH_BYTES + NAME_BYTES], *content = NULL;
    long size;
    path_of(folder, name, path);
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    if (fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) >= 0 && (size_t)size <= most_bytes &&
        fseek(file, 0, SEEK_SET) == 0 && (content = malloc((size_t)size + 1)) &&
        fread(content, 1, (size_t)size, file) != (size_t)size) {
        free(content);
        content = NULL;
    }
    fclose(file);
    if (content) *bytes = (size_t)size;
    return content;
}

const char *fa_folder_write(const fa_folder *folder, const char *name, const void *head, size_t head_bytes,
                            const void *body, size_t body_bytes) {
    static atomic_uint num_written;
    char path[FA_PATH_BYTES + NAME_BYTES], unfinished[FA_PATH_BYTES + NAME_BYTES + 64];
    path_of(folder, name, path);
    snprintf(unfinished, sizeof unfinished, "%s.%d.%u.new", path, _getpid(), atomic_fetch_add(&num_written, 1));
    FILE *file = fopen(unfinished, "wbx");
    if (!file) return strerror(errno);
    bool is_good = fwrite(head, 1, head_bytes, file) == head_bytes && fwrite(body, 1, body_bytes, file) == body_bytes;
    is_good = fclose(file) == 0 && is_good;
    if (is_good) remove(path);
    is_good = is_good && rename(unfinished, path) == 0;
    const char *why = is_good ? NULL : strerror(errno);
    if (!is_good) remove(unfinished);
    return why;
}

void fa_folder_trim(const fa_folder *folder, bool (*is_ours)(const char *name), size_t most_bytes) {
    (void)folder, (void)is_ours, (void)most_bytes;
}

#endif
