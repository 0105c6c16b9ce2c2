/* What the GPU part asks of the program around it. The folder torch/ fills this in when the module is imported; a test may
 * fill in something else. Nothing else here knows of torch or of Python. */
#ifndef FA_GPU_HOST_H
#define FA_GPU_HOST_H

#include "flash_attn.h"

typedef struct {
    /* The stream (CUstream) that PyTorch queues work on at the moment, of this thread and this GPU. */
    fa_status (*current_stream)(int device_idx, void **stream, fa_error *err);
    /* PyTorch's allocator gives back the GPU memory that it holds unused. The caller holds no lock. */
    void (*empty_cache)(void);
    /* Reads the environment again (system/environment.h), while nobody changes it. The caller holds no lock. */
    void (*read_environment)(void);
    /* An address in libtorch. NVIDIA's packages lie beside torch, and NVRTC in one of them. NULL: unknown. */
    const void *library;
} fa_gpu_host;

extern fa_gpu_host fa_host;

#endif
