/* Finds the CUDA driver and its GPUs at first use. */
#include "driver.h"

#include <stdatomic.h>
#include <string.h>

#include "system/library.h"
#include "system/lock.h"

#if defined(_WIN32)
#define DRIVER_LIBRARY "nvcuda.dll"
#else
#define DRIVER_LIBRARY "libcuda.so.1"
#endif

/* ---- an imagined GPU ------------------------------------------------------------------------------------------- */

/* What calls ask of a driver between the plan and the end of the last launch. */
static CUresult launch_nothing(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    return (void)config, (void)function, (void)parameters, (void)extra, 0;
}
static CUresult is_not_capturing(CUstream stream, int *status) { return (void)stream, *status = 0, 0; }
static CUresult fill_nothing(uint64_t to, uint32_t value, size_t num, CUstream stream) {
    return (void)to, (void)value, (void)num, (void)stream, 0;
}
static CUresult fill_no_rows(uint64_t to, size_t pitch, unsigned char value, size_t width, size_t height,
                             CUstream stream) {
    return (void)to, (void)pitch, (void)value, (void)width, (void)height, (void)stream, 0;
}
static const fa_driver imagined_driver = {.cuLaunchKernelEx = launch_nothing,
                                          .cuStreamIsCapturing = is_not_capturing,
                                          .cuMemsetD32Async = fill_nothing,
                                          .cuMemsetD2D8Async = fill_no_rows};
static THREAD_LOCAL fa_gpu imagined;

void fa_gpu_imagine(int capability, int num_sms) {
    imagined =
        (fa_gpu){.device = FA_MAX_GPUS, .capability = capability, .num_sms = num_sms, .is_imagined = capability > 0};
}

const fa_gpu *fa_gpu_imagined(void) { return imagined.is_imagined ? &imagined : NULL; }

/* ---- the driver ------------------------------------------------------------------------------------------------ */

static fa_lock lock = FA_LOCK_INIT;
static fa_driver driver;
static atomic_bool driver_is_ready;

static fa_status load_driver(fa_driver *found, fa_error *err) {
    void *library = fa_library_open(DRIVER_LIBRARY);
    if (!library)
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: CUDA tensors need NVIDIA's driver, and " DRIVER_LIBRARY " is not on this machine");
#define FIND(symbol, parameters)                                                                            \
    {                                                                                                       \
        void *address = fa_library_symbol(library, #symbol);                                                \
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
    if (imagined.is_imagined) return *out = &imagined_driver, FA_OK;
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
    if (imagined.is_imagined) return *out = &imagined, FA_OK;
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
    if (gpu->is_imagined) return FA_OK;
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
