/* A plan for a GPU -> launches on PyTorch's current stream. */
#ifndef FA_CUDA_RUN_H
#define FA_CUDA_RUN_H

#include "cuda/tensor_map.h"
#include "kernels.h"

/* workspace: plan->workspace_bytes of the GPU's memory, or NULL where the plan asks for none. Allocates nothing, reads
 * nothing from the device, waits for nothing. */
fa_status fa_cuda_run(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                      fa_error *err);

/* ---- between the files of this part ----------------------------------------------------------------------------- */

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

/* How TMA sees a tensor of 16-bit elements: boxes of so many rows and columns (64, or 32 where 64 does not divide the
 * tile). num_rows: of a sequence, or of the packed tensor. */
typedef struct {
    int rows, columns;
    bool packed;
} fa_box;
fa_status fa_cuda_map(const fa_cuda_call *call, const fa_view *tensor, int64_t num_rows, int64_t num_heads, fa_box box,
                      fa_tensor_map *map, fa_error *err);

#define FA_LOG2_E 1.44269504f
/* A window wider than any sequence, small enough to be added to positions. */
static inline int fa_clamp_window(int64_t window) { return (int)(window < 1 << 30 ? window : 1 << 30); }

/* cuda_launch.c. A launch: CTAs, threads of each, CTAs of a cluster (0: there are none). waits_itself: the kernel begins with
 * griddepcontrol.wait, so the driver need not make it wait for what the stream does before it; that takes the host 0.5 us
 * less. */
typedef struct {
    unsigned grid_x, grid_y, grid_z, threads, cluster;
    bool waits_itself;
} fa_launch;
/* Launches a kernel with its row's shared memory. Nothing happens where there is no CTA. */
fa_status fa_cuda_launch(const fa_cuda_call *call, fa_variant variant, fa_launch launch, const void *parameters,
                         fa_error *err);

/* Fills the kernel's parameters and launches it, with whatever must run before and after. One for each kernel that a
 * plan can name. */
typedef fa_status fa_cuda_launcher(const fa_cuda_call *call, fa_error *err);
fa_cuda_launcher fa_cuda_fwd_sm90, fa_cuda_decode_sm90, fa_cuda_bwd_sm90, fa_cuda_fwd_any, fa_cuda_bwd_any;

/* cuda_kvcache.c: writes the new keys and values into the cache and, if there is rotary, the turned queries into q_rotated
 * [b, len_q, h, d] contiguous, fa_rotated_q_bytes of the workspace. Nothing happens where nothing is asked for. */
fa_status fa_cuda_append(const fa_cuda_call *call, void *q_rotated, fa_error *err);

/* cuda_slots.c: a slot of the kernel's own counters for this launch. Two launches that may run at the same time must not
 * share one. Launches of one stream follow each other, so a stream keeps its slot. A captured launch may be replayed
 * beside anything but its own graph: what a stream adds to a graph has a slot for as long as the graph lives. -1: none is
 * left, and the launch does without. num_slots: at most FA_MOST_SLOTS. */
enum { FA_MOST_SLOTS = 4096 };
int fa_cuda_slot(const fa_cuda_call *call, int num_slots);

#endif
