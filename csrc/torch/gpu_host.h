/* The services of torch and Python that gpu/ needs. */
#ifndef FA_TORCH_GPU_HOST_H
#define FA_TORCH_GPU_HOST_H

/* Fills in fa_host (gpu/host.h). torch's functions must have been found. */
void fa_gpu_host_load(void);

#endif
