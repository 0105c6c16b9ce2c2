/* The emulated GPU of check_cuda. cuda_emulation.h describes it. */
#ifndef EMULATE_CUDA_H
#define EMULATE_CUDA_H

/* A kernel takes one parameter, by reference. */
typedef void emulated_kernel(const void *parameter);

typedef struct {
    unsigned grid_x, grid_y, grid_z; /* number of CTAs; `cluster` CTAs in the first direction run together */
    unsigned cluster, block, shared_bytes;
} emulated_shape;

void emulate_launch(emulated_kernel *kernel, const void *parameter, const emulated_shape *shape);

#endif
