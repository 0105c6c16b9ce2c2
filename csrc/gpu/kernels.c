/* Finds and loads kernels. */
#include "kernels.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_cache.h"
#include "kernel_source.h"
#include "system/lock.h"

static fa_asked_kernel asked_kernel_of(fa_variant variant) {
    fa_asked_kernel kernel = {.arch = variant.arch};
    fa_variant_name(variant, kernel.name);
    return kernel;
}

/* Whoever compiles a kernel holds its lock, and looks for the kernel before. So two threads that need one kernel do
 * not both compile it. Different kernels are compiled at once, but for few that share a lock. */
static fa_lock *lock_of(uint64_t key) {
    static fa_lock locks[] = {FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT,
                              FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT,
                              FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT, FA_LOCK_INIT};
    return &locks[key % (sizeof locks / sizeof *locks)];
}

/* ---- pending kernels --------------------------------------------------------------------------------------------- */

/* A kernel that some thread will compile, or one that was compiled and could not be kept on disk. */
typedef struct pending {
    struct pending *next;
    uint64_t key;
    char name[FA_VARIANT_NAME_BYTES];
    fa_compilation *compilation; /* NULL: it was compiled */
    fa_blob cubin;
} pending;
static pending *all_pending;
static fa_lock pending_lock = FA_LOCK_INIT;

static void free_pending(pending *p) {
    fa_compilation_free(p->compilation);
    free(p->cubin.data);
    free(p);
}

static void add_pending(pending *p) {
    fa_lock_acquire(&pending_lock);
    pending **end = &all_pending;
    while (*end) end = &(*end)->next;
    *end = p, p->next = NULL;
    fa_lock_release(&pending_lock);
}

/* Takes the first kernel that is to be compiled (key NULL), or the one with this key that was compiled. */
static pending *take_pending(const uint64_t *key) {
    fa_lock_acquire(&pending_lock);
    pending **at = &all_pending;
    while (*at && (key ? (*at)->compilation || (*at)->key != *key : !(*at)->compilation)) at = &(*at)->next;
    pending *p = *at;
    if (p) *at = p->next;
    fa_lock_release(&pending_lock);
    return p;
}

static fa_status make_pending(fa_variant variant, const fa_asked_kernel *kernel, fa_error *err) {
    pending *p = calloc(1, sizeof *p);
    if (!p) return fa_fail(err, FA_ENOMEM, "flash_attn: no memory for a kernel's name");
    p->key = kernel->key;
    memcpy(p->name, kernel->name, sizeof p->name);
    const fa_status status = fa_compilation_new(variant, &p->compilation, err);
    if (status == FA_OK)
        add_pending(p);
    else
        free_pending(p);
    return status;
}

bool fa_kernel_compile_pending(void) {
    fa_error unused = {""};
    fa_blob there = {0};
    pending *p = take_pending(NULL);
    if (!p) return false;
    fa_lock *own = lock_of(p->key);
    fa_lock_acquire(own);
    bool is_kept = fa_cache_read(p->name, p->key, &there);
    if (!is_kept && fa_compilation_run(p->compilation, &p->cubin, &unused) == FA_OK) {
        is_kept = fa_cache_write(p->name, p->key, &p->cubin);
        fa_compilation_free(p->compilation);
        p->compilation = NULL;
    } else if (!is_kept) { /* The call that needs the kernel compiles it again, and says why it fails. */
        char *log, *mods;
        fa_compile_failure(&log, &mods);
        free(log);
        free(mods);
    }
    if (!is_kept && !p->compilation)
        add_pending(p);
    else
        free_pending(p);
    fa_lock_release(own);
    free(there.data);
    return true;
}

/* ---- building ahead ---------------------------------------------------------------------------------------------- */

