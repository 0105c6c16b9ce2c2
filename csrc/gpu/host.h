/* The services that gpu/ needs from the program around it. torch/ fills this struct when the module is imported. A test
 * may fill in other functions. Nothing else in gpu/ depends on torch or Python. */
#ifndef FA_GPU_HOST_H
#define FA_GPU_HOST_H

#include "flash_attn.h"

typedef struct {
    /* Returns PyTorch's current stream (CUstream) of this thread on this GPU. */
    fa_status (*current_stream)(int device_idx, void **stream, fa_error *err);
    /* Makes PyTorch's allocator give back the GPU memory that it holds unused. The caller must not hold a lock. */
    void (*empty_cache)(void);
    /* Reads the environment again (system/environment.h) under a lock that prevents changes. The caller must not hold a
     * lock. */
    void (*read_environment)(void);
    /* An address in libtorch. NVIDIA's packages lie beside torch, and one of them contains NVRTC. NULL: unknown. */
    const void *library;
} fa_gpu_host;

extern fa_gpu_host fa_host;

#endif
