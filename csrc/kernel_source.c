/* The text of a variant, and its compilation by NVRTC. The sources lie beside the module: in flash_attn/cuda of an
 * installed package, in csrc/cuda of a checkout. They include nothing but each other. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* dladdr */
#endif
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lock.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

static const char *const file_names[] = {"attn_fwd_sm90.cu", "ptx_sm90.cuh", "attn_fwd_params.h", "tensor_map.h"};
enum { NUM_FILES = sizeof file_names / sizeof *file_names, PATH_BYTES = 1024 };

bool fa_module_folder(char *path, size_t room) {
    static const char here = 0;
#if defined(_WIN32)
    HMODULE module;
    if (!GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                            &here, &module) ||
        GetModuleFileNameA(module, path, (DWORD)room) >= room)
        return false;
#else
    Dl_info info;
    if (!dladdr(&here, &info) || !info.dli_fname || (size_t)snprintf(path, room, "%s", info.dli_fname) >= room)
        return false;
#endif
    char *slash = strrchr(path, '/'), *backslash = strrchr(path, '\\');
    if (backslash && (!slash || backslash > slash)) slash = backslash;
    if (!slash) return (size_t)snprintf(path, room, ".") < room;
    *slash = '\0';
    return true;
}

/* ---- sources --------------------------------------------------------------------------------------------------- */

static struct {
    char folder[PATH_BYTES];
    char *text[NUM_FILES]; /* read once, kept */
    bool is_read;
} sources;
static fa_lock lock = FA_LOCK_INIT;

static char *read_text(const char *folder, const char *name) {
    char path[PATH_BYTES + 64];
    char *text = NULL;
    long bytes;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    if (fseek(file, 0, SEEK_END) == 0 && (bytes = ftell(file)) >= 0 && fseek(file, 0, SEEK_SET) == 0) {
        text = malloc((size_t)bytes + 1);
        if (text && fread(text, 1, (size_t)bytes, file) != (size_t)bytes) {
            free(text);
            text = NULL;
        }
        if (text) text[bytes] = '\0';
    }
    fclose(file);
    return text;
}

static fa_status read_sources_locked(fa_error *err) {
    static const char *const places[] = {"flash_attn/cuda", "csrc/cuda"};
    char module[PATH_BYTES - 32] = "";
    if (sources.is_read) return FA_OK;
    if (!fa_module_folder(module, sizeof module))
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: the folder of flash_attn_2_cuda is not known");
    for (size_t place = 0; place < sizeof places / sizeof *places && !sources.is_read; place++) {
        snprintf(sources.folder, sizeof sources.folder, "%s/%s", module, places[place]);
        int num = 0;
        while (num < NUM_FILES && (sources.text[num] = read_text(sources.folder, file_names[num]))) num++;
        sources.is_read = num == NUM_FILES;
        while (!sources.is_read && num > 0) free(sources.text[--num]);
    }
    return sources.is_read
               ? FA_OK
               : fa_fail(err, FA_EUNSUPPORTED, "flash_attn: the kernels' sources are neither in %s/%s nor in %s/%s",
                         module, places[0], module, places[1]);
}

static fa_status read_sources(fa_error *err) {
    fa_lock_acquire(&lock);
    fa_status status = read_sources_locked(err);
    fa_lock_release(&lock);
    return status;
}

/* ---- options --------------------------------------------------------------------------------------------------- */

void fa_variant_options(fa_variant variant, fa_compile_options *options) {
    const fa_tile *t = &fa_fwd_tiles_sm90[variant.tile];
    const unsigned f = variant.features;
    options->num = 0;
#define OPTION(...)                                         \
    do {                                                    \
        char *text = options->text[options->num];           \
        snprintf(text, sizeof *options->text, __VA_ARGS__); \
        options->list[options->num++] = text;               \
    } while (0)
    OPTION("--gpu-architecture=sm_90a");
    OPTION("--std=c++17");
    OPTION("--use_fast_math");
    OPTION("-DHEAD_DIM=%d", t->d);
    OPTION("-DBLOCK_KV=%d", t->block_kv);
    OPTION("-DWGS=%d", t->wgs);
    OPTION("-DSTAGES=%d", t->stages);
    OPTION("-DQ_STAGES=%d", t->q_stages);
    OPTION("-DEARLY=%d", t->early);
    OPTION("-DTURN=%d", t->turn);
    OPTION("-DSPLIT_WAIT=%d", t->split);
    OPTION("-DBF16=%d", (f & FA_IN_BF16) != 0);
    OPTION("-DCAUSAL=%d", (f & FA_CAUSAL) != 0);
    OPTION("-DLOCAL=%d", (f & FA_LOCAL) != 0);
    OPTION("-DVARLEN=%d", (f & FA_VARLEN) != 0);
    OPTION("-DSCORE=%d", (f & FA_SCORE) != 0);
    OPTION("-DDROPOUT=%d", (f & FA_DROPOUT) != 0);
#undef OPTION
}

