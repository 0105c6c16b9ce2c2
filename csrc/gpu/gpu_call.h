/* What every launcher is given. */
#ifndef FA_GPU_GPU_CALL_H
#define FA_GPU_GPU_CALL_H

#include "driver.h"
#include "plan/kernel_table.h"

/* What a launch needs. The GPU's context is current. */
typedef struct {
    const fa_problem *problem;
    const fa_plan *plan;
    bool zero_tensors;
    void *workspace;
    const fa_gpu *gpu;
    const fa_driver *driver;
    CUstream stream;
} fa_cuda_call;

#define FA_LOG2_E 1.44269504f
/* A window wider than any sequence, small enough to be added to positions. */
static inline int fa_clamp_window(int64_t window) { return (int)(window < 1 << 30 ? window : 1 << 30); }

#endif
