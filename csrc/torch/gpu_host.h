/* What the GPU part asks of torch and of Python. */
#ifndef FA_TORCH_GPU_HOST_H
#define FA_TORCH_GPU_HOST_H

/* Fills in fa_host (gpu/host.h), once torch's functions are found. */
void fa_gpu_host_load(void);

#endif
