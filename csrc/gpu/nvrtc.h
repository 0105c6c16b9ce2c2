/* The functions of NVRTC, CUDA's run-time compiler, that we call, as a table. Nothing is linked. The table is filled at
 * first use from the library that PyTorch ships. */
#ifndef FA_GPU_NVRTC_H
#define FA_GPU_NVRTC_H

#include "flash_attn.h"

typedef struct nvrtcProgram_st *nvrtcProgram;
typedef int nvrtcResult; /* 0: success */

/* X(symbol, result, parameters) */
#define FA_NVRTC_SYMBOLS(X)                                                                                       \
    X(nvrtcVersion, nvrtcResult, (int *major, int *minor))                                                        \
    X(nvrtcGetErrorString, const char *, (nvrtcResult result))                                                    \
    X(nvrtcCreateProgram, nvrtcResult,                                                                            \
      (nvrtcProgram * program, const char *source, const char *name, int num_headers, const char *const *headers, \
       const char *const *names))                                                                                 \
    X(nvrtcDestroyProgram, nvrtcResult, (nvrtcProgram * program))                                                 \
    X(nvrtcCompileProgram, nvrtcResult, (nvrtcProgram program, int num_options, const char *const *options))      \
    X(nvrtcGetProgramLogSize, nvrtcResult, (nvrtcProgram program, size_t *bytes))                                 \
    X(nvrtcGetProgramLog, nvrtcResult, (nvrtcProgram program, char *log))                                         \
    X(nvrtcGetCUBINSize, nvrtcResult, (nvrtcProgram program, size_t *bytes))                                      \
    X(nvrtcGetCUBIN, nvrtcResult, (nvrtcProgram program, char *cubin))

typedef struct {
#define FA_NVRTC_MEMBER(symbol, result, parameters) result(*symbol) parameters;
    FA_NVRTC_SYMBOLS(FA_NVRTC_MEMBER)
#undef FA_NVRTC_MEMBER
    int major, minor;
    uint32_t identity; /* number of the release, made of the version and the size of the library */
    char path[512];    /* path of the library */
} fa_nvrtc;

/* Finds NVRTC. FLASH_ATTN_NVRTC may hold the library's path. Then the function tries libraries that are already loaded.
 * NVIDIA's packages beside torch, libraries that the system finds by name, and CUDA_HOME follow, in this order. */
fa_status fa_nvrtc_get(const fa_nvrtc **nvrtc, fa_error *err);

#endif
