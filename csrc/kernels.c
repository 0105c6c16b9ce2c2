/* Finds and loads kernels. */
#include "kernels.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/attn_fwd_params.h"
#include "lock.h"

const fa_tile fa_fwd_tiles_sm90[] = {
#define FA_FWD_TILE_SM90(d, block_kv, wgs, stages, q_stages, early, turn, split, serves) \
    {d, block_kv, wgs, stages, q_stages, early, turn, split, serves, "sm90_d" #d "_wg" #wgs "_kv" #block_kv},
#include "cuda/tiles.def"
#undef FA_FWD_TILE_SM90
};

enum { NUM_TILES = sizeof fa_fwd_tiles_sm90 / sizeof *fa_fwd_tiles_sm90 };
const int fa_num_fwd_tiles_sm90 = NUM_TILES;

void fa_variant_name(fa_variant variant, char name[FA_VARIANT_NAME_BYTES]) {
    const fa_tile *t = &fa_fwd_tiles_sm90[variant.tile];
    const unsigned f = variant.features;
    snprintf(name, FA_VARIANT_NAME_BYTES, "attn_fwd_sm90_%s_d%d_q%dkv%d%s%s%s%s%s", f & FA_IN_BF16 ? "bf16" : "fp16",
             t->d, FA_ROWS_OF_A_WARPGROUP * t->wgs, t->block_kv, f & FA_CAUSAL ? "_causal" : "",
             f & FA_LOCAL ? "_local" : "", f & FA_VARLEN ? "_varlen" : "", f & FA_SCORE ? "_score" : "",
             f & FA_DROPOUT ? "_dropout" : "");
}

/* ---- building ahead -------------------------------------------------------------------------------------------- */

/* plan_cuda.c takes the first row that fits, and a later one only for short causal problems. */
bool fa_variant_is_chosen(fa_variant variant) {
    const unsigned wanted = variant.features & FA_ALL_FEATURES;
    if (variant.tile < 0 || variant.tile >= NUM_TILES || variant.features >= FA_NUM_FEATURE_SETS) return false;
    const fa_tile *row = &fa_fwd_tiles_sm90[variant.tile];
    if ((row->serves & wanted) != wanted || (wanted & FA_CAUSAL && wanted & FA_LOCAL)) return false;
    for (const fa_tile *t = fa_fwd_tiles_sm90; t < row; t++)
        if (t->d == row->d && (t->serves & wanted) == wanted && !(t->wgs == 3 && wanted & FA_CAUSAL)) return false;
    return true;
}

fa_status fa_variant_build(fa_variant variant, bool *compiled, fa_error *err) {
    char name[FA_VARIANT_NAME_BYTES];
    fa_blob cubin = {0};
    uint64_t key;
    *compiled = false;
    if (!fa_variant_is_chosen(variant))
        return fa_fail(err, FA_EINVAL, "there is no CUDA kernel of row %d with features %u", variant.tile,
                       variant.features);
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

/* Written under the lock, kernel before devices; read without it. */
typedef struct {
    CUkernel kernel;
    _Atomic uint64_t devices; /* bit i: the kernel is set up on PyTorch's GPU i */
} loaded;

static loaded table[NUM_TILES][FA_NUM_FEATURE_SETS];
static fa_lock lock = FA_LOCK_INIT;

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

fa_status fa_kernel_get(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    loaded *entry = &table[variant.tile][variant.features];
    const uint64_t device = (uint64_t)1 << gpu->device;
    const fa_driver *driver;
    fa_status status = FA_OK;
    if (!(atomic_load_explicit(&entry->devices, memory_order_acquire) & device)) {
        status = fa_driver_get(&driver, err);
        if (status != FA_OK) return status;
        fa_lock_acquire(&lock);
        if (!entry->kernel) status = find(variant, driver, &entry->kernel, err);
        if (status == FA_OK)
            status = fa_driver_check(driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                                  FA_SHARED_BYTES, entry->kernel, gpu->device),
                                     "giving a kernel its shared memory", err);
        if (status == FA_OK) atomic_fetch_or_explicit(&entry->devices, device, memory_order_release);
        fa_lock_release(&lock);
    }
    *kernel = entry->kernel;
    return status;
}
