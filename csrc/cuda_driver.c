/* Finds the CUDA driver and NVRTC, at first use. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* dladdr */
#endif
#include "cuda_driver.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "environment.h"
#include "lock.h"
#include "torch_abi.h"

/* ---- libraries ------------------------------------------------------------------------------------------------ */

#if defined(_WIN32)
static void *open_library(const char *name) { return (void *)LoadLibraryA(name); }
static void *open_loaded(const char *name) { return (void *)GetModuleHandleA(name); }
static void *find_symbol(void *library, const char *symbol) { return (void *)GetProcAddress((HMODULE)library, symbol); }
static bool path_of_address(const void *address, char *path, size_t room) {
    HMODULE module;
    return GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                              (LPCSTR)address, &module) &&
           GetModuleFileNameA(module, path, (DWORD)room) < room;
}
#define DRIVER_LIBRARY "nvcuda.dll"
static const char *const nvrtc_names[] = {"nvrtc64_130_0.dll", "nvrtc64_120_0.dll"};
#define BUILTINS_NAME "nvrtc-builtins64_%d%d.dll"
static const char *const nvrtc_folders[] = {"nvidia/cu13/bin", "nvidia/cuda_nvrtc/bin", "torch/lib"};
static const char *const toolkit_folders[] = {"bin"};
#else
#include <dlfcn.h>
static void *open_library(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }
static void *open_loaded(const char *name) { return dlopen(name, RTLD_NOW | RTLD_NOLOAD); }
static void *find_symbol(void *library, const char *symbol) { return dlsym(library, symbol); }
static bool path_of_address(const void *address, char *path, size_t room) {
    Dl_info info;
    return dladdr(address, &info) && info.dli_fname && (size_t)snprintf(path, room, "%s", info.dli_fname) < room;
}
#define DRIVER_LIBRARY "libcuda.so.1"
static const char *const nvrtc_names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
#define BUILTINS_NAME  "libnvrtc-builtins.so.%d.%d"
static const char *const nvrtc_folders[] = {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"};
static const char *const toolkit_folders[] = {"lib64", "lib"};
#endif

#define NUM(array) (sizeof(array) / sizeof *(array))

/* ---- the driver ----------------------------------------------------------------------------------------------- */

static fa_lock lock = FA_LOCK_INIT;
static fa_driver driver;
static atomic_bool driver_is_ready;

static fa_status load_driver(fa_driver *found, fa_error *err) {
    void *library = open_library(DRIVER_LIBRARY);
    if (!library)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: CUDA tensors need NVIDIA's driver, and " DRIVER_LIBRARY " is not on this machine");
#define FIND(symbol, parameters)                                                                            \
    {                                                                                                       \
        void *address = find_symbol(library, #symbol);                                                      \
        if (!address)                                                                                       \
            return fa_fail(err, FA_EUNSUPPORTED,                                                            \
                           "flash_attn needs a driver for CUDA " FA_OLDEST_DRIVER_NAME                      \
                           " or newer: this machine's lacks %s",                                            \
                           #symbol);                                                                        \
        memcpy(&found->symbol, &address, sizeof address); /* ISO C has no cast from void * to a function */ \
    }
    FA_DRIVER_SYMBOLS(FIND)
#undef FIND
    int version = 0;
    found->cuDriverGetVersion(&version);
    if (version < FA_OLDEST_DRIVER)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn needs a driver for CUDA " FA_OLDEST_DRIVER_NAME
                       " or newer: this machine's is for CUDA %d.%d",
                       version / 1000, version % 1000 / 10);
    CUresult result = found->cuInit(0);
    if (result != 0) {
        const char *text = NULL;
        found->cuGetErrorString(result, &text);
        return fa_fail(err, FA_EFAILED, "flash_attn: the CUDA driver does not start: %s", text ? text : "?");
    }
    return FA_OK;
}

fa_status fa_driver_get(const fa_driver **out, fa_error *err) {
    fa_status status = FA_OK;
    if (!atomic_load_explicit(&driver_is_ready, memory_order_acquire)) {
        fa_lock_acquire(&lock);
        if (!atomic_load(&driver_is_ready)) {
            fa_driver found = {0};
            status = load_driver(&found, err);
            if (status == FA_OK) {
                driver = found;
                atomic_store_explicit(&driver_is_ready, true, memory_order_release);
            }
        }
        fa_lock_release(&lock);
    }
    *out = &driver;
    return status;
}

fa_status fa_driver_check(CUresult result, const char *attempt, fa_error *err) {
    if (result == 0) return FA_OK;
    const char *name = NULL, *text = NULL;
    driver.cuGetErrorName(result, &name);
    driver.cuGetErrorString(result, &text);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        size_t free_bytes = 0, bytes = 0;
        driver.cuMemGetInfo_v2(&free_bytes, &bytes);
        return fa_fail(err, FA_ENOMEM_GPU,
                       "CUDA out of memory: %s failed with %s (%d); of the GPU's %zu MiB %zu are free", attempt,
                       name ? name : "an error", result, bytes >> 20, free_bytes >> 20);
    }
    return fa_fail(err, FA_EFAILED, "flash_attn: %s failed with %s (%d): %s", attempt, name ? name : "an error", result,
                   text ? text : "unknown to the driver");
}

/* ---- GPUs ------------------------------------------------------------------------------------------------------ */

static fa_gpu gpus[FA_MAX_GPUS];
static atomic_bool gpu_is_ready[FA_MAX_GPUS];

static fa_status ask_gpu(int device_idx, fa_gpu *gpu, fa_error *err) {
    int major = 0, minor = 0;
    fa_status status = fa_driver_check(driver.cuDeviceGet(&gpu->device, device_idx), "looking for the GPU", err);
    if (status == FA_OK)
        status = fa_driver_check(driver.cuDevicePrimaryCtxRetain(&gpu->context, gpu->device),
                                 "entering PyTorch's context on the GPU", err);
    if (status != FA_OK) return status;
    driver.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, gpu->device);
    driver.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, gpu->device);
    driver.cuDeviceGetAttribute(&gpu->num_sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, gpu->device);
    gpu->capability = 10 * major + minor;
    return FA_OK;
}

