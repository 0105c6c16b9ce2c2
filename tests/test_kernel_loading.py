"""Loading and launching of GPU kernels, through a C program with a stub of the driver."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
GCC = shutil.which("gcc")

pytestmark = pytest.mark.skipif(GCC is None, reason="gcc is not installed")

# A kernel is the address of its name, and a library has one kernel. A command prints nothing unless it fails.
PROGRAM = r"""
#include "gpu/kernels.c"

#include "gpu/host.h"
#include "gpu/launch.h"
#include "gpu/memory.h"
#include "gpu/slots.h"

#include <sched.h>
#include <time.h>

#define CHECK(condition)                                                  \
    do {                                                                  \
        if (!(condition)) {                                               \
            printf("line %d: %s: %s\n", __LINE__, #condition, err.text);  \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

/* ---- the driver ----------------------------------------------------------------------------------------------- */

enum { LOAD = 1, GET, LOOK, ALLOW, FUNCTION, LAUNCH, KEEP };
static _Thread_local struct {
    int fails_at, with, times; /* the step, the result, how often */
    int loads, unloads, launches, static_shared, compilations, emptied, capturing;
    bool has_file, cannot_write;
    uint64_t filled, free_bytes;
    const char *launched;
} state;
static fa_error err;

static CUresult step(int at) {
    if (at != state.fails_at || state.times == 0) return 0;
    state.times--;
    return state.with;
}
static CUresult load_data(CUlibrary *library, const void *image, int *a, void **b, unsigned c, int *d, void **e,
                          unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    if (step(LOAD)) return state.with;
    *library = (CUlibrary)image;
    state.loads++;
    return 0;
}
static CUresult unload(CUlibrary library) { return (void)library, state.unloads++, 0; }
static CUresult get_kernel(CUkernel *kernel, CUlibrary library, const char *name) {
    if (strcmp((const char *)library, name) != 0) return 500; /* not found */
    *kernel = (CUkernel)library;
    return step(GET);
}
static CUresult look(int *value, int attribute, CUkernel kernel, CUdevice device) {
    (void)kernel, (void)device;
    *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? state.static_shared : -1;
    return step(LOOK);
}
static CUresult look_at_device(int *value, int attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK ? 1024 : -1;
    return 0;
}
static CUresult allow(int attribute, int value, CUkernel kernel, CUdevice device) {
    (void)attribute, (void)value, (void)kernel, (void)device;
    return step(ALLOW);
}
static CUresult get_function(CUfunction *function, CUkernel kernel) {
    *function = (CUfunction)kernel;
    return step(FUNCTION);
}
static CUresult exchange(int *mode) { return (void)mode, 0; }
static CUresult launch(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    (void)config, (void)parameters, (void)extra;
    if (step(LAUNCH)) return state.with;
    state.launched = (const char *)function;
    state.launches++;
    return 0;
}
static CUresult is_capturing(CUstream stream, int *status) { return (void)stream, *status = state.capturing > 0, 0; }
/* A capture is a number, its graph the address of what it keeps. */
static struct graph {
    void (*destroy[64])(void *);
    void *kept[64];
    int num;
} graphs[4096];
static void (*last_destroy)(void *);
static CUresult capture_info(CUstream stream, int *status, uint64_t *id, CUgraph *graph, const void **a, const void **b,
                             size_t *c) {
    (void)stream, (void)a, (void)b, (void)c;
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE, *id = (uint64_t)state.capturing;
    *graph = (CUgraph)&graphs[state.capturing];
    return 0;
}
static CUresult create(CUuserObject *object, void *value, void (*destroy)(void *), unsigned num, unsigned flags) {
    (void)num, (void)flags;
    *object = value, last_destroy = destroy;
    return 0;
}
static CUresult release(CUuserObject object, unsigned num) { return (void)num, last_destroy(object), 0; }
static CUresult retain(CUgraph graph, CUuserObject object, unsigned num, unsigned flags) {
    struct graph *g = (struct graph *)graph;
    (void)num, (void)flags;
    if (step(KEEP)) return state.with;
    g->kept[g->num] = object, g->destroy[g->num++] = last_destroy;
    return 0;
}
static void destroy_graph(int capture) {
    struct graph *g = &graphs[capture];
    while (g->num > 0) g->num--, g->destroy[g->num](g->kept[g->num]);
}
static CUresult fill(uint64_t to, uint32_t value, size_t num, CUstream stream) {
    (void)to, (void)value, (void)stream;
    state.filled += num;
    return 0;
}
static CUresult fill_rows(uint64_t to, size_t pitch, unsigned char value, size_t width, size_t height, CUstream s) {
    (void)to, (void)pitch, (void)value, (void)width, (void)height, (void)s;
    return 0;
}
static CUresult memory(size_t *free_bytes, size_t *bytes) {
    return *free_bytes = state.free_bytes, *bytes = 1 << 30, 0;
}
static CUresult current(CUcontext *context) { return *context = NULL, 0; }

static const fa_driver driver = {
    .cuLibraryLoadData = load_data, .cuLibraryUnload = unload, .cuLibraryGetKernel = get_kernel,
    .cuKernelGetAttribute = look, .cuDeviceGetAttribute = look_at_device, .cuKernelSetAttribute = allow,
    .cuKernelGetFunction = get_function, .cuThreadExchangeStreamCaptureMode = exchange, .cuLaunchKernelEx = launch,
    .cuStreamIsCapturing = is_capturing, .cuStreamGetCaptureInfo_v3 = capture_info, .cuUserObjectCreate = create,
    .cuUserObjectRelease = release, .cuGraphRetainUserObject = retain, .cuMemsetD32Async = fill,
    .cuMemGetInfo_v2 = memory, .cuMemsetD2D8Async = fill_rows, .cuCtxGetCurrent = current,
};
static const fa_gpu gpus[2] = {{.device = 0, .capability = 90}, {.device = 1, .capability = 90}};

/* ---- what lies around ------------------------------------------------------------------------------------------ */

fa_status fa_driver_get(const fa_driver **out, fa_error *e) { return (void)e, *out = &driver, FA_OK; }
fa_status fa_gpu_get(int idx, const fa_gpu **gpu, fa_error *e) { return (void)e, *gpu = &gpus[idx], FA_OK; }
fa_status fa_context_enter(const fa_gpu *gpu, fa_context_guard *guard, fa_error *e) {
    return (void)gpu, (void)guard, (void)e, FA_OK;
}
void fa_context_leave(const fa_context_guard *guard) { (void)guard; }
static fa_status current_stream(int idx, void **stream, fa_error *e) {
    return (void)idx, (void)e, *stream = NULL, FA_OK;
}
fa_status fa_driver_check(CUresult result, const char *attempt, fa_error *e) {
    if (result == 0) return FA_OK;
    const fa_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? FA_ENOMEM_GPU : FA_EUNSUPPORTED;
    return fa_fail(e, status, "%s: %d", attempt, result);
}
fa_status fa_variant_key(fa_variant v, uint64_t *key, fa_error *e) { return (void)v, (void)e, *key = 0, FA_OK; }
static fa_blob blob_of(const char *name) {
    fa_blob cubin = {malloc(128), 128};
    snprintf(cubin.data, 128, "%s", name);
    return cubin;
}
bool fa_cache_read(const char *name, uint64_t key, fa_blob *cubin) {
    (void)key;
    if (state.has_file) *cubin = blob_of(name);
    return state.has_file;
}
bool fa_cache_write(const char *name, uint64_t key, const fa_blob *cubin) {
    return (void)name, (void)key, (void)cubin, state.has_file = !state.cannot_write;
}
struct fa_compilation {
    fa_variant variant;
};
fa_status fa_compilation_new(fa_variant variant, fa_compilation **c, fa_error *e) {
    (void)e;
    *c = malloc(sizeof **c);
    (*c)->variant = variant;
    return FA_OK;
}
static atomic_int num_begun, num_ended, fails_to_compile;
fa_status fa_compilation_run(fa_compilation *c, fa_blob *cubin, fa_error *e) {
    atomic_fetch_add(&num_begun, 1);
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    const fa_status status = fails_to_compile ? FA_EFAILED : fa_variant_compile(c->variant, cubin, e);
    atomic_fetch_add(&num_ended, 1);
    return status;
}
void fa_compilation_free(fa_compilation *c) { (void)c; }
void fa_compile_failure(char **log, char **mods) { *log = *mods = NULL; }
fa_status fa_variant_compile(fa_variant variant, fa_blob *cubin, fa_error *e) {
    char name[FA_VARIANT_NAME_BYTES];
    (void)e;
    fa_variant_name(variant, name);
    *cubin = blob_of(name);
    state.compilations++;
    return FA_OK;
}
static void empty_cache(void) { state.emptied++; }
static void read_environment(void) {}
fa_gpu_host fa_host = {current_stream, empty_cache, read_environment, NULL};

/* The driver keeps a copy of a cubin; here its address is the kernel, so that it must stay. */
static void keep(void *pointer) { (void)pointer; }

/* ---- commands --------------------------------------------------------------------------------------------------- */

static const fa_variant some = {FA_FWD_SM90, 0, FA_IN_BF16, 90};

/* Each step of a load fails once: nothing stays, and the next call starts from the beginning. */
static void failures(void) {
    for (int at = LOAD; at <= FUNCTION; at++)
        for (int has_file = 0; has_file < 2; has_file++) {
            CUkernel kernel;
            memset(table, 0, sizeof table);
            memset(&state, 0, sizeof state);
            state.has_file = has_file, state.fails_at = at, state.with = CUDA_ERROR_OUT_OF_MEMORY, state.times = 1;
            CHECK(fa_kernel_load(some, &gpus[0], &kernel, &err) == FA_ENOMEM_GPU);
            CHECK(strstr(err.text, "attn_fwd_sm90_bf16") || at == LOOK);
            CHECK(state.loads == state.unloads && state.loads == (at > LOAD) && state.compilations == !has_file);
            CHECK(!fa_kernel_is_loaded(some, &gpus[0], &kernel) && state.has_file);
            CHECK(fa_kernel_load(some, &gpus[0], &kernel, &err) == FA_OK && state.compilations == !has_file);
            CHECK(fa_kernel_is_loaded(some, &gpus[0], &kernel) && state.loads == state.unloads + 1);
            /* another GPU, on which it fails, too, loads its own */
            state.times = 1;
            CHECK(fa_kernel_load(some, &gpus[1], &kernel, &err) == FA_ENOMEM_GPU);
            CHECK(fa_kernel_is_loaded(some, &gpus[0], &kernel) && !fa_kernel_is_loaded(some, &gpus[1], &kernel));
            CHECK(state.loads == state.unloads + 1);
        }
    /* a file that does not suit the driver is compiled anew */
    CUkernel kernel;
    memset(table, 0, sizeof table);
    memset(&state, 0, sizeof state);
    state.has_file = true, state.fails_at = LOAD, state.with = 209, state.times = 1;
    CHECK(fa_kernel_load(some, &gpus[0], &kernel, &err) == FA_OK && state.compilations == 1 && state.loads == 1);
}

static void static_shared_memory(void) {
    const fa_variant alike[] = {some, {FA_BWD_SM90, 0, 0, 90}, {FA_BWD_WIDE_SM90, 0, 0, 90}};
    CUkernel kernel;
    state.static_shared = 16;
    for (int i = 0; i < 3; i++) {
        CHECK(fa_kernel_load(alike[i], &gpus[0], &kernel, &err) == FA_EUNSUPPORTED);
        CHECK(strstr(err.text, "wants its shared memory to begin at 1024") && strstr(err.text, "1024 + 16 bytes"));
    }
    CHECK(fa_kernel_load((fa_variant){FA_KVCACHE, 0, 0, 90}, &gpus[0], &kernel, &err) == FA_OK);
}

static fa_status launch_on(const fa_gpu *gpu, fa_variant variant) {
    const fa_problem problem = {.b = 1};
    const fa_plan plan = {.gpu = {.row = 0}};
    const fa_cuda_call call = {.problem = &problem, .plan = &plan, .gpu = gpu, .driver = &driver};
    const int parameters = 0;
    return fa_cuda_launch(&call, variant, (fa_launch){1, 1, 1, .threads = 32}, &parameters, &err);
}
static fa_status launch_one(fa_variant variant) { return launch_on(&gpus[0], variant); }

/* A launch on an imagined GPU compiles the kernel that the same launch loads on a GPU, and loads nothing. */
static void imagined(void) {
    const fa_gpu imagined_gpu = {.device = FA_MAX_GPUS, .capability = 90, .is_imagined = true};
    const fa_variant with_mods = {FA_FWD_SM90, 0, FA_IN_BF16 | FA_FLEX, 90, .mods_hash = 0x123456789abcdef0};
    int num;
    fa_asked_kernels_reset(FA_ABSENT_NOTED);
    for (int i = 0; i < 20; i++) CHECK(launch_on(&imagined_gpu, i % 2 ? some : with_mods) == FA_OK);
    const fa_asked_kernel *asked_for = fa_asked_kernels(&num);
    CHECK(num == 2 && asked_for[0].is_absent && asked_for[1].is_absent && !asked_for[0].is_compiled);
    CHECK(state.compilations == 0);
    for (int has_file = 0; has_file < 2; has_file++) {
        fa_asked_kernels_reset(FA_ABSENT_COMPILED);
        CHECK(launch_on(&imagined_gpu, with_mods) == FA_OK && launch_on(&imagined_gpu, with_mods) == FA_OK);
        asked_for = fa_asked_kernels(&num);
        CHECK(num == 1 && asked_for->is_absent == !has_file && asked_for->is_compiled == !has_file);
        CHECK(asked_for->arch == 90 && state.compilations == 1 && state.loads == 0 && state.has_file);
    }
    CHECK(launch_one(with_mods) == FA_OK && state.compilations == 1 && state.loads == 1);
    CHECK(strcmp(state.launched, asked_for->name) == 0 && strstr(asked_for->name, "_flex_123456789abcdef0"));
    for (int row = 0; row < fa_families[FA_FWD_ANY].num_rows; row++) /* the list grows */
        CHECK(launch_on(&imagined_gpu, (fa_variant){FA_FWD_ANY, row, FA_IN_F32 * (row >= 6), 80}) == FA_OK);
    fa_asked_kernels(&num);
    CHECK(num == 1 + fa_families[FA_FWD_ANY].num_rows && num > 8);
    fa_asked_kernels_reset(FA_ABSENT_NOTED);
    CHECK(!fa_asked_kernels(&num) && num == 0);
}

static void *compile_all(void *unused) {
    state.cannot_write = true; /* each thread of this test has files of its own */
    while (fa_kernel_compile_pending()) {}
    return unused;
}

/* Kernels that a call on an imagined GPU left pending are compiled later, and once. */
static void compiled_ahead(void) {
    const fa_gpu imagined_gpu = {.device = FA_MAX_GPUS, .capability = 90, .is_imagined = true};
    int num;
    CHECK(!fa_kernel_compile_pending());
    for (int writes = 0; writes < 2; writes++) {
        memset(table, 0, sizeof table);
        memset(&state, 0, sizeof state);
        state.cannot_write = !writes;
        fa_asked_kernels_reset(FA_ABSENT_PENDING);
        CHECK(launch_on(&imagined_gpu, some) == FA_OK && launch_on(&imagined_gpu, some) == FA_OK);
        const fa_asked_kernel *asked_for = fa_asked_kernels(&num);
        CHECK(num == 1 && asked_for->is_absent && !asked_for->is_compiled && state.compilations == 0);
        CHECK(fa_kernel_compile_pending() && state.compilations == 1 && state.has_file == writes);
        CHECK(!fa_kernel_compile_pending());
        CHECK(launch_one(some) == FA_OK && state.compilations == 1 && state.loads == 1);
    }
    fa_asked_kernels_reset(FA_ABSENT_PENDING); /* a kernel that is there is not pending */
    CHECK(launch_on(&imagined_gpu, some) == FA_OK && !fa_kernel_compile_pending());
    /* a kernel that came to the disk meanwhile is not compiled; one that does not compile is left to its call */
    for (int fails = 0; fails < 2; fails++) {
        state.has_file = false;
        fa_asked_kernels_reset(FA_ABSENT_PENDING);
        CHECK(launch_on(&imagined_gpu, some) == FA_OK);
        state.has_file = !fails, state.compilations = 0, fails_to_compile = fails;
        CHECK(fa_kernel_compile_pending() && !fa_kernel_compile_pending() && state.compilations == 0);
        memset(table, 0, sizeof table);
        CHECK(launch_one(some) == FA_OK && state.compilations == fails);
    }
    /* a call waits for the thread that compiles its kernel */
    fails_to_compile = num_begun = num_ended = 0;
    for (int i = 1; i <= 200; i++) {
        pthread_t other;
        memset(table, 0, sizeof table);
        memset(&state, 0, sizeof state);
        fa_asked_kernels_reset(FA_ABSENT_PENDING);
        CHECK(launch_on(&imagined_gpu, some) == FA_OK);
        pthread_create(&other, NULL, compile_all, NULL);
        while (num_begun < i) sched_yield();
        CHECK(launch_one(some) == FA_OK && num_ended == i && state.compilations == 0 && state.loads == 1);
        pthread_join(other, NULL);
    }
    CHECK(!all_pending);
}

/* Without memory torch gives back what it holds unused, once, and not while a graph records. */
static void launches(void) {
    for (int at = LOAD; at <= LAUNCH; at++)
        for (int times = 1; times <= 2; times++)
            for (int capturing = 0; capturing < 2; capturing++) {
                memset(table, 0, sizeof table);
                memset(&state, 0, sizeof state);
                state.fails_at = at, state.with = CUDA_ERROR_OUT_OF_MEMORY, state.times = times;
                state.capturing = capturing;
                const bool works = times == 1 && !capturing;
                CHECK(launch_one(some) == (works ? FA_OK : FA_ENOMEM_GPU));
                CHECK(state.emptied == !capturing && state.launches == works);
                state.times = 0;
                CHECK(launch_one(some) == FA_OK && state.launches == 1 + works && state.emptied == !capturing);
            }
    for (int is_short = 0; is_short < 2; is_short++) { /* what the driver says of a first launch on a full GPU */
        state.fails_at = LAUNCH, state.with = CUDA_ERROR_INVALID_VALUE, state.times = 1, state.emptied = 0;
        state.free_bytes = is_short ? 1 << 20 : 1 << 29;
        state.capturing = state.loads = 0;
        CHECK(launch_one(some) == (is_short ? FA_OK : FA_EUNSUPPORTED));
        CHECK(state.emptied == is_short && state.loads == is_short); /* by a copy of the kernel of its own */
        CHECK(launch_one(some) == FA_OK && state.loads == is_short);
    }
    state.free_bytes = 1 << 20;
    for (int i = 0; i < 100; i++) {
        state.times = 2;
        CHECK(launch_one(some) == FA_ENOMEM_GPU);
    }
    CHECK(state.loads < 20 && launch_one(some) == FA_OK);
    state.fails_at = LAUNCH, state.with = 719, state.times = 1, state.emptied = 0;
    CHECK(launch_one(some) == FA_EUNSUPPORTED && state.emptied == 0);
    CHECK(strstr(err.text, "launching the kernel attn_fwd_sm90_bf16"));
}

/* Two threads, and variants that belong in one place of the table. Where other processes take all cores, the threads
 * wait for these at each meeting. So the rounds end after some seconds, too. */
static atomic_int num_arrived, num_loaded;
static fa_variant colliding[2];
static atomic_bool is_wrong, is_over;

static void meet(int num) {
    atomic_fetch_add(&num_arrived, 1);
    while (atomic_load(&num_arrived) < num) sched_yield();
}

static uint64_t slot_of(fa_variant v) { return (number_of(v, &gpus[0]) * 0x9e3779b97f4a7c15u >> 40) % TABLE_SLOTS; }

static void find_collision(void) {
    for (int row = 0; row < fa_families[FA_FWD_SM90].num_rows; row++)
        for (unsigned features = 0; features < 128; features++)
            for (int arch = 0; arch < 128; arch++) {
                colliding[0] = some, colliding[1] = (fa_variant){FA_FWD_SM90, row, features, arch};
                if (row > 0 && slot_of(colliding[0]) == slot_of(colliding[1])) return;
            }
    puts("no collision"), exit(1);
}

enum { ROUNDS = 20000, SECONDS = 5 };
static void *load_in_turns(void *own) {
    const int me = own != NULL;
    const uint64_t next_slot = (slot_of(some) + 1) % TABLE_SLOTS;
    char want[FA_VARIANT_NAME_BYTES];
    static _Thread_local fa_error unused;
    fa_variant_name(colliding[me], want);
    state.has_file = true;
    const time_t start = time(NULL);
    for (int i = 0; i < ROUNDS; i++) {
        CUkernel kernel;
        if (me == 0 && time(NULL) > start + SECONDS) atomic_store(&is_over, true);
        meet(4 * i + 2);
        if (is_over) break;
        if (me == 0) memset(&table[slot_of(some)], 0, sizeof *table), memset(&table[next_slot], 0, sizeof *table);
        meet(4 * i + 4);
        bool found = false; /* one asks for its kernel all the while that the other loads another */
        do {
            found = fa_kernel_is_loaded(colliding[me], &gpus[0], &kernel);
        } while (me == 1 && !found && atomic_load(&num_loaded) <= i);
        if (!found && fa_kernel_load(colliding[me], &gpus[0], &kernel, &unused) != FA_OK)
            atomic_store(&is_wrong, true);
        else if (!kernel || strcmp((const char *)kernel, want) != 0)
            atomic_store(&is_wrong, true);
        if (me == 0) atomic_fetch_add(&num_loaded, 1);
    }
    return NULL;
}

static void race(void) {
    pthread_t other;
    find_collision();
    pthread_create(&other, NULL, load_in_turns, colliding);
    load_in_turns(NULL);
    pthread_join(other, NULL);
    CHECK(!is_wrong);
}

static int slot(int capture, uintptr_t stream) {
    const fa_plan plan = {.gpu = {.row = 0}};
    const fa_cuda_call call = {.plan = &plan, .driver = &driver, .stream = (CUstream)stream};
    state.capturing = capture;
    return fa_cuda_slot(&call, 2048);
}

static void slots(void) {
    CHECK(slot(0, 64) >= 0 && slot(0, 64) == slot(0, 64) && slot(0, 64) != slot(0, 128) && slot(0, 64) < 1024);
    const int first = slot(1, 64), second = slot(2, 64), side = slot(1, 128);
    CHECK(first >= 1024 && second >= 1024 && side >= 1024 && first != second && first != side && second != side);
    for (int i = 0; i < 100; i++) CHECK(slot(1, 64) == first && slot(1, 128) == side && slot(2, 64) == second);
    destroy_graph(1);
    CHECK(slot(2, 64) == second);
    for (int capture = 3; capture < 4000; capture++) { /* more than there are, but not at once */
        CHECK(slot(capture, 64) >= 1024 && slot(capture, 64) != second);
        destroy_graph(capture);
    }
    int num = 0;
    while (slot(3 + num, 64) >= 0) num++;
    CHECK(num == 1024 - 1 && slot(3, 64) >= 0 && slot(2, 64) == second); /* the graph of `second` lives */
    destroy_graph(3);
    state.fails_at = KEEP, state.with = 1, state.times = 1; /* a slot that no graph keeps is not given out */
    CHECK(slot(4000, 64) < 0 && slot(4000, 64) >= 0);
}

/* Packed rows that belong to no sequence are filled in an lse that somebody wants. */
static void unwanted_lse(void) {
    fa_problem p = {.pass = FA_FWD, .h = 8, .b = 1, .d = 64, .d_v = 64, .total_q = 30000, .len_q = 30000,
                    .dtype = FA_BF16};
    CHECK(fa_cuda_zero_tensors(&p, &driver, NULL, &err) == FA_OK && state.filled == 0);
    p.lse.data = (float *)&p, p.lse.stride_h = 30000;
    CHECK(fa_cuda_zero_tensors(&p, &driver, NULL, &err) == FA_OK && state.filled == 240000);
}

int main(int argc, char **argv) {
    (void)argc;
#define COMMAND(name) if (strcmp(argv[1], #name) == 0) name()
    COMMAND(failures);
    COMMAND(static_shared_memory);
    COMMAND(launches);
    COMMAND(race);
    COMMAND(slots);
    COMMAND(unwanted_lse);
    COMMAND(imagined);
    COMMAND(compiled_ahead);
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loading")
    # A kernel is the address of its cubin, which must not move.
    (folder / "main.c").write_text(
        "#include <stdlib.h>\n#define free(pointer) keep(pointer)\nstatic void keep(void *);\n" + PROGRAM
    )
    names = ("gpu/launch", "gpu/slots", "gpu/memory", "plan/kernel_table", "flash_attn")
    files = [CSRC / f"{name}.c" for name in names]
    command = [GCC, "-std=c11", "-O2", "-D_GNU_SOURCE", "-I", CSRC, folder / "main.c", *files, "-lpthread", "-lm"]
    subprocess.run([*command, "-o", folder / "loading"], check=True)
    return folder / "loading"


@pytest.mark.parametrize(
    "command",
    ("failures", "static_shared_memory", "launches", "race", "slots", "unwanted_lse", "imagined", "compiled_ahead"),
)
def test_loading(program, command):
    done = subprocess.run([program, command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
