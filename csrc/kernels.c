/* Finds and loads kernels. */
#include "kernels.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lock.h"

/* ---- building ahead -------------------------------------------------------------------------------------------- */

fa_status fa_variant_build(fa_variant variant, bool *compiled, fa_error *err) {
    char name[FA_VARIANT_NAME_BYTES];
    fa_blob cubin = {0};
    uint64_t key;
    *compiled = false;
    if (!fa_variant_is_chosen(variant))
        return fa_fail(err, FA_EINVAL, "there is no CUDA kernel of family %d, row %d, with features %u for sm_%d",
                       (int)variant.family, variant.row, variant.features, variant.arch);
    fa_variant_name(variant, name);
    fa_status status = fa_variant_key(variant, &key, err);
    if (status != FA_OK) return status;
    if (!fa_cache_read(name, key, &cubin)) {
        status = fa_variant_compile(variant, &cubin, err);
        *compiled = status == FA_OK;
        if (status == FA_OK && !fa_cache_write(name, key, &cubin))
            status = fa_fail(err, FA_EINVAL, "the compiled kernel %s could not be stored", name);
    }
    free(cubin.data);
    return status;
}

/* ---- loaded kernels -------------------------------------------------------------------------------------------- */

/* An open-addressed table. Entries are written under the lock, the variant last of a new one, and read without it. */
typedef struct {
    _Atomic uint64_t variant; /* 0: free */
    CUkernel kernel;
    _Atomic uint64_t devices; /* bit i: the kernel is set up on GPU i */
} loaded;

enum { TABLE_SLOTS = 2048 };
static loaded table[TABLE_SLOTS];
static fa_lock lock = FA_LOCK_INIT;

static uint64_t number_of(fa_variant v) {
    return ((uint64_t)v.arch << 48 | (uint64_t)v.family << 40 | (uint64_t)v.row << 24 | v.features) + 1;
}

/* The variant's entry, or the free one where it belongs; NULL: the table is full. */
static loaded *entry_of(fa_variant variant) {
    const uint64_t number = number_of(variant);
    for (uint64_t i = 0, slot = number * 0x9e3779b97f4a7c15u >> 40; i < TABLE_SLOTS; i++, slot++) {
        loaded *entry = &table[slot % TABLE_SLOTS];
        const uint64_t found = atomic_load_explicit(&entry->variant, memory_order_acquire);
        if (found == number || found == 0) return entry;
    }
    return NULL;
}

static fa_status load(const fa_driver *driver, const char *name, const fa_blob *cubin, CUkernel *kernel,
                      fa_error *err) {
    CUlibrary library;
    fa_status status = fa_driver_check(driver->cuLibraryLoadData(&library, cubin->data, NULL, NULL, 0, NULL, NULL, 0),
                                       "loading a kernel", err);
    if (status != FA_OK) return status;
    status = fa_driver_check(driver->cuLibraryGetKernel(kernel, library, name), "finding a kernel in its cubin", err);
    if (status != FA_OK) driver->cuLibraryUnload(library);
    return status;
}

/* The driver takes a copy of the cubin, and keeps it for the life of the process. */
static fa_status find(fa_variant variant, const fa_driver *driver, CUkernel *kernel, fa_error *err) {
    char name[FA_VARIANT_NAME_BYTES];
    fa_blob cubin = {0};
    uint64_t key;
    fa_variant_name(variant, name);
    fa_status status = fa_variant_key(variant, &key, err);
    if (status != FA_OK) return status;
    if (fa_cache_read(name, key, &cubin)) {
        status = load(driver, name, &cubin, kernel, err);
        free(cubin.data);
        if (status == FA_OK) return FA_OK; /* else what was stored does not suit this driver: compile it here */
    }
    status = fa_variant_compile(variant, &cubin, err);
    if (status != FA_OK) return status;
    status = load(driver, name, &cubin, kernel, err);
    if (status == FA_OK) fa_cache_write(name, key, &cubin);
    free(cubin.data);
    return status;
}

static fa_status set_up(fa_variant variant, const fa_gpu *gpu, loaded **entry, fa_error *err) {
    const int shared_bytes = fa_families[variant.family].rows[variant.row].shared_bytes;
    const fa_driver *driver;
    CUfunction function;
    fa_status status = fa_driver_get(&driver, err);
    if (status != FA_OK) return status;
    loaded *e = *entry = entry_of(variant); /* again: another thread may have been here */
    if (!e) return fa_fail(err, FA_ENOMEM, "flash_attn: more than %d CUDA kernels in one process", (int)TABLE_SLOTS);
    if (!e->kernel) {
        status = find(variant, driver, &e->kernel, err);
        if (status != FA_OK) return status;
        atomic_store_explicit(&e->variant, number_of(variant), memory_order_release);
    }
    status = fa_driver_check(driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes,
                                                          e->kernel, gpu->device),
                             "giving a kernel its shared memory", err);
    if (status == FA_OK) /* else the driver would load it at its first launch */
        status = fa_driver_check(driver->cuKernelGetFunction(&function, e->kernel), "loading a kernel", err);
    if (status == FA_OK) atomic_fetch_or_explicit(&e->devices, (uint64_t)1 << gpu->device, memory_order_release);
    return status;
}

/* While a stream of this thread records a CUDA graph, the driver refuses what it might have to wait for, and loading is
 * such. Relaxed, it only refuses that to the stream itself. */
static fa_status set_up_at_any_time(fa_variant variant, const fa_gpu *gpu, loaded **entry, fa_error *err) {
    const fa_driver *driver;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    fa_status status = fa_driver_get(&driver, err);
    if (status == FA_OK)
        status = fa_driver_check(driver->cuThreadExchangeStreamCaptureMode(&mode), "preparing to load a kernel", err);
    if (status != FA_OK) return status;
    status = set_up(variant, gpu, entry, err);
    driver->cuThreadExchangeStreamCaptureMode(&mode);
    return status;
}

fa_status fa_kernel_get(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    loaded *entry = entry_of(variant);
    fa_status status = FA_OK;
    if (!entry || !(atomic_load_explicit(&entry->devices, memory_order_acquire) & (uint64_t)1 << gpu->device)) {
        fa_lock_acquire(&lock);
        status = set_up_at_any_time(variant, gpu, &entry, err);
        fa_lock_release(&lock);
    }
    *kernel = status == FA_OK ? entry->kernel : NULL;
    return status;
}

fa_variant fa_plan_variant(const fa_plan *plan, const fa_gpu *gpu) {
    return (fa_variant){(fa_family_id)plan->cuda_family, plan->cuda_row, plan->cuda_features, gpu->capability};
}
