/* Reads the text of a variant and compiles the text with NVRTC. The sources lie beside the module: in flash_attn/cuda
 * or flash_attn_3/cuda of an installed package, or in csrc/cuda of a checkout. The sources include only each other. */
#include "kernel_source.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flex/source.h"
#include "nvrtc.h"
#include "system/hash.h"
#include "system/library.h"
#include "system/lock.h"

enum { PATH_BYTES = 1024 };

/* ---- sources --------------------------------------------------------------------------------------------------- */

static char folder[PATH_BYTES]; /* "": not searched yet */
/* A file is read once and kept. */
typedef struct kept_file {
    struct kept_file *next;
    const char *name;
    char *text;
} kept_file;
static kept_file *files;
static fa_lock lock = FA_LOCK_INIT;

static char *read_text(const char *name) {
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

static fa_status find_folder(fa_error *err) {
    static const char *const places[] = {"flash_attn/cuda", "csrc/cuda",             /* flash_attn_2_cuda */
                                         "cuda", "../../csrc/cuda", "../csrc/cuda"}; /* flash_attn_3._C */
    char module[PATH_BYTES - 32] = "";
    if (*folder) return FA_OK;
    if (!fa_module_folder(module, sizeof module))
        return fa_fail(err, FA_EUNSUPPORTED, "flash_attn: the folder of the module is not known");
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(folder, sizeof folder, "%s/%s", module, places[i]);
        char *text = read_text(fa_families[0].files[0]);
        free(text);
        if (text) return FA_OK;
    }
    *folder = '\0';
    return fa_fail(err, FA_EUNSUPPORTED,
                   "flash_attn: the kernels' sources are not in %s, neither in flash_attn/cuda, csrc/cuda nor cuda",
                   module);
}

static fa_status read_file(const char *name, const char **text, fa_error *err) {
    kept_file *file = files;
    while (file && strcmp(file->name, name) != 0) file = file->next;
    if (!file) {
        char *content = read_text(name);
        if (!content)
            return fa_fail(err, FA_EFAILED, "flash_attn: cannot read the kernels' source %s/%s", folder, name);
        if (!(file = malloc(sizeof *file))) {
            free(content);
            return fa_fail(err, FA_ENOMEM, "flash_attn: no memory for the kernels' source %s", name);
        }
        *file = (kept_file){files, name, content};
        files = file;
    }
    *text = file->text;
    return FA_OK;
}

/* The texts of a variant, with their names: the files of the family in the order of the list, and the text of the
 * user's functions. */
typedef struct {
    const char **texts, **names;
    char *mods; /* NULL: the kernel takes no functions */
    int num;
} source;

static void free_source(source *s) {
    free(s->texts);
    free(s->names);
    free(s->mods);
    *s = (source){0};
}

static fa_status read_files(const fa_family *family, source *s, fa_error *err) {
    fa_lock_acquire(&lock);
    fa_status status = find_folder(err);
    for (; status == FA_OK && family->files[s->num]; s->num++) {
        s->names[s->num] = family->files[s->num];
        status = read_file(family->files[s->num], &s->texts[s->num], err);
    }
    fa_lock_release(&lock);
    return status;
}

static fa_status add_mods(fa_variant variant, source *s, fa_error *err) {
    const fa_mods none = {0}, *mods = variant.mods ? variant.mods : &none;
    fa_status status = fa_flex_source(mods->score, mods->mask, mods->derivative, mods->text, &s->mods, err);
    s->names[s->num] = FA_MODS_FILE;
    s->texts[s->num] = s->mods;
    if (status == FA_OK) s->num++;
    return status;
}

static fa_status read_source(fa_variant variant, source *s, fa_error *err) {
    const fa_family *family = &fa_families[variant.family];
    size_t num = 1;
    while (family->files[num - 1]) num++;
    *s = (source){malloc(num * sizeof *s->texts), malloc(num * sizeof *s->names), NULL, 0};
    fa_status status = s->texts && s->names
                           ? read_files(family, s, err)
                           : fa_fail(err, FA_ENOMEM, "flash_attn: no memory for the source of %s", family->name);
    if (status == FA_OK && family->takes_mods && variant.features & FA_FLEX) status = add_mods(variant, s, err);
    if (status != FA_OK) free_source(s);
    return status;
}

/* ---- options --------------------------------------------------------------------------------------------------- */

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static fa_status add_option(fa_compile_options *options, fa_error *err, const char *format, ...) {
    va_list values;
    va_start(values, format);
    const int length = vsnprintf(NULL, 0, format, values);
    va_end(values);
    char **list = realloc(options->list, (size_t)(options->num + 1) * sizeof *list);
    if (list) options->list = list;
    char *text = list && length >= 0 ? malloc((size_t)length + 1) : NULL;
    if (!text) return fa_fail(err, FA_ENOMEM, "flash_attn: no memory for the compiler's options");
    va_start(values, format);
    vsnprintf(text, (size_t)length + 1, format, values);
    va_end(values);
    options->list[options->num++] = text;
    return FA_OK;
}

