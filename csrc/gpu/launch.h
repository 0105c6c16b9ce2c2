/* The launch of a kernel. */
#ifndef FA_GPU_LAUNCH_H
#define FA_GPU_LAUNCH_H

#include "gpu_call.h"

/* A launch: CTAs, threads of each, CTAs of a cluster (0: there are none). waits_itself: the kernel begins with
 * griddepcontrol.wait, so the driver need not make it wait for what the stream does before it; that takes the host 0.5 us
 * less. */
typedef struct {
    unsigned grid_x, grid_y, grid_z, threads, cluster;
    bool waits_itself;
} fa_launch;
/* Launches a kernel with its row's shared memory. Nothing happens where there is no CTA. */
fa_status fa_cuda_launch(const fa_cuda_call *call, fa_variant variant, fa_launch launch, const void *parameters,
                         fa_error *err);

#endif