/* Looks for the variant on disk. If the variant is absent, it may be compiled now. */
static fa_status build_it(fa_variant variant, fa_absent_kernels absent, fa_asked_kernel *kernel, fa_error *err) {
    fa_blob cubin = {0};
    kernel->is_absent = !fa_cache_read(kernel->name, kernel->key, &cubin);
    fa_status status = FA_OK;
    if (kernel->is_absent && absent == FA_ABSENT_PENDING) status = make_pending(variant, kernel, err);
    if (kernel->is_absent && absent == FA_ABSENT_COMPILED) {
        status = fa_variant_compile(variant, &cubin, err);
        kernel->is_compiled = status == FA_OK;
        if (status == FA_OK && !fa_cache_write(kernel->name, kernel->key, &cubin))
            status =
                fa_fail(err, FA_EINVAL,
                        "the compiled kernel %s could not be stored: set FLASH_ATTN_CACHE_DIR to a folder that you "
                        "and nobody else can write to",
                        kernel->name);
    }
    free(cubin.data);
    return status;
}

static fa_status build(fa_variant variant, fa_absent_kernels absent, fa_asked_kernel *kernel, fa_error *err) {
    if (absent != FA_ABSENT_COMPILED) return build_it(variant, absent, kernel, err);
    fa_lock_acquire(lock_of(kernel->key));
    const fa_status status = build_it(variant, absent, kernel, err);
    fa_lock_release(lock_of(kernel->key));
    return status;
}

fa_status fa_variant_build(fa_variant variant, bool *compiled, fa_error *err) {
    *compiled = false;
    if (!fa_variant_is_chosen(variant))
        return fa_fail(err, FA_EINVAL, "there is no CUDA kernel of family %d, row %d, with features %u for sm_%d",
                       (int)variant.family, variant.row, variant.features, variant.arch);
    fa_asked_kernel kernel = asked_kernel_of(variant);
    fa_status status = fa_variant_key(variant, &kernel.key, err);
    if (status == FA_OK) status = build(variant, FA_ABSENT_COMPILED, &kernel, err);
    *compiled = kernel.is_compiled;
    return status;
}

/* ---- kernels of calls on an imagined GPU ------------------------------------------------------------------------- */

static THREAD_LOCAL struct {
    fa_absent_kernels absent;
    int num, room;
    fa_asked_kernel *list;
} asked;

void fa_asked_kernels_reset(fa_absent_kernels absent) {
    free(asked.list);
    asked.absent = absent, asked.num = asked.room = 0, asked.list = NULL;
}

bool fa_call_is_rehearsal(void) { return asked.absent == FA_ABSENT_PENDING; }

const fa_asked_kernel *fa_asked_kernels(int *num) { return *num = asked.num, asked.list; }

static bool is_listed(const fa_asked_kernel *kernel) {
    for (int i = 0; i < asked.num; i++) {
        const fa_asked_kernel *other = &asked.list[i];
        if (other->key == kernel->key && other->arch == kernel->arch && strcmp(other->name, kernel->name) == 0)
            return true;
    }
    return false;
}

static fa_status ask_for(fa_variant variant, fa_error *err) {
    fa_asked_kernel kernel = asked_kernel_of(variant);
    fa_status status = fa_variant_key(variant, &kernel.key, err);
    if (status != FA_OK || is_listed(&kernel)) return status;
    if (asked.num == asked.room) {
        const int room = 2 * asked.room + 8;
        fa_asked_kernel *list = realloc(asked.list, (size_t)room * sizeof *list);
        if (!list) return fa_fail(err, FA_ENOMEM, "flash_attn: no memory for a list of kernels");
        asked.list = list, asked.room = room;
    }
    status = build(variant, asked.absent, &kernel, err);
    if (status == FA_OK) asked.list[asked.num++] = kernel;
    return status;
}

/* ---- loaded kernels -------------------------------------------------------------------------------------------- */

/* An open-addressed table of the kernels that are ready on a GPU. Each GPU loads its own library. So a library that
 * fails to load on one GPU is unloaded, and other GPUs keep their libraries. Entries are written under the lock. An
 * entry's number is written last and never changes, so entries can be read without the lock. */
typedef struct {
    _Atomic uint64_t number;  /* number of variant and GPU, or of a user's functions; 0: the entry is free */
    _Atomic(CUkernel) kernel; /* NULL: given up, must be loaded again */
    atomic_int num_given_up;
} loaded;

