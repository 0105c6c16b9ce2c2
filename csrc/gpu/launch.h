/* The launch of a kernel. */
#ifndef FA_GPU_LAUNCH_H
#define FA_GPU_LAUNCH_H

#include "gpu_call.h"

/* A launch has a grid of CTAs, threads of each CTA, and CTAs of each cluster (0: no clusters). waits_itself: the kernel
 * begins with griddepcontrol.wait. Then the driver does not make the kernel wait for earlier work of the stream, which
 * takes the host 0.5 us less. */
typedef struct {
    unsigned grid_x, grid_y, grid_z, threads, cluster;
    bool waits_itself;
} fa_launch;

/* Launches a kernel with its row's shared memory. A grid without CTAs launches nothing. */
fa_status fa_cuda_launch(const fa_cuda_call *call, fa_variant variant, fa_launch launch, const void *parameters,
                         fa_error *err);

#endif
