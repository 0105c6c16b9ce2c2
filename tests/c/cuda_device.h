/* The GPU of check_cuda. It has the real plan, the real launchers, and a small emulated driver. Kernels are compiled
 * for the CPU at their first use (cuda_emulation.h). */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include "cases.h"
#include "emulate_cuda.h"
#include "flex/source.h"
#include "gpu/align.h"
#include "gpu/any_problem.h"
#include "gpu/append.h"
#include "gpu/host.h"
#include "gpu/kernels.h"
#include "gpu/launchers.h"
#include "gpu/memory.h"
#include "plan/gpu.h"
#include <dlfcn.h>
#include <sys/stat.h>

/* ---- in place of gpu/kernels.c and gpu/driver.c ------------------------------------------------------------------ */

fa_status fa_driver_check(CUresult result, const char *attempt, fa_error *err) {
    return result == 0 ? FA_OK : fa_fail(err, FA_EUNSUPPORTED, "%s failed with %d", attempt, result);
}

bool fa_kernel_is_loaded(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel) {
    (void)variant, (void)gpu, (void)kernel;
    return false;
}
void fa_kernel_give_up(fa_variant variant, const fa_gpu *gpu, CUkernel kernel) {
    (void)variant, (void)gpu, (void)kernel;
}
static void read_no_environment(void) {}
fa_gpu_host fa_host = {.read_environment = read_no_environment};
bool fa_cuda_make_room(const fa_driver *driver, CUstream stream) {
    (void)driver, (void)stream;
    return false;
}

static const char *parameters_of(fa_variant variant) {
    switch (variant.family) {
    case FA_DECODE_SM90:
    case FA_DECODE_SM80: return variant.features & FA_FLEX ? "params" : "fa_attn_decode_params";
    case FA_BWD_SM80:
    case FA_BWD_DQ_SM80: return "fa_attn_bwd_sm80_params";
    case FA_COMBINE: return "fa_combine_params";
    case FA_ALIGN: return "fa_align_params";
    case FA_GATHER: return "fa_gather_params";
    case FA_QUANTIZE: return "fa_quantize_params";
    case FA_FLEX_BLOCKS: return "fa_cuda_flex_blocks";
    case FA_FLEX_CLASSIFY: return "classification";
    case FA_FLEX_LISTS: return "fa_cuda_flex_lists";
    case FA_FLEX_EXACT_SUMS: return "fa_cuda_exact_sums";
    case FA_FLEX_WALKS: return "fa_cuda_flex_walks";
    case FA_FLEX_HIDDEN: return "hidden_params";
    default: return variant.features & FA_FLEX ? "problem" : "fa_cuda_problem";
    }
}

/* Writes the text of a user's functions to BUILD_FOLDER/<name>.mods. */
static fa_status write_mods(const char *name, const fa_mods *mods, fa_error *err) {
    char path[512], *text;
    fa_status status = fa_flex_source(mods->score, mods->mask, mods->derivative, mods->text, &text, err);
    if (status != FA_OK) return status;
    snprintf(path, sizeof path, BUILD_FOLDER "/%s.mods", name);
    mkdir(path, 0777);
    snprintf(path, sizeof path, BUILD_FOLDER "/%s.mods/" FA_MODS_FILE, name);
    FILE *file = fopen(path, "w");
    if (!file) return fa_fail(err, FA_EFAILED, "cannot write %s", path);
    fputs(text, file);
    fclose(file);
    free(text);
    return FA_OK;
}