fa_status fa_gpu_get(int device_idx, const fa_gpu **out, fa_error *err) {
    const fa_driver *unused;
    fa_status status = fa_driver_get(&unused, err);
    if (status != FA_OK) return status;
    if (device_idx < 0 || device_idx >= FA_MAX_GPUS)
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: the GPU has index %d; up to %d are supported", device_idx,
                       FA_MAX_GPUS);
    if (!atomic_load_explicit(&gpu_is_ready[device_idx], memory_order_acquire)) {
        fa_lock_acquire(&lock);
        if (!atomic_load(&gpu_is_ready[device_idx])) {
            status = ask_gpu(device_idx, &gpus[device_idx], err);
            if (status == FA_OK) atomic_store_explicit(&gpu_is_ready[device_idx], true, memory_order_release);
        }
        fa_lock_release(&lock);
    }
    *out = &gpus[device_idx];
    return status;
}

fa_status fa_context_enter(const fa_gpu *gpu, fa_context_guard *guard, fa_error *err) {
    CUcontext current = NULL;
    guard->pushed = false;
    fa_status status = fa_driver_check(driver.cuCtxGetCurrent(&current), "asking for the current context", err);
    if (status != FA_OK || current == gpu->context) return status;
    status = fa_driver_check(driver.cuCtxPushCurrent_v2(gpu->context), "entering PyTorch's context on the GPU", err);
    guard->pushed = status == FA_OK;
    return status;
}

void fa_context_leave(const fa_context_guard *guard) {
    CUcontext popped;
    if (guard->pushed) driver.cuCtxPopCurrent_v2(&popped);
}

/* ---- NVRTC ----------------------------------------------------------------------------------------------------- */

static fa_lock nvrtc_lock = FA_LOCK_INIT;
static fa_nvrtc nvrtc;
static bool nvrtc_is_ready;

/* The folder that holds torch and NVIDIA's packages: libtorch lies in <folder>/torch/lib. */
static bool find_packages_folder(char *path, size_t room) {
    void *address;
    memcpy(&address, &fa_torch.aoti_torch_get_dim, sizeof address);
    if (!address || !path_of_address(address, path, room)) return false;
    for (int level = 0; level < 3; level++) { /* the file, lib, torch */
        char *slash = strrchr(path, '/'), *backslash = strrchr(path, '\\');
        if (backslash && (!slash || backslash > slash)) slash = backslash;
        if (!slash) return false;
        *slash = '\0';
    }
    return true;
}

