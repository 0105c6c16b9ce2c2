/* Finds NVRTC at first use. */
#include "nvrtc.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "host.h"
#include "system/environment.h"
#include "system/library.h"
#include "system/lock.h"

#if defined(_WIN32)
static const char *const nvrtc_names[] = {"nvrtc64_130_0.dll", "nvrtc64_120_0.dll"};
#define BUILTINS_NAME "nvrtc-builtins64_%d%d.dll"
static const char *const nvrtc_folders[] = {"nvidia/cu13/bin", "nvidia/cuda_nvrtc/bin", "torch/lib"};
static const char *const toolkit_folders[] = {"bin"};
#else
static const char *const nvrtc_names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
#define BUILTINS_NAME "libnvrtc-builtins.so.%d.%d"
static const char *const nvrtc_folders[] = {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"};
static const char *const toolkit_folders[] = {"lib64", "lib"};
#endif

#define NUM(array) (sizeof(array) / sizeof *(array))

static fa_lock lock = FA_LOCK_INIT;
static fa_nvrtc nvrtc;
static bool nvrtc_is_ready;

/* Finds the folder that holds torch and NVIDIA's packages. libtorch lies in <folder>/torch/lib. */
static bool find_packages_folder(char *path, size_t room) {
    if (!fa_host.library || !fa_library_path(fa_host.library, path, room)) return false;
    for (int level = 0; level < 3; level++) /* cuts off the file, lib and torch */
        if (!fa_path_cut(path)) return false;
    return true;
}

static void *open_in_folders(const char *root, const char *const *folders, size_t num_folders) {
    char path[1024];
    for (size_t name = 0; name < NUM(nvrtc_names); name++)
        for (size_t folder = 0; folder < num_folders; folder++) {
            if ((size_t)snprintf(path, sizeof path, "%s/%s/%s", root, folders[folder], nvrtc_names[name]) >=
                sizeof path)
                continue;
            void *library = fa_library_open(path);
            if (library) return library;
        }
    return NULL;
}

static void *open_nvrtc(void) {
    char path[1024], packages[1024], toolkit[1024];
    void *library = fa_environment_get(FA_FLASH_ATTN_NVRTC, path, sizeof path) ? fa_library_open(path) : NULL;
    for (size_t i = 0; !library && i < NUM(nvrtc_names); i++) library = fa_library_loaded(nvrtc_names[i]);
    if (!library && find_packages_folder(packages, sizeof packages))
        library = open_in_folders(packages, nvrtc_folders, NUM(nvrtc_folders));
    for (size_t i = 0; !library && i < NUM(nvrtc_names); i++) library = fa_library_open(nvrtc_names[i]);
    if (!library && fa_environment_get(FA_CUDA_HOME, toolkit, sizeof toolkit))
        library = open_in_folders(toolkit, toolkit_folders, NUM(toolkit_folders));
    return library;
}

/* When NVRTC compiles, it opens a second library by name. This library lies beside NVRTC, and the system does not look
 * there. Once the library is loaded, its name is enough. */
static void open_builtins(const fa_nvrtc *found) {
    char folder[sizeof found->path], path[sizeof found->path + 64];
    memcpy(folder, found->path, sizeof folder);
    if (!fa_path_cut(folder)) return;
    snprintf(path, sizeof path, "%s/" BUILTINS_NAME, folder, found->major, found->minor);
    fa_library_open(path);
}

/* Returns the size of a file, or 0 if it is unknown. Only this size tells releases of the same NVRTC version apart. */
static long size_of_file(const char *path) {
    FILE *file = *path ? fopen(path, "rb") : NULL;
    long bytes = 0;
    if (file && (fseek(file, 0, SEEK_END) != 0 || (bytes = ftell(file)) < 0)) bytes = 0;
    if (file) fclose(file);
    return bytes;
}

static fa_status load_nvrtc(fa_nvrtc *found, fa_error *err) {
    void *library = open_nvrtc();
    if (!library) {
        char path[1024], named[1100] = "";
        if (fa_environment_get(FA_FLASH_ATTN_NVRTC, path, sizeof path))
            snprintf(named, sizeof named, "; it is %s, which cannot be loaded", path);
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: this kernel is not compiled yet and %s, which would compile it, was not found: "
                       "install NVIDIA's package nvidia-cuda-nvrtc, or set FLASH_ATTN_NVRTC to the library's path%s",
                       nvrtc_names[0], named);
    }
#define FIND(symbol, result, parameters)                                                           \
    {                                                                                              \
        void *address = fa_library_symbol(library, #symbol);                                       \
        if (!address) return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: NVRTC lacks %s", #symbol); \
        memcpy(&found->symbol, &address, sizeof address);                                          \
    }
    FA_NVRTC_SYMBOLS(FIND)
#undef FIND
    if (found->nvrtcVersion(&found->major, &found->minor) != 0)
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: NVRTC does not say its version");
    void *address;
    memcpy(&address, &found->nvrtcVersion, sizeof address);
    if (!fa_library_path(address, found->path, sizeof found->path)) found->path[0] = '\0';
    found->identity = (uint32_t)(1000 * found->major + 10 * found->minor) ^ (uint32_t)size_of_file(found->path) << 8;
    open_builtins(found);
    return FA_OK;
}

fa_status fa_nvrtc_get(const fa_nvrtc **out, fa_error *err) {
    fa_status status = FA_OK;
    fa_lock_acquire(&lock);
    if (!nvrtc_is_ready) {
        fa_nvrtc found = {0};
        status = load_nvrtc(&found, err);
        if (status == FA_OK) nvrtc = found, nvrtc_is_ready = true;
    }
    fa_lock_release(&lock);
    *out = &nvrtc;
    return status;
}
