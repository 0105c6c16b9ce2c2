/* The GPU of check_cuda: see cuda_emulation.h. */
#ifndef EMULATE_CUDA_H
#define EMULATE_CUDA_H

/* A kernel's one parameter, taken by reference. */
typedef void emulated_kernel(const void *parameter);

void emulate_launch(emulated_kernel *kernel, const void *parameter, unsigned grid_x, unsigned grid_y, unsigned block,
                    unsigned shared_bytes);

#endif