static void *open_in_folders(const char *root, const char *const *folders, size_t num_folders) {
    char path[1024];
    for (size_t name = 0; name < NUM(nvrtc_names); name++)
        for (size_t folder = 0; folder < num_folders; folder++) {
            if ((size_t)snprintf(path, sizeof path, "%s/%s/%s", root, folders[folder], nvrtc_names[name]) >=
                sizeof path)
                continue;
            void *library = open_library(path);
            if (library) return library;
        }
    return NULL;
}

static void *open_nvrtc(void) {
    char path[1024], packages[1024], toolkit[1024];
    void *library = fa_environment_get(FA_FLASH_ATTN_NVRTC, path, sizeof path) ? open_library(path) : NULL;
    for (size_t i = 0; !library && i < NUM(nvrtc_names); i++) library = open_loaded(nvrtc_names[i]);
    if (!library && find_packages_folder(packages, sizeof packages))
        library = open_in_folders(packages, nvrtc_folders, NUM(nvrtc_folders));
    for (size_t i = 0; !library && i < NUM(nvrtc_names); i++) library = open_library(nvrtc_names[i]);
    if (!library && fa_environment_get(FA_CUDA_HOME, toolkit, sizeof toolkit))
        library = open_in_folders(toolkit, toolkit_folders, NUM(toolkit_folders));
    return library;
}

/* NVRTC opens a second library by name when it compiles. It lies beside the first, where the system does not look;
 * once it is loaded, the name is enough. */
static void open_builtins(const fa_nvrtc *found) {
    char path[sizeof found->path + 64];
    const char *slash = strrchr(found->path, '/'), *backslash = strrchr(found->path, '\\');
    if (backslash && (!slash || backslash > slash)) slash = backslash;
    if (!slash) return;
    snprintf(path, sizeof path, "%.*s" BUILTINS_NAME, (int)(slash + 1 - found->path), found->path, found->major,
             found->minor);
    open_library(path);
}

/* Releases of one version differ in nothing else that the library says. 0: unknown. */
static long size_of_file(const char *path) {
    FILE *file = *path ? fopen(path, "rb") : NULL;
    long bytes = 0;
    if (file && (fseek(file, 0, SEEK_END) != 0 || (bytes = ftell(file)) < 0)) bytes = 0;
    if (file) fclose(file);
    return bytes;
}

static fa_status load_nvrtc(fa_nvrtc *found, fa_error *err) {
    void *library = open_nvrtc();
    if (!library)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: this kernel is not compiled yet and %s, which would compile it, was not found: "
                       "install NVIDIA's package nvidia-cuda-nvrtc, or set FLASH_ATTN_NVRTC to the library's path",
                       nvrtc_names[0]);
#define FIND(symbol, result, parameters)                                                           \
    {                                                                                              \
        void *address = find_symbol(library, #symbol);                                             \
        if (!address) return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: NVRTC lacks %s", #symbol); \
        memcpy(&found->symbol, &address, sizeof address);                                          \
    }
    FA_NVRTC_SYMBOLS(FIND)
#undef FIND
    if (found->nvrtcVersion(&found->major, &found->minor) != 0)
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: NVRTC does not say its version");
    void *address;
    memcpy(&address, &found->nvrtcVersion, sizeof address);
    if (!path_of_address(address, found->path, sizeof found->path)) found->path[0] = '\0';
    found->identity = (uint32_t)(1000 * found->major + 10 * found->minor) ^ (uint32_t)size_of_file(found->path) << 8;
    open_builtins(found);
    return FA_OK;
}

fa_status fa_nvrtc_get(const fa_nvrtc **out, fa_error *err) {
    fa_status status = FA_OK;
    fa_lock_acquire(&nvrtc_lock);
    if (!nvrtc_is_ready) {
        fa_nvrtc found = {0};
        status = load_nvrtc(&found, err);
        if (status == FA_OK) nvrtc = found, nvrtc_is_ready = true;
    }
    fa_lock_release(&nvrtc_lock);
    *out = &nvrtc;
    return status;
}