void fa_options_free(fa_compile_options *options) {
    for (int i = 0; i < options->num; i++) free(options->list[i]);
    free(options->list);
    *options = (fa_compile_options){0};
}

fa_status fa_variant_options(fa_variant variant, fa_compile_options *options, fa_error *err) {
#define DTYPE(constant, bit) {bit, #constant}
#define FEATURE(constant, bit, word) \
    { bit, #constant }
    static const struct {
        unsigned bit;
        const char *constant;
    } constants[] = {FA_DTYPE_FEATURES(DTYPE), FA_FEATURES(FEATURE)};
    const fa_family *family = &fa_families[variant.family];
    /* GPUs of 8.9 run what is compiled for 8.6. So one cubin serves both. */
    const int arch = variant.arch == 89 && !family->has_89 ? 86 : variant.arch;
    *options = (fa_compile_options){0};
    fa_status status = add_option(options, err, "--gpu-architecture=sm_%d%s", arch, family->arch ? "a" : "");
    if (status == FA_OK) status = add_option(options, err, "--std=c++17");
    /* A user's functions are computed as torch computes them. */
    if (status == FA_OK && !(variant.features & FA_FLEX)) status = add_option(options, err, "--use_fast_math");
    for (int i = 0; status == FA_OK && i < FA_MAX_COLUMNS && family->columns[i]; i++)
        status = add_option(options, err, "-D%s=%d", family->columns[i], family->rows[variant.row].columns[i]);
    for (size_t i = 0; status == FA_OK && i < sizeof constants / sizeof *constants; i++)
        if (family->knows & constants[i].bit)
            status =
                add_option(options, err, "-D%s=%d", constants[i].constant, (variant.features & constants[i].bit) != 0);
    return status;
}

fa_status fa_variant_key(fa_variant variant, uint64_t *key, fa_error *err) {
    fa_compile_options options;
    source s;
    fa_status status = read_source(variant, &s, err);
    if (status != FA_OK) return status;
    uint64_t hash = 0;
    for (int i = 0; i < s.num; i++) hash = fa_hash(hash, s.texts[i], strlen(s.texts[i]) + 1);
    free_source(&s);
    status = fa_variant_options(variant, &options, err);
    for (int i = 0; i < options.num; i++) hash = fa_hash(hash, options.list[i], strlen(options.list[i]) + 1);
    fa_options_free(&options);
    *key = hash;
    return status;
}

/* ---- compilation ----------------------------------------------------------------------------------------------- */

/* Adds the line of the user's functions that an error names, as in flex_mods.cuh(12): error: .. */
static void quote_mods(const char *mods, char *error, size_t room) {
    const char *at = strstr(error, FA_MODS_FILE "(");
    if (!at) return;
    long number = strtol(at + strlen(FA_MODS_FILE "("), NULL, 10);
    while (number > 1 && *mods) number--, mods += strcspn(mods, "\n") + (strchr(mods, '\n') != NULL);
    mods += strspn(mods, " ");
    const size_t used = strlen(error);
    snprintf(error + used, room - used, ", in the line: %.*s", (int)strcspn(mods, "\n"), mods);
}

/* Returns the compiler's log, which the caller frees, or NULL. */
static char *log_of(const fa_nvrtc *nvrtc, nvrtcProgram program) {
    size_t bytes = 0;
    if (nvrtc->nvrtcGetProgramLogSize(program, &bytes) != 0 || bytes < 2) return NULL;
    char *log = malloc(bytes + 1);
    if (log && nvrtc->nvrtcGetProgramLog(program, log) == 0) return log[bytes] = '\0', log;
    free(log);
    return NULL;
}

/* Finds the first line of the log that contains an error. */
static void first_error(const char *log, char *line, size_t room) {
    const char *start = strstr(log, "error:");
    if (!start) start = strstr(log, "error");
    if (!start) start = log;
    while (start > log && start[-1] != '\n') start--;
    snprintf(line, room, "%.*s", (int)strcspn(start, "\n"), start);
}

static THREAD_LOCAL struct {
    char *log, *mods;
} failure;

void fa_compile_failure(char **log, char **mods) {
    *log = failure.log, *mods = failure.mods;
    failure.log = failure.mods = NULL;
}

static void forget_failure(void) {
    free(failure.log);
    free(failure.mods);
    failure.log = failure.mods = NULL;
}

/* Takes over the log. why: the compiler's name of the failure. */
static fa_status fail(const fa_nvrtc *nvrtc, fa_variant variant, const char *name, char *log, const char *why,
                      const char *mods, fa_error *err) {
    char line[256];
    failure.log = log;
    if (log && strstr(log, "--gpu-architecture"))
        return fa_fail(err, FA_EUNSUPPORTED,
                       "flash_attn: NVRTC %d.%d compiles no kernels for sm_%d: install a newer nvidia-cuda-nvrtc, or "
                       "set FLASH_ATTN_NVRTC to the path of a newer library",
                       nvrtc->major, nvrtc->minor, variant.arch);
    first_error(log ? log : why, line, sizeof line);
    if (mods) quote_mods(mods, line, sizeof line);
    return fa_fail(err, FA_EFAILED, "flash_attn: NVRTC %d.%d does not compile %s: %s (the texts are in %s)",
                   nvrtc->major, nvrtc->minor, name, line, folder);
}

struct fa_compilation {
    fa_variant variant; /* without its mods */
    char name[FA_VARIANT_NAME_BYTES];
    source source;
    fa_compile_options options;
};

void fa_compilation_free(fa_compilation *c) {
    if (!c) return;
    free_source(&c->source);
    fa_options_free(&c->options);
    free(c);
}

fa_status fa_compilation_new(fa_variant variant, fa_compilation **out, fa_error *err) {
    fa_compilation *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c) return fa_fail(err, FA_ENOMEM, "flash_attn: no memory for a compilation");
    fa_variant_name(variant, c->name);
    fa_status status = read_source(variant, &c->source, err);
    if (status == FA_OK) status = fa_variant_options(variant, &c->options, err);
    if (status == FA_OK) status = add_option(&c->options, err, "-DKERNEL=%s", c->name);
    /* NVRTC before 13.1 takes a lambda with a parameter of type `auto` for a function of the host otherwise. */
    if (status == FA_OK) status = add_option(&c->options, err, "--device-as-default-execution-space");
    if (status != FA_OK) return fa_compilation_free(c), status;
    c->variant = variant, c->variant.mods = NULL;
    *out = c;
    return FA_OK;
}