enum { TABLE_SLOTS = 8192 };
static loaded table[TABLE_SLOTS];
static fa_lock lock = FA_LOCK_INIT;

static uint64_t number_of(fa_variant v, const fa_gpu *gpu) {
    return (((uint64_t)gpu->device << 56 | (uint64_t)v.arch << 48 | (uint64_t)v.family << 40 | (uint64_t)v.row << 24 |
             v.features) +
            1) ^
           v.mods_hash;
}

/* Returns the entry of a number. *found tells whether there is such an entry. If the number has no entry, the function
 * returns the free entry for the number, or NULL if the table is full. Another thread may fill the free entry at any
 * time. */
static loaded *entry_of(uint64_t number, bool *found) {
    for (uint64_t i = 0, slot = number * 0x9e3779b97f4a7c15u >> 40; i < TABLE_SLOTS; i++, slot++) {
        loaded *entry = &table[slot % TABLE_SLOTS];
        const uint64_t other = atomic_load_explicit(&entry->number, memory_order_acquire);
        *found = other == number;
        if (*found || other == 0) return entry;
    }
    return NULL;
}

/* Some kernels rely on dynamic shared memory that is aligned to FA_SHARED_ALIGNMENT. The memory is aligned if the
 * kernel has no static shared memory and the driver reserves exactly FA_SHARED_ALIGNMENT bytes. This check gives an
 * error message instead of a kernel that traps. */
static fa_status check_shared_memory(const fa_driver *driver, fa_variant variant, const char *name, CUkernel kernel,
                                     const fa_gpu *gpu, fa_error *err) {
    int static_bytes = 0, reserved = 0;
    if (!fa_families[variant.family].aligns_shared) return FA_OK;
    fa_status status = fa_driver_check(
        driver->cuKernelGetAttribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, gpu->device),
        "asking for a kernel's shared memory", err);
    if (status == FA_OK)
        status = fa_driver_check(
            driver->cuDeviceGetAttribute(&reserved, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, gpu->device),
            "asking for a GPU's shared memory", err);
    if (status == FA_OK && (static_bytes != 0 || reserved != FA_SHARED_ALIGNMENT))
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: %s wants its shared memory to begin at %d, and with this driver and compiler it "
                       "begins behind %d + %d bytes",
                       name, (int)FA_SHARED_ALIGNMENT, reserved, static_bytes);
    return status;
}

/* Does all that a launch needs of a kernel, or nothing. If the GPU's memory is full, each step may fail, even a step
 * after the first. A library that was loaded only in part would fail at every later launch. */
static fa_status load(const fa_driver *driver, fa_variant variant, const char *name, const fa_blob *cubin,
                      const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    const int shared_bytes = fa_variant_shared_bytes(variant);
    char attempt[FA_VARIANT_NAME_BYTES + 32];
    CUlibrary library;
    CUfunction function;
    snprintf(attempt, sizeof attempt, "loading the kernel %s", name);
    fa_status status =
        fa_driver_check(driver->cuLibraryLoadData(&library, cubin->data, NULL, NULL, 0, NULL, NULL, 0), attempt, err);
    if (status != FA_OK) return status;
    status = fa_driver_check(driver->cuLibraryGetKernel(kernel, library, name), attempt, err);
    if (status == FA_OK) status = check_shared_memory(driver, variant, name, *kernel, gpu, err);
    if (status == FA_OK)
        status = fa_driver_check(driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                                              shared_bytes, *kernel, gpu->device),
                                 attempt, err);
    if (status == FA_OK) /* otherwise the driver would load the kernel at the first launch */
        status = fa_driver_check(driver->cuKernelGetFunction(&function, *kernel), attempt, err);
    if (status != FA_OK) driver->cuLibraryUnload(library);
    return status;
}