/* Loads BUILD_FOLDER/<name>.so. CXX compiles the file if it does not exist. */
fa_status fa_kernel_load(fa_variant variant, const fa_gpu *gpu, CUkernel *kernel, fa_error *err) {
    const fa_family *family = &fa_families[variant.family];
    char name[FA_VARIANT_NAME_BYTES], path[512], command[2048];
    (void)gpu;
    fa_variant_name(variant, name);
    snprintf(path, sizeof path, BUILD_FOLDER "/%s.so", name);
    if (access(path, R_OK) != 0) {
        const bool has_mods = family->takes_mods && variant.features & FA_FLEX;
        if (has_mods && write_mods(name, variant.mods, err) != FA_OK) return FA_EFAILED;
        int at = snprintf(
            command, sizeof command,
            CXX " -std=c++17 -Og -shared -fPIC -fvisibility=hidden -w -ffp-contract=off "
                "-include cuda_emulation.h -include flex_device.h -I" CSRC_FOLDER " -I" CSRC_FOLDER "/cuda"
                " -DSOURCE='\"cuda/%s\"' -DPARAMETERS=%s -DBF16=%d -DF32=%d -DE4M3=%d -DOF_3=%d"
                " -DFLEX=%d -DSCORE=%d -DDROPOUT=%d -DCACHE=%d -DVARLEN=%d -I" BUILD_FOLDER "/%s.mods",
            family->files[0], parameters_of(variant), !!(variant.features & FA_IN_BF16),
            !!(variant.features & FA_IN_F32), !!(variant.features & FA_IN_E4M3), !!(variant.features & FA_OF_3),
            !!(variant.features & FA_FLEX), !!(variant.features & FA_SCORE), !!(variant.features & FA_DROPOUT),
            !!(variant.features & FA_CACHE), !!(variant.features & FA_VARLEN), name);
        for (int i = 0; i < FA_MAX_COLUMNS && family->columns[i]; i++)
            at += snprintf(command + at, sizeof command - (size_t)at, " -D%s=%d", family->columns[i],
                           family->rows[variant.row].columns[i]);
        snprintf(command + at, sizeof command - (size_t)at, " emulated_kernel.cpp -o %s", path);
        if (system(command) != 0) return fa_fail(err, FA_EUNSUPPORTED, "%s", command);
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *function = library ? dlsym(library, "emulated") : NULL;
    if (!function) return fa_fail(err, FA_EUNSUPPORTED, "%s", dlerror());
    memcpy(kernel, &function, sizeof function);
    return FA_OK;
}

static CUresult is_capturing(CUstream stream, int *status) {
    static int num_calls;
    (void)stream;
    *status = 0;
    return num_calls++ % 2; /* a failure: the counters then lie in the workspace */
}

static CUresult clear(uint64_t to, uint32_t value, size_t num, CUstream stream) {
    (void)stream;
    for (size_t i = 0; i < num; i++) ((uint32_t *)(uintptr_t)to)[i] = value;
    return 0;
}

static CUresult launch(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    emulated_kernel *kernel;
    emulated_shape shape = {config->grid_x, config->grid_y, config->grid_z, 1, config->block_x, config->shared_bytes};
    (void)extra;
    for (unsigned i = 0; i < config->num_attributes; i++)
        if (config->attributes[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            shape.cluster = (unsigned)config->attributes[i].value[0];
    if (config->block_y * config->block_z != 1 || shape.grid_x % shape.cluster) return 1;
    /* CTAs of generic attention kernels take turns. */
    if (config->num_attributes == 0 && shape.grid_y == 1 && shape.grid_x > 60 && shape.shared_bytes > 0 && !is_short)
        shape.grid_x = 60;
    memcpy(&kernel, &function, sizeof kernel);
    emulate_launch(kernel, parameters[0], &shape);
    return 0;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

typedef struct {
    fa_problem problem;
    fa_plan plan;
    uint64_t rng_state[2];
    fa_cuda_call call;
} cuda_run;

static fa_gpu gpu = {.capability = 80, .num_sms = 1};
static bool zero_tensors; /* rows of o that belong to no sequence become zero */
/* The kernels that a plan may take; NULL: all. check_cuda_decode alone runs the decode kernel. */
static const char *gpu_kernels = "any,fwd_sm80,bwd_sm80";

/* Runs the same problem on the emulated GPU. *run must keep its address. */
static void cuda_run_make(cuda_run *run, const fa_problem *p, bool at_end) {
    static const fa_driver driver = {
        .cuLaunchKernelEx = launch, .cuStreamIsCapturing = is_capturing, .cuMemsetD32Async = clear};
    /* GPUs of compute capability 8.0, 8.6 and 10.0 take different rows of tiles.def. */
    static const int capabilities[] = {80, 86, 100};
    if (gpu.capability != 90) gpu.capability = capabilities[(p->len_q + p->len_kv) % 3];
    const fa_machine machine = {.gpu_capability = gpu.capability, .gpu_sms = gpu.num_sms, .gpu_kernels = gpu_kernels};
    fa_error err = {""};
    *run = (cuda_run){.problem = *p, .rng_state = {p->seed, p->offset}};
    run->problem.device = FA_CUDA;
    run->problem.seed = run->problem.offset = 0;
    if (p->dropout_p > 0) run->problem.rng_state = run->rng_state;
    /* max_seqlen is less than some of the lengths, which is not known before the kernel reads them. */
    if (is_short && p->cu_seqlens_q && (p->total_q + p->total_kv) % 3 == 0) {
        run->problem.len_q = (p->total_q + p->b - 1) / p->b;
        run->problem.len_kv = (p->total_kv + p->b - 1) / p->b;
    }
    if (fa_plan_cuda(&run->problem, &machine, &run->plan, &err)) fail_msg("fa_plan_cuda: %s", err.text);
    void *workspace = guarded_alloc(run->plan.workspace_bytes, 64, at_end);
    run->call = (fa_cuda_call){&run->problem, &run->plan, zero_tensors, workspace, &gpu, &driver, NULL};
}

/* Problems that attn_fwd_sm80 and attn_bwd_sm80 have served, and how many of these walk some heads together. Problems
 * of attn_fwd_short and attn_bwd_short, and of the decode kernels. */
static int num_sm80[2], num_together[2], num_short[2], num_decodes;

static inline void run_on_cuda(const fa_problem *p, bool at_end) {
    cuda_run run;
    fa_error err = {""};
    cuda_run_make(&run, p, at_end);
    const bool is_sm80 = run.plan.gpu.family == FA_FWD_SM80 || run.plan.gpu.family == FA_BWD_SM80;
    const bool is_decode = run.plan.gpu.family == FA_DECODE_SM90 || run.plan.gpu.family == FA_DECODE_SM80;
    const bool runs_short = run.plan.gpu.family == FA_FWD_SHORT || run.plan.gpu.family == FA_BWD_SHORT;
    fa_cuda_launcher *const launcher = is_decode           ? fa_cuda_decode
                                       : runs_short        ? fa_cuda_short
                                       : p->pass == FA_FWD ? is_sm80 ? fa_cuda_fwd_sm80 : fa_cuda_fwd_any
                                       : is_sm80           ? fa_cuda_bwd_sm80
                                                           : fa_cuda_bwd_any;
    num_decodes += is_decode;
    num_sm80[p->pass] += is_sm80;
    num_short[p->pass] += runs_short;
    num_together[p->pass] += is_sm80 && run.plan.gpu.group_heads > 1;
    if (fa_cuda_run_aligned(&run.call, launcher, &err)) fail_msg("%s", err.text);
}

/* Runs the decode kernel on a Hopper, or on a GPU before Hopper, with this number of SMs. Returns false if the plan
 * takes another kernel. */
static inline bool run_decode_on_cuda(const fa_problem *p, bool is_hopper, int num_sms, bool at_end) {
    cuda_run run;
    fa_error err = {""};
    gpu = (fa_gpu){.capability = is_hopper ? 90 : 80, .num_sms = num_sms};
    gpu_kernels = NULL;
    cuda_run_make(&run, p, at_end);
    if (run.plan.gpu.family != (is_hopper ? FA_DECODE_SM90 : FA_DECODE_SM80)) return false;
    if (fa_cuda_decode(&run.call, &err)) fail_msg("%s", err.text);
    return true;
}

static inline void append_on_cuda(const fa_problem *p, void *q_rotated) {
    cuda_run run;
    fa_error err = {""};
    cuda_run_make(&run, p, true);
    if (fa_cuda_append(&run.call, q_rotated, &err)) fail_msg("%s", err.text);
}

static inline void s_dmask_on_cuda(const fa_problem *p) {
    cuda_run run;
    fa_error err = {""};
    cuda_run_make(&run, p, true);
    const fa_cuda_problem a = fa_cuda_problem_of(&run.call);
    if (fa_cuda_launch_probs(&run.call, &a, &err)) fail_msg("%s", err.text);
}

#endif