static fa_status compile(const fa_nvrtc *nvrtc, nvrtcProgram program, const fa_compilation *c, fa_blob *cubin,
                         fa_error *err) {
    const nvrtcResult result =
        nvrtc->nvrtcCompileProgram(program, c->options.num, (const char *const *)c->options.list);
    if (result != 0)
        return fail(nvrtc, c->variant, c->name, log_of(nvrtc, program), nvrtc->nvrtcGetErrorString(result),
                    c->source.mods, err);
    if (nvrtc->nvrtcGetCUBINSize(program, &cubin->bytes) != 0 || cubin->bytes == 0)
        return fa_fail(err, FA_EFAILED, "flash_attn: NVRTC %d.%d gives no cubin for sm_%d", nvrtc->major, nvrtc->minor,
                       c->variant.arch);
    cubin->data = malloc(cubin->bytes);
    if (!cubin->data) return fa_fail(err, FA_ENOMEM, "flash_attn: no memory for a compiled kernel");
    return nvrtc->nvrtcGetCUBIN(program, cubin->data) == 0
               ? FA_OK
               : fa_fail(err, FA_EFAILED, "flash_attn: NVRTC does not hand over its cubin");
}

fa_status fa_compilation_run(fa_compilation *c, fa_blob *cubin, fa_error *err) {
    const fa_nvrtc *nvrtc;
    nvrtcProgram program = NULL;
    source *s = &c->source;
    *cubin = (fa_blob){0};
    forget_failure();
    fa_status status = fa_nvrtc_get(&nvrtc, err);
    if (status != FA_OK) return status;
    if (nvrtc->nvrtcCreateProgram(&program, s->texts[0], s->names[0], s->num - 1, s->texts + 1, s->names + 1) != 0)
        return fa_fail(err, FA_ENOMEM, "flash_attn: NVRTC does not take the kernel's source");
    status = compile(nvrtc, program, c, cubin, err);
    if (status != FA_OK) {
        free(cubin->data);
        *cubin = (fa_blob){0};
        failure.mods = s->mods, s->mods = NULL;
    }
    nvrtc->nvrtcDestroyProgram(&program);
    return status;
}

fa_status fa_variant_compile(fa_variant variant, fa_blob *cubin, fa_error *err) {
    const fa_nvrtc *nvrtc;
    fa_compilation *c = NULL;
    *cubin = (fa_blob){0};
    fa_status status = fa_nvrtc_get(&nvrtc, err);
    if (status == FA_OK) status = fa_compilation_new(variant, &c, err);
    if (status == FA_OK) status = fa_compilation_run(c, cubin, err);
    fa_compilation_free(c);
    return status;
}