/* Finds or compiles a cubin and loads it. The driver keeps its copy of the cubin for the life of the process. */
static fa_status find_it(const fa_driver *driver, fa_variant variant, const char *name, uint64_t key, const fa_gpu *gpu,
                         CUkernel *kernel, fa_error *err) {
    fa_blob cubin = {0};
    fa_status status = FA_OK;
    pending *compiled = take_pending(&key);
    if (compiled) {
        status = load(driver, variant, name, &compiled->cubin, gpu, kernel, err);
        if (status == FA_ENOMEM_GPU)
            add_pending(compiled);
        else
            free_pending(compiled);
        if (status == FA_OK || status == FA_ENOMEM_GPU) return status;
    }
    if (fa_cache_read(name, key, &cubin)) {
        status = load(driver, variant, name, &cubin, gpu, kernel, err);
        free(cubin.data);
        /* otherwise the stored cubin does not suit this driver and is compiled here */
        if (status == FA_OK || status == FA_ENOMEM_GPU) return status;
    }
    status = fa_variant_compile(variant, &cubin, err);
    if (status != FA_OK) return status;
    status = load(driver, variant, name, &cubin, gpu, kernel, err);
    if (status == FA_OK || status == FA_ENOMEM_GPU) fa_cache_write(name, key, &cubin);
    free(cubin.data);
    return status;
}

static fa_status find(const fa_driver *driver, fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    char name[FA_VARIANT_NAME_BYTES];
    uint64_t key;
    fa_variant_name(variant, name);
    fa_status status = fa_variant_key(variant, &key, err);
    if (status != FA_OK) return status;
    fa_lock_acquire(lock_of(key));
    status = find_it(driver, variant, name, key, gpu, kernel, err);
    fa_lock_release(lock_of(key));
    return status;
}

static fa_status set_up(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    const uint64_t number = number_of(variant, gpu);
    const fa_driver *driver;
    bool found;
    fa_status status = fa_driver_get(&driver, err);
    if (status != FA_OK) return status;
    loaded *entry = entry_of(number, &found); /* looked up again, because another thread may have loaded it */
    if (!entry)
        return fa_fail(err, FA_ENOMEM, "flash_attn: more than %d CUDA kernels in one process", (int)TABLE_SLOTS);
    *kernel = found ? atomic_load_explicit(&entry->kernel, memory_order_acquire) : NULL;
    if (*kernel) return FA_OK;
    status = find(driver, variant, gpu, kernel, err);
    if (status != FA_OK) return status;
    atomic_store_explicit(&entry->kernel, *kernel, memory_order_release);
    atomic_store_explicit(&entry->number, number, memory_order_release);
    return FA_OK;
}

/* During CUDA graph capture on this thread, the driver refuses calls that may have to wait, such as loading. In the
 * relaxed mode the driver refuses them for the capturing stream only. */
static fa_status set_up_at_any_time(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    const fa_driver *driver;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    fa_status status = fa_driver_get(&driver, err);
    if (status == FA_OK)
        status = fa_driver_check(driver->cuThreadExchangeStreamCaptureMode(&mode), "preparing to load a kernel", err);
    if (status != FA_OK) return status;
    status = set_up(variant, gpu, kernel, err);
    driver->cuThreadExchangeStreamCaptureMode(&mode);
    return status;
}

bool fa_kernel_is_loaded(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel) {
    bool found;
    const loaded *entry = entry_of(number_of(variant, gpu), &found);
    if (!entry || !found) return false;
    *kernel = atomic_load_explicit(&entry->kernel, memory_order_acquire);
    return *kernel != NULL;
}

/* The kernel's library stays loaded, because another thread may be about to launch the kernel. */
void fa_kernel_give_up(fa_variant variant, const fa_gpu *gpu, CUkernel kernel) {
    enum { MOST_COPIES = 16 };
    bool found;
    loaded *entry = entry_of(number_of(variant, gpu), &found);
    if (entry && found && atomic_fetch_add(&entry->num_given_up, 1) < MOST_COPIES)
        atomic_compare_exchange_strong(&entry->kernel, &kernel, NULL);
}

fa_status fa_kernel_load(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    if (gpu->is_imagined) return *kernel = NULL, ask_for(variant, err);
    fa_lock_acquire(&lock);
    fa_status status = set_up_at_any_time(variant, gpu, kernel, err);
    fa_lock_release(&lock);
    return status;
}
