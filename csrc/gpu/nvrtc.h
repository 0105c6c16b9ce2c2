/* The part of NVRTC, the run-time compiler of CUDA, that we call, as a table of functions. Nothing is linked: the table is
 * filled at first use, from the library that PyTorch ships. */
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
    uint32_t identity; /* of its release: version and size of the library */
    char path[512];    /* of the library */
} fa_nvrtc;

/* Looks, in this order, at FLASH_ATTN_NVRTC (a path), at what is already loaded, at the folders of NVIDIA's packages
 * beside torch, at what the system finds by name, and at CUDA_HOME. */
fa_status fa_nvrtc_get(const fa_nvrtc **nvrtc, fa_error *err);

#endif
