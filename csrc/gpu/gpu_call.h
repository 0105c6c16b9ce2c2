/* The argument of every launcher. */
#ifndef FA_GPU_GPU_CALL_H
#define FA_GPU_GPU_CALL_H

#include "driver.h"
#include "plan/kernel_table.h"

/* All that a launch needs. The GPU's context is current. */
typedef struct {
    const fa_problem *problem;
    const fa_plan *plan;
    bool zero_tensors;
    void *workspace;
    const fa_gpu *gpu;
    const fa_driver *driver;
    CUstream stream;
    void *walks; /* of a block mask, with its map, in memory that outlives the call; NULL: they begin the workspace */
    bool has_walks; /* they are there */
} fa_cuda_call;

#define FA_LOG2_E 1.44269504f

/* Limits a window to a size that is wider than any sequence and small enough to be added to positions. */
static inline int fa_clamp_window(int64_t window) { return (int)(window < 1 << 30 ? window : 1 << 30); }

/* Limits an attention chunk. Chunks of 2^31 - 1 keys and more are alike for all positions. */
static inline int fa_clamp_chunk(int64_t chunk) { return (int)(chunk < INT32_MAX ? chunk : INT32_MAX); }

#endif