fa_status fa_variant_key(fa_variant variant, uint64_t *key, fa_error *err) {
    fa_compile_options options;
    fa_status status = read_sources(err);
    if (status != FA_OK) return status;
    uint64_t hash = 0;
    for (int i = 0; i < NUM_FILES; i++) hash = fa_hash(hash, sources.text[i], strlen(sources.text[i]) + 1);
    fa_variant_options(variant, &options);
    for (int i = 0; i < options.num; i++) hash = fa_hash(hash, options.list[i], strlen(options.list[i]) + 1);
    *key = hash;
    return FA_OK;
}

/* ---- compilation ----------------------------------------------------------------------------------------------- */

/* The line of the log that says what went wrong. */
static void first_error(const fa_nvrtc *nvrtc, nvrtcProgram program, char *line, size_t room) {
    size_t bytes = 0;
    snprintf(line, room, "NVRTC says nothing about it");
    if (nvrtc->nvrtcGetProgramLogSize(program, &bytes) != 0 || bytes < 2) return;
    char *log = malloc(bytes + 1);
    if (log && nvrtc->nvrtcGetProgramLog(program, log) == 0) {
        log[bytes] = '\0';
        const char *start = strstr(log, "error");
        if (!start) start = log;
        while (start > log && start[-1] != '\n') start--;
        snprintf(line, room, "%.*s", (int)strcspn(start, "\n"), start);
    }
    free(log);
}

static fa_status compile(const fa_nvrtc *nvrtc, nvrtcProgram program, fa_variant variant, fa_blob *cubin,
                         fa_error *err) {
    char name[FA_VARIANT_NAME_BYTES], kernel[FA_VARIANT_NAME_BYTES + 16], line[256];
    fa_compile_options options;
    fa_variant_options(variant, &options);
    fa_variant_name(variant, name);
    snprintf(kernel, sizeof kernel, "-DKERNEL=%s", name);
    options.list[options.num++] = kernel;

    nvrtcResult result = nvrtc->nvrtcCompileProgram(program, options.num, options.list);
    if (result != 0) {
        first_error(nvrtc, program, line, sizeof line);
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: NVRTC %d.%d does not compile %s from %s: %s", nvrtc->major,
                       nvrtc->minor, name, sources.folder, line);
    }
    if (nvrtc->nvrtcGetCUBINSize(program, &cubin->bytes) != 0 || cubin->bytes == 0)
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: NVRTC %d.%d gives no cubin for sm_90a", nvrtc->major,
                       nvrtc->minor);
    cubin->data = malloc(cubin->bytes);
    if (!cubin->data) return fa_fail(err, FA_ENOMEM, "flash_attn: no memory for a compiled kernel");
    return nvrtc->nvrtcGetCUBIN(program, cubin->data) == 0
               ? FA_OK
               : fa_fail(err, FA_EUNSUPPORTED, "flash_attn: NVRTC does not hand over its cubin");
}

fa_status fa_variant_compile(fa_variant variant, fa_blob *cubin, fa_error *err) {
    const fa_nvrtc *nvrtc;
    nvrtcProgram program = NULL;
    *cubin = (fa_blob){0};
    fa_status status = read_sources(err);
    if (status == FA_OK) status = fa_nvrtc_get(&nvrtc, err);
    if (status != FA_OK) return status;
    if (nvrtc->nvrtcCreateProgram(&program, sources.text[0], file_names[0], NUM_FILES - 1,
                                  (const char *const *)sources.text + 1, file_names + 1) != 0)
        return fa_fail(err, FA_ENOMEM, "flash_attn: NVRTC does not take the kernel's source");
    status = compile(nvrtc, program, variant, cubin, err);
    if (status != FA_OK) {
        free(cubin->data);
        *cubin = (fa_blob){0};
    }
    nvrtc->nvrtcDestroyProgram(&program);
    return status;
}
